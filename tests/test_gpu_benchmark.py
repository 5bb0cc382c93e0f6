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
    __main__ as command,
    cases,
    contenders,
    machine,
    record as recording,
    stages,
    suite,
    supervise,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.voice import Voice, shortened
from triton_cases import HAS_GPU, needs_triton

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
    popen = subprocess.Popen

    def started(arguments: list[str], **named: Any) -> Any:
        return popen([sys.executable, str(script), arguments[-1]], **named)

    monkeypatch.setattr(subprocess, "Popen", started)
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
        ("memory", "raised", "OutOfMemoryError"),
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
    assert small_worker.data["stages"]["stage"]["troubles"] == ["no time was left"]


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


def test_what_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.parsed([]).seconds == 450
    assert command.parsed(["--quick"]).seconds == 210
    quick = command.told(command.parsed(["--quick"]))
    assert quick["only"].count("^") == command.QUICK
    few = command.told(command.parsed(["--against", "^Liger$", "--fault", "a=b=hang"]))
    assert few["names"] == ["tightrope", "copy", "Liger"]
    assert few["faults"] == {"a=b": "hang"}
    with pytest.raises(SystemExit):
        command.parsed(["--stages", "nothing"])
    assert "there is no stage nothing; there are machine, checks" in capsys.readouterr().err


def test_the_sources_have_a_digest() -> None:
    assert len(machine.digest()) == 16
    assert machine.digest() == machine.digest()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        env=environment, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip


@needs_triton
def test_all_stages_run_dry_and_outlast_faults(tmp_path: Path) -> None:
    """A check that raises, a contender that takes the process, a test that hurts the device."""
    out = tmp_path / "dry.json"
    done = run(
        "--dry-run", "--out", str(out), "--only", "^prefill 2k$|^memory|^streams|^tables",
        "--against", "^eager$", "--tests", "wrong_direct_call_is_refused[w", "--seconds", "400",
        "--fault", "memory=raise", "--fault", "prefill 2k | eager | 2 | replays=exit",
        "--fault", "refused[words]=poison",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["finished"] is True
    assert found["machine"]["dry"] is True
    assert found["options"]["against"] == "^eager$"
    stages = {name: stage["units"] for name, stage in found["stages"].items()}
    assert list(stages) == list(command.STAGES)
    assert all(stage["troubles"] == [] for stage in found["stages"].values())
    assert stages["machine"]["device"]["result"] == {"name": "Triton's interpreter"}
    assert "PlantedError" in stages["checks"]["memory"]["failed"]
    for name in ("streams", "tables"):
        assert "result" in stages["checks"][name]
    lost = "tests/test_triton.py::test_a_wrong_direct_call_is_refused[words]"
    assert {name for name, unit in stages["tests"].items() if "failed" in unit} == {lost}
    assert len(stages["tests"]) == 2
    assert {n: "result" in u for n, u in stages["prepare"].items()} == {
        "prefill 2k | tightrope": True, "prefill 2k | copy": True, "prefill 2k | eager": True,
    }  # fmt: skip
    assert stages["counts"]["compilations"]["result"]["after one call"] == 0
    assert stages["counts"]["host | the operator"]["result"]["median"] > 0
    failed = {name for name, unit in stages["times"].items() if "failed" in unit}
    assert failed == {"prefill 2k | eager | 2 | replays"}
    for name in ("tightrope", "copy"):
        for turn in (1, 2, 3):
            assert "result" in stages["times"][f"prefill 2k | {name} | {turn} | calls"]
    (entry,) = found["summary"]["cases"]
    assert set(entry["contenders"]) == {"tightrope", "copy", "eager"}
    assert "memory: " in done.stdout


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_the_command_says_that_it_needs_a_gpu() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr.strip() == "torch sees no GPU here; --dry-run needs none"
