"""Findings that are read from the profile: pairs, direction, factor, frequencies, keys and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tightrope.spec import RopeSpec

from ._call import CallFailed, Subject, gradient
from ._identify import Identity, identify
from ._log import Log
from ._profile import (
    DENSE,
    NARROW,
    NEAR,
    SHORT,
    Pair,
    Profile,
    agree,
    apart,
    matrices,
    measure,
    pairs_in,
    wrapped,
)

_LOOSE = 8e-3
"""Tolerance of factors; bfloat16 tables change them by up to 4e-3."""
_CLOSE = 1e-4
"""Largest relative error of a frequency that counts as equal. float32 gives 1e-6."""
_PAIRINGS = {True: "interleaved", False: "half"}


def check_rotation(log: Log) -> bool:
    """Measure the profile and report its faults; return whether angles can be checked."""
    with log.check("it rotates pairs of channels") as fresh:
        log.profile = profile = measure(fresh, log.limit)
        sound = _pairs_are_rotations(log, profile)
    if log.profile is None:
        why = log.checks[-1].outcome.removeprefix("skipped: ")
        log.add("raises", f"positions up to {NEAR[-1]}, so nothing was measured: {why}")
        return False
    if not profile.pairs:
        return False
    log.facts["pairing"] = profile.pairing
    log.facts["channels"] = _channels(profile, fresh.head_dim)
    if not sound:
        return False
    if profile.order is not None:
        _moved(log, profile, profile.order)
    with log.check("direction and position 0"):
        _direction(log, profile)
    if log.found("not-linear"):
        log.skip(
            "factor and frequencies",
            "the function is not linear, so unit vectors do not predict its result for other x",
        )
        return False
    _name(log, profile)
    with log.check("factor"):
        _factor(log, profile)
    return True


def _channels(profile: Profile, head_dim: int) -> str:
    last = profile.start + profile.rotary_dim - 1
    turning = 2 * len(profile.pairs)
    idle = f", {turning} of them turning" if turning < profile.rotary_dim else ""
    return f"{profile.start} to {last} of {head_dim}{idle}"


def listed(values: Sequence[object]) -> str:
    """The first values as text."""
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown) + (", …" if len(values) > 8 else "")


def add_does_nothing(log: Log) -> None:
    """Add the finding that x comes back unchanged; a note if the declared pairs make whole turns only."""
    rates = None if log.spec is None else log.spec.frequencies().inv_freq
    still = rates is not None and bool((wrapped(rates).abs() < 1e-6).all())
    evidence = "tokens at positions up to 50 come back unchanged"
    log.add("does-nothing", evidence, "note" if still else "error")


def _moved(log: Log, profile: Profile, order: tuple[int, ...]) -> None:
    halves = profile.interleaved and profile.comes_out(profile.start + 2) == profile.start + 1
    first = next(i for i, j in enumerate(order) if i != j)
    how = (
        "pairs go in interleaved and come out as two halves"
        if halves
        else f"channel {first} changes place"
    )
    log.facts["order"] = how
    log.add(
        "channel-order",
        f"{how}; scores stay the same, as q and k are reordered alike, but other implementations cannot "
        "use the rotated keys",
    )


# --- pairs ------------------------------------------------------------------------------------------


def _pairs_are_rotations(log: Log, profile: Profile) -> bool:
    pairs, tangled, alone = profile.pairs, profile.tangled, profile.alone
    if not bool(profile.matrices.isfinite().all()):
        log.add("not-finite", "unit vectors at positions near 0")
        return False
    if not pairs and not tangled and not alone:
        add_does_nothing(log)
        return False
    if profile.blocks > 1 and not tangled and not alone:
        if log.spec is not None and not set(pairs) <= set(pairs_of(log.spec)):
            evidence = f"in {profile.blocks} blocks, so the audit checks no frequency and no angle"
            _add_distance(log, profile, log.spec, evidence)
            return False
        evidence = "the audit measures one block only, so it checks no frequency and no angle"
        log.add("blocks", evidence, blocks=profile.blocks)
        return False
    if tangled and log.found("not-linear"):
        return False  # unit vectors do not show which channels mix
    if tangled or (pairs and profile.interleaved is None and profile.rotary_dim > 2):
        channel, index = (tangled or pairs[0])[0], 3
        reach = (profile.matrices[index, :, channel].abs() > 1e-6).nonzero().flatten().tolist()
        evidence = f"channel {channel} affects channels {listed(reach)} at position {NEAR[index]}"
        log.add("not-pairs", evidence)
        return False
    meant = None if log.spec is None else wrapped(log.spec.frequencies().inv_freq).abs()
    half_turns = meant is None or bool(((meant < 1e-6) | (meant > math.pi - 1e-6)).all())
    if alone and not pairs and half_turns and all(profile.flips(channel) for channel in alone):
        log.add(
            "half-turns",
            "whole positions do not show which channels are pairs, so no frequency and no angle was checked",
            code="fast",
        )
        return False
    if alone:
        factors = profile.matrices[:5, alone[0], alone[0]].tolist()
        log.add(
            "pass-through",
            f"channel {alone[0]} is multiplied by {listed([f'{f:.4g}' for f in factors])} at positions "
            f"{listed(NEAR[:5])}",
            channels=listed(alone),
        )
        if not pairs:
            return False
    skew = (profile.lengths[0] - profile.lengths[1]).abs().amax(0)
    scaled = skew > 1e-2 * profile.lengths.mean(0).amax(0)
    apart = ~agree(profile.firsts, profile.seconds, 1e-2)
    wrong = (scaled | apart.any(0)).nonzero().flatten().tolist()
    if not wrong:
        return True
    k = wrong[0]
    u, v = pairs[k]
    first, second = profile.firsts[:, k], profile.seconds[:, k]
    far = (~agree(first, second, 5e-2)).nonzero().flatten().tolist()
    index = far[0] if far else len(NEAR) - 1
    evidence = (
        f"{len(wrong)} of {len(pairs)} pairs; channels {u} and {v} at position {NEAR[index]}: the first "
        f"turns by {float(first[index]):+.4f} rad, the second by {float(second[index]):+.4f}"
    )
    if bool((agree(first, -second, 1e-2) | agree(first, math.pi - second, 1e-2)).all()):
        log.add("sign-missing", evidence)
    elif scaled[k]:
        log.add("not-a-rotation", f"{evidence}; lengths differ by up to {float(skew[k]):.4f}")
    else:
        log.add("table-pairing", evidence)
    return False


# --- direction, position 0, factor --------------------------------------------------------------------


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
    back = (omegas < 0) & (omegas.abs() < math.pi - _CLOSE)
    if rates is not None:
        # At whole positions a frequency looks like the same one plus a turn per position.
        tolerance = _CLOSE * rates.abs()
        forward = wrapped(omegas - rates).abs() <= tolerance
        backward = wrapped(omegas + rates).abs() <= tolerance
        fast = (rates.abs() > 3.0) & (forward | backward)
        negative = rates < 0
        back = torch.where(fast, forward == negative, back)
        back = back != negative if declared else back
    return torch.where(back, -1.0, 1.0).double()


def _direction(log: Log, profile: Profile) -> None:
    """Check the direction of the turn, and that nothing turns at position 0."""
    omegas, starts = profile.omegas, profile.intercepts
    moving = omegas.abs() > 1e-6
    moving = moving if bool(moving.any()) else torch.ones_like(moving)
    (u, v), at_0 = profile.pairs[0], f"{float(starts[0]):+.4f} rad at position 0"
    back = (signs_of(log, profile) < 0) & moving
    swapped = bool(agree(starts[moving], math.pi / 2, 2e-2).all())
    if swapped and bool((back == moving).all()):
        log.add("swapped-tables", f"channels {u} and {v}: {at_0}")
        return
    count, total = int(back.sum()), int(moving.sum())
    if count and log.spec is None and count < total and _may_be_fast(omegas):
        evidence = "whole positions do not tell a frequency from the same one minus a turn"
        log.add("fast", evidence, count=count)
    elif count:
        k = int(back.nonzero()[0])
        name = "All pairs turn" if count == total else f"{count} of {total} pairs turn"
        rates = rates_of(log, profile)
        usual, why = "RoPE", "RoPE turns the first channel towards the second"
        if rates is not None and float(rates[k]) < 0:
            usual, why = "the declared one", f"{float(rates[k]):+.4f} was declared"
        log.add(
            "sign",
            f"channels {profile.pairs[k].first} and {profile.pairs[k].second} turn by "
            f"{float(omegas[k]):+.4f} rad per position; {why}. "
            "Either direction works, but the two cannot be mixed",
            "warning" if log.spec is None else "error",
            pairs=name,
            whose=usual,
        )
    if bool(agree(starts, 0.0, max(1e-3, 2 * profile.noise)).all()):
        return
    if bool(agree(profile.firsts[0], 0.0, 1e-3).all()):
        return  # position 0 itself is right: the check of angles finds where the others begin to be wrong
    if whole := profile.shift:
        log.add(
            "position-offset",
            f"channels {u} and {v}: {at_0}, and {float(omegas[0]):.4f} rad per position; harmless if q and all "
            "keys go through this function, wrong with keys that other code cached",
            whole=whole,
        )
    else:
        log.add("phase", f"channels {u} and {v}: {at_0}")


def _may_be_fast(omegas: torch.Tensor) -> bool:
    """True if frequencies above π per position may explain pairs that turn backwards.

    Measured modulo a turn, they do not fall from pair to pair, as those of a rotation below π do.
    """
    size = omegas.abs()
    return float(size.max()) > 1.05 and bool((size[1:] > size[:-1]).any())


def _factor(log: Log, profile: Profile) -> None:
    # Near positions only: faults far away have findings of their own.
    least, most = float(profile.lengths.min()), float(profile.lengths.max())
    narrow = profile.table in NARROW
    allowed = _LOOSE if narrow else min(_LOOSE, _CLOSE + most - least)
    found = None if log.identity is None else log.identity.spec
    takes = log.subject.way.form.takes_tables
    usual = [1.0 if log.spec is None else log.spec.attention_scaling()]
    if log.spec is None and found is not None:
        usual.append(found.attention_scaling())
    if takes:
        usual.append(1.0)  # the caller's tables may include the factor; those of the audit do not
    near = [each for each in usual if abs(profile.amplitude - each) <= allowed]
    if near:
        # Replace a measurement that may come from rounded tables.
        profile.amplitude = near[-1]
    log.facts["amplitude"] = f"{profile.amplitude:.6g}"
    if most - least > _LOOSE * profile.amplitude:
        log.add("amplitude-varies", f"factors from {least:.4g} to {most:.4g}")
    elif not near:
        # Beside frequencies of an unknown rule, the factor may belong to that rule.
        doubt = "note" if found is None and not takes else "warning"
        log.add(
            "amplitude",
            f"scores of two rotated vectors are multiplied by the square, {profile.amplitude**2:.6g}",
            doubt if log.spec is None else "error",
            seen=profile.amplitude,
            meant=usual[0],
        )


# --- frequencies --------------------------------------------------------------------------------------


def _slots_of(profile: Profile) -> dict[Pair, float]:
    """The absolute frequency of each pair of the slice, rad per position; 0 if it never turns."""
    measured = dict(zip(profile.pairs, profile.omegas.abs().tolist()))
    return {pair: measured.get(pair, 0.0) for pair in profile.slots}


def _name(log: Log, profile: Profile) -> None:
    """Identify base and scaling from the frequencies."""
    if log.subject.way.form.takes_tables:
        log.facts["frequencies"] = "provided by the caller, as cosines and sines"
        return
    if len(profile.pairs) == 1 and profile.interleaved is None:
        log.facts["frequencies"] = f"{float(profile.omegas[0].abs()):.6g} rad per position"
        return
    log.identity = identity_of(profile)
    text = log.identity.text
    log.facts["frequencies"] = f"about {text}" if log.identity.loose else text


def identity_of(profile: Profile) -> Identity:
    """Return the rule behind the measured frequencies; needs a pairing."""
    return identify(
        [*_slots_of(profile).values()],
        profile.amplitude,
        noise=2 * profile.noise / profile.farthest,
        head_dim=profile.subject.head_dim,
        rotary_dim=profile.rotary_dim,
        start=profile.start,
        interleaved=bool(profile.interleaved),
    )


def is_of(profile: Profile, spec: RopeSpec) -> bool:
    """True if a function has the channels and the frequencies of a spec."""
    rates = dict(zip(pairs_of(spec), spec.frequencies().inv_freq.double().cpu().tolist()))
    if not set(profile.pairs) <= set(rates):
        return False
    wanted = torch.tensor([abs(rates[pair]) for pair in profile.pairs], dtype=torch.float64)
    gap = (profile.omegas.abs() - wanted).abs()
    return bool((gap <= _CLOSE * wanted + 2 * profile.blur).all())


def record_of(recorded: bool | None, profile: Profile) -> dict[str, Any]:
    """Return the words of the finding that the record of a conversion contradicts the code; {} if it does not.

    Args:
        recorded: whether the record states "interleaved"; None if there is no record.
    """
    if recorded is None or profile.interleaved is None or recorded == profile.interleaved:
        return {}
    return {"recorded": _PAIRINGS[recorded], "seen": _PAIRINGS[profile.interleaved]}


def pairs_of(spec: RopeSpec) -> list[Pair]:
    """The channels of each pair of a spec."""
    return pairs_in(spec.start, spec.rotary_dim, spec.interleaved)


def check_declared(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    """Compare with the declared spec; return whether the frequencies are the declared ones."""
    same = False
    with log.check("pairing and slice are as declared"):
        same = _pairing(log, spec, profile)
    if not same or log.subject.way.form.takes_tables:
        return False
    with log.check("frequencies are as declared"):
        same = _frequencies(log, spec, profile)
    return same


def check_record(log: Log, profile: Profile) -> None:
    """Compare the pairing with that of the weights, as the record of their conversion states it."""
    if log.recorded is None:
        return
    with log.check("pairing is that of the conversion record"):
        if words := record_of(log.recorded, profile):
            (u, v), evidence = profile.pairs[0], "the weights give fluent nonsense with this code"
            log.add("record", f"channel {u} turns with channel {v}; {evidence}", **words)


def _pairing(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    meant = pairs_of(spec)
    if set(profile.pairs) <= set(meant):
        turning = dict(zip(meant, spec.frequencies().inv_freq))
        lost = [pair for pair in meant if pair not in profile.pairs]
        # A pair that should turn is a matter of its frequency, unless it stands at an end of the slice.
        if log.subject.way.form.takes_tables:
            lost = lost if profile.rotary_dim != spec.rotary_dim else []
        else:
            lost = [pair for pair in lost if abs(wrapped(turning[pair])) > 1e-6]
        if not lost or profile.rotary_dim == spec.rotary_dim:
            return True
    u, v = profile.pairs[0]
    if profile.interleaved is not None and profile.interleaved != spec.interleaved:
        log.add(
            "pairing",
            f"channel {u} turns with channel {v}, not with {meant[0].second}; weights made for one pairing "
            "give fluent nonsense with the other",
            seen=_PAIRINGS[profile.interleaved],
            meant=_PAIRINGS[spec.interleaved],
        )
        return False
    evidence = f"{len(profile.pairs)} pairs turn, the first being channels {u} and {v}"
    if part := _declared_part(log, spec, profile):
        # The base of these frequencies over the channels that turn is no one's.
        log.facts["frequencies"] = part
        evidence += f", by {part}"
        if profile.interleaved is False and profile.rotary_dim != spec.rotary_dim:
            _add_distance(log, profile, spec, evidence)
            return False
    seen, declared = (f"{p.start} to {p.start + p.rotary_dim - 1}" for p in (profile, spec))
    log.add("slice", evidence, seen=seen, meant=declared)
    return False


def _declared_part(log: Log, spec: RopeSpec, profile: Profile) -> str:
    """Name the part of the declared frequencies with which pairs of other channels turn; "" if they are others."""
    meant = spec.frequencies().inv_freq.double().cpu().abs()
    meant, own = meant[wrapped(meant).abs() > 1e-6], profile.omegas.abs()
    count = len(own)
    if log.subject.way.form.takes_tables or not 1 < count <= len(meant):
        return ""
    if bool(((own - meant[:count]).abs() > _CLOSE * meant[:count] + 2 * profile.blur).any()):
        return ""
    return (
        "the declared ones"
        if count == len(meant)
        else f"the first {count} of {len(meant)} declared ones"
    )


def _add_distance(log: Log, profile: Profile, spec: RopeSpec, evidence: str) -> None:
    """Report pairs whose channels are closer or farther apart than those of the spec."""
    own, meant = min(profile.distances), pairs_of(spec)[0]
    words: dict[str, Any] = {
        "seen": f"i with i + {own}",
        "meant": f"i with i + {meant.second - meant.first}",
    }
    log.add("pairing-distance", evidence, code="pairing", **words)


def _frequencies(log: Log, spec: RopeSpec, profile: Profile) -> bool:
    pairs = pairs_of(spec)
    known = dict(zip(profile.pairs, (profile.omegas * signs_of(log, profile)).tolist()))
    measured = torch.tensor([known.get(pair, 0.0) for pair in pairs], dtype=torch.float64)
    meant = spec.frequencies().inv_freq.double().cpu()
    gap = wrapped(measured - meant).abs()
    noise = 2 * profile.noise / profile.farthest
    # A pair that turns too little to be measured counts as correct.
    allowed = torch.clamp(_CLOSE * meant.abs() + noise, min=1e-8)
    # Declared frequencies rounded to 16 bits pass here: the check of angles finds what was rounded.
    if bool((gap <= allowed).all()) or is_rounded(measured, meant, noise):
        return True
    worst = int((gap / torch.clamp(meant.abs(), min=1e-8)).argmax())
    turns, should = measured.tolist(), meant.tolist()
    u, v = pairs[worst]
    kind, words, extra = _cause(log, spec, turns, should)
    evidence = (
        f"pair {worst} (channels {u} and {v}) turns by {turns[worst]:.6g} rad per position, "
        f"{should[worst]:.6g} declared{extra}"
    )
    log.add(kind, evidence, **words)
    return False


def _cause(
    log: Log, spec: RopeSpec, measured: Sequence[float], meant: Sequence[float]
) -> tuple[str, dict[str, Any], str]:
    """Return (kind, its words, more evidence) for frequencies that are not the declared ones."""
    plain = replace(spec, scaling=None)
    if spec.scaling is not None and _same(measured, plain.frequencies().inv_freq.tolist()):
        return "scaling-ignored", {"plain": plain}, f"; declared {spec.scaling!r}"
    if spec.rotary_dim < spec.head_dim:
        row = [spec.base ** (-2 * k / spec.head_dim) for k in range(len(measured))]
        if _same(measured, row):
            words = {"head_dim": spec.head_dim, "rotary_dim": spec.rotary_dim}
            return "denominator", words, ""
    ratios = [b / a for a, b in zip(measured, meant, strict=True) if a and b]
    turning = all(bool(a) == bool(b) for a, b in zip(measured, meant, strict=True))
    alike = len(ratios) > 1 and max(ratios) - min(ratios) <= 2 * _CLOSE * max(ratios)
    if turning and alike and abs(ratios[0] - 1) > 4 * _CLOSE:
        what = f"All frequencies are the declared ones divided by {ratios[0]:.6g}"
        return "scaling", {"what": what}, ""
    found = None if log.identity is None or log.identity.loose else log.identity.spec
    if found is None or min(measured) < 0:  # it is known by its absolute frequencies
        return "frequencies", {}, ""
    if found.scaling is None and spec.scaling is None:
        return "base", {"seen": found.base, "meant": spec.base}, ""
    what = f"The frequencies are those of {found!r}"
    return "scaling", {"what": what}, f"; declared {spec!r}"


def _same(measured: Sequence[float], row: Sequence[float]) -> bool:
    return all(
        abs(a - b) <= _CLOSE * max(abs(b), 1e-30) for a, b in zip(measured, row, strict=True)
    )


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
                "denominator-or-base",
                "declare the intended rotation with spec=",
                "note" if profile.interleaved else "warning",
                code="denominator",
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
                    log.add(
                        "axes",
                        f"coordinate {axis} {does} pair {k} (channels {u} and {v}), which is declared for "
                        f"coordinate {own}",
                    )


# --- k and gradients ------------------------------------------------------------------------------------


def check_keys(log: Log, profile: Profile) -> None:
    """Check that k comes out like an equal q: in all dtypes, rows, heads and strides, near and far."""
    way = log.subject.way
    if not way.takes_keys:
        return
    rows = 2 if way.rows_differ and way.takes_ids else 1
    where = torch.tensor([[0, 3, 257, 1003, 4099, *NEAR], [7, 300, 2051, 1, 2, *NEAR]])[:rows]
    if way.axes > 1 and not way.counts:
        where = torch.stack([where + 5 * axis for axis in range(way.axes)])
    with log.check("k is rotated like q") as fresh:
        for dtype in log.dtypes:
            x = fresh.random(rows, 9, where.shape[-1], dtype=dtype, seed=41)
            for k in (x.clone(), torch.stack((x, x), -1)[..., 0]):
                try:
                    ours, theirs = fresh.rotate_qk(x.clone(), k, where)
                except CallFailed:
                    continue
                size = apart(ours, theirs)
                if not torch.equal(k, x):  # also if x is, which is one finding
                    how = " if it is passed as k"
                    log.add("mutates", "k is overwritten, and x is not", how=how)
                if size <= 4 * torch.finfo(dtype).eps:
                    continue
                if dtype == torch.float32 and torch.equal(theirs, x):
                    log.add("k-not-rotated", "k comes back unchanged at every position")
                    return
                log.add(
                    "q-k",
                    f"for equal {SHORT[dtype]} vectors at positions up to {int(where.max()):,} the results "
                    f"differ by up to {size:.4g}",
                )
        block = range(min(DENSE, profile.reach))
        sides = (fresh, fresh.keys())
        ours, theirs = (replace(profile, subject=side).tables(block) for side in sides)
        if (size := apart(ours, theirs)) > 1e-5:
            evidence = (
                f"at positions below {len(block):,} a cosine or sine differs by up to {size:.4g}"
            )
            log.add("q-k", evidence)


_SHIFTS = (1, 100, 1000, 30_000)


def check_relative(log: Log) -> None:
    """Check that scores do not change when both positions shift. A drift with a known cause is no finding."""
    name = "scores depend on relative position only"
    if log.subject.way.form.takes_tables:
        log.skip(name, "the caller provides the angles")
        return
    with log.check(name) as fresh:
        q, k = fresh.random(1, 2, 1, seed=31), fresh.random(1, 2, 1, seed=32)

        def score(m: int, n: int) -> torch.Tensor:
            turned = [fresh.rotate(x.clone(), [p]).detach().double() for x, p in ((q, m), (k, n))]
            return (turned[0] * turned[1]).sum(-1).cpu()

        here = score(7, 3)
        size = float((q.double().norm(dim=-1) * k.double().norm(dim=-1)).max())
        drift = {}
        for shift in _SHIFTS:
            if shift + 7 > log.longest or (not fresh.way.takes_ids and shift > 2000):
                break
            try:
                drift[shift] = float((score(7 + shift, 3 + shift) - here).abs().max()) / size
            except CallFailed:
                break
        sizes = ", ".join(f"{value:.1e} (+{shift})" for shift, value in drift.items())
        log.facts["scores"] = f"change by {sizes} of |q| |k|"
        worst = max(drift, key=drift.__getitem__, default=1)
        # Two float32 angles at position 30,000 are each off by at most 4e-3.
        known = log.found() or log.found("length", "amplitude-varies")
        if drift and drift[worst] > 1e-2 and not known:
            log.add(
                "relative",
                f"from positions 7 and 3 to {7 + worst} and {3 + worst} a score changes by "
                f"{drift[worst]:.3g} of |q| |k|",
            )


_GRADIENTS = (0, 1, 5, 40)


def check_gradients(log: Log) -> None:
    """Check that the gradients of x, or of q and k, are the transposed rotation of the incoming ones."""
    if log.found("not-linear", "nondeterminism"):
        log.skip("gradients", "no fixed linear map of x was measured")
        return
    with log.check("gradients") as fresh:
        _gradient(log, fresh, "q" if fresh.way.takes_keys else "x")
    if log.subject.way.takes_keys:
        with log.check("gradients of k") as fresh:
            _gradient(log, fresh.keys(), "k")


def _gradient(log: Log, subject: Subject, name: str) -> None:
    maps = matrices(subject, _GRADIENTS)
    heads = 1 if log.found("heads") else 2
    leaf = subject.random(1, heads, len(_GRADIENTS), seed=21).requires_grad_()
    generator = torch.Generator().manual_seed(22)
    with log.refusal("gradient-raises", name=name):
        # A copy of the leaf, as an in-place function may write to it.
        y = subject.rotate(leaf * 1.0, _GRADIENTS)
        cotangent = torch.randn(y.shape, generator=generator).to(y)
        seen = gradient(y, leaf, cotangent)
        if seen is None:
            evidence = f"the result has no grad_fn that leads to {name}"
            log.add("gradient-missing", evidence, name=name)
            return
        flat, got = (t.detach().cpu().double() for t in (cotangent, seen))
        # [tokens, out, in] and [.., tokens, out] -> [.., tokens, in]
        wanted = torch.einsum("toi,bhto->bhti", maps, flat)
        diagonal = maps.diagonal(dim1=-2, dim2=-1)
        forwards = torch.einsum("tio,bhto->bhti", maps, flat)
        causes = {
            "": wanted,
            "the term with the sine is detached": diagonal * flat,
            "the term with the cosine is detached": wanted - diagonal * flat,
            "the incoming gradient is rotated forwards instead of back": forwards,
            "the incoming gradient is passed on unrotated": flat,
            "it is zero": torch.zeros_like(flat),
        }
        near = (cause for cause, each in causes.items() if apart(got, each) <= 1e-3)
        if cause := next(near, "it is not the incoming gradient rotated back"):
            evidence = f"it differs by up to {apart(got, wanted):.3g} from the transposed rotation"
            log.add("gradient-wrong", evidence, name=name, cause=cause)
