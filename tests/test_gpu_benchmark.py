"""The benchmark of GPUs without one: what is lost and what is kept when something fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import (
    record as recording,
    supervise,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.voice import Voice, shortened

ROOT = Path(__file__).resolve().parent.parent


# A worker without torch: units a to d, of which a fault may take any.
WORKER = """
import json, os, sys, time
from pathlib import Path
from benchmarks.gpu.voice import AbsentError, Voice
options = json.loads(Path(sys.argv[1]).read_text())
voice = Voice(Path(options["lines"]), options["skip"], options["lost"],
              time.monotonic() + options["seconds"], lambda: "GPU_BENCHMARK_BROKEN" in os.environ,
              options["faults"])
print("noise", '{"end": "a"}', flush=True)
def absent():
    raise AbsentError("not here")
voice.plan("abcd")
for name in "abcd":
    voice.unit(name, options["limit"], absent if name == "c" else lambda: {"value": name})
voice.finish()
time.sleep(options.get("lingers", 0))
"""


@pytest.fixture
def small_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Workers are those of WORKER; the record that they fill."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    popen: Any = subprocess.Popen

    class Started(popen):
        def __init__(self, arguments: list[str], **named: Any) -> None:
            super().__init__([sys.executable, str(script), arguments[-1]], **named)

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(supervise, "GRACE", 0.4)
    return Record(tmp_path / "out.json", {})


def job(seconds: float = 60.0, limit: float = 30.0, **options: Any) -> supervise.Job:
    return supervise.Job(
        "stage",
        {"limit": limit, "faults": {}, **options},
        seconds,
        {"PYTHONPATH": str(ROOT)},
    )


def units_of(record: Record) -> dict[str, Any]:
    assert record.path is not None
    found = json.loads(record.path.read_text())["stages"]["stage"]
    return found["units"]


GOOD = {"a": {"value": "a"}, "b": {"value": "b"}, "d": {"value": "d"}}


def test_units_are_taken_down_as_they_end(small_worker: Record) -> None:
    supervise.run(job(), small_worker)
    found = units_of(small_worker)
    assert {name: unit.get("result") for name, unit in found.items()} == {**GOOD, "c": None}
    assert found["c"] == {"absent": "not here", "missing": False}
    assert small_worker.data["stages"]["stage"]["troubles"] == []


@pytest.mark.parametrize(
    "fault, kind, text",
    [
        ("raise", "raised", "PlantedError: planted"),
        ("memory", "raised", "RuntimeError: CUDA out of memory"),
        ("quit", "raised", "SystemExit"),
        ("poison", "raised", "illegal memory access"),
        ("exit", "died", "its process ended with 3"),
        ("crash", "died", "its process ended with -11"),
        ("garbage", "died", "its process ended with -9"),
    ],
)
def test_a_fault_costs_its_unit(small_worker: Record, fault: str, kind: str, text: str) -> None:
    supervise.run(job(faults={"b": fault}), small_worker)
    found = units_of(small_worker)
    assert found["b"]["kind"] == kind
    assert text in found["b"]["failed"]
    if kind == "raised":
        assert 'File "' in found["b"]["failed"]
    assert {n: found[n]["result"] for n in "ad"} == {n: GOOD[n] for n in "ad"}
    troubles = small_worker.data["stages"]["stage"]["troubles"]
    assert len(troubles) == 2 * (fault == "garbage")
    assert all("a line that is none" in text for text in troubles)


def test_a_hang_costs_its_unit_and_says_where(small_worker: Record) -> None:
    supervise.run(job(limit=0.3, faults={"b": "hang"}), small_worker)
    found = units_of(small_worker)
    assert found["b"]["kind"] == "late"
    assert "in _hang" in found["b"]["failed"]
    assert {n: found[n]["result"] for n in "ad"} == {n: GOOD[n] for n in "ad"}


def test_who_stops_the_watchdog_too_is_killed(small_worker: Record, tmp_path: Path) -> None:
    """A process that is stopped altogether, as by a driver that does not return."""
    script = tmp_path / "worker.py"
    stopped = "os.kill(os.getpid(), 19) if name == 'b' else None"
    script.write_text(
        WORKER.replace('lambda: {"value": name}', f'lambda: [{{"value": name}}, {stopped}][0]')
    )
    supervise.run(job(limit=0.2), small_worker)
    found = units_of(small_worker)
    assert found["b"]["kind"] == "late"
    assert {n: found[n]["result"] for n in "ad"} == {n: GOOD[n] for n in "ad"}


def test_a_worker_that_cannot_start_is_given_up(small_worker: Record, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import nothing_of_that_name")
    supervise.run(job(), small_worker)
    troubles = small_worker.data["stages"]["stage"]["troubles"]
    assert "nothing_of_that_name" in troubles[0]
    assert troubles[-1] == "given up: 2 processes did nothing"


def test_no_time_is_said(small_worker: Record) -> None:
    start = time.monotonic()
    supervise.run(job(seconds=0.5, faults={"b": "hang"}), small_worker)
    assert time.monotonic() - start < 20
    found = units_of(small_worker)
    assert found["a"]["result"] == GOOD["a"]
    assert found["b"] == {"not run": "cut off when the time was over"}
    assert found["c"] == found["d"] == {"not run": "no time was left"}
    supervise.run(job(seconds=0.0), small_worker)
    assert small_worker.data["stages"]["stage"]["troubles"][-1] == "no time was left"


def test_all_may_be_stopped(small_worker: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    supervise.stop.set()
    try:
        supervise.run(job(), small_worker)
    finally:
        supervise.stop.clear()
    assert small_worker.data["stages"]["stage"]["troubles"] == ["it was stopped"]


def test_who_has_finished_is_not_waited_for(small_worker: Record) -> None:
    start = time.monotonic()
    supervise.run(job(lingers=300), small_worker)
    assert time.monotonic() - start < 60
    assert set(units_of(small_worker)) == set("abcd")


def test_units_that_others_need_are_done_again(tmp_path: Path) -> None:
    voice = Voice(tmp_path / "lines", skip={"a", "b"}, lost={"b"})
    assert voice.unit("a", 9, lambda: 1) is None
    assert voice.unit("a", 9, lambda: 1, again=True) == 1
    assert voice.unit("b", 9, lambda: 1, again=True) is None
    voice.finish()
    late = Voice(tmp_path / "late", ends=0.0)
    assert late.unit("a", 9, lambda: 1) is None
    late.close()
    line = json.loads((tmp_path / "late").read_text())
    assert line == {"end": "a", "not run": "no time was left"}


def test_long_texts_keep_both_ends() -> None:
    text = shortened("a" * 5000 + "b" * 5000)
    assert len(text) < 6100
    assert text[0] == "a"
    assert text[-1] == "b"


def test_a_process_that_cannot_be_ended_is_left(
    small_worker: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for a driver which never answers outlasts SIGKILL."""

    left: list[Any] = []

    def wait(self: Any, timeout: float | None = None) -> int:
        left.append(self)
        raise subprocess.TimeoutExpired("worker", timeout or 0.0)

    with monkeypatch.context() as within:
        within.setattr(subprocess.Popen, "wait", wait)
        supervise.run(job(limit=0.2, faults={"b": "hang"}), small_worker)
    for process in left:
        process.wait()
    found = units_of(small_worker)
    assert found["b"]["kind"] == "late"
    assert found["d"]["result"] == GOOD["d"]
    assert "cannot be ended" in small_worker.data["stages"]["stage"]["troubles"][0]


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), ValueError("odd")])
def test_no_process_at_all_is_said(
    small_worker: Record, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", fails)
    supervise.run(job(), small_worker)
    (text,) = small_worker.data["stages"]["stage"]["troubles"]
    assert str(error) in text


def test_who_dies_between_units_again_and_again_is_given_up(
    small_worker: Record, tmp_path: Path
) -> None:
    """Such as one that does a unit anew in each process, and then ends: it would go on for ever."""
    script = WORKER.replace("voice.finish()", "os._exit(9)").replace("else lambda", "else lambda")
    script = script.replace(
        "voice.unit(name, options", "voice.unit(name, again=True, limit=options"
    )
    (tmp_path / "worker.py").write_text(script.replace("absent if", "work=absent if"))
    supervise.run(job(), small_worker)
    troubles = small_worker.data["stages"]["stage"]["troubles"]
    assert troubles[-1] == "given up: 2 processes did nothing"
    assert "its process ended with 9" in troubles[0]
    assert units_of(small_worker)["a"]["result"] == GOOD["a"]


# --- what is on disk ----------------------------------------------------------------------------------


def test_what_cannot_be_written_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    refuge = tmp_path / "refuge"
    monkeypatch.setattr(recording.tempfile, "gettempdir", lambda: str(refuge))
    record = Record(tmp_path / "file" / "out.json", {"value": float("nan")})
    record.unit("stage", "a", {"result": [float("inf"), {1, 2}, Path("x")]})
    record.not_run("stage", ["b"], "no time")
    assert record.written is not None
    assert record.written.parent == refuge
    found = json.loads(record.written.read_text(), parse_constant=pytest.fail)
    assert found["value"] == "nan"
    assert found["stages"]["stage"]["units"]["a"] == {"result": ["inf", [1, 2], repr(Path("x"))]}
    assert "file" in str(next(iter(found["unwritten"])))
    (tmp_path / "file").unlink()
    record.put("more", 1)
    assert record.written == tmp_path / "file" / "out.json"


def test_what_takes_long_to_write_is_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the results of a run in which all fails, each with its traceback."""
    now = [0.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    replace = os.replace

    def slow(*names: Any) -> None:
        now[0] += 0.5
        replace(*names)

    monkeypatch.setattr(os, "replace", slow)
    record = Record(tmp_path / "out.json", {})
    for name in "abc":
        record.unit("stage", name, {"result": 1})
    assert json.loads((tmp_path / "out.json").read_text())["stages"] == {}
    now[0] += 5.0
    record.settle()
    assert set(json.loads((tmp_path / "out.json").read_text())["stages"]["stage"]["units"]) == set(
        "abc"
    )
    written = now[0]
    record.settle()
    assert now[0] == written


def test_nothing_that_can_be_written_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full from some unit on: what was written before is whole, and the run goes on."""
    record = Record(tmp_path / "out.json", {})
    record.unit("stage", "a", {"result": 1})
    record.put("more", 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as within:
        within.setattr(os, "replace", full)
        record.unit("stage", "b", {"result": 2})
        record.put("more", 2)
        assert record.written is None
        assert "No space left" in str(record.data["unwritten"])
    assert list(json.loads((tmp_path / "out.json").read_text())["stages"]["stage"]["units"]) == [
        "a"
    ]
    record.put("more", 1)
    assert list(json.loads((tmp_path / "out.json").read_text())["stages"]["stage"]["units"]) == [
        "a",
        "b",
    ]
