"""The benchmark of GPUs without one: what is lost and what is kept when something fails, and its sums."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import (
    __main__ as command,
    cases,
    contenders,
    device,
    expected,
    inputs,
    machine,
    peers,
    report,
    summary,
    supervise,
    table,
    timing,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.voice import AbsentError, Voice, shortened
from triton_cases import HAS_GPU, needs_triton

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

# --- workers and their units ----------------------------------------------------------------------

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
    monkeypatch.setattr(supervise, "GRACE", 1.0)
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
    assert found["c"] == {"absent": "not here"}
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
    assert small_worker.data["stages"]["stage"]["troubles"] == []


def test_a_hang_costs_its_unit_and_says_where(small_worker: Record) -> None:
    supervise.run(job(limit=1.0, faults={"b": "hang"}), small_worker)
    found = units_of(small_worker)
    assert found["b"]["kind"] == "late"
    assert "in _hang" in found["b"]["failed"]
    assert {n: found[n]["result"] for n in "ad"} == {n: GOOD[n] for n in "ad"}


def test_who_stops_the_watchdog_too_is_killed(small_worker: Record, tmp_path: Path) -> None:
    """A process that is stopped altogether, as by a driver that does not return."""
    script = tmp_path / "worker.py"
    stopped = "os.kill(os.getpid(), 19) if name == 'b' else None"
    script.write_text(WORKER.replace('lambda: {"value": name}', f'lambda: [{{"value": name}}, {stopped}][0]'))
    supervise.run(job(limit=1.0), small_worker)
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
    supervise.run(job(seconds=1.0, faults={"a": "hang"}), small_worker)
    assert time.monotonic() - start < 20
    found = units_of(small_worker)
    assert found["a"]["kind"] == "no time"
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
    assert line == {"end": "a", "failed": "no time was left", "kind": "no time"}


def test_long_texts_keep_both_ends() -> None:
    text = shortened("a" * 5000 + "b" * 5000)
    assert len(text) < 6100
    assert text[0] == "a"
    assert text[-1] == "b"


# --- the device's calls -----------------------------------------------------------------------------


class Calls:
    """Notes the calls of what stands for a class of torch.cuda, and binds them to its signature."""

    def __init__(self) -> None:
        self.names: list[str] = []


def test_the_device_is_used_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Gpu, over stand-ins whose calls must fit the signatures of torch and Triton."""
    import triton.testing

    names: list[str] = []
    stream_of = contextlib.nullcontext

    class Stream:
        def wait_stream(self, other: Any) -> None:
            names.append("wait_stream")

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            names.append("record")

        def synchronize(self) -> None:
            names.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 0.25

    class Graph:
        def replay(self) -> None:
            names.append("replay")

    captured = inspect.signature(torch.cuda.graph.__init__)

    @contextlib.contextmanager
    def graph(*given: Any, **named: Any) -> Any:
        captured.bind(None, *given, **named)
        names.append("begin")
        yield
        names.append("end")

    timed = inspect.signature(triton.testing.do_bench)

    def do_bench(*given: Any, **named: Any) -> list[float]:
        assert timed.bind(*given, **named).arguments["return_mode"] == "all"
        given[0]()
        return [0.5]

    cuda = {
        "current_device": lambda: 0, "Stream": Stream, "Event": Event, "CUDAGraph": Graph,
        "graph": graph, "synchronize": lambda: names.append("synchronize"),
        "current_stream": lambda: None, "stream": lambda _: stream_of(),
        "memory_reserved": lambda: 5, "memory_allocated": lambda: 3,
        "mem_get_info": lambda: (7, 9), "empty_cache": lambda: names.append("release"),
    }  # fmt: skip
    for name, value in cuda.items():
        assert hasattr(torch.cuda, name), name
        monkeypatch.setattr(torch.cuda, name, value)
    properties = type("Properties", (), {"L2_cache_size": 60 << 20})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    gpu = device.Gpu()
    assert (gpu.cache_bytes(), gpu.free_bytes()) == (60 << 20, 9)
    with gpu.aside():
        replay = gpu.capture(lambda: names.append("work"))
    replay()
    assert gpu.time(lambda: names.append("work"))() == 0.25
    assert gpu.each(lambda: names.append("work"), 40.0) == [0.5]
    gpu.release()
    assert names == [
        "wait_stream", "begin", "work", "end", "replay", "record", "work", "record", "wait", "work",
        "release",
    ]  # fmt: skip
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    assert not gpu.broken()

    def raises(error: BaseException) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise error

        return call

    monkeypatch.setattr(torch, "zeros", raises(torch.OutOfMemoryError("full")))
    assert not gpu.broken()
    monkeypatch.setattr(torch, "zeros", raises(RuntimeError("CUDA error: an illegal memory access")))
    assert gpu.broken()


# --- cases and what they must give ------------------------------------------------------------------


def test_cases_are_those_of_the_design() -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert not any(" | " in name for name in names)
    budget = [c for c in cases.CASES if c.budget]
    assert {(c.rows, c.tokens, c.q_heads, c.k_heads, c.work) for c in budget} == {
        (12, 32768, 12, 0, "out"),
        (12, 32768, 12, 0, "backward"),
        (1, 32768, 32, 8, "out"),
        (1, 32768, 32, 8, "backward"),
    }
    long = cases.CASES[0]
    assert long.moved == 2 * 2 * 12 * 32768 * 12 * 128 == long.copied
    silu = next(c for c in cases.CASES if c.name == "silu 32k, training")
    assert silu.moved * 4 == silu.copied * 5
    assert inputs.count_of(long, 60 << 20, 130 << 30) == 2
    assert inputs.count_of(long, 60 << 20, 1 << 30) == 1
    decode = next(c for c in cases.CASES if c.rows == 256)
    sets = inputs.count_of(decode, 60 << 20, 130 << 30)
    assert sets * decode.one_pass > 2 * (60 << 20)


SMALL = [cases.small(case) for case in cases.CASES if not case.neighbours]


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_ours_and_others_give_what_a_case_must(case: cases.Case) -> None:
    """Of two formulas that share nothing."""
    case = replace(case, against="all", tokens=min(case.tokens, 9))
    (given,) = inputs.sets(case, CPU, 1)
    want = expected.expected(case, given)
    for name in ("tightrope", "definition", "eager", "transformers"):
        mine = given.clone()
        try:
            found = contenders.results(contenders.CONTENDERS[name](case, CPU)(mine), mine)
        except AbsentError as reason:
            assert name not in ("tightrope", "definition"), reason
            continue
        assert expected.error(case, found, want) <= expected.bound(case), name


def test_wrong_results_are_told_from_right_ones() -> None:
    case = replace(cases.small(cases.CASES[1]), tokens=9)
    (given,) = inputs.sets(case, CPU, 1)
    want = expected.expected(case, given)
    wrong = {
        "as they were": given.xs,
        "the other pairing": inputs.our_call(replace(case, interleaved=True), CPU)(given),
        "one position on": inputs.ours(replace(case, positions="packed", tokens=9), CPU)(*given.xs),
        "one of two": given.xs[:1],
        "no number": (given.q * float("nan"), given.k),
    }
    for name, found in wrong.items():
        assert not expected.error(case, inputs.tensors(found), want) <= expected.bound(case), name


def test_some_tokens_are_of_both_ends() -> None:
    rows, tokens = expected.some(cases.CASES[0], CPU)
    assert rows.tolist()[0] == 0
    assert rows.tolist()[-1] == 11
    assert tokens.tolist()[:2] == [0, 1]
    assert tokens.tolist()[-1] == 32767
    assert len(tokens) == expected.TOKENS == len(set(tokens.tolist()))


# --- peers --------------------------------------------------------------------------------------------


def test_peers_are_loaded_out_of_loose_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose package cannot be imported, in a repository of the package's name, with einops."""
    root = tmp_path / "loose_peer"
    for name, text in {
        "loose_peer/__init__.py": "raise RuntimeError('the whole package')",
        "loose_peer/utils/__init__.py": "raise RuntimeError('more of it')",
        "loose_peer/utils/few.py": "def given(): return 5",
        "loose_peer/ops.py": "from einops import rearrange\nfrom loose_peer.utils import given, left_out",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    peer = peers.Peer(
        "someone/loose_peer", "loose_peer.ops", (), ("loose_peer", "loose_peer.utils"),
        {"loose_peer.utils": {"loose_peer.utils.few": ("given",), "": ("left_out",)}},
    )  # fmt: skip
    monkeypatch.setitem(peers.PEERS, "loose", peer)
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    for module in [m for m in sys.modules if m.startswith("loose_peer")]:
        monkeypatch.delitem(sys.modules, module)
    found = peers.load("loose")
    assert found.given() == 5
    with pytest.raises(AbsentError, match="left out"):
        found.left_out()
    assert peers.load("loose") is found


def test_peers_that_are_not_there_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    for name, peer in peers.PEERS.items():
        if peer.module not in sys.modules:
            with pytest.raises(AbsentError, match="neither installed nor in"):
                peers.load(name)
    broken = tmp_path / "Liger" / "src" / "liger_kernel" / "ops" / "rope.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise RuntimeError('no driver')")
    with pytest.raises(AbsentError, match="RuntimeError: no driver"):
        peers.load("Liger")
    assert "liger_kernel" not in sys.modules


def test_the_files_of_peers_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    for peer in peers.PEERS.values():
        assert peer.repository in text
        for path in peer.files:
            assert path.rsplit("/", 1)[1].removesuffix(".py") in text, path


# --- sums and tables --------------------------------------------------------------------------------


def test_quantiles() -> None:
    assert timing.quantiles([3.0, 1.0, 2.0]) == {"count": 3, "ms": [1.0, 1.5, 2.0, 2.5, 3.0]}
    assert timing.quantiles([4.0])["ms"] == [4.0] * 5


def recorded(ours: float = 1.0, other: float = 1.25) -> dict[str, Any]:
    """What a run might have taken down of one case."""
    case = cases.CASES[1]
    names = {"tightrope": ours, "copy": 0.95, "torch.compile": other}
    prepared = {f"{case.name} | {name}": {"result": {}} for name in names}
    prepared[f"{case.name} | Liger"] = {"absent": "not here"}
    prepared[f"{case.name} | FLA"] = {"failed": "Traceback\nDifferentError: off by 1"}
    timed = {
        f"{case.name} | {name} | {turn} | {way}": {"result": timing.quantiles([ms * (1 + turn / 100)])}
        for name, ms in names.items()
        for turn in (1, 2, 3)
        for way in timing.WAYS
    }
    facts = {
        "dry": False, "torch": "2", "triton": "3", "commit": "a" * 40, "changed": False, "sources": "b",
        "date": "2026-11-21T00:00:00+00:00", "gpu before": {"driver_version": "580"},
    }  # fmt: skip
    stages = {
        "machine": {"units": {"device": {"result": {"name": "GPU"}}}, "troubles": []},
        "prepare": {"units": prepared, "troubles": []},
        "times": {"units": timed, "troubles": []},
        "counts": {
            "units": {
                "compilations": {"result": {"after one call": 1, "after many": 1}},
                "host | a call": {"result": {"median": 20.0, "least": 19.0, "most": 40.0}},
                "launches | a call": {"result": {"launches": 2, "names": []}},
            },
            "troubles": [],
        },
    }
    data: dict[str, Any] = {"machine": facts, "stages": stages}
    data["summary"] = summary.conclude(data)
    return data


def test_budgets_held_and_not_held() -> None:
    data = recorded()
    (entry,) = data["summary"]["cases"]
    assert entry["share of copy"] == [0.95, 0.95, 0.95]
    assert entry["contenders"]["torch.compile"]["tightrope / it"]["device"] == [0.8, 0.8, 0.8]
    assert entry["absent"] == {"Liger": "not here", "FLA": "DifferentError: off by 1"}
    held = {b["name"]: b["held"] for b in data["summary"]["budgets"]}
    assert held["share of the copy: prefill 32k"] is True
    assert held["share of the copy: 12 x 32768, 12 heads"] is None
    assert held["prefill 32k: torch.compile"] is True
    assert held["right: prepare"] is True
    assert held["right: checks"] is None
    assert held["compilations"] is True
    assert held["microseconds of the host | a call"] is True
    assert held["launches | a call"] is False
    slow = {b["name"]: b["held"] for b in recorded(1.3)["summary"]["budgets"]}
    assert slow["prefill 32k: torch.compile"] is False
    assert slow["share of the copy: prefill 32k"] is False


def test_a_budget_within_the_spread_is_open() -> None:
    assert summary._beyond(0.92, [0.91, 0.93, 0.94]) is None
    assert summary._beyond(0.92, [0.92, 0.93, 0.94]) is True
    assert summary._beyond(0.92, [0.89, 0.90, 0.91]) is False


def test_tables_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = recorded()
    printed = table.printed(data)
    assert "prefill 32k" in printed
    assert "NOT HELD  launches | a call: 2 (1)" in printed
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps(data))
    assert report.main([str(results)]) == 0
    text = capsys.readouterr().out
    assert "| prefill 32k | 1 020.0 |" in text
    assert "| launches: a call 1 | 2 | **no** |" in text
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([str(results), "--page", str(page)]) == 0
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert "old" not in page.read_text()
    assert "commit aaaaaaaaaaaa" in page.read_text()
    page.write_text("no marks")
    assert report.main([str(results), "--page", str(page)]) == 2
    dry = {**data, "machine": {**data["machine"], "dry": True}}
    results.write_text(json.dumps(dry))
    assert report.main([str(results)]) == 2
    assert "dry run" in capsys.readouterr().err


def test_results_are_summed_up_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was cut off has no summary; what it took down suffices."""
    data = recorded()
    del data["summary"]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(data))
    assert report.main([str(path)]) == 0
    assert "| prefill 32k |" in capsys.readouterr().out


def test_the_page_has_the_marks_of_the_table() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert text.index(report.BEGIN) < text.index(report.END)


# --- the command ------------------------------------------------------------------------------------


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
