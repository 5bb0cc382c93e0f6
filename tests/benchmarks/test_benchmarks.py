"""The benchmarks in miniature: right results are timed fairly, reported, and stored; the committed pages show the committed results."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from benchmarks import __main__ as command, contenders, measure, report
from benchmarks.calls import EVERY, build
from benchmarks.cases import BETTER, KERNELS, MICROSECONDS, SUITES, Case, tiny
from benchmarks.contenders import Made, Rotate, Rotation, WrongError, checked
from benchmarks.measure import DRY, OURS, Built, Child, How, Timer, apart, medians, settings
from tests.support.helpers import ROOT

DRY_RUN = ["--dry-run", "--against", "^eager$"]
RESULTS = ROOT / "benchmarks" / "results"
PLAIN = tiny(Case("plain", k_heads=4), 9)
(OWN,) = (one for one in EVERY if one.name == OURS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process; return its exit code, output and error stream."""

    def done(*arguments: object) -> tuple[int, str, str]:
        try:
            code = command.main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        return code, *capsys.readouterr()

    return done


# --- right results --------------------------------------------------------------------------------


def distinct(suite: str) -> set[Case]:
    """The cases of a suite on small sizes, one for each kind of call; without counts of GPU kernels."""
    plain: dict[str, Any] = {"name": suite, "bounds": (), "cold": False, "rounds": 0, "shape": None}
    cases = [case for case in SUITES[suite].cases if case.kind != "kernels"]
    return {replace(tiny(case, 9), **plain) for case in cases}


@pytest.mark.parametrize("suite", SUITES.keys() - {"streams", "blocks", "gpu-shapes"})
def test_every_contender_of_a_suite_is_right(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours takes part in every case, and nothing of another is wrong; each call can be repeated."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for case in distinct(suite):
        with torch.set_grad_enabled(case.work == "training"), settings(case):
            built = build(case, re.compile(""))
            assert case.work == "backward" or OURS in built.calls, built.absent
            wrong = [why for why in built.absent.values() if re.search("off by|it failed", why)]
            assert not wrong, case
            for name, call in built.calls.items():
                built.renew.get(name, lambda: None)()
                call()


def wrong(rotation: Rotation) -> Rotate:
    return Rotate(lambda *xs: xs)


def missing(_: Rotation) -> Rotate:
    raise ImportError("no compiler\nand more")


def nearly(rotation: Rotation) -> Made:
    call, right = contenders.prepared(rotation, OWN.make(rotation))
    return Made(call, tuple(x * (1 + 1e-4) for x in right))


def test_a_wrong_or_failing_contender_is_absent_and_ours_an_error() -> None:
    others = (replace(OWN, name="bad", make=wrong), replace(OWN, name="no", make=missing))
    built = contenders.build(PLAIN, (OWN, *others), re.compile(""))
    assert set(built.calls) == {OURS}
    assert "elements are wrong; the first is q[0, 0, 1, 0]" in built.absent["bad"]
    assert built.absent["no"] == "it failed: ImportError: no compiler"
    for make, about in ((wrong, "must be right in plain but its result"), (missing, "no comp")):
        with pytest.raises(RuntimeError, match=about):
            contenders.build(PLAIN, (replace(OWN, make=make),), re.compile(""))
    checked(replace(OWN, name="other", make=nearly), Rotation(PLAIN))
    with pytest.raises(WrongError):  # this library is held to more
        checked(replace(OWN, make=nearly), Rotation(PLAIN))


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "grad_q", "grad_k"])
@pytest.mark.parametrize("planted", [1.0, float("nan")])
def test_a_single_wrong_element_is_found(which: int, planted: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(contenders, "AT_A_TIME", 200)  # one or two tokens at a time
    with torch.enable_grad():
        rotation = Rotation(replace(PLAIN, work="training"))
        right = contenders.prepared(rotation, OWN.make(rotation)).results
        assert rotation.mismatch(right, 1e-5) is None
        spoilt = [x.clone() for x in right]
        spoilt[which][0, 0, 7, 5] += planted
        assert "1 of " in str(rotation.mismatch(tuple(spoilt), 1e-5))
        assert "shapes" in str(rotation.mismatch(right[:2], 1e-5))


# --- fair times -----------------------------------------------------------------------------------


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


def test_groups_compete_in_the_grid(monkeypatch: Any) -> None:
    times = {OURS: 4.0, f"{OURS}, tables": 2.0, "eager": 8.0, "compiled a": 5.0, "compiled b": 4.0}
    monkeypatch.setattr(measure, "medians", lambda *_: (times, False))
    built = Built(dict.fromkeys(times, lambda: None), absent={"b": "why"})
    found = measure.measure(Case("warm", cold=False, best=True), built, DRY)
    assert found["ratios"] == {"eager": [0.25], "compiled": [0.5], BETTER: [0.5]}
    assert found["absent"] == {"b": "why"}


def test_bounds_are_held_open_or_missed() -> None:
    bounds = (("a", 1.0), (MICROSECONDS, 8.0), (KERNELS, 0.0), ("absent", 1.0))
    result = {"us": 7.0, "ratios": {"a": [0.9, 1.1]}, "numbers": {KERNELS: 2.0}}
    every = measure.held(Case("any", bounds=bounds), result)
    found = {name: measure.within(values, most) for name, most, values in every}
    assert found == {"a": "open", MICROSECONDS: "held", KERNELS: "MISSED"}


# In other processes.


def _right(note: Callable[[str], None], value: int) -> int:
    return value + 1


def _aborts(note: Callable[[str], None]) -> None:
    note("the bad one")
    measure.os.abort()


def _call() -> Callable[[], None]:
    return lambda: None


@pytest.mark.slow
def test_a_crash_costs_its_process_only() -> None:
    assert 0 < Child(_call, environment={}).seconds(10, cold=True) < 1
    assert apart(_right, 1, limit=60) == (2, "")
    assert apart(_aborts, limit=60) == (None, "the bad one")


# --- the command ----------------------------------------------------------------------------------


def test_every_case_is_measured_and_stored(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    code, output, _ = run(*DRY_RUN, "--threads", 1, "--json", file)
    assert code == 0
    text = file.read_text()
    # The results are published.
    assert str(Path(tightrope.__file__).parent) not in text
    assert str(tmp_path) not in text
    data = json.loads(text)
    cases = {case.name: case for case in SUITES["short"].cases}
    assert [row["case"] for row in data["results"]] == list(cases)
    for row in data["results"]:
        floor = "neg_" if cases[row["case"]].work == "in place" else "clone"
        assert set(row["ratios"]) == {"eager", floor}
        assert row["us"] > 0
        assert f"| {row['case']} " in output
    assert data["machine"]["torch"] == torch.__version__
    assert "A dry run: times mean nothing." in output


def test_a_file_has_the_suites_of_one_machine(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    few = ["--dry-run", "--json", file, "--only"]
    assert run(*few, "decode 32.*fp32")[0] == 0
    assert run(*few, "rotary_pos_embedding", "--suite", "small")[0] == 0
    data = json.loads(file.read_text())
    assert [row["suite"] for row in data["results"]] == ["short", "small"]
    data["machine"]["processor"] = "another"
    file.write_text(json.dumps(data))
    code, _, error = run(*few, "decode 32.*bf16")
    assert (code, "its processor is another, not" in error) == (2, True)


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["--only", "nothing"], "--only 'nothing' matches no case"),
        (["--only", "("], "'(' is not a valid regular expression"),
        (["--json", "/nowhere/x.json"], "/nowhere: there is no such folder"),
        (["--runs", "0"], "--runs: must be from 1 to 100 but got 0"),
        (["--device", "cuda"], "torch finds no GPU"),
    ],
)
def test_wrong_options(run: Any, arguments: list[str], about: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, error = run(*arguments)
    assert (code, out, about in error) == (2, "", True)


def test_errors_and_ctrl_c_keep_the_other_results(
    monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Path
) -> None:
    file, seen = tmp_path / "results.json", list[str]()

    def stopped(case: Any, *given: Any) -> Any:
        seen.append(case.name)
        if len(seen) == 2:
            raise RuntimeError("tightrope must be right")
        if len(seen) == 4:
            raise KeyboardInterrupt
        return {"case": case.name, "us": 1.0, "ratios": {"neg_": [1.0, 2.0]}}

    monkeypatch.setattr(command, "result_of", stopped)
    code, output, error = run("--json", file)
    assert code == command.INTERRUPTED
    assert "Error: tightrope must be right" in error
    assert "Interrupted; these are the results so far." in output
    assert len(json.loads(file.read_text())["results"]) == 3


def test_a_missed_bound_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    found = {"us": 1.0, "ratios": {"neg_": [1.4, 1.5], "transformers": [0.06, 0.07]}}
    monkeypatch.setattr(command, "result_of", lambda case, *_: {"case": case.name, **found})
    arguments = "--suite", "full", "--only", "^prefill 2048, cold, fp32"
    code, output, _ = run(*arguments)
    assert code == 1
    assert "prefill 2048, cold, fp32: neg_ 1.40–1.50, at most 1.3: MISSED" in output
    assert "transformers 0.06–0.07, at most 0.0667: open" in output


# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "benchmarks"])
def test_the_committed_tables_are_those_of_the_committed_results(
    name: str, run: Any, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    (copied := tmp_path / f"{name}.md").write_text(text, encoding="utf-8")
    machines = [f"{cpu}-2core-{isa}" for cpu in ("epyc", "xeon") for isa in ("avx512bf16", "avx2")]
    files = [RESULTS / f"cpu-{machine}.json" for machine in machines]
    given: list[Any] = [*files, "--suite", "grid"]
    if name == "benchmarks":
        block = text.partition("python -m benchmarks --report ")[2].partition("```")[0]
        words = shlex.split(block.replace("\\\n", ""))
        shown = [words[words.index(key) + at] for key in ("--only", "--against") for at in (0, 1)]
        given = [files[0], "--suite", "full", *shown]
    assert run("--report", *given, "--page", copied)[0] == 0
    assert copied.read_text("utf-8") == text


def test_committed_results_say_where_they_come_from() -> None:
    for path in RESULTS.glob("cpu-*.json"):
        data = json.loads(path.read_text("utf-8"))
        assert {row["suite"] for row in data["results"]} == set(data["suites"])
        for name, how in data["suites"].items():
            assert how["tree"], path
            assert how["command"], path
            cases = {case.name for case in SUITES[name].cases}
            assert {row["case"] for row in data["results"] if row["suite"] == name} <= cases, path


def test_numbers_of_tables_and_pictures(run: Any, tmp_path: Path) -> None:
    assert [report.span(x) for x in ([0.123, 0.2], [1.0, 1.004], [0.001])] == [
        "0.12–0.20",
        "1.00",
        "0.001",
    ]
    old, new = (
        {"results": [{"suite": "a", "case": "b", "ratios": {"neg_": x}}]} for x in ([1.0], [3.0])
    )
    assert report.changes(old, new).endswith("| b / neg_ | 1.00 | 3.00 | slower |")
    assert report.changes(new, old).endswith("| b / neg_ | 3.00 | 1.00 | faster |")
    drawn, file = tmp_path / "picture.png", RESULTS / "cpu-epyc-2core-avx512bf16.json"
    few = ["--report", file, "--suite", "full", "--only", "^decode 1 row"]
    assert "| decode 1 row, fp32 | 6.56 |" in run(*few, "--png", drawn)[1]
    assert drawn.read_bytes().startswith(b"\x89PNG")
