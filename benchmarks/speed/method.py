"""The timing method of all benchmarks, and its reasons.

The speed of a shared machine changes by a factor of two within minutes. A single time is therefore
unreliable, and times taken minutes apart cannot be compared. Hence:

* contenders of one case take turns, in a new random order each round: a `cold` turn is one call, a
  `warm` turn up to 200;
* a case reports medians, and ratios of medians taken in the same rounds;
* `cold` cases flush the caches before each call by touching 128 MB; `warm` calls follow one another;
* threads spin for a while after their work, on cores that the next contender needs. If a contender has
  its own threads, every turn waits until all threads sleep: before the single call of a `cold` turn,
  whose time then includes waking them, or before the warm-up calls of a `warm` turn;
* runs are repeated, and each ratio is given with its range over the runs;
* f and P change the values further with every call in place, and values near zero or infinity can take
  longer: such cases restore every contender's tensors before each turn, outside the timed part;
* a contender whose result is wrong is not timed (see `measure.mismatch`);
* on a GPU a turn is timed by two events. `cold` overwrites 512 MB before each call: this empties the
  cache, and the host runs ahead meanwhile, so that its time does not count. `warm` calls follow one
  another as in a program, so that the slower of host and GPU determines their time. Cases with `graph`
  replay the calls from a CUDA graph, without the host.
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
    """Evict q and k from the caches."""
    _flushing(device).add_(1)


# ONNX Runtime's threads spin for about 35 ms after their work, torch's for 5.
REST_SECONDS = 0.04
WAKE_SECONDS = 0.005

# Most calls per turn; fewer if successive calls in place change the values more and more.
BATCH, BATCH_RENEWED = 200, 10

# Approximate seconds of a warm turn; it is shorter if it reaches the most calls.
TURN_SECONDS = {"cpu": 2e-4, "cuda": 2e-3}

#: Number of calls in one CUDA graph.
GRAPHED = 20


def captured(call: Call, count: int = GRAPHED) -> Call:
    """Capture `count` calls in a CUDA graph; return the function that replays it.

    One call before the capture compiles the kernels.
    """
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
    """Time `count` calls by the clock, or between two events of a GPU."""
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

    This is a busy wait, because an idle virtual core may take milliseconds to resume.
    """
    end = time.perf_counter() + REST_SECONDS
    while time.perf_counter() < end:
        pass


def _warm_up(call: Call, rest: bool) -> None:
    """Call once; after a rest, call until the threads are awake."""
    if rest:
        _rest()
    end = time.perf_counter() + WAKE_SECONDS
    call()
    while rest and time.perf_counter() < end:
        call()


def _warm_batch(call: Call, most: int, device: str) -> int:
    """Return how many calls to time together, so that the clock's own cost is negligible."""
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
    """Return the median seconds per call of each contender.

    Args:
        calls: the contenders, by name.
        cold: whether to flush the caches before each call.
        rounds: number of turns of each contender.
        rng: generates the order of each round.
        rest: whether each turn waits until the threads of the previous one sleep.
        renew: functions to call before a contender's turn, outside the timed part.
        device: "cpu" or "cuda": where the calls run.
        each: number of a contender's calls that one timed call makes, as in a CUDA graph.
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
