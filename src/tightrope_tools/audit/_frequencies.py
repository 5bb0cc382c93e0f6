"""What the measured frequencies are: the rule behind them, and how they differ from the declared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tightrope.spec import RopeSpec

from ._identify import identify, nice
from ._log import Log
from ._profile import NARROW, Pair, Profile, pairs_of, wrapped

CLOSE = 1e-4
"""Largest relative error of a frequency that counts as equal. float32 gives 1e-6."""
_PAIRINGS = {True: "interleaved", False: "half"}


def rates_by_pair(spec: RopeSpec) -> dict[Pair, float]:
    """The frequencies of a spec, by the channels of their pairs."""
    rates = spec.frequencies().inv_freq.double().cpu()
    return dict(zip(pairs_of(spec), rates.tolist(), strict=True))


def rates_of(log: Log, profile: Profile) -> torch.Tensor | None:
    """The frequencies that the pairs should have: the declared ones, or those of the audit's tables."""
    known = {} if log.spec is None else rates_by_pair(log.spec)
    if log.subject.way.form.takes_tables:
        known = dict(zip(profile.slots, log.subject.rates.tolist()))
    if not known.keys() >= {*profile.pairs}:
        return None
    return torch.tensor([known[pair] for pair in profile.pairs], dtype=torch.float64)


def signs_of(log: Log, profile: Profile, *, declared: bool = True) -> torch.Tensor:
    """+1 for each pair that turns in the direction that is meant, -1 for the others.

    Args:
        declared: whether that is the direction of the declared frequencies, of which some may be negative. Else, and
            without a declaration, a pair turns its first channel towards the second.
    """
    omegas, rates = profile.omegas, rates_of(log, profile)
    if rates is None:
        # Half a turn per position is the same in both directions.
        back = (omegas < 0) & (omegas.abs() < math.pi - CLOSE)
    else:
        # At whole positions a frequency looks like the same one plus a turn per position.
        forward, backward = wrapped(omegas - rates).abs(), wrapped(omegas + rates).abs()
        back = backward < (1 - 1e-6) * forward
        back = back if declared else back != (rates < 0)
    return torch.where(back, -1.0, 1.0).double()


def name_rule(log: Log, profile: Profile) -> None:
    """Identify base and scaling from the frequencies."""
    if log.subject.way.form.takes_tables:
        log.facts["frequencies"] = "provided by the caller, as cosines and sines"
        return
    measured = dict(zip(profile.pairs, profile.omegas.abs().tolist()))
    omegas = [measured.get(pair, 0.0) for pair in profile.slots]
    where: dict[str, Any] = {"start": profile.start, "interleaved": bool(profile.interleaved)}
    make = partial(RopeSpec, profile.subject.head_dim, rotary_dim=profile.rotary_dim, **where)
    noise = 2 * profile.noise / profile.farthest
    log.identity = identify(omegas, make, profile.amplitude, noise)
    text = log.identity.text
    log.facts["frequencies"] = f"about {text}" if log.identity.loose else text


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
    rates, takes = rates_by_pair(spec), log.subject.way.form.takes_tables
    turning = {
        pair: rate for pair, rate in rates.items() if takes or abs(math.sin(rate / 2)) > 5e-7
    }
    if {*profile.pairs} <= rates.keys():
        # A pair that should turn is a matter of its frequency, unless it stands at an end of the slice.
        if turning.keys() <= {*profile.pairs} or profile.rotary_dim == spec.rotary_dim:
            return True
    u, v = profile.pairs[0]
    if profile.interleaved is not None and profile.interleaved != spec.interleaved:
        seen, declared = _PAIRINGS[profile.interleaved], _PAIRINGS[spec.interleaved]
        log.add("pairing", seen=seen, meant=declared, u=u, v=v, other=pairs_of(spec)[0].second)
        return False
    count, total, part = len(profile.pairs), len(turning), ""
    words: dict[str, Any] = {"count": count, "u": u, "v": v}
    first = torch.tensor([*turning.values()][:count], dtype=torch.float64)
    if not takes and 1 < count <= total and _turn_by(profile, first):
        # The base of these frequencies over the channels that turn is no one's.
        part = (
            "the declared ones" if count == total else f"the first {count} of {total} declared ones"
        )
        log.facts["frequencies"] = part
        part = f", by {part}"
        if profile.interleaved is False and profile.rotary_dim != spec.rotary_dim:
            add_distance(log, profile, spec, part=part, **words)
            return False
    seen, declared = (f"{p.start} to {p.start + p.rotary_dim - 1}" for p in (profile, spec))
    log.add("slice", seen=seen, meant=declared, part=part, **words)
    return False


def add_distance(
    log: Log, profile: Profile, spec: RopeSpec, kind: str = "pairing/distance", **words: Any
) -> None:
    """Report pairs whose channels are closer or farther apart than those of the spec."""
    meant = pairs_of(spec)[0]
    steps = profile.distance, meant.second - meant.first
    seen, declared = (f"i with i + {step}" for step in steps)
    log.add(kind, seen=seen, meant=declared, **words)


def _frequencies(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    rates = rates_by_pair(spec)
    known = dict(zip(profile.pairs, (profile.omegas * signs_of(log, profile)).tolist()))
    measured = torch.tensor([known.get(pair, 0.0) for pair in rates], dtype=torch.float64)
    meant = torch.tensor([*rates.values()], dtype=torch.float64)
    noise = 2 * profile.noise / profile.farthest
    # A pair that turns too little to be measured counts as correct.
    allowed = torch.clamp(CLOSE * meant.abs() + noise, min=1e-8)
    gap = wrapped(measured - meant).abs()
    # Declared frequencies rounded to 16 bits pass here: the check of angles finds what was rounded.
    if bool((gap <= allowed).all()) or is_rounded(measured, meant, noise):
        return True
    worst = int((gap / torch.clamp(meant.abs(), min=1e-8)).argmax())
    u, v = [*rates][worst]
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
    ratio = float(meant[0] / measured[0])
    if ratio > 0 and abs(ratio - 1) > 4 * CLOSE and _same(measured * ratio, meant):
        return (
            "scaling",
            {"what": f"All frequencies are the declared ones divided by {ratio:.6g}"},
            "",
        )
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
    for dtype in NARROW:
        near = meant.to(dtype).double()
        close = (measured - near).abs() <= 2e-5 * near.abs() + 1e-12 + noise
        if bool(close.all()) and bool(((near - meant).abs() > 2e-5 * meant.abs()).any()):
            return True
    return False


def check_identity(log: Log, profile: Profile) -> None:
    """Without a declared spec, warn of a base below 1000 if exponents divided by head_dim may explain it."""
    found = None if log.identity is None or log.identity.loose else log.identity.spec
    if log.spec is not None or found is None:
        return
    with log.check("frequencies are plausible"):
        sizes = {"head_dim": found.head_dim, "rotary_dim": found.rotary_dim}
        base = nice(found.base ** (found.head_dim / found.rotary_dim), 2e-5)
        if found.scaling is None and found.base < 1000 <= base:
            # Interleaved pairs of which the last never turn look the same, as in a proportional rule.
            severity = "note" if profile.interleaved else "warning"
            meant = replace(found, base=base)
            log.add(
                "denominator/or-base", "", severity, spec=meant, seen=found.base, base=base, **sizes
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
