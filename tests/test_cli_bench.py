"""`tightrope bench` and `tightrope info` end to end: tables, JSON, pictures and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.speed import CONTENDERS, SUITES
from benchmarks.speed.picture import copies
from typer.testing import CliRunner

import tightrope
from tightrope.cli import _bench, app, bench as command, info as info_command
from tightrope.workbench.environment import PACKAGES, read_environment

SMALL = ["--tokens", "3", "--rounds", "1", "--against", "^eager$"]


def run(*arguments: object, width: int = 80) -> tuple[int, str, str]:
    """Run one command; return its exit code, output and error stream."""
    output = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app.app, output, env={"COLUMNS": str(width)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


# --- bench ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Numbers, output and picture of one run of the suite "short" with 3 tokens."""
    folder = tmp_path_factory.mktemp("bench")
    numbers, picture = folder / "bench.json", folder / "bench.png"
    code, output, _ = run("bench", *SMALL, "--threads", 1, "--out", numbers, "--plot", picture)
    assert code == 0
    return json.loads(numbers.read_text()), output, picture


def test_every_case_is_measured(measured: tuple[dict[str, Any], str, Path]) -> None:
    numbers = measured[0]
    assert [result["case"]["name"] for result in numbers["results"]] == [
        case.name.replace("2048", "3") for case in SUITES["short"]
    ]
    for result in numbers["results"]:
        floor = "neg_" if result["case"]["work"] == "in place" else "clone"
        assert set(result["seconds"]) == {"tightrope", "eager", floor}
        assert result["copies"][floor] == 1.0
        ours = result["seconds"]["tightrope"][0] / result["seconds"][floor][0]
        assert result["copies"]["tightrope"] == ours
        assert result["case"]["threads"] == 1
        assert result["absent"]["jax jit"] == "not selected"
    assert numbers["machine"]["torch"] == torch.__version__
    assert (numbers["runs"], numbers["rounds"], numbers["interrupted"]) == (1, 1, False)


def test_the_table(measured: tuple[dict[str, Any], str, Path]) -> None:
    _, output, picture = measured
    assert max(map(len, output.splitlines())) <= max(80, len(f"picture  {picture}"))
    assert "\x1b" not in output
    whole = " ".join(output.split())
    for text in ("relative to copying them", "Time relative to tightrope: eager", "1 thread,"):
        assert text in whole
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("for_each_core", "warned"), [(0.4, False), (1.5, True)])
def test_a_busy_machine_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, for_each_core: float, warned: bool
) -> None:
    load = for_each_core * read_environment().cores
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    out = tmp_path / "bench.json"
    code, output, _ = run("bench", *SMALL, "--only", "decode", "--out", out, width=200)
    assert code == 0
    assert ("This machine was busy" in output) == warned
    assert json.loads(out.read_text())["load"] == pytest.approx(load, abs=0.01)


def test_a_median_of_runs_is_taken_run_by_run() -> None:
    result = {"seconds": {"clone": [1.0, 2.0, 4.0], "tightrope": [3.0, 2.0, 4.0], "odd": []}}
    assert copies(result, "tightrope") == 1.0
    assert copies(result, "absent") is None
    assert copies({"seconds": {"tightrope": [1.0]}}, "tightrope") is None


def test_json_and_nothing_else() -> None:
    code, output, error = run("bench", *SMALL, "--only", "decode 32.*fp32", "--json", "--runs", 2)
    assert code == 0
    (result,) = json.loads(output)["results"]
    assert len(result["seconds"]["eager"]) == 2
    assert "measuring   0%" in error


def test_a_list_measures_nothing() -> None:
    code, output, _ = run("bench", "--list", "--only", "decode")
    assert code == 0
    assert output.count("decode") == 4
    for contender in CONTENDERS:
        assert f"  {contender.name}: " in output
    assert "copy_: only with --against" in output


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["--only", "nothing"], "--only 'nothing' matches no case"),
        (["--only", "("], "--only '(' is not a valid regular expression"),
        (["--against", "unknown"], "--against 'unknown' matches no contender"),
        (["--out", "/nowhere/x.json"], "/nowhere: there is no such folder"),
        (["--plot", "/nowhere/x.png"], "/nowhere: there is no such folder"),
        (["--runs", "0"], "--runs"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    about: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tightrope", "bench", *arguments])
    assert app.run() == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert about in error
    assert error.count("\n") == 1


def test_a_wrong_result_of_ours_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise RuntimeError("[measure] tightrope must be right in this but it is not.")

    monkeypatch.setattr(command, "measure", wrong)
    code, _, error = run("bench", *SMALL)
    assert code == 1
    assert error == "Error: [measure] tightrope must be right in this but it is not.\n"


@pytest.mark.slow
def test_ctrl_c_keeps_the_results_so_far() -> None:
    call = [sys.executable, "-m", "tightrope.cli", "bench", "--json", "--rounds", "1000"]
    call += ["--against", "^eager$", "--tokens", "100"]
    with subprocess.Popen(
        call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline().startswith("measuring   0%")
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 130
    numbers = json.loads(output)
    assert numbers["interrupted"]
    assert 1 <= len(numbers["results"]) < len(SUITES["short"])


def test_other_tokens_leave_the_caches_as_the_name_says() -> None:
    for case in [each for suite in SUITES.values() for each in suite]:
        sized = command._sized(case, 1, 77)
        assert (sized.cold, sized.tokens) == (case.cold, 1 if case.tokens == 1 else 77)


@pytest.mark.parametrize(
    "fault", ["it failed: x", "its result is off: x", "its results have wrong"]
)
def test_a_fault_matters_more_than_a_case_that_does_not_apply(fault: str) -> None:
    results = [{"absent": {"peer": each}} for each in ("no", fault, "no again")]
    assert _bench._absent(results, []) == {"peer": fault}


def test_absent_contenders_are_named() -> None:
    results = [
        {"absent": {"jax jit": "jax is not installed", "copy_": "not selected", "peer": "no"}},
        {"absent": {"jax jit": "something later", "eager": "in one case", "peer": "it failed: x"}},
    ]
    wanted = {"jax jit": "jax is not installed", "peer": "it failed: x"}
    assert _bench._absent(results, ["eager"]) == wanted


# --- info -----------------------------------------------------------------------------------------


def test_results_name_no_folder_of_this_machine(measured: tuple[Any, str, Path]) -> None:
    """They are published; `info`, for a bug report, says where the package is."""
    assert str(Path(tightrope.__file__).parent) not in json.dumps(measured[0])


@pytest.mark.parametrize("width", [80, 200])
def test_info_in_words(width: int) -> None:
    code, output, error = run("info", width=width)
    assert (code, error) == (0, "")
    assert max(map(len, output.splitlines())) <= width
    for name in ("processor", "threads", "instruction set", "gpu", "found"):
        assert f"\n{name}" in output


def test_info_has_the_facts_for_a_bug_report() -> None:
    found = json.loads(run("info", "--json")[1])
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["rich"] is not None
    assert found["cores"] >= 1
    assert Path(found["installed_at"]) == Path(tightrope.__file__).parent
    assert (found["why_no_gpu"] is None) == torch.cuda.is_available()


@pytest.mark.parametrize("reason, code", [(None, 0), ("it is not built", 1)])
def test_a_backend_can_be_required(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, code: int
) -> None:
    here = read_environment()
    here.backends["cpu"] = reason
    monkeypatch.setattr(info_command, "read_environment", lambda: here)
    assert run("info", "--require", "cpu")[0] == code
    assert run("info", "--require", "reference", "--json")[0] == 0


def test_an_unknown_backend() -> None:
    code, output, error = run("info", "--require", "abacus")
    assert (code, output) == (2, "")
    assert error.startswith("Error: --require must be one of ")
    assert error.endswith("but got 'abacus'.\n")
