"""How things are timed here, and why so.

A shared machine changes its speed by a factor of two within minutes, so a time says little and a
difference between two times taken minutes apart says nothing. Therefore:

* contenders of one case take turns, call by call, in an order drawn anew each round;
* a case reports medians, and ratios of medians taken in the same rounds;
* `cold` flushes the caches before each call by touching 128 MB; `warm` calls follow one another;
* a run is repeated, and the range of each ratio over the runs is given with it;
* a contender whose result is wrong is not timed (see `gate`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]

FLUSH_BYTES = 128 * 2**20
_flush = torch.zeros(FLUSH_BYTES // 4)


def _warm_batch(call: Call) -> int:
    """How many calls to time together, so that a timing is far above the clock's own cost."""
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    return max(1, min(200, int(2e-4 / max(once, 1e-9))))


def medians(
    calls: Mapping[str, Call], *, cold: bool, rounds: int, rng: random.Random
) -> dict[str, float]:
    """Median seconds per call of each contender.

    Args:
        calls: the contenders, by name.
        cold: whether to flush the caches before each call.
        rounds: how often each contender has its turn.
        rng: draws the order of each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    batch = {}
    for name, call in calls.items():
        call()
        batch[name] = 1 if cold else _warm_batch(call)
    for _ in range(rounds):
        order = list(calls)
        rng.shuffle(order)
        for name in order:
            call = calls[name]
            if cold:
                _flush.add_(1)
            else:
                call()
            start = time.perf_counter()
            for _ in range(batch[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / batch[name])
    return {name: statistics.median(values) for name, values in seconds.items()}
