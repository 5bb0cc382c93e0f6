"""The timing of benchmarks: turns, clocks, processes, ratios and bounds."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.cases import BETTER, KERNELS, MICROSECONDS, Case
from benchmarks.measure import DRY, OURS, Built, Child, How, Timer, apart, medians

WARM = Case("warm", cold=False)


def test_contenders_take_turns_and_slow_ones_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-6  # as pauses read it until they are over
        return now

    def caller(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            order.append(name)
            now += seconds

        return call

    monkeypatch.setattr(measure.time, "perf_counter", clock)
    built = Built({"a": caller("a", 1e-3), "b": caller("b", 1e-3), "slow": caller("slow", 5e-3)})
    timer = Timer(Case("cold"), built)
    order.clear()
    found, _ = medians(timer, How(1, 8, 0.0, 1), random.Random(0))
    assert [order.count(name) for name in ("a", "b", "slow")] == [8, 8, 2]
    fast = [name for name in order if name != "slow"]
    assert {"ab", "ba"} == {"".join(fast[i : i + 2]) for i in range(0, 16, 2)}
    assert found == pytest.approx({"a": 1e-3, "b": 1e-3, "slow": 5e-3}, rel=0.01)


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_values_are_restored_before_each_turn(cold: bool) -> None:
    """Otherwise repeated halving would end in subnormal numbers, which are slower."""
    x, seen = torch.ones(4), list[float]()

    def call() -> None:
        seen.append(x[0].item())
        x.mul_(0.5)

    case = Case("changing", cold=cold, act="relu")
    built = Built({"a": call}, renew={"a": lambda: x.fill_(1.0)})
    medians(Timer(case, built), How(1, 5, 0.0, 1), random.Random(0))
    assert seen.count(1.0) == 6
    assert min(seen) >= 0.5 ** (measure.BATCH_CHANGING + 1)


class FakeEvent:
    """A stand-in for a CUDA event that reports 3 ms between any two events."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: object) -> float:
        return 3.0


@pytest.mark.parametrize("graph", [True, False])
def test_events_of_a_gpu_are_the_clock_there(graph: bool, monkeypatch: Any) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(measure, "flush", flushed.append)
    case = Case("a", device="cuda", graph=graph)
    found, _ = medians(Timer(case, Built({"a": lambda: None})), How(1, 2, 0.0, 1), random.Random(0))
    assert found == {"a": pytest.approx(3e-3 / (measure.GRAPHED if graph else 1))}
    assert flushed == ["cuda"] * 2
    host = Timer(replace(case, host=True, graph=False), Built({"a": lambda: None}))
    assert host.turn("a") < 1e-3


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_turns_wait_only_where_threads_differ(cold: bool, monkeypatch: Any) -> None:
    rests: list[None] = []
    monkeypatch.setattr(measure, "_rest", lambda: rests.append(None))
    for rest, count in ((False, 0), (True, 6)):
        built = Built({"a": lambda: None, "b": lambda: None}, rest=rest)
        rests.clear()
        medians(Timer(Case("a", cold=cold), built), How(1, 3, 0.0, 1), random.Random(0))
        assert len(rests) == count


def test_a_busy_machine_is_tried_again_and_reported(monkeypatch: Any) -> None:
    used = iter([0.0, 100.0, 100.0, 200.0])
    monkeypatch.setattr(measure, "_others_seconds", lambda: next(used))
    timer = Timer(WARM, Built({OURS: lambda: None}))
    assert medians(timer, How(1, 1, 0.0, 2), random.Random(0))[1]
    monkeypatch.setattr(measure, "_others_seconds", lambda: 0.0)
    assert not medians(timer, How(1, 1, 0.0, 2), random.Random(0))[1]


def test_ratios_are_of_the_same_run(monkeypatch: Any) -> None:
    runs = iter([({OURS: 2e-6, "a": 4e-6}, False), ({OURS: 3e-6, "a": 3e-6}, True)])
    monkeypatch.setattr(measure, "medians", lambda *_: next(runs))
    built = Built({OURS: lambda: None, "a": lambda: None}, absent={"b": "why"})
    assert measure.measure(WARM, built, How(2)) == {
        "case": "warm",
        "us": 2.5,
        "ratios": {"a": [0.5, 1.0]},
        "busy": True,
        "absent": {"b": "why"},
    }


def test_groups_compete_in_the_grid(monkeypatch: Any) -> None:
    times = {OURS: 4.0, f"{OURS}, tables": 2.0, "eager": 8.0, "compiled a": 5.0, "compiled b": 4.0}
    monkeypatch.setattr(measure, "medians", lambda *_: (times, False))
    built = Built(dict.fromkeys(times, lambda: None))
    found = measure.measure(replace(WARM, best=True), built, DRY)
    assert found["ratios"] == {"eager": [0.25], "compiled": [0.5], BETTER: [0.5]}


def test_bounds_are_held_open_or_missed() -> None:
    bounds = (("a", 1.0), (MICROSECONDS, 8.0), (KERNELS, 0.0), ("absent", 1.0))
    result = {"us": 7.0, "ratios": {"a": [0.9, 1.1]}, "numbers": {KERNELS: 2.0}}
    found = {
        name: measure.within(values, most)
        for name, most, values in measure.held(replace(WARM, bounds=bounds), result)
    }
    assert found == {"a": "open", MICROSECONDS: "held", KERNELS: "MISSED"}


# ---- processes: these functions run in others -----------------------------------------------------


def _environment(name: str) -> Callable[[], None]:
    assert os.environ["TIGHTROPE_TEST_OF_CHILDREN"] == name
    return lambda: None


def _right(note: Callable[[str], None], value: int) -> int:
    note("first")
    return value + 1


def _aborts(note: Callable[[str], None]) -> None:
    note("the bad one")
    os.abort()


def _hangs(note: Callable[[str], None]) -> None:
    note("the slow one")
    time.sleep(120)


def _fails(_: Callable[[str], None]) -> None:
    raise ValueError("planted")


@pytest.mark.slow
def test_processes_of_their_own() -> None:
    """A crash or a hang costs the process only, and its last note tells what it did."""
    child = Child(_environment, "x", environment={"TIGHTROPE_TEST_OF_CHILDREN": "x"})
    assert 0 < child.seconds(10, cold=True) < 1
    assert "TIGHTROPE_TEST_OF_CHILDREN" not in os.environ
    assert apart(_right, 1, limit=60) == (2, "")
    assert apart(_aborts, limit=60) == (None, "the bad one")
    assert apart(_hangs, limit=25) == (None, "the slow one")
    with pytest.raises(RuntimeError, match="ValueError: planted"):
        apart(_fails, limit=60)
