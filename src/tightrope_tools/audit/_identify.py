"""Identify the frequency rule behind measured frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from tightrope.frequencies import Linear, Llama3, YaRN
from tightrope.spec import RopeSpec

_CLOSE = 3e-5
"""Relative tolerance between a rule and measured frequencies; float32 alone makes them differ by 1e-6."""
_ORIGINALS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1024, 512)


@dataclass(frozen=True)
class Identity:
    """The rule behind measured frequencies.

    Attributes:
        spec: the rotation as a spec; None if no rule matches the frequencies.
        text: the rule as text.
        loose: whether it matches only to about one per cent.
        by_head_dim: the base if exponents are divided by head_dim instead of rotary_dim; None if the two
            are equal or the frequencies are not plainly geometric.
    """

    spec: RopeSpec | None
    text: str
    loose: bool = False
    by_head_dim: float | None = None


def identify(
    omegas: Sequence[float],
    amplitude: float,
    *,
    noise: float = 0.0,
    head_dim: int,
    rotary_dim: int,
    start: int,
    interleaved: bool,
) -> Identity:
    """Identify the rule behind frequencies: one per pair of the slice, 0 for pairs that never turn.

    Args:
        noise: the largest error of a measured frequency.
    """
    where = {
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "start": start,
        "interleaved": interleaved,
    }

    def spec(base: float, scaling: object = None) -> RopeSpec:
        return RopeSpec(base=base, scaling=scaling, **where)  # type: ignore[arg-type]

    moving = [k for k, omega in enumerate(omegas) if omega > 0]
    if not moving:
        return Identity(None, "no pair turns")
    if len(moving) < len(omegas):
        return _partly(omegas, moving, rotary_dim)
    if len(omegas) == 1:
        return Identity(None, f"one frequency, {omegas[0]:.6g} rad per position")
    ratio, factor = _geometric(omegas)
    base = ratio ** -(rotary_dim / 2)
    for close in (_CLOSE, 1e-2):
        if _meets(omegas, [ratio**k * factor for k in range(len(omegas))], close):
            # The base is only as accurate as the frequencies: round it to that accuracy.
            nice = _nice(base, 1e-5 if close == _CLOSE else 20 * close)
            loose = close != _CLOSE
            if abs(factor - 1) <= 2 * close:
                by_head = None
                if rotary_dim < head_dim:
                    by_head = _nice(ratio ** -(head_dim / 2), 2e-5)
                return Identity(spec(nice), f"geometric, base {nice:g}", loose, by_head)
            if factor < 1:
                linear = _nice(1 / factor, 2 * close)
                text = f"geometric, base {nice:g}, linear scaling by {linear:g}"
                return Identity(spec(nice, Linear(linear)), text, loose)
    found = _scaled(omegas, amplitude, spec, noise)
    return found or Identity(None, "no rule that the audit knows")


def _partly(omegas: Sequence[float], moving: list[int], rotary_dim: int) -> Identity:
    """Describe frequencies of which some are 0."""
    turning = [omegas[k] for k in moving]
    text = f"{len(moving)} of {len(omegas)} pairs turn"
    if moving == list(range(len(moving))) and len(moving) > 1:
        ratio, factor = _geometric(turning)
        if abs(factor - 1) < 1e-4:
            base = _nice(ratio ** -(rotary_dim / 2), 1e-3)
            text += f"; these are geometric, base {base:g} over {rotary_dim} channels"
    return Identity(None, text)


def _geometric(omegas: Sequence[float]) -> tuple[float, float]:
    """Fit a geometric sequence to frequencies; return its ratio and first term."""
    logs = [math.log(omega) for omega in omegas]
    count = len(logs)
    # Median of the steps over half the sequence: insensitive to a few outliers.
    half = count // 2
    ratio = math.exp(median((logs[k + half] - logs[k]) / half for k in range(count - half)))
    first = math.exp(median(log - k * math.log(ratio) for k, log in enumerate(logs)))
    return ratio, first


def _meets(
    measured: Sequence[float],
    wanted: Sequence[float],
    close: float = _CLOSE,
    noise: float = 0.0,
) -> bool:
    return all(abs(a - b) <= close * abs(b) + noise for a, b in zip(measured, wanted, strict=True))


def _nice(value: float, close: float) -> float:
    """Return the number with the fewest digits within a relative distance of the value."""
    for digits in range(1, 8):
        rounded = float(f"{value:.{digits - 1}e}")
        if abs(rounded - value) <= close * abs(value):
            return rounded
    return value


def _scaled(
    omegas: Sequence[float], amplitude: float, spec: object, noise: float
) -> Identity | None:
    """Match YaRN and Llama 3: fast pairs unchanged, slow pairs divided by a factor, a transition between."""
    make = spec
    for base in _bases(omegas):
        plain: RopeSpec = make(base)  # type: ignore[operator]
        unscaled = plain.frequencies().inv_freq.tolist()
        divided = [b / a for a, b in zip(omegas, unscaled, strict=True)]
        factor = _nice(divided[-1], 1e-4 + noise / omegas[-1])
        slack = 1e-3 + noise / omegas[-1]
        if factor <= 1 or not all(1 - slack <= r <= factor * (1 + slack) for r in divided):
            continue
        for rule in _rules(factor):
            try:
                candidate: RopeSpec = make(base, rule)  # type: ignore[operator]
                wanted = candidate.frequencies().inv_freq.tolist()
            except ValueError:
                continue
            if _meets(omegas, wanted, noise=noise):
                name = {YaRN: "YaRN", Llama3: "Llama 3"}[type(rule)]
                text = (
                    f"geometric, base {base:g}, {name} scaling by {factor:g} "
                    f"from {rule.original_max_position} positions"
                )
                if abs(candidate.amplitude - amplitude) > 1e-4:
                    text += f" (its factor on the channels would be {candidate.amplitude:.4f})"
                return Identity(candidate, text)
    return None


def _bases(omegas: Sequence[float]) -> Iterator[float]:
    """Yield candidates for the base, from fast pairs, which scaling leaves unchanged."""
    count = len(omegas)
    for k in (1, 2, max(1, count // 8), max(1, count // 4)):
        if k < count and 1e-6 < omegas[k] < 1:
            yield _nice(omegas[k] ** -(count / k), 1e-5 * count / k)


def _rules(factor: float) -> Iterator[YaRN | Llama3]:
    for original in _ORIGINALS:
        yield Llama3(factor, 1.0, 4.0, original)
        for truncate in (True, False):
            yield YaRN(factor, original, truncate=truncate)
