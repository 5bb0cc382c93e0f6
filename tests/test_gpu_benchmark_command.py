"""The command that measures a GPU: its stages and their time, its errors, and all of it without a GPU."""

from __future__ import annotations

import json
import os
import signal
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
    counts,
    machine,
    stages,
    suite,
    supervise,
    table,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.voice import Voice

from triton_cases import HAS_GPU, needs_triton

ROOT = Path(__file__).resolve().parent.parent


def test_what_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.parsed([]).budget == 8.0
    assert command.parsed([]).out == command.OUT
    assert command.parsed(["--dry-run"]).out is None
    few = stages.told(command.parsed(["--against", "^Liger$", "--fault", "a=b=hang"]))
    assert few["names"] == ["tightrope", "copy", "Liger"]
    assert few["faults"] == {"a=b": "hang"}
    for arguments, text in {
        ("--stages", "nothing"): "there is no stage nothing; there are machine, budgets",
        ("--budget", "0"): "--budget must be more than 0 minutes but is 0.0",
        ("--only", "("): "'(' is no regular expression",
    }.items():
        with pytest.raises(SystemExit):
            command.parsed(list(arguments))
        assert text in capsys.readouterr().err


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Stages and seconds of the jobs that are started, none of which does anything."""
    found: list[tuple[str, float]] = []
    monkeypatch.setattr(
        supervise,
        "run",
        lambda job, record: found.append((job.stage, job.seconds)) or record.stage(job.stage),
    )
    return found


def test_time_is_kept_for_what_comes_later(jobs: list[tuple[str, float]]) -> None:
    options = command.parsed(["--jobs", "4"])
    stages.measure(options, Record(None, {"machine": {}}), "caches", time.monotonic() + 480)
    assert [stage for stage, _ in jobs[:3]] == ["machine", "budgets", "counts"]
    assert [stage for stage, _ in jobs[3:6]] == ["prepare", "checks", "tests"]
    assert len(jobs) == 3 + sum(stages.PARTS.values()) + 2
    assert [stage for stage, _ in jobs[-2:]] == ["times", "blocks"]
    seconds = dict(jobs)
    assert seconds["machine"] == pytest.approx(120, abs=2)
    assert seconds["checks"] == pytest.approx(240, abs=2)
    assert seconds["times"] == pytest.approx(360, abs=2)
    assert seconds["blocks"] == pytest.approx(480, abs=2)
    jobs.clear()
    options = command.parsed(["--stages", "machine,checks"])
    stages.measure(options, Record(None, {"machine": {}}), "caches", time.monotonic() + 480)
    assert dict(jobs)["checks"] == pytest.approx(480, abs=2)
    jobs.clear()
    stages.measure(options, Record(None, {"machine": {}}), "caches", time.monotonic() - 1)
    assert dict(jobs)["machine"] == 0.0


def test_an_error_of_the_command_itself_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(options: Any, record: Record, *_: Any) -> None:
        record.unit("checks", "a", {"result": {}})
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(stages, "measure", breaks)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    out = tmp_path / "out.json"
    assert command.main(["--dry-run", "--out", str(out)]) == command.WRONG
    found = json.loads(out.read_text())
    assert found["stages"]["checks"]["units"] == {"a": {"result": {}}}
    assert "not foreseen" in found["stages"]["all"]["troubles"][0]
    assert found["summary"]["budgets"][2]["said"] == "held"
    assert "held          no failure: checks" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_end_it_in_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is until then is summed up and written."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(command.signal, "signal", handlers.__setitem__)

    def measure(options: Any, record: Record, *_: Any) -> None:
        handlers[getattr(signal, name)](0, None)
        supervise.run(supervise.Job("stage", {}, 60.0), record)

    monkeypatch.setattr(stages, "measure", measure)
    out = tmp_path / "out.json"
    try:
        assert command.main(["--dry-run", "--out", str(out)]) == command.FINE
    finally:
        supervise.stop.clear()
    found = json.loads(out.read_text())
    assert found["finished"] is False
    assert found["stages"]["stage"]["troubles"] == ["it was stopped"]
    assert found["summary"]["budgets"]


def test_who_does_not_listen_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def write(self, _: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    table.tell("nobody hears this")
    record = Record(tmp_path / "out.json", {})
    stages._progress(record, "a stage that nobody knows", 1.0)
    assert record.data["stages"] == {}
    monkeypatch.setattr(table, "progress", lambda *_: 1 / 0)
    stages._progress(record, "checks", 1.0)
    assert "ZeroDivisionError" in record.data["stages"]["checks"]["troubles"][0]


def test_without_pytest_the_tests_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda _: None)
    voice = Voice(tmp_path / "lines")
    suite.run(voice, 0, 1, "")
    voice.close()
    line = json.loads((tmp_path / "lines").read_text())
    assert line == {"end": "all tests", "absent": "pytest is not installed, or tests/ is not here"}


def test_the_tests_of_the_device_are_there() -> None:
    names = {path.name for path in suite.TESTS.glob(suite.PATTERN)} - set(suite.NOT)
    assert {"test_triton.py", "test_triton_backend.py"} <= names
    assert all((suite.TESTS / name).is_file() for name in suite.NOT)


@needs_triton
def test_what_kernels_were_compiled_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightrope.backends.triton import launch

    class Kernel:
        n_regs, n_spills = 64, 2

    monkeypatch.setattr(launch, "compiled", {("rotate", 1): Kernel(), ("rotate", 2): object()})
    assert counts.number() == 2
    assert counts.kernels() == [
        {"kernel": "rotate", "warps": None, "registers": 64, "spills": 2},
        {"kernel": "rotate", "warps": None, "registers": None, "spills": None},
    ]
    assert len(counts.kernels(1)) == 1


def test_the_sources_have_a_digest() -> None:
    assert len(machine.digest()) == 16
    assert machine.digest() == machine.digest()


def test_who_does_not_answer_is_not_waited_for() -> None:
    start = time.monotonic()
    assert machine._said("sleep", "60", seconds=0.1) is None
    assert machine._said("nothing of that name") is None
    assert machine._said("echo", "5") == "5"
    assert time.monotonic() - start < 20


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        env=environment, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip


# All stages in one process, as torch takes long to import.
STAGE_BY_STAGE = """
import json, sys
from pathlib import Path
from benchmarks.gpu import stages, worker
from benchmarks.gpu.voice import Voice
folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
for stage in stages.STAGES:
    voice = Voice(folder / stage, faults=options["faults"])
    worker._STAGES[stage](voice, options)
    voice.finish()
"""


@needs_triton
def test_every_stage_does_what_it_announces(tmp_path: Path) -> None:
    case, test = "prefill 32k", "test_triton.py::test_a_wrong_direct_call_is_refused[w"
    options = {
        "dry": True, "only": "^prefill 32k$|^tables|^compilations|^host . the operator$",
        "names": ["tightrope", "copy", "xopes"], "tests": "wrong_direct_call_is_refused[w",
        "part": 0, "parts": 1, "right": {case: ["tightrope", "copy"], "prefill 2k": ["copy"]},
        "faults": {"refused[width]": "raise", "tables": "raise"},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", STAGE_BY_STAGE, str(tmp_path), json.dumps(options)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ended: dict[str, dict[str, Any]] = {}
    for stage in stages.STAGES:
        lines = [json.loads(line) for line in (tmp_path / stage).read_text().splitlines()]
        assert lines[-1] == {"finished": True}
        ended[stage] = {line["end"]: line for line in lines if "end" in line}
        (planned,) = (line["plan"] for line in lines if "plan" in line)
        assert planned
        assert set(planned) <= set(ended[stage])
    failed = {
        name: unit["failed"]
        for units in ended.values()
        for name, unit in units.items()
        if "failed" in unit
    }
    assert {name.partition("::")[2] or name for name in failed} == {
        test.partition("::")[2] + "idth]",
        "tables",
    }
    assert all("PlantedError" in text for text in failed.values())
    assert ended["machine"]["device"]["result"] == {"name": "Triton's interpreter"}
    assert ended["counts"]["compilations"]["result"]["after one call"] == 0
    assert ended["counts"]["host | the operator"]["result"]["median"] > 0
    assert set(ended["prepare"]) == {f"{case} | {name}" for name in options["names"]}
    assert ended["prepare"][f"{case} | tightrope"]["result"]["off by"] < 2**-6
    assert ended["prepare"][f"{case} | xopes"]["missing"] is False
    assert sum("result" in unit for unit in ended["tests"].values()) == 2
    assert set(ended["blocks"]) == {
        f"{case} | {name}" for name in ("inputs", cases.TABLE, "together 1")
    }
    assert all("failed" not in unit for unit in ended["blocks"].values())
    for stage in ("budgets", "times"):
        for name in ("tightrope", "copy"):
            for turn in (1, 2):
                for way in cases.WAYS:
                    assert (
                        len(ended[stage][f"{case} | {name} | {turn} | {way}"]["result"]["ms"]) == 5
                    )
    assert "prefill 2k" not in ended["times"]


CASE = "decode 1, in place"


@needs_triton
def test_the_command_outlasts_faults(tmp_path: Path) -> None:
    """We take the process with us: nothing else is lost, it is said where, and the status is 1."""
    out = tmp_path / "dry.json"
    done = run(
        "--dry-run", "--out", str(out), "--only", "^decode 1,", "--against", "^nobody$",
        "--stages", "prepare,times", "--fault", f"{CASE} | tightrope | 2 | replays=exit",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["finished"] is True
    assert found["machine"]["dry"] is True
    assert found["machine"]["commit"]
    assert found["options"]["against"] == "^nobody$"
    units = {name: stage["units"] for name, stage in found["stages"].items()}
    assert set(units) == {"prepare", "times"}
    assert all(stage["troubles"] == [] for stage in found["stages"].values())
    assert {name: "result" in unit for name, unit in units["prepare"].items()} == {
        f"{CASE} | tightrope": True, f"{CASE} | copy": True,
    }  # fmt: skip
    failed = {name for name, unit in units["times"].items() if "failed" in unit}
    assert failed == {f"{CASE} | tightrope | 2 | replays"}
    for turn in (1, 2):
        assert "result" in units["times"][f"{CASE} | copy | {turn} | calls"]
    (entry,) = found["summary"]["cases"]
    assert set(entry["contenders"]) == {"tightrope", "copy"}
    assert f"  {CASE} | tightrope | 2 | replays: its process ended with 3" in done.stdout


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_the_command_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--out", str(out))
    assert done.returncode == 2
    assert done.stderr.strip() == "torch sees no GPU here; --dry-run needs none"
    found = json.loads(out.read_text())
    assert list(found["stages"]) == ["machine"]
    assert "sees no GPU" in found["stages"]["machine"]["units"]["device"]["absent"]


@needs_triton
def test_a_checkout_that_was_never_installed_can_be_imported() -> None:
    """As on a machine that is lent for minutes: all that is there is the tree."""
    code = (
        "import importlib.metadata as m; old = m.version\n"
        "def version(name):\n"
        "    if name == 'tightrope': raise m.PackageNotFoundError(name)\n"
        "    return old(name)\n"
        "m.version = version\n"
        "import tightrope; print(tightrope.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout == "0+uninstalled\n", done.stderr
