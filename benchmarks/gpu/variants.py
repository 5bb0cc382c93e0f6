"""Other shapes of blocks than those of the table, timed: what the table would be if it were measured.

A result has the same bits whatever the shape, and is held to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tightrope.backends.triton import blocks

from . import counts
from .cases import CASES, TABLE, Case
from .device import Device
from .inputs import Inputs, count_of, our_call, sets, tensors
from .timing import replays, sized
from .voice import Voice

#: Seconds that a shape may take, most of them to be compiled.
LIMIT = 45.0

#: What is varied, and by which part of the backend: a table of shapes, or the number of programs
#: below which heads are shared out.
VARIED = {
    "prefill 32k": "PLAIN",
    "12 x 32768, 12 heads": "PLAIN",
    "silu 32k": "HEAVY",
    "decode 256, in place": "PROGRAMS",
    "decode 32, in place": "PROGRAMS",
}

#: Pairs of a tile with warps: from 4 to 16 of them for a thread.
TILES = ((512, 2), (512, 4), (1024, 2), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (1024, 4))

PROGRAMS = (64, 128, 256, 512, 1024, 2048)


def shapes_of(given: Any) -> dict[str, Any]:
    """Shapes by what they change of a given one, which is the first, the least changed before others."""
    changes: list[dict[str, int]] = [{"together": n} for n in (1, 2, 4, 8)]
    changes += [{"registers": n} for n in (0, 64, 96, 128)]
    changes += [{"pairs": pairs, "warps": warps} for pairs, warps in TILES]
    free = {"registers": 0}
    changes += [{"pairs": p, "warps": w, "together": n, **free} for p, w in TILES for n in (1, 4)]
    found = {TABLE: given}
    for change in changes:
        known = {name: n for name, n in change.items() if name in given._fields}
        shape = given._replace(**known)
        if shape not in found.values():
            found[", ".join(f"{name} {n}" for name, n in known.items())] = shape
    return found


@contextlib.contextmanager
def _instead(table: str, value: Any) -> Iterator[None]:
    """The backend with another shape for 16-bit numbers, or another number of programs."""
    from tightrope.backends.triton import rotation

    place = vars(blocks) if table == "PROGRAMS" else getattr(blocks, table)
    key: Any = table if table == "PROGRAMS" else 2
    before = place[key]
    place[key] = value
    rotation._plans.clear()
    try:
        yield
    finally:
        place[key] = before
        rotation._plans.clear()


def of_table(table: str) -> dict[str, Any]:
    """By name, what is tried for 16-bit numbers, that in use first."""
    if table != "PROGRAMS":
        return shapes_of(getattr(blocks, table)[2])
    here = {TABLE: blocks.PROGRAMS}
    return here | {f"programs {n}": n for n in PROGRAMS if n != blocks.PROGRAMS}


def _timed(
    case: Case, device: Device, table: str, value: Any, inputs: list[Inputs], want: list[Any]
) -> dict[str, Any]:
    with _instead(table, value):
        before = counts.number()
        call = our_call(case, device.at)
        spare = inputs[-1].clone()
        found = tensors(call(spare)) or spare.xs
        if not all(torch.equal(x, y) for x, y in zip(found, want, strict=True)):
            raise ValueError("other bits than those of the table's shape")
        took = replays(call, inputs[:-1], device)
    shape = value._asdict() if isinstance(value, tuple) else {"programs": value}
    return {**took, "shape": shape, "kernels": counts.kernels(before)}


def time_shapes(device: Device, names: list[str], voice: Voice) -> None:
    """Every shape of every case, a unit each.

    Args:
        names: of the cases that were asked for.
    """
    wanted = [case for case in CASES if case.name in VARIED and case.name in names]
    wanted.sort(key=lambda case: list(VARIED).index(case.name))
    every = {case: of_table(VARIED[case.name]) for case in wanted}
    if device.dry:
        every = {case: dict(list(found.items())[:2]) for case, found in every.items()}
    voice.plan(f"{case.name} | {name}" for case, found in every.items() for name in found)
    for whole, found in every.items():
        if all(f"{whole.name} | {name}" in voice.skip for name in found):
            continue
        case = sized(whole, device)

        def make(case: Case = case) -> tuple[list[Inputs], list[Any]]:
            count = 1 + count_of(case, device.cache_bytes(), device.free_bytes())
            inputs = sets(case, device.at, count)
            spare = inputs[-1].clone()
            results = tensors(our_call(case, device.at)(spare)) or spare.xs
            return inputs, [x.clone() for x in results]

        made = voice.unit(
            f"{case.name} | inputs",
            LIMIT,
            make,
            lambda made: {"sets": len(made[0]) - 1},
            again=True,
        )
        if made is None:
            continue
        for name, value in found.items():
            work = partial(_timed, case, device, VARIED[case.name], value, *made)
            voice.unit(f"{case.name} | {name}", LIMIT, work)
        del made
        device.release()
