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
* a contender whose result is wrong is not timed (see `gate`);
* on a GPU a turn lies between two of its own events. `cold` overwrites 512 MB before each call: that
  empties the cache, and meanwhile the host gets ahead, so that its time does not count. `warm` calls
  follow one another as a program makes them, and the slower of host and GPU sets their time. Where a
  case says so, a CUDA graph replays them, and the host plays no part.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

Call = Callable[[], object]

FLUSH_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}


@lru_cache(maxsize=1)
def _flushing(device: str) -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES[device] // 4, device=device)


def flush(device: str = "cpu") -> None:
    """Drop q and k from the caches."""
    _flushing(device).add_(1)


# ONNX Runtime's threads spin for about 35 ms after their work, torch's for 5.
REST_SECONDS = 0.04
WAKE_SECONDS = 0.005

# Calls of one turn at most; fewer where they change their numbers more and more.
BATCH, BATCH_RENEWED = 200, 10

# What one turn takes at least, if that many calls are enough.
TURN_SECONDS = {"cpu": 2e-4, "cuda": 2e-3}

#: Calls in one CUDA graph.
GRAPHED = 20


def captured(call: Call, count: int = GRAPHED) -> Call:
    """A CUDA graph of so many calls, as one call. A first call must have compiled what it runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def _seconds(call: Call, count: int, device: str) -> float:
    """How long so many calls take, by the clock, or between two events of a GPU."""
    if device == "cpu":
        before = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - before
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


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


def _warm_batch(call: Call, most: int, device: str) -> int:
    """How many calls to time together, so that a timing is far above the clock's own cost."""
    once = _seconds(call, 1, device)
    return max(1, min(most, int(TURN_SECONDS[device] / max(once, 1e-9))))


def medians(
    calls: Mapping[str, Call],
    *,
    cold: bool,
    rounds: int,
    rng: random.Random,
    rest: bool = False,
    renew: Mapping[str, Call] | None = None,
    device: str = "cpu",
    each: int = 1,
) -> dict[str, float]:
    """Median seconds per call of each contender.

    Args:
        calls: the contenders, by name.
        cold: whether to flush the caches before each call.
        rounds: how often each contender has its turn.
        rng: draws the order of each round.
        rest: whether each turn waits until the threads of the one before sleep.
        renew: what to do before a contender's turn, outside of its time.
        device: "cpu" or "cuda": where the calls run.
        each: how many calls of a contender one call here stands for.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    batch = {}
    before = renew or {}
    for name, call in calls.items():
        if name in before:
            before[name]()
        _warm_up(call, rest)
        batch[name] = 1
        if not cold:
            batch[name] = _warm_batch(call, BATCH_RENEWED if name in before else BATCH, device)
    for _ in range(rounds):
        order = list(calls)
        rng.shuffle(order)
        for name in order:
            call = calls[name]
            if name in before:
                before[name]()
            if cold:
                flush(device)
                if rest:
                    _rest()
            else:
                _warm_up(call, rest)
            seconds[name].append(_seconds(call, batch[name], device) / batch[name] / each)
    return {name: statistics.median(values) for name, values in seconds.items()}
