"""`python -m benchmarks.speed`: its table, its file, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from benchmarks.speed import CONTENDERS, SUITES, __main__ as command, report
from tightrope.environment import read_environment

SMALL = ["--tokens", "3", "--rounds", "1", "--against", "^eager$"]


@pytest.fixture
def speed(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the benchmark in this process; return its exit code, output and error stream."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = command.main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        return code, *capsys.readouterr()

    return run


def test_every_case_is_measured(speed: Any, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    code, output, error = speed(*SMALL, "--threads", 1, "--out", out)
    assert code == 0
    assert "measuring   0%" in error
    text = out.read_text()
    # The results are published.
    assert str(Path(tightrope.__file__).parent) not in text
    data = json.loads(text)
    cases = {case.name.replace("2048", "3"): case for case in SUITES["short"]}
    assert [row["case"] for row in data["results"]] == list(cases)
    for row in data["results"]:
        floor = "neg_" if cases[row["case"]].work == "in place" else "clone"
        assert set(row["ratios"]) == {"eager", floor}
        assert row["us"] > 0
        assert f'{{"case":{json.dumps(row["case"])},' in text
        assert f"| {row['case']} | " in output
    assert data["machine"]["torch"] == torch.__version__
    assert (data["runs"], data["rounds"]) == (1, 1)
    assert "time of tightrope / time of | µs | `neg_` | `clone` | `eager` |" in output


def test_a_row_keeps_the_digits_that_a_table_shows() -> None:
    result = {
        "case": {"name": "decode"},
        "seconds": {"tightrope": [2e-6, 1.23456e-6, 1e-6]},
        "ratios": {"eager": [0.123456, 0.2]},
    }
    row = report.row(result)
    assert row == {"case": "decode", "us": 1.23, "ratios": {"eager": [0.12346, 0.2]}}


@pytest.mark.parametrize(("for_each_core", "warned"), [(0.4, False), (1.5, True)])
def test_a_busy_machine_is_reported(
    monkeypatch: pytest.MonkeyPatch, speed: Any, for_each_core: float, warned: bool
) -> None:
    load = for_each_core * read_environment().cores
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    code, output, _ = speed(*SMALL, "--only", "decode")
    assert code == 0
    assert ("This machine is busy" in output) == warned


def test_a_list_measures_nothing(speed: Any) -> None:
    code, output, _ = speed("--list", "--only", "decode")
    assert code == 0
    assert output.count("decode") == 4
    for contender in CONTENDERS:
        assert f"  {contender.name}: " in output
    assert "copy_: only with --against" in output


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["--only", "nothing"], "--only 'nothing' matches no case"),
        (["--only", "("], "'(' is not a valid regular expression"),
        (["--against", "unknown"], "--against 'unknown' matches no contender"),
        (["--out", "/nowhere/x.json"], "/nowhere: there is no such folder"),
        (["--runs", "0"], "--runs: must be from 1 to 100 but got 0"),
        (["--threads", "0"], "--threads: must be from 1 to 1024 but got 0"),
    ],
)
def test_wrong_options(speed: Any, arguments: list[str], about: str) -> None:
    code, out, error = speed(*arguments)
    assert (code, out) == (2, "")
    assert about in error


def test_a_wrong_result_of_ours_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, speed: Any) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise RuntimeError("[measure] tightrope must be right in this but it is not.")

    monkeypatch.setattr(command, "measure", wrong)
    code, _, error = speed(*SMALL)
    assert code == 1
    assert error.endswith("Error: [measure] tightrope must be right in this but it is not.\n")


def test_ctrl_c_keeps_the_results_so_far(
    monkeypatch: pytest.MonkeyPatch, speed: Any, tmp_path: Path
) -> None:
    real, out = command.measure, tmp_path / "speed.json"

    def stopped(case: Any, *given: Any, **options: Any) -> Any:
        if case.name == SUITES["short"][1].name.replace("2048", "3"):
            raise KeyboardInterrupt
        return real(case, *given, **options)

    monkeypatch.setattr(command, "measure", stopped)
    code, output, _ = speed(*SMALL, "--out", out)
    assert code == command.INTERRUPTED
    assert "Interrupted; these are the results so far." in output
    assert len(json.loads(out.read_text())["results"]) == 1


def test_other_tokens_leave_the_caches_as_the_name_says() -> None:
    for case in [each for suite in SUITES.values() for each in suite]:
        sized = command._sized(case, 1, 77)
        assert (sized.cold, sized.tokens) == (case.cold, 1 if case.tokens == 1 else 77)


@pytest.mark.parametrize(
    "fault", ["it failed: x", "its result is off: x", "its results have wrong"]
)
def test_a_fault_matters_more_than_a_case_that_does_not_apply(fault: str) -> None:
    absent: dict[str, str] = {}
    for reason in ("no", fault, "no again"):
        command._note({"absent": {"peer": reason, "copy_": "not selected"}}, absent)
    assert absent == {"peer": fault}


def test_help_explains_the_numbers(speed: Any) -> None:
    code, output, _ = speed("--help")
    assert code == 0
    for text in ("(rows, heads, tokens, channels)", "exit codes:", "divided"):
        assert text in output
