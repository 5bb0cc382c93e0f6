"""What the measured frequencies are: the rule behind them, and how they differ from the declared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tightrope.spec import RopeSpec

from ._identify import identify
from ._log import Log
from ._profile import Profile, pairs_of, wrapped

CLOSE = 1e-4
"""Largest relative error of a frequency that counts as equal. float32 gives 1e-6."""
_PAIRINGS = {True: "interleaved", False: "half"}


def rates_of(log: Log, profile: Profile) -> torch.Tensor | None:
    """The frequencies that the pairs should have: the declared ones, or those of the audit's tables."""
    rates = None if log.spec is None else log.spec.frequencies().inv_freq.double().cpu()
    start = 0 if log.spec is None else log.spec.start
    if log.subject.way.form.takes_tables:
        rates, start = log.subject.rates, profile.start
    stride = 2 if profile.interleaved else 1
    at = [(pair.first - start) // stride for pair in profile.pairs]
    fits = rates is not None and all(0 <= k < len(rates) for k in at)
    return rates[at] if rates is not None and fits else None


def signs_of(log: Log, profile: Profile, *, declared: bool = True) -> torch.Tensor:
    """+1 for each pair that turns in the direction that is meant, -1 for the others.

    Args:
        declared: whether that is the direction of the declared frequencies, of which some may be negative. Else, and
            without a declaration, a pair turns its first channel towards the second.
    """
    omegas, rates = profile.omegas, rates_of(log, profile)
    # Half a turn per position is the same in both directions.
    back = (omegas < 0) & (omegas.abs() < math.pi - CLOSE)
    if rates is not None:
        # At whole positions a frequency looks like the same one plus a turn per position.
        tolerance = CLOSE * rates.abs()
        forward = wrapped(omegas - rates).abs() <= tolerance
        backward = wrapped(omegas + rates).abs() <= tolerance
        fast = (rates.abs() > 3.0) & (forward | backward)
        negative = rates < 0
        back = torch.where(fast, forward == negative, back)
        back = back != negative if declared else back
    return torch.where(back, -1.0, 1.0).double()


def name_rule(log: Log, profile: Profile) -> None:
    """Identify base and scaling from the frequencies."""
    if log.subject.way.form.takes_tables:
        log.facts["frequencies"] = "provided by the caller, as cosines and sines"
        return
    if len(profile.pairs) == 1 and profile.interleaved is None:
        log.facts["frequencies"] = f"{float(profile.omegas[0].abs()):.6g} rad per position"
        return
    measured = dict(zip(profile.pairs, profile.omegas.abs().tolist()))
    omegas = [measured.get(pair, 0.0) for pair in profile.slots]
    where: dict[str, Any] = {"start": profile.start, "interleaved": bool(profile.interleaved)}
    make = partial(RopeSpec, profile.subject.head_dim, rotary_dim=profile.rotary_dim, **where)
    noise = 2 * profile.noise / profile.farthest
    log.identity = identify(omegas, make, profile.amplitude, noise)
    text = log.identity.text
    log.facts["frequencies"] = f"about {text}" if log.identity.loose else text


def is_of(profile: Profile, spec: RopeSpec) -> bool:
    """True if a function has the channels and the frequencies of a spec."""
    rates = dict(zip(pairs_of(spec), spec.frequencies().inv_freq.double().cpu().tolist()))
    if not set(profile.pairs) <= set(rates):
        return False
    return _turn_by(profile, torch.tensor([rates[pair] for pair in profile.pairs]).double())


def _turn_by(profile: Profile, rates: torch.Tensor) -> bool:
    """True if all pairs have these frequencies, in either direction."""
    gap = (profile.omegas.abs() - rates.abs()).abs()
    return bool((gap <= CLOSE * rates.abs() + 2 * profile.blur).all())


def check_record(log: Log, profile: Profile) -> None:
    """Compare the pairing with that of the weights, as the record of their conversion states it."""
    if log.recorded is None or profile.interleaved is None:
        return
    with log.check("pairing is that of the conversion record"):
        if log.recorded != profile.interleaved:
            u, v = profile.pairs[0]
            recorded, seen = _PAIRINGS[log.recorded], _PAIRINGS[profile.interleaved]
            log.add("record", recorded=recorded, seen=seen, u=u, v=v)


def check_declared(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    """Compare with the declared spec; return whether the frequencies are the declared ones."""
    same = False
    with log.check("pairing and slice are as declared"):
        same = _pairing(log, spec, profile)
    if not same or log.subject.way.form.takes_tables:
        return False
    name = "frequencies are as declared"
    if log.found("history") and not log.subject.renew:
        log.skip(name, "they depend on earlier calls")
        return False
    with log.check(name):
        same = _frequencies(log, spec, profile)
    return same


def _pairing(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    meant = pairs_of(spec)
    if set(profile.pairs) <= set(meant):
        # A pair that should turn is a matter of its frequency, unless it stands at an end of the slice.
        turning = (wrapped(spec.frequencies().inv_freq).abs() > 1e-6).tolist()
        takes = log.subject.way.form.takes_tables
        lost = any(pair not in profile.pairs for pair, on in zip(meant, turning) if on or takes)
        if not lost or profile.rotary_dim == spec.rotary_dim:
            return True
    u, v = profile.pairs[0]
    if profile.interleaved is not None and profile.interleaved != spec.interleaved:
        seen, declared = _PAIRINGS[profile.interleaved], _PAIRINGS[spec.interleaved]
        log.add("pairing", seen=seen, meant=declared, u=u, v=v, other=meant[0].second)
        return False
    words: dict[str, Any] = {"count": len(profile.pairs), "u": u, "v": v, "part": ""}
    if part := _declared_part(log, spec, profile):
        # The base of these frequencies over the channels that turn is no one's.
        log.facts["frequencies"] = part
        words["part"] = f", by {part}"
        if profile.interleaved is False and profile.rotary_dim != spec.rotary_dim:
            add_distance(log, profile, spec, **words)
            return False
    seen, declared = (f"{p.start} to {p.start + p.rotary_dim - 1}" for p in (profile, spec))
    log.add("slice", seen=seen, meant=declared, **words)
    return False


def _declared_part(log: Log, spec: RopeSpec, profile: Profile) -> str:
    """Name the part of the declared frequencies with which pairs of other channels turn; "" if they are others."""
    meant = spec.frequencies().inv_freq.double().cpu()
    meant, count = meant[wrapped(meant).abs() > 1e-6], len(profile.pairs)
    if log.subject.way.form.takes_tables or not 1 < count <= len(meant):
        return ""
    if not _turn_by(profile, meant[:count]):
        return ""
    every = count == len(meant)
    return "the declared ones" if every else f"the first {count} of {len(meant)} declared ones"


def add_distance(
    log: Log, profile: Profile, spec: RopeSpec, kind: str = "pairing/distance", **words: Any
) -> None:
    """Report pairs whose channels are closer or farther apart than those of the spec."""
    meant = pairs_of(spec)[0]
    steps = min(profile.distances), meant.second - meant.first
    seen, declared = (f"i with i + {step}" for step in steps)
    log.add(kind, seen=seen, meant=declared, **words)


def _frequencies(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    pairs = pairs_of(spec)
    known = dict(zip(profile.pairs, (profile.omegas * signs_of(log, profile)).tolist()))
    measured = torch.tensor([known.get(pair, 0.0) for pair in pairs], dtype=torch.float64)
    meant = spec.frequencies().inv_freq.double().cpu()
    gap = wrapped(measured - meant).abs()
    noise = 2 * profile.noise / profile.farthest
    # A pair that turns too little to be measured counts as correct.
    allowed = torch.clamp(CLOSE * meant.abs() + noise, min=1e-8)
    # Declared frequencies rounded to 16 bits pass here: the check of angles finds what was rounded.
    if bool((gap <= allowed).all()) or is_rounded(measured, meant, noise):
        return True
    worst = int((gap / torch.clamp(meant.abs(), min=1e-8)).argmax())
    u, v = pairs[worst]
    kind, words, extra = _cause(log, spec, measured, meant)
    evidence = (
        f"pair {worst} (channels {u} and {v}) turns by {float(measured[worst]):.6g} rad per position, "
        f"{float(meant[worst]):.6g} declared{extra}"
    )
    log.add(kind, evidence, **words)
    return False


def _cause(
    log: Log, spec: RopeSpec, measured: torch.Tensor, meant: torch.Tensor
) -> tuple[str, dict[str, Any], str]:
    """Return (kind, its words, more evidence) for frequencies that are not the declared ones."""
    plain = replace(spec, scaling=None)
    if spec.scaling is not None and _same(measured, plain.frequencies().inv_freq.double().cpu()):
        return "scaling-ignored", {"plain": plain}, f"; declared {spec.scaling!r}"
    row = spec.base ** (-2 * torch.arange(len(measured)).double() / spec.head_dim)
    if spec.rotary_dim < spec.head_dim and _same(measured, row):
        return "denominator", {"head_dim": spec.head_dim, "rotary_dim": spec.rotary_dim}, ""
    moving = meant != 0
    ratios = meant[moving] / measured[moving]
    spread = float(ratios.max() - ratios.min()) if len(ratios) > 1 else math.inf
    alike = bool(((measured != 0) == moving).all()) and spread <= 2 * CLOSE * float(ratios.max())
    if alike and abs(float(ratios[0]) - 1) > 4 * CLOSE:
        what = f"All frequencies are the declared ones divided by {float(ratios[0]):.6g}"
        return "scaling", {"what": what}, ""
    found = None if log.identity is None or log.identity.loose else log.identity.spec
    if found is None or float(measured.min()) < 0:  # it is known by its absolute frequencies
        return "frequencies", {}, ""
    if found.scaling is None and spec.scaling is None:
        return "base", {"seen": found.base, "meant": spec.base}, ""
    return "scaling", {"what": f"The frequencies are those of {found!r}"}, f"; declared {spec!r}"


def _same(measured: torch.Tensor, row: torch.Tensor) -> bool:
    return bool(((measured - row).abs() <= CLOSE * row.abs()).all())


def is_rounded(measured: torch.Tensor, meant: torch.Tensor, noise: float = 0.0) -> bool:
    """True if measured frequencies are those of ``meant`` rounded to a 16-bit dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        near = meant.to(dtype).double()
        differs = (near - meant).abs() > 2e-5 * meant.abs()
        close = (measured - near).abs() <= 2e-5 * near.abs() + 1e-12 + noise
        if bool(differs.any()) and bool(close.all()):
            return True
    return False


def check_identity(log: Log, profile: Profile) -> None:
    """Without a declared spec, warn of a base below 1000 if exponents divided by head_dim may explain it."""
    identity = log.identity
    if log.spec is not None or identity is None or identity.spec is None or identity.loose:
        return
    with log.check("frequencies are plausible"):
        if identity.by_head_dim is not None and identity.spec.base < 1000 <= identity.by_head_dim:
            # Interleaved pairs of which the last never turn look the same, as in a proportional rule.
            log.add(
                "denominator/or-base",
                severity="note" if profile.interleaved else "warning",
                spec=replace(identity.spec, base=identity.by_head_dim),
                seen=identity.spec.base,
                base=identity.by_head_dim,
                head_dim=log.subject.head_dim,
                rotary_dim=profile.rotary_dim,
            )


def check_axes(log: Log, spec: RopeSpec, profile: Profile) -> None:
    """Check that each coordinate turns the pairs declared for it, and no others."""
    if spec.axes is None:
        return
    name = "each coordinate turns its own pairs"
    if not log.subject.way.takes_positions or log.subject.way.counts:
        log.skip(name, "the function does not take the positions of each token")
        return
    with log.check(name) as subject:
        far = min(log.longest, 2**16)
        where = torch.tensor([1, 3, 50, far // 17, far])
        x = subject.laid_out(torch.ones(1, subject.most_heads or 2, len(where), subject.head_dim))
        slow = (spec.frequencies().inv_freq.abs() * far < 2e-2).tolist()
        owners = [own for own, _, _ in spec.axes.pairs]
        for axis in range(spec.axis_count):
            ids = torch.zeros(spec.axis_count, 1, len(where), dtype=torch.int64)
            ids[axis, 0] = where
            y = subject.rotate(x.clone(), ids).detach()
            moved = (y - x * profile.amplitude).abs().amax((0, 1, 2)) > 1e-3
            for k, ((u, v), own) in enumerate(zip(pairs_of(spec), owners)):
                if not slow[k] and bool(moved[u] | moved[v]) != (own == axis):
                    does = "does not turn" if own == axis else "turns"
                    log.add("axes", axis=axis, does=does, k=k, u=u, v=v, own=own)
