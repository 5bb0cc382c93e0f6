"""Time of one decoded token by a plain call with a spec, and of writing into a cache, beside that of other calls.

OMP_NUM_THREADS=1 python -m benchmarks.small_calls --out RESULTS.json

In place, 32 heads of q and 8 of k, 128 channels, float32, so that almost all the time is that of Python and of the
dispatcher. Keys in a cache have 8 heads of 128 channels, float32 too, in blocks of 16 entries. Each ratio is one of medians in one run, whose calls alternate in random order; three runs give its range.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tightrope import RopeSpec, positions, rotate, rotate_qk_
from tightrope.environment import read_environment
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rotary_pos_embedding

from .pages import written
from .speed.method import Call, medians

# Each call, and the call whose time it is divided by.
RATIOS = (
    ("an offset", "prepared, an offset"),
    ("ids", "prepared, ids"),
    ("ids of rows", "prepared, ids"),
    ("rotary_pos_embedding", "rotate"),
    ("dynamic NTK, a new length", "an offset"),
    ("dynamic NTK, the same length", "an offset"),
    ("dynamic NTK, 32 rows", "32 rows"),
    ("dynamic NTK, 32 rows, again", "32 rows"),
    ("1 key to a slot", "1 key"),
    ("512 keys to slots", "512 keys, out"),
    ("512 keys to slots", "512 keys, then index_copy_"),
    ("512 keys and values to slots", "512 keys, then index_copy_ of both"),
)


def calls() -> dict[str, Call]:
    """Return the calls by name."""
    spec, whole = RopeSpec(128), RopeSpec(64, interleaved=True)
    # Of the second, only one call is measured, so that it finds the phase words of the layer before.
    dynamic, again = (RopeSpec(128, scaling=DynamicNTK(factor, 4096)) for factor in (2.0, 4.0))
    q, k = (torch.randn(1, heads, 1, 128) for heads in (32, 8))
    rows = [torch.randn(32, heads, 1, 128) for heads in (32, 8)]
    x, ids = torch.randn(2, 12, 8, 64), torch.tensor([17])
    by_row = ids[None]
    prepared, by_ids = spec.at(17), spec.at(ids)
    offsets, lengths = positions.per_row(torch.arange(5000, 5032)), itertools.count(5000)
    return {
        "prepared, an offset": lambda: rotate_qk_(q, k, prepared),
        "prepared, ids": lambda: rotate_qk_(q, k, by_ids),
        "an offset": lambda: rotate_qk_(q, k, spec, 17),
        "ids": lambda: rotate_qk_(q, k, spec, ids),
        "ids of rows": lambda: rotate_qk_(q, k, spec, by_row),
        "rotate": lambda: rotate(x, whole),
        "rotary_pos_embedding": lambda: rotary_pos_embedding(x),
        "dynamic NTK, a new length": lambda: rotate_qk_(q, k, dynamic, next(lengths)),
        "dynamic NTK, the same length": lambda: rotate_qk_(q, k, dynamic, 5000),
        "32 rows": lambda: rotate_qk_(*rows, spec, offsets),
        "dynamic NTK, 32 rows": lambda: rotate_qk_(*rows, dynamic, offsets),
        "dynamic NTK, 32 rows, again": lambda: rotate_qk_(*rows, again, offsets),
        **_to_a_cache(),
    }


def _to_a_cache() -> dict[str, Call]:
    """Return calls that write keys, and values, into a cache of packed tokens."""
    spec, count = RopeSpec(128), 512
    k, v, out = (torch.randn(count, 8, 128) for _ in range(3))
    keys, of_values = torch.zeros(2, 128, 16, 8, 128)
    flat, flat_values = keys.flatten(0, 1), of_values.flatten(0, 1)
    slots, ids = torch.randperm(len(flat))[:count], torch.arange(count)
    one, slot, at = k[:1], slots[:1], torch.tensor([700])

    def copied(both: bool) -> None:
        flat.index_copy_(0, slots, rotate(k, spec, ids, layout="thd"))
        if both:
            flat_values.index_copy_(0, slots, v)

    def to_slots(**more: Any) -> None:
        rotate(k, spec, ids, layout="thd", out=keys, slots=slots, **more)

    return {
        "1 key": lambda: rotate(one, spec, at, layout="thd"),
        "1 key to a slot": lambda: rotate(one, spec, at, layout="thd", out=keys, slots=slot),
        "512 keys, out": lambda: rotate(k, spec, ids, layout="thd", out=out),
        "512 keys to slots": to_slots,
        "512 keys, then index_copy_": lambda: copied(False),
        "512 keys and values to slots": lambda: to_slots(values=(v, of_values)),
        "512 keys, then index_copy_ of both": lambda: copied(True),
    }


def measure(
    every: Mapping[str, Call], ratios: Sequence[tuple[str, str]], rounds: int, runs: int
) -> list[dict[str, Any]]:
    """Return each ratio, sorted by size over the runs, and the microseconds of the first run."""
    times = [
        medians(every, cold=False, rounds=rounds, rng=random.Random(run)) for run in range(runs)
    ]
    return [
        {
            "call": name,
            "over": other,
            "ratio": sorted(round(time[name] / time[other], 2) for time in times),
            "microseconds": round(1e6 * times[0][name], 1),
        }
        for name, other in ratios
    ]


def command(
    about: str | None, every: Mapping[str, Call], ratios: Sequence[tuple[str, str]], rounds: int
) -> None:
    """Measure calls, and print their ratios; on request, write them into a file."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    found = measure(every, ratios, options.rounds, options.runs)
    for case in found:
        low, high = case["ratio"][0], case["ratio"][-1]
        print(f"{case['call']}: {low} to {high} times {case['over']}, {case['microseconds']} µs")
    if options.out:
        results = {"environment": asdict(read_environment()), "ratios": found}
        options.out.write_text(written(results), encoding="utf-8")


if __name__ == "__main__":
    command(__doc__, calls(), RATIOS, 2000)
