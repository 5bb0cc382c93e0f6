"""`python -m benchmarks.speed` end to end: tables, JSON, pictures, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from benchmarks.speed import CONTENDERS, SUITES, __main__ as command, table
from benchmarks.speed.interrupt import Interrupt
from benchmarks.speed.picture import copies
from tests.support.helpers import ROOT, full_disk, left_as_it_was
from tightrope.environment import read_environment

COMMAND = [sys.executable, "-m", "benchmarks.speed"]
DECODE = ["--only", "decode 1.*fp32", "--against", "^eager$", "--rounds", "1"]
SMALL = ["--tokens", "3", "--rounds", "1", "--against", "^eager$"]


def speed(*arguments: object, width: int = 80) -> tuple[int, str, str]:
    """Run the benchmark in this process; return its exit code, output and error stream."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.setenv("COLUMNS", str(width))
        try:
            code = command.main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else -1
    return code, out.getvalue(), error.getvalue()


def started(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a process of its own, after other Python code."""
    script = f"import sys; {code}\nfrom benchmarks.speed.__main__ import main; sys.exit(main())"
    paths = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


# --- speed ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Numbers, output and picture of one run of the suite "short" with 3 tokens."""
    folder = tmp_path_factory.mktemp("speed")
    numbers, picture = folder / "speed.json", folder / "speed.png"
    code, output, _ = speed(*SMALL, "--threads", 1, "--out", numbers, "--plot", picture)
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
    out = tmp_path / "speed.json"
    code, output, _ = speed(*SMALL, "--only", "decode", "--out", out, width=200)
    assert code == 0
    assert ("This machine was busy" in output) == warned
    assert json.loads(out.read_text())["load"] == pytest.approx(load, abs=0.01)


def test_a_median_of_runs_is_taken_run_by_run() -> None:
    result = {"seconds": {"clone": [1.0, 2.0, 4.0], "tightrope": [3.0, 2.0, 4.0], "odd": []}}
    assert copies(result, "tightrope") == 1.0
    assert copies(result, "absent") is None
    assert copies({"seconds": {"tightrope": [1.0]}}, "tightrope") is None


def test_json_and_nothing_else() -> None:
    code, output, error = speed(*SMALL, "--only", "decode 32.*fp32", "--json", "--runs", 2)
    assert code == 0
    (result,) = json.loads(output)["results"]
    assert len(result["seconds"]["eager"]) == 2
    assert "measuring   0%" in error


def test_a_list_measures_nothing() -> None:
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
        (["--only", "("], "--only '(' is not a valid regular expression"),
        (["--against", "unknown"], "--against 'unknown' matches no contender"),
        (["--out", "/nowhere/x.json"], "/nowhere: there is no such folder"),
        (["--plot", "/nowhere/x.png"], "/nowhere: there is no such folder"),
        (["--plot", "x.xyz"], "--plot must be a .png, .pdf or .svg file but got 'x.xyz'"),
        (["--out", "."], ".: it is a folder"),
        (["--suite", "long"], "--suite must be short or full but got 'long'"),
        (["--runs", "0"], "--runs: must be from 1 to 100 but got 0"),
        (["--threads", "0"], "--threads: must be from 1 to 1024 but got 0"),
        (["--tokens", "two"], "--tokens: invalid number value: 'two'"),
        (["--round", "1"], "unrecognized arguments: --round"),
    ],
)
def test_wrong_options(arguments: list[str], about: str) -> None:
    code, out, error = speed(*arguments)
    assert code == 2
    assert out == ""
    assert error.startswith("Error: ")
    assert about in error
    assert error.count("\n") == 1


def test_a_wrong_result_of_ours_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise RuntimeError("[measure] tightrope must be right in this but it is not.")

    monkeypatch.setattr(command, "measure", wrong)
    code, _, error = speed(*SMALL)
    assert code == 1
    progress, last = error.splitlines()
    assert progress.startswith("measuring   0%")
    assert last == "Error: [measure] tightrope must be right in this but it is not."


@pytest.mark.slow
def test_ctrl_c_keeps_the_results_so_far() -> None:
    call = [*COMMAND, "--json", "--rounds", "1000", "--against", "^eager$", "--tokens", "100"]
    with subprocess.Popen(
        call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    assert table._absent(results, []) == {"peer": fault}


def test_absent_contenders_are_named() -> None:
    results = [
        {"absent": {"jax jit": "jax is not installed", "copy_": "not selected", "peer": "no"}},
        {"absent": {"jax jit": "something later", "eager": "in one case", "peer": "it failed: x"}},
    ]
    wanted = {"jax jit": "jax is not installed", "peer": "it failed: x"}
    assert table._absent(results, ["eager"]) == wanted


@pytest.mark.parametrize(
    "time, output",
    [
        (2.5, "2.50 s"),
        (0.1234, "123 ms"),
        (0.0123, "12.3 ms"),
        (4.567e-6, "4.57 us"),
        (1e-8, "0.01 us"),
    ],
)
def test_duration(time: float, output: str) -> None:
    assert table.duration(time) == output


HEADINGS = ("case", "a copy", "tightrope", "compiled eager", "rotary-embedding-torch")
ROWS = (
    ("prefill 2048, in place, fp32", "783 us", "1.29", "8.98", "-"),
    ("decode", "3.10 us", "3.47", "10.2", "11.0"),
)


def test_a_table_fits_its_width() -> None:
    lines = table._table(HEADINGS, ROWS, 100)
    assert [line.split() for line in lines] == [
        ["rotary-"],
        ["compiled", "embedding-"],
        ["case", "a", "copy", "tightrope", "eager", "torch"],
        ["-" * 70],
        ["prefill", "2048,", "in", "place,", "fp32", "783", "us", "1.29", "8.98", "-"],
        ["decode", "3.10", "us", "3.47", "10.2", "11.0"],
    ]
    # Numbers and their headings end in the same column.
    assert {lines[row].index(end) + len(end) for row, end in ((2, "eager"), (4, "8.98"))} == {58}
    wrapped = table._table(HEADINGS, ROWS, 62)
    assert max(map(len, wrapped)) == 62
    assert wrapped[4].startswith("prefill 2048, in  ")
    assert wrapped[5] == "place, fp32"
    assert table._table(HEADINGS, ROWS, 50) == [
        "prefill 2048, in place, fp32",
        "  a copy 783 us, tightrope 1.29, compiled eager",
        "  8.98, rotary-embedding-torch -",
        "decode",
        "  a copy 3.10 us, tightrope 3.47, compiled eager",
        "  10.2, rotary-embedding-torch 11.0",
    ]


def test_help_explains_the_numbers() -> None:
    code, output, _ = speed("--help")
    assert code == 0
    for text in ("(rows, heads, tokens, channels)", "examples:", "exit codes:", "divided by"):
        assert text in output


@pytest.mark.parametrize(("arguments", "code"), [("--list", 0), ("--plot x.png", 2)])
def test_only_pictures_need_matplotlib(tmp_path: Path, arguments: str, code: int) -> None:
    """Neither matplotlib nor the packages of the `tightrope` command are needed for a table."""
    names = ("matplotlib", "safetensors", "typer", "rich")
    without = "; ".join(f"sys.modules[{name!r}] = None" for name in names)
    done = started(without, *arguments.split(), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == []
    if code:
        assert done.stderr == (
            "Error: --plot needs matplotlib. Install with `python -m pip install matplotlib`.\n"
        )


@pytest.mark.one_in(2)
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes")
@pytest.mark.parametrize(
    "arguments",
    [["--list"], ["--only", "decode 1.*fp32", "--against", "^eager$", "--rounds", "1", "--json"]],
    ids=" ".join,
)
def test_a_closed_pipe_is_no_finding(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert "rror" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has this device")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "--list"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "Error: the output could not be written: No space left on device.\n"


def test_files_are_written_where_links_and_devices_lead(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("below/real.json")
    for text in ("first", "second"):
        command._write_whole(link, text)
        assert link.is_symlink()
        assert (tmp_path / "below" / "real.json").read_text() == text
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["real.json"]
    command._write_whole(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        command._write_whole(tmp_path, "x")


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", stopped)
    code, output, error = speed(*SMALL)
    assert (code, output) == (130, "")
    assert error.splitlines()[1:] == ["Interrupted."]


def test_the_second_ctrl_c_interrupts_a_loop() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# --- info -----------------------------------------------------------------------------------------


def test_results_name_no_folder_of_this_machine(measured: tuple[Any, str, Path]) -> None:
    """They are published; `info`, for a bug report, says where the package is."""
    assert str(Path(tightrope.__file__).parent) not in json.dumps(measured[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("option, name", [("--out", "numbers.json"), ("--plot", "picture.pdf")])
def test_a_full_disk_and_the_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str, older: bool
) -> None:
    out = tmp_path / name
    if older:
        out.write_text("older", encoding="utf-8")
    with full_disk(500), pytest.raises(SystemExit, match=r"^1$"):
        command.main([*DECODE, option, str(out)])
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {out}: File too large."
    left_as_it_was(tmp_path, name, older)
