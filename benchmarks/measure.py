"""The timing method of all benchmarks, and its reasons.

The speed of a shared machine changes by a factor of two within minutes. A single time is therefore
unreliable, and times taken minutes apart cannot be compared. Hence:

* contenders of one case take turns, in a new random order each round: a `cold` turn is one call, a
  `warm` turn up to 200, after one that is not timed;
* a run reports medians, and ratios of medians taken in the same rounds; runs are repeated, and each
  ratio is given with its range over the runs;
* a run has at least 13 rounds and takes at least 2.2 seconds; a contender that is three times slower
  than the fastest takes part in every fourth round;
* a run during which other processes use a tenth of a core is repeated, up to three times;
* `cold` cases flush the caches before each call by touching 128 MB; `warm` calls follow one another;
* threads spin for a while after their work, on cores that the next contender needs. If a contender has
  its own threads, every turn waits until all threads sleep: before the single call of a `cold` turn,
  whose time then includes waking them, or before the first calls of a `warm` turn;
* calls in place change the values. Before each turn, outside the timed part, they are restored, so that
  no values near zero or infinity slow a contender down;
* a contender whose result is wrong is not timed (see :mod:`benchmarks.contenders`);
* on a GPU a turn is timed by two events. `cold` overwrites 512 MB before each call: this empties the
  cache, and the host runs ahead meanwhile, so that its time does not count. `warm` calls follow one
  another as in a program, so that the slower of host and GPU determines their time. Cases with `graph`
  replay the calls from a CUDA graph, without the host.

pyperf runs each benchmark in processes of its own, one benchmark after the other, and pytest-benchmark
finishes one function before it starts the next. Neither alternates between contenders, so neither can
give paired ratios, and this module measures by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from .cases import BETTER, Case

Call = Callable[[], object]

#: The name of this library among the contenders.
OURS = "tightrope"

FLUSH_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}

# ONNX Runtime's threads spin for about 35 ms after their work, torch's for 5.
REST_SECONDS = 0.04
WAKE_SECONDS = 0.005

# Most calls of a warm turn, and approximately its seconds. Fewer calls if each changes the values.
BATCH, BATCH_CHANGING, TURN_SECONDS = 200, 10, 2e-3

# How much slower than the fastest a contender is that takes part in every fourth round.
SLOW = 3.0

# The share of a core that other processes may use during a run, and how often a run is tried.
BUSY, TRIES = 0.1, 3

#: Number of calls in one CUDA graph.
GRAPHED = 20


class How(NamedTuple):
    """The number of runs, and of each run the least rounds and seconds and the most tries."""

    runs: int = 3
    rounds: int = 13
    seconds: float = 2.2
    tries: int = TRIES


#: For a first look, and for a dry run, whose times mean nothing.
QUICK, DRY = How(1, 5, 0.0, 1), How(1, 1, 0.0, 1)


@dataclass
class Built:
    """The calls of a case, ready to be timed.

    Attributes:
        calls: the contenders that take part, by name.
        absent: for each contender that does not, the reason.
        renew: functions to call before a contender's turn, outside the timed part.
        rest: whether a contender has threads of its own.
        numbers: counts to report instead of times.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    renew: dict[str, Call] = field(default_factory=dict)
    rest: bool = False
    numbers: dict[str, float] = field(default_factory=dict)


# ---- processes ------------------------------------------------------------------------------------

_CONTEXT = multiprocessing.get_context("spawn")


class Child:
    """A contender in a process of its own, which has another environment.

    The process makes the call by ``make(*given)``, and times it itself.
    """

    def __init__(
        self, make: Callable[..., Call], *given: Any, environment: Mapping[str, str]
    ) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, make, *given), daemon=True)
        with patch.dict(os.environ, environment):
            self._process.start()
        theirs.close()
        self._connection.recv()

    def __call__(self) -> None:
        """Call once."""
        self.seconds(1, False)

    def seconds(self, count: int, cold: bool) -> float:
        """Return the seconds of some calls, after a flush of that process's caches if `cold`."""
        self._connection.send((count, cold))
        return float(self._connection.recv())


def _serve(connection: Any, make: Callable[..., Call], *given: Any) -> None:
    call = make(*given)
    connection.send(None)
    while True:
        try:
            count, cold = connection.recv()
        except EOFError:
            return
        if cold:
            flush()
        connection.send(by_clock(call, count))


def apart(function: Callable[..., Any], *given: Any, limit: float) -> tuple[Any, str]:
    """Return ``function(note, *given)``, run in a process of its own, and "".

    Args:
        function: it calls ``note(text)`` to tell what it does next.
        limit: seconds without a note or the result, after which the process is killed.

    Returns:
        If the process died or was killed: None, and the last text that it noted.

    Raises:
        RuntimeError: the function raised it.
    """
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_noting, args=(theirs, function, *given), daemon=False)
    process.start()
    theirs.close()
    last = ""
    try:
        while ours.poll(limit):
            is_note, value = ours.recv()
            if not is_note:
                if isinstance(value, RuntimeError):
                    raise value
                return value, ""
            last = value
    except EOFError:
        process.join(1.0)  # it writes its trace
    finally:
        process.kill()
        process.join()
    return None, last


def _noting(connection: Any, function: Callable[..., Any], *given: Any) -> None:
    try:
        found = function(lambda text: connection.send((True, text)), *given)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        found = RuntimeError(f"{type(error).__name__}: {error}")
    connection.send((False, found))


# ---- time -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _flushing(device: str) -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES[device] // 4, device=device)


def flush(device: str = "cpu") -> None:
    """Evict q and k from the caches."""
    with torch.no_grad():
        _flushing(device).add_(1)


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


def by_clock(call: Call, count: int) -> float:
    """Return the seconds until `count` calls have returned."""
    before = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - before


def _by_events(call: Call, count: int) -> float:
    """Return the seconds of `count` calls between two events of a GPU."""
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


def _others_seconds() -> float:
    """Return the seconds of all cores that other processes used so far; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = sum(map(int, stat.read_text("utf-8").split()[1:4]))
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


class Timer:
    """Takes the time of turns.

    Attributes:
        case: it decides the clock, and whether caches are flushed.
        built: the calls, and what happens before their turns.
    """

    def __init__(self, case: Case, built: Built) -> None:
        self.case, self.built = case, built
        self.on_gpu = case.device == "cuda" and not case.host
        self.each = GRAPHED if case.graph and case.device == "cuda" else 1
        most = BATCH if case.plain or case.work != "in place" else BATCH_CHANGING
        # The first calls compile and allocate; the second time decides how many calls a turn has.
        self.once = {name: self._once(name) for name in built.calls}
        self._batches = {
            name: 1 if case.cold else max(1, min(most, int(TURN_SECONDS / max(once, 1e-9))))
            for name, once in self.once.items()
        }

    def _once(self, name: str) -> float:
        self._before(name)
        first = self._seconds(name, 1)
        return first if first > 0.5 else self._seconds(name, 1)

    def _before(self, name: str) -> None:
        if name in self.built.renew:
            self.built.renew[name]()

    def _seconds(self, name: str, count: int) -> float:
        call = self.built.calls[name]
        if isinstance(call, Child):
            return call.seconds(count, self.case.cold)
        return _by_events(call, count) if self.on_gpu else by_clock(call, count)

    def turn(self, name: str) -> float:
        """Return the seconds per call of one turn of a contender."""
        call, count = self.built.calls[name], self._batches[name]
        self._before(name)
        if self.case.cold:
            if not isinstance(call, Child):
                flush(self.case.device)
            if self.built.rest:
                _rest()
        else:
            if self.built.rest:
                _rest()
            end = time.perf_counter() + WAKE_SECONDS
            call()
            while self.built.rest and time.perf_counter() < end:
                call()
            if self.case.host and self.case.device == "cuda":
                torch.cuda.synchronize()
        return self._seconds(name, count) / count / self.each


def medians(timer: Timer, how: How, rng: random.Random) -> tuple[dict[str, float], bool]:
    """Return the median seconds per call of each contender in one run, and whether the machine was busy.

    Args:
        rng: generates the order of each round.
    """
    names, once = list(timer.built.calls), timer.once
    slow = SLOW * min(once.values())
    rounds = timer.case.rounds or how.rounds
    seconds = 0.0 if timer.case.rounds else how.seconds
    others = any(isinstance(call, Child) for call in timer.built.calls.values())
    for _ in range(how.tries):
        times: dict[str, list[float]] = {name: [] for name in names}
        start, before, turn = time.perf_counter(), _others_seconds(), 0
        while turn < rounds or time.perf_counter() < start + seconds:
            rng.shuffle(names)
            for name in names:
                if turn % 4 == 0 or once[name] < slow:
                    times[name].append(timer.turn(name))
            turn += 1
        used = _others_seconds() - before
        busy = not others and used >= BUSY * (time.perf_counter() - start)
        if not busy:
            break
    return {name: statistics.median(each) for name, each in times.items()}, busy


# ---- a case ---------------------------------------------------------------------------------------


_COMPILER = {
    # torch 2.13 crashed when it read code that a process with another instruction set had stored.
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    # One kernel compiles faster than a pool of compilers starts.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@contextmanager
def settings(case: Case) -> Iterator[None]:
    """Set the number of threads of a case, and whether gradients are recorded; forget compiled code."""
    torch.empty(2**25 - 2**17, dtype=torch.uint8)  # from here on, glibc recycles blocks up to 32 MB
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    if "torch._dynamo" in sys.modules:
        # Compilations for other cases count towards torch's limit of recompilations.
        torch._dynamo.reset()
    try:
        with patch.dict(os.environ, _COMPILER), torch.set_grad_enabled(case.work == "training"):
            yield
    finally:
        torch.set_num_threads(threads)


def measure(case: Case, built: Built, how: How) -> dict[str, Any]:
    """Time all contenders of a case.

    Returns:
        ``case``, its name; ``us``, our median time in microseconds; ``ratios``, for each contender our
        time divided by its time, run by run; and, only where there are any, ``absent``, the reason for
        each contender that did not take part, ``numbers``, and ``busy``, whether other processes were.
    """
    found: dict[str, Any] = {"case": case.name}
    if built.calls:
        timer = Timer(case, built)
        runs = [medians(timer, how, random.Random(run)) for run in range(how.runs)]
        seconds = [_grouped(run) if case.best else run for run, _ in runs]
        ours = statistics.median(run[OURS] for run in seconds)
        names = [name for name in seconds[0] if name != OURS]
        ratios = {name: [run[OURS] / run[name] for run in seconds] for name in names}
        if case.best and names:
            ratios[BETTER] = [max(each) for each in zip(*ratios.values(), strict=True)]
        found["us"] = float(f"{1e6 * ours:.3g}")
        found["ratios"] = {name: [_short(x) for x in each] for name, each in ratios.items()}
        if any(busy for _, busy in runs):
            found["busy"] = True
    more = {"absent": built.absent, "numbers": built.numbers}
    return found | {key: value for key, value in more.items() if value}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _grouped(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the fastest of ours, of eager and of compiled code."""
    groups: dict[str, float] = {}
    for name, value in seconds.items():
        group = OURS if name.startswith(OURS) else "compiled" if "compiled" in name else "eager"
        groups[group] = min(value, groups.get(group, value))
    return groups
