"""The channel pairs of a spec: how long a turn takes, and what scaling did to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal

from ...frequencies import CONTEXT, TWO_PI, Frequencies
from ...spec import RopeSpec


@dataclass(frozen=True)
class Pair:
    """One pair of channels that turns together.

    Attributes:
        index: which frequency; heads and axes with frequencies of their own count on.
        channels: the two channels of a head.
        axis: which coordinate turns it; None where positions have one.
        head: which head it is of; None where heads are alike.
        inv_freq: radians per position, as scaled.
        wavelength: positions per turn; infinite for a pair that stands still.
        unscaled: the same without scaling.
        slower: how many times slower it turns than without scaling; 1.0 exactly if it was kept.
        turns: within the context; None where no length is known.
        turns_trained: without scaling, within the length of training; None where it is not known.
    """

    index: int
    channels: tuple[int, int]
    axis: int | None
    head: int | None
    inv_freq: float
    wavelength: float
    unscaled: float
    slower: float
    turns: float | None
    turns_trained: float | None

    @property
    def effect(self) -> str:
        """What scaling did: ``kept``, ``÷ 8`` (slower), ``× 1.25`` (faster) or ``stopped``."""
        if self.slower == 1.0:
            return "kept"
        if math.isinf(self.slower):
            return "stopped"
        if abs(self.slower) >= 1.0:
            return f"÷ {self.slower:.4g}"
        return f"× {1 / self.slower:.4g}" if self.slower else "started"


def pairs_of(spec: RopeSpec, context: int | None, trained: int | None) -> tuple[Pair, ...]:
    """Every pair of a spec, at a length of the context.

    >>> pairs = pairs_of(RopeSpec(4), context=8, trained=None)
    >>> [round(pair.wavelength, 3) for pair in pairs]
    [6.283, 628.319]
    """
    scaled = spec.frequencies(context)
    row = _unscaled(spec).exact
    count = max(len(row), 1)
    heads = scaled.shape is not None
    made = []
    for index, omega in enumerate(scaled.exact):
        pair, plain = index % count, row[index % count]
        made.append(
            Pair(
                index=index,
                channels=_channels(spec, pair),
                axis=_axis(spec, scaled, index),
                head=index // count % _heads(scaled) if heads else None,
                inv_freq=float(omega),
                wavelength=_wavelength(omega),
                unscaled=_wavelength(plain),
                slower=_ratio(plain, omega),
                turns=_turns(omega, context),
                turns_trained=_turns(plain, trained),
            )
        )
    return tuple(made)


def _unscaled(spec: RopeSpec) -> Frequencies:
    return spec.frequencies() if spec.scaling is None else replace(spec, scaling=None).frequencies()


def _heads(frequencies: Frequencies) -> int:
    shape = frequencies.shape
    return 1 if shape is None else shape[-2]


def _axis(spec: RopeSpec, frequencies: Frequencies, index: int) -> int | None:
    if spec.axes is not None:
        return spec.axes.pairs[index % len(spec.axes.pairs)][0]
    shape = frequencies.shape
    return index // (shape[1] * shape[2]) if shape is not None and len(shape) == 3 else None


def _channels(spec: RopeSpec, pair: int) -> tuple[int, int]:
    if spec.interleaved:
        first = spec.start + 2 * pair
        return first, first + 1
    return spec.start + pair, spec.start + pair + spec.rotary_dim // 2


def _wavelength(omega: Decimal) -> float:
    return math.inf if omega == 0 else float(CONTEXT.divide(TWO_PI, abs(omega)))


def _turns(omega: Decimal, length: int | None) -> float | None:
    return None if length is None else float(CONTEXT.divide(abs(omega) * length, TWO_PI))


def _ratio(plain: Decimal, omega: Decimal) -> float:
    if plain == omega:
        return 1.0
    ratio = math.inf if omega == 0 else float(CONTEXT.divide(plain, omega))
    # A ratio that only rounds to 1 is none.
    return math.nextafter(1.0, 2.0) if ratio == 1.0 else ratio
