"""How things are timed here, and why so.

A shared machine changes its speed by a factor of two within minutes, so a time says little and a
difference between two times taken minutes apart says nothing. Therefore:

* contenders of one case take turns, call by call, in an order drawn anew each round;
* a case reports medians, and ratios of medians taken in the same rounds;
* `cold` flushes the caches before each call by touching 128 MB; `warm` calls follow one another;
* threads spin for a while after their work, on cores that the next contender needs: where some
  contender brings threads of its own, every turn waits until all of them sleep, before the one call
  of `cold`, whose time then includes waking them, or before the calls that warm up for `warm`;
* a run is repeated, and the range of each ratio over the runs is given with it;
* f and P change numbers more with every call in place, and numbers near zero or infinity have times of
  their own: in such cases everybody's tensors are made new before each turn, outside of its time;
* a contender whose result is wrong is not timed (see `gate`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

Call = Callable[[], object]

FLUSH_BYTES = 128 * 2**20


@lru_cache(maxsize=1)
def _flushing() -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES // 4)


def flush() -> None:
    """Drop q and k from the caches."""
    _flushing().add_(1)


# ONNX Runtime's threads spin for about 35 ms after their work, torch's for 5.
REST_SECONDS = 0.04
WAKE_SECONDS = 0.005

# Calls of one turn at most; fewer where they change their numbers more and more.
BATCH, BATCH_RENEWED = 200, 10


def _rest() -> None:
    """Wait until the threads of earlier calls sleep.

    Busy, for a virtual core that has been idle may take milliseconds to come back.
    """
    end = time.perf_counter() + REST_SECONDS
    while time.perf_counter() < end:
        pass


def _warm_up(call: Call, rest: bool) -> None:
    """Call once or, after a rest, until the threads are awake."""
    if rest:
        _rest()
    end = time.perf_counter() + WAKE_SECONDS
    call()
    while rest and time.perf_counter() < end:
        call()


def _warm_batch(call: Call, most: int) -> int:
    """How many calls to time together, so that a timing is far above the clock's own cost."""
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    return max(1, min(most, int(2e-4 / max(once, 1e-9))))


def medians(
    calls: Mapping[str, Call],
    *,
    cold: bool,
    rounds: int,
    rng: random.Random,
    rest: bool = False,
    renew: Mapping[str, Call] | None = None,
) -> dict[str, float]:
    """Median seconds per call of each contender.

    Args:
        calls: the contenders, by name.
        cold: whether to flush the caches before each call.
        rounds: how often each contender has its turn.
        rng: draws the order of each round.
        rest: whether each turn waits until the threads of the one before sleep.
        renew: what to do before a contender's turn, outside of its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    batch = {}
    before = renew or {}
    for name, call in calls.items():
        if name in before:
            before[name]()
        _warm_up(call, rest)
        batch[name] = 1 if cold else _warm_batch(call, BATCH_RENEWED if name in before else BATCH)
    for _ in range(rounds):
        order = list(calls)
        rng.shuffle(order)
        for name in order:
            call = calls[name]
            if name in before:
                before[name]()
            if cold:
                flush()
                if rest:
                    _rest()
            else:
                _warm_up(call, rest)
            start = time.perf_counter()
            for _ in range(batch[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / batch[name])
    return {name: statistics.median(values) for name, values in seconds.items()}
