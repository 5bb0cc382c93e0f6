"""Whether channels turn in pairs, in which direction, and with which factor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ._frequencies import CLOSE, add_distance, name_rule, rates_of, signs_of
from ._log import Log
from ._near import NEAR, apart
from ._profile import NARROW, Profile, agree, flips, measure, pairs_of, wrapped

_LOOSE = 8e-3
"""Tolerance of factors; bfloat16 tables change them by up to 4e-3."""


def check_rotation(log: Log) -> bool:
    """Measure the profile and report its faults; return whether angles can be checked."""
    with log.check("it rotates pairs of channels") as fresh:
        log.profile = profile = measure(fresh, log.near, log.limit)
        sound = _pairs_are_rotations(log, profile)
    if log.profile is None:
        log.add("raises", log.checks[-1].outcome.removeprefix("skipped: "))
        return False
    if not profile.pairs:
        return False
    log.facts["pairing"] = profile.pairing
    last = profile.start + profile.rotary_dim - 1
    turning = 2 * len(profile.pairs)
    idle = f", {turning} of them turning" if turning < profile.rotary_dim else ""
    log.facts["channels"] = f"{profile.start} to {last} of {fresh.head_dim}{idle}"
    if not sound:
        return False
    if profile.order is not None:
        _moved(log, profile, profile.order)
    with log.check("direction and position 0"):
        _direction(log, profile)
    if log.found("not-linear"):
        why = "the function is not linear, so unit vectors do not predict its result for other x"
        log.skip("factor and frequencies", why)
        return False
    name_rule(log, profile)
    with log.check("factor"):
        _factor(log, profile)
    return True


def _listed(values: Sequence[object]) -> str:
    """The first values as text."""
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown) + (", …" if len(values) > 8 else "")


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
    """Report channels that are no pairs, and pairs that are not rotated."""
    pairs, tangled, alone = profile.pairs, profile.tangled, profile.alone
    maps = profile.near.matrices
    if not pairs and not tangled and not alone:
        rates = None if log.spec is None else log.spec.frequencies().inv_freq
        whole = rates is not None and bool((wrapped(rates).abs() < 1e-6).all())
        evidence = "tokens at positions 0 to 15 come back unchanged"
        log.add("does-nothing", evidence, "note" if whole else "error")
        return False
    changes = apart(maps[0], torch.eye(len(maps[0]))) > 1e-3
    if profile.near.is_constant and log.subject.way.takes_positions and changes:
        log.add("positions-ignored", "tokens at positions 0 to 15 come out the same")
        return False
    if profile.blocks > 1 and not tangled and not alone:
        if log.spec is not None and not set(pairs) <= set(pairs_of(log.spec)):
            evidence = f"in {profile.blocks} blocks, so the audit checks no frequency and no angle"
            add_distance(log, profile, log.spec, evidence)
            return False
        evidence = "the audit measures one block only, so it checks no frequency and no angle"
        log.add("blocks", evidence, blocks=profile.blocks)
        return False
    if tangled and log.found("not-linear"):
        return False  # unit vectors do not show which channels mix
    if tangled or (pairs and profile.interleaved is None and profile.rotary_dim > 2):
        channel = (tangled or pairs[0])[0]
        reach = (maps[3, :, channel].abs() > 1e-6).nonzero().flatten().tolist()
        log.add("not-pairs", f"channel {channel} affects channels {_listed(reach)} at position 3")
        return False
    meant = None if log.spec is None else wrapped(log.spec.frequencies().inv_freq).abs()
    half_turns = meant is None or bool(((meant < 1e-6) | (meant > math.pi - 1e-6)).all())
    if alone and not pairs and half_turns and all(flips(maps[:, c, c]) for c in alone):
        evidence = "whole positions do not show which channels are pairs, so no frequency and no angle was checked"
        log.add("fast/half-turns", evidence)
        return False
    if alone:
        factors = [f"{f:.4g}" for f in maps[:5, alone[0], alone[0]].tolist()]
        evidence = f"channel {alone[0]} is multiplied by {_listed(factors)} at positions 0 to 4"
        log.add("pass-through", evidence, channels=_listed(alone))
        if not pairs:
            return False
    return _are_rotated(log, profile)


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
    evidence = (
        f"{len(wrong)} of {len(profile.pairs)} pairs; channels {u} and {v} at position {index}: the first "
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
    if bool(agree(profile.firsts[0].angle(), 0.0, 1e-3).all()):
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
    sizes = torch.cat((profile.firsts, profile.seconds)).abs()
    least, most = float(sizes.min()), float(sizes.max())
    narrow = profile.table in NARROW
    allowed = _LOOSE if narrow else min(_LOOSE, CLOSE + most - least)
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
