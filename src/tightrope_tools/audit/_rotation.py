"""Whether channels turn in pairs, as declared: the pairs, their direction, their factor and their frequencies.

Pairs are conjugated, shifted to position 0 and divided by a factor, in this order: each correction is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tightrope.spec import RopeSpec
from tightrope_tools.forms import Pair, pairs_of

from ._identify import identify, nice
from ._log import Log
from ._profile import NARROW, NEAR, Profile, agree, flips, measure, wrapped

CLOSE = 1e-4
"""Largest relative error of a frequency that counts as equal. float32 gives 1e-6."""
_PAIRINGS = {True: "interleaved", False: "half"}
_LOOSE = 8e-3
"""Tolerance of factors; bfloat16 tables change them by up to 4e-3."""


def check_rotation(log: Log) -> bool:
    """Measure the profile and report its faults; return whether angles can be checked.

    Raises:
        CallFailed: a call failed that the measurement needs.
    """
    log.profile = profile = measure(log.subject.fresh(), log.near, log.limit)
    with log.check("it rotates pairs of channels"):
        sound = _pairs_are_rotations(log, profile)
    if not profile.pairs:
        return False
    log.facts["pairing"] = profile.pairing
    last = profile.start + profile.rotary_dim - 1
    turning = 2 * len(profile.pairs)
    idle = f", {turning} of them turning" if turning < profile.rotary_dim else ""
    log.facts["channels"] = f"{profile.start} to {last} of {log.subject.head_dim}{idle}"
    if not sound:
        return False
    if profile.order is not None:
        _moved(log, profile, profile.order)
    with log.check("direction and position 0"):
        check_direction(log, profile)
    if log.found("not-linear"):
        why = "the function is not linear, so unit vectors do not predict its result for other x"
        log.skip("factor and frequencies", why)
        return False
    name_rule(log, profile)
    with log.check("factor"):
        check_factor(log, profile)
    return True


def _listed(values: Sequence[object]) -> str:
    """The first values as text."""
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown) + (", …" if len(values) > 8 else "")


def _moved(log: Log, profile: Profile, order: tuple[int, ...]) -> None:
    first = next(i for i, j in enumerate(order) if i != j)
    how = f"channel {first} changes place"
    if profile.interleaved and profile.comes_out(profile.start + 2) == profile.start + 1:
        how = "pairs go in interleaved and come out as two halves"
    log.facts["order"] = how
    log.add("channel-order", how=how)


def _pairs_are_rotations(log: Log, profile: Profile) -> bool:
    """Report channels that are no pairs, and pairs that are not rotated."""
    pairs, tangled, alone = profile.pairs, profile.tangled, profile.alone
    maps, rates = log.near.matrices, None
    if log.spec is not None:
        rates = wrapped(log.spec.frequencies().inv_freq).abs()
    if not pairs and not tangled and not alone:
        whole = rates is not None and bool((rates < 1e-6).all())
        log.add("does-nothing", severity="note" if whole else "error")
        return False
    if profile.blocks > 1 and not tangled and not alone:
        _blocks(log, profile)
        return False
    if tangled and log.found("not-linear"):
        return False  # unit vectors do not show which channels mix
    if tangled or (pairs and profile.interleaved is None and profile.rotary_dim > 2):
        channel = (tangled or pairs[0])[0]
        reach = (maps[3, :, channel].abs() > 1e-6).nonzero().flatten().tolist()
        log.add("not-pairs", channel=channel, reach=_listed(reach))
        return False
    half_turns = rates is None or bool(((rates < 1e-6) | (rates > math.pi - 1e-6)).all())
    if alone and not pairs and half_turns and all(flips(maps[:, c, c]) for c in alone):
        log.add("fast/half-turns")
        return False
    if alone:
        factors = _listed([f"{f:.4g}" for f in maps[:5, alone[0], alone[0]].tolist()])
        log.add("pass-through", channels=_listed(alone), channel=alone[0], factors=factors)
    return bool(pairs) and _are_rotated(log, profile)


def _blocks(log: Log, profile: Profile) -> None:
    """Report half pairs in several blocks: as pairs that are not declared, or as what is not checked."""
    if log.spec is not None and not set(profile.pairs) <= set(pairs_of(log.spec)):
        add_distance(log, profile, log.spec, "pairing/blocks", blocks=profile.blocks)
    else:
        log.add("blocks", blocks=profile.blocks)


def _are_rotated(log: Log, profile: Profile) -> bool:
    """Report pairs whose two channels are not turned by one cosine and one sine."""
    sizes = torch.stack((profile.firsts, profile.seconds)).abs()
    skew = (sizes[0] - sizes[1]).abs().amax(0)
    scaled = skew > 1e-2 * sizes.mean(0).amax(0)
    first, second = profile.firsts.angle(), profile.seconds.angle()
    wrong = (scaled | (~agree(first, second, 1e-2)).any(0)).nonzero().flatten().tolist()
    if not wrong:
        return True
    k = wrong[0]
    (u, v), first, second = profile.pairs[k], first[:, k], second[:, k]
    far = (~agree(first, second, 5e-2)).nonzero().flatten().tolist()
    index = far[0] if far else NEAR - 1
    kind = "not-a-rotation" if scaled[k] else "table-pairing"
    if bool((agree(first, -second, 1e-2) | agree(first, math.pi - second, 1e-2)).all()):
        kind = "sign-missing"
    words: dict[str, Any] = {"u": u, "v": v, "index": index, "skew": float(skew[k])}
    words |= {"first": float(first[index]), "second": float(second[index])}
    log.add(kind, count=len(wrong), total=len(profile.pairs), **words)
    return False


# --- conjugate, shift, divide ---------------------------------------------------------------------


def check_direction(log: Log, profile: Profile) -> None:
    """Check the direction of the turn, and that nothing turns at position 0."""
    starts, moving = profile.intercepts, profile.omegas.abs() > 1e-6
    moving |= ~moving.any()
    back = (signs_of(log, profile) < 0) & moving
    (u, v), start, turn = profile.pairs[0], float(starts[0]), float(profile.omegas[0])
    at_0: dict[str, Any] = {"u": u, "v": v, "start": start, "turn": turn}
    if bool(agree(starts[moving], math.pi / 2, 2e-2).all()) and torch.equal(back, moving):
        log.add("swapped-tables", **at_0)
        return
    if bool(back.any()):
        _conjugate(log, profile, back, int(moving.sum()))
    # If position 0 itself is right, the check of angles finds where the others begin to be wrong.
    right = bool(agree(profile.firsts[0].angle(), 0.0, 1e-3).all())
    if not right and not bool(agree(starts, 0.0, max(1e-3, 2 * profile.noise)).all()):
        log.add("position-offset" if profile.shift else "phase", **at_0, whole=profile.shift)


def _conjugate(log: Log, profile: Profile, back: torch.Tensor, total: int) -> None:
    """Report the pairs that turn backwards, of so many that turn."""
    rates, count, k = rates_of(log, profile), int(back.sum()), int(back.nonzero()[0])
    if log.spec is None and count < total and _may_be_fast(profile.omegas):
        log.add("fast", count=count)
        return
    whose, why = "RoPE", "RoPE turns the first channel towards the second"
    if rates is not None and float(rates[k]) < 0:
        whose, why = "the declared one", f"{float(rates[k]):+.4f} was declared"
    severity = "warning" if log.spec is None else "error"
    pairs = "All pairs turn" if count == total else f"{count} of {total} pairs turn"
    (u, v), turn = profile.pairs[k], float(profile.omegas[k])
    log.add("sign", severity=severity, pairs=pairs, whose=whose, why=why, u=u, v=v, turn=turn)


def _may_be_fast(omegas: torch.Tensor) -> bool:
    """True if frequencies above π per position may explain pairs that turn backwards.

    Measured modulo a turn, they do not fall from pair to pair, as those of a rotation below π do.
    """
    size = omegas.abs()
    return float(size.max()) > 1.05 and bool((size[1:] > size[:-1]).any())


def check_factor(log: Log, profile: Profile) -> None:
    """Check the factor on the rotated channels, and replace a measured one by the one that is meant.

    Only near positions are looked at: faults far away have findings of their own.
    """
    sizes = torch.cat((profile.firsts, profile.seconds)).abs()
    least, most = float(sizes.min()), float(sizes.max())
    allowed = _LOOSE if profile.table in NARROW else min(_LOOSE, CLOSE + most - least)
    found = None if log.identity is None else log.identity.spec
    takes = log.subject.way.takes_tables
    spec = log.spec or found
    usual = [] if spec is None else [spec.attention_scaling()]
    if takes or log.spec is None:
        usual.append(1.0)  # the caller's tables may include the factor; those of the audit do not
    near = [each for each in usual if abs(profile.amplitude - each) <= allowed]
    seen = profile.amplitude = near[0] if near else profile.amplitude
    log.facts["amplitude"] = f"{seen:.6g}"
    if most - least > _LOOSE * seen:
        log.add("amplitude-varies", least=least, most=most)
    elif not near:
        # Beside frequencies of an unknown rule, the factor may belong to that rule.
        doubt = "note" if found is None and not takes else "warning"
        severity = doubt if log.spec is None else "error"
        log.add("amplitude", severity=severity, seen=seen, square=seen**2, meant=usual[0])


# --- frequencies ----------------------------------------------------------------------------------


def rates_by_pair(spec: RopeSpec) -> dict[Pair, float]:
    """The frequencies of a spec, by the channels of their pairs."""
    rates = spec.frequencies().inv_freq.double().cpu()
    return dict(zip(pairs_of(spec), rates.tolist(), strict=True))


def rates_of(log: Log, profile: Profile) -> torch.Tensor | None:
    """The frequencies that the pairs should have: the declared ones, or those of the audit's tables."""
    known = {} if log.spec is None else rates_by_pair(log.spec)
    if log.subject.way.takes_tables:
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
    if log.subject.way.takes_tables:
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
    if not same or log.subject.way.takes_tables:
        return False
    name = "frequencies are as declared"
    if log.found("history") and not log.subject.renew:
        log.skip(name, "they depend on earlier calls")
        return False
    with log.check(name):
        same = _frequencies(log, spec, profile)
    return same


def _pairing(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    rates, takes = rates_by_pair(spec), log.subject.way.takes_tables
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
    if (
        not takes
        and 1 < count <= total
        and _same(profile.omegas.abs(), first.abs(), 2 * profile.blur)
    ):
        # The base of these frequencies over the channels that turn is no one's.
        every = "the declared ones"
        some = f"the first {count} of {total} declared ones"
        log.facts["frequencies"] = every if count == total else some
        part = f", by {log.facts['frequencies']}"
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
    close = CLOSE if profile.rounded is None else torch.finfo(profile.rounded).eps
    allowed = torch.clamp(close * meant.abs() + noise, min=1e-8)
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
        what = f"All frequencies are the declared ones divided by {ratio:.6g}"
        return "scaling", {"what": what}, ""
    found = None if log.identity is None or log.identity.loose else log.identity.spec
    if found is None or float(measured.min()) < 0:  # it is known by its absolute frequencies
        return "frequencies", {}, ""
    if found.scaling is None and spec.scaling is None:
        return "base", {"seen": found.base, "meant": spec.base}, ""
    return "scaling", {"what": f"The frequencies are those of {found!r}"}, f"; declared {spec!r}"


def _same(measured: torch.Tensor, row: torch.Tensor, noise: torch.Tensor | float = 0.0) -> bool:
    return bool(((measured - row).abs() <= CLOSE * row.abs() + noise).all())


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
        fresh, rates = replace(profile, subject=subject), rates_by_pair(spec)
        known = {
            pair: (k, own) for k, (pair, (own, _, _)) in enumerate(zip(rates, spec.axes.pairs))
        }
        for axis in range(spec.axis_count):
            ids = torch.zeros(spec.axis_count, 1, len(where), dtype=torch.int64)
            ids[axis, 0] = where
            off = (fresh.tables(ids) - profile.amplitude).abs().amax(0)
            for pair, moved in zip(profile.pairs, (off > 1e-3).tolist(), strict=True):
                (u, v), (k, own) = pair, known[pair]
                if abs(rates[pair] * far) >= 2e-2 and moved != (own == axis):
                    does = "does not turn" if own == axis else "turns"
                    log.add("axes", axis=axis, does=does, k=k, u=u, v=v, own=own)
