"""The benchmarks in miniature: only right results are timed, reported and stored; the committed pages show the committed results."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from benchmarks import __main__ as command, contenders
from benchmarks.calls import EVERY, build
from benchmarks.cases import SUITES, Case, tiny
from benchmarks.contenders import Made, Rotate, Rotation, WrongError, checked
from benchmarks.measure import OURS, settings
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
    plain: dict[str, Any] = {"name": suite, "bounds": (), "cold": False, "rounds": 0}
    cases = [case for case in SUITES[suite].cases if case.kind != "kernels"]
    return {replace(tiny(case, 9), **plain) for case in cases}


@pytest.mark.parametrize("suite", sorted(SUITES.keys() - {"streams", "blocks"}))
def test_every_contender_of_a_suite_is_right(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours takes part in every case, and nothing of another is wrong; each call can be repeated."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for case in distinct(suite):
        with torch.set_grad_enabled(case.work == "training"), settings(case):
            built = build(case, re.compile(""))
            assert case.work == "backward" or OURS in built.calls, built.absent
            wrong = [why for why in built.absent.values() if "No module named" not in why]
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


# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", ["grid", "full"])
def test_the_committed_tables_are_those_of_the_committed_results(
    suite: str, run: Any, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    (copied := tmp_path / "benchmarks.md").write_text(text, encoding="utf-8")
    machines = [f"{cpu}-2core-{isa}" for cpu in ("epyc", "xeon") for isa in ("avx512bf16", "avx2")]
    files = [RESULTS / f"cpu-{machine}.json" for machine in machines]
    given: list[Any] = [*files, "--suite", "grid"]
    if suite == "full":
        block = text.partition("python -m benchmarks --report ")[2].partition("```")[0]
        words = shlex.split(block.replace("\\\n", ""))
        shown = [words[words.index(key) + at] for key in ("--only", "--against") for at in (0, 1)]
        given = [files[0], "--suite", suite, *shown]
    assert run("--report", *given, "--page", copied)[0] == 0
    assert copied.read_text("utf-8") == text
