"""`python -m benchmarks`: its tables, its files, its exit codes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from benchmarks import __main__ as command, calls, pages, report
from benchmarks.calls import EVERY, result_of
from benchmarks.cases import SUITES, tiny
from benchmarks.measure import DRY, OURS
from tests.support.helpers import ROOT

DRY_RUN = ["--dry-run", "--against", "^eager$"]
RESULTS = ROOT / "benchmarks" / "results"


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


def test_every_case_is_measured(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    code, output, error = run(*DRY_RUN, "--threads", 1, "--json", file)
    assert (code, "measuring   0%" in error) == (0, True)
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
        assert f'"case":{json.dumps(row["case"])},' in text
        assert f"| {row['case']} " in output
    assert data["machine"]["torch"] == torch.__version__
    how = data["suites"]["short"]
    assert how["command"].startswith("python -m benchmarks --dry-run --against")
    assert how["runs"] == 1
    assert "time of tightrope / time of | µs | `neg_` | `clone` | `eager` |" in output
    assert "A dry run: times mean nothing." in output


def test_a_file_has_the_suites_of_one_machine(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    few = ["--dry-run", "--json", file, "--only"]
    assert run(*few, "decode 32.*fp32")[0] == 0
    assert run(*few, "rotary_pos_embedding", "--suite", "small")[0] == 0
    data = json.loads(file.read_text())
    assert [row["suite"] for row in data["results"]] == ["short", "small"]
    assert run(*few, "decode 32.*bf16")[0] == 0
    names = [row["case"] for row in json.loads(file.read_text())["results"]]
    assert names == ["rotary_pos_embedding", "decode 32 rows, in place, bf16"]
    data["machine"]["processor"] = "another"
    file.write_text(json.dumps(data))
    code, _, error = run(*few, "decode 32.*bf16")
    assert (code, "its processor is another, not" in error) == (2, True)


@pytest.mark.parametrize(("for_each_core", "warned"), [(0.4, False), (1.5, True)])
def test_a_busy_machine_is_reported(
    monkeypatch: pytest.MonkeyPatch, run: Any, for_each_core: float, warned: bool
) -> None:
    load = for_each_core * (os.cpu_count() or 1)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    code, output, _ = run(*DRY_RUN, "--only", "decode 32.*fp32")
    assert (code, "This machine is busy" in output) == (0, warned)


def test_a_list_measures_nothing(run: Any) -> None:
    for device in ("cpu", "cuda"):
        code, output, _ = run("--list", "--only", "decode", "--device", device)
        assert code == 0
        for contender in EVERY:
            assert f"  {contender.name}: " in output
        for name in SUITES:
            assert f"  {name}: " in output
        assert "copy_: only with --against" in output or device == "cuda"


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["--only", "nothing"], "--only 'nothing' matches no case"),
        (["--only", "("], "'(' is not a valid regular expression"),
        (["--json", "/nowhere/x.json"], "/nowhere: there is no such folder"),
        (["--runs", "0"], "--runs: must be from 1 to 100 but got 0"),
        (["--device", "cuda"], "torch finds no GPU"),
        (["--device", "cuda", "--suite", "small"], "--device must be cpu for the suite small but"),
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
    assert run(*arguments, "--quick")[0] == 0


@pytest.mark.slow
def test_a_crashed_contender_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a real process, those that measure are stand-ins: one dies at a contender, the next does not."""
    case = replace(SUITES["gpu"].cases[0], device="cpu")
    tried = []

    def apart(_: Any, case: Any, wanted: Any, how: Any, limit: float) -> tuple[Any, str]:
        tried.append([name for name in ("eager", "Liger") if wanted.search(name)])
        return (None, "Liger") if len(tried) == 1 else ({"case": case.name}, "")

    alone = replace(tiny(case), alone=True)
    found = result_of(alone, command.re.compile("^clone$"), DRY)
    assert set(found["ratios"]) == {"clone"}
    monkeypatch.setattr(calls, "apart", apart)
    found = result_of(case, command.re.compile("^(eager|Liger)$"), DRY)
    assert tried == [["eager", "Liger"], ["eager"]]
    assert found["absent"] == {"Liger": "it crashed or hung"}
    monkeypatch.setattr(calls, "apart", lambda *_, **__: (None, OURS))
    with pytest.raises(RuntimeError, match="its process died or hung"):
        result_of(case, command.re.compile(""), DRY)


def test_from_files_to_pages_and_pictures(run: Any, tmp_path: Path) -> None:
    """The committed tables are those of the committed results."""
    machines = (
        "epyc-2core-avx512bf16",
        "epyc-2core-avx2",
        "xeon-2core-avx512bf16",
        "xeon-2core-avx2",
    )
    files = [RESULTS / f"cpu-{machine}.json" for machine in machines]
    for name, page, given in (
        ("grid", "cpu", [*files, "--suite", "grid"]),
        ("full", "benchmarks", [files[0], "--suite", "full", *_options_of_the_page()]),
    ):
        copied = tmp_path / f"{page}.md"
        text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
        copied.write_text(text, encoding="utf-8")
        assert run("--report", *given, "--page", copied)[0] == 0
        assert copied.read_text("utf-8") == text, name
    drawn = tmp_path / "picture.png"
    few = ["--report", files[0], "--suite", "full", "--only", "^decode 1 row"]
    assert run(*few, "--png", drawn)[0] == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "| decode 1 row, fp32 | 6.56 |" in run(*few)[1]
    copied.write_text("no marks")
    assert run(*few, "--page", copied)[0] == 2
    assert (
        "| decode 1 row, fp32 / neg_ | 5.47–5.76 | 5.47–5.76 |  |"
        in run(*few, "--before", files[0])[1]
    )


def _options_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    _, _, block = page.partition("python -m benchmarks --report ")
    words = command.shlex.split(block.partition("```")[0].replace("\\\n", ""))
    return [words[words.index(name) + at] for name in ("--only", "--against") for at in (0, 1)]


def test_committed_results_say_where_they_come_from() -> None:
    for path in RESULTS.glob("cpu-*.json"):
        data = json.loads(path.read_text("utf-8"))
        assert {row["suite"] for row in data["results"]} == set(data["suites"])
        for name, how in data["suites"].items():
            assert how["tree"], path
            assert how["command"], path
            cases = {case.name for case in SUITES[name].cases}
            assert {row["case"] for row in data["results"] if row["suite"] == name} <= cases, path
    assert sum(path.stat().st_size for path in RESULTS.glob("*.json")) < 250_000


def test_numbers_of_tables_and_pictures() -> None:
    assert [report.span(x) for x in ([0.123, 0.2], [1.0, 1.004], [0.001])] == [
        "0.12–0.20",
        "1.00",
        "0.001",
    ]
    result = {"ratios": {"clone": [1.0, 2.0, 4.0], "eager": [0.25, 0.5, 0.5]}}
    assert [report.copies(result, name) for name in (OURS, "eager", "absent")] == [2.0, 4.0, None]
    old, new = (
        {"results": [{"suite": "a", "case": "b", "ratios": {"neg_": x}}]} for x in ([1.0], [3.0])
    )
    assert report.changes(old, new).endswith("| b / neg_ | 1.00 | 3.00 | slower |")
    assert report.changes(new, old).endswith("| b / neg_ | 3.00 | 1.00 | faster |")
    assert pages.table(["a"], [["x|y <z> `<z>`\n"]])[-1] == "| x\\|y &lt;z> `<z>`  |"
