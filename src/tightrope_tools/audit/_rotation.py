"""Whether channels turn in pairs, each by one cosine and one sine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._corrections import check_direction, check_factor
from ._frequencies import add_distance, name_rule
from ._log import Log
from ._near import NEAR
from ._profile import Profile, agree, flips, measure, pairs_of, wrapped


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
    maps, rates = profile.near.matrices, None
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
