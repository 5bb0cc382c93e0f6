"""What a run on a GPU comes to: ratios, budgets and tables, of results that are made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import cases, report, summary, table, timing

ROOT = Path(__file__).resolve().parent.parent


def test_quantiles() -> None:
    assert timing.quantiles([3.0, 1.0, 2.0]) == {"count": 3, "ms": [1.0, 1.5, 2.0, 2.5, 3.0]}
    assert timing.quantiles([4.0])["ms"] == [4.0] * 5


def shaped(ms: float) -> dict[str, Any]:
    return {"result": {**timing.quantiles([ms]), "shape": {"warps": 8}}}


def recorded(ours: float = 1.0, other: float = 1.25) -> dict[str, Any]:
    """What a run might have taken down of one case."""
    case = cases.CASES[1]
    names = {"tightrope": ours, "copy": 0.95, "torch.compile": other}
    prepared: dict[str, Any] = {f"{case.name} | {name}": {"result": {}} for name in names}
    prepared[f"{case.name} | Liger"] = {"absent": "it has no way to do: out", "missing": False}
    prepared[f"{case.name} | xopes"] = {"absent": "xopes is not there", "missing": True}
    prepared[f"{case.name} | FLA"] = {"failed": "Traceback\nDifferentError: off by 1"}
    prepared[f"{case.name} | flash-attention"] = {"failed": "it died\nnoise", "kind": "died"}
    timed: dict[str, Any] = {
        f"{case.name} | {name} | {turn} | {way}": {
            "result": timing.quantiles([ms * (1 + turn / 100)])
        }
        for name, ms in names.items()
        for turn in (1, 2, 3)
        for way in cases.WAYS
    }
    facts = {
        "dry": False, "torch": "2", "triton": "3", "commit": "a" * 40, "changed": False, "sources": "b",
        "date": "2026-11-21T00:00:00+00:00", "gpu before": {"driver_version": "580"},
    }  # fmt: skip
    found = {
        "machine": {"device": {"result": {"name": "GPU"}}},
        "prepare": prepared,
        "times": timed
        | {case.name: {"result": {}}, cases.CASES[0].name: {"not run": "no time was left"}},
        "blocks": {
            f"{case.name} | inputs": {"result": {"sets": 2}},
            f"{case.name} | {cases.TABLE}": shaped(1.0),
            f"{case.name} | warps 8": shaped(0.9),
            f"{case.name} | warps 2": {"failed": "ValueError: other bits", "kind": "raised"},
            f"{cases.CASES[0].name} | warps 8": shaped(0.9),
        },
        "counts": {
            "compilations": {"result": {"after one call": 1, "after many": 1}},
            "host | rotate_qk_, prepared": {
                "result": {"median": 20.0, "least": 19.0, "most": 40.0}
            },
            "launches | rotate_qk_, prepared": {"result": {"launches": 2, "names": []}},
            "launches | rotate_qk, prepared": {"result": {"launches": 0, "names": []}},
        },
    }
    stages = {name: {"units": units, "troubles": []} for name, units in found.items()}
    data: dict[str, Any] = {"machine": facts, "stages": stages}
    data["summary"] = summary.conclude(data)
    return data


def said(data: dict[str, Any]) -> dict[str, str]:
    """Of each budget, whether it held, and why it was not measured."""
    every = summary.conclude(data)["budgets"]
    return {b["name"]: ": ".join([b["said"], *([b["note"]] if "note" in b else [])]) for b in every}


def test_budgets_held_not_held_and_not_measured() -> None:
    data = recorded()
    (entry,) = data["summary"]["cases"]
    assert entry["share of copy"] == [0.95, 0.95, 0.95]
    assert entry["contenders"]["torch.compile"]["tightrope / it"]["device"] == [0.8, 0.8, 0.8]
    assert entry["absent"] == {
        "Liger": "it has no way to do: out",
        "xopes": "xopes is not there",
        "FLA": "DifferentError: off by 1",
        "flash-attention": "it died",
    }
    assert said(data) == {
        "no failure: budgets": "not measured",
        "no failure: counts": "held",
        "no failure: checks": "not measured",
        "no failure: tests": "not measured",
        "no failure: prepare": "held",
        "no failure: times": "open",
        "share of the copy: 12 x 32768, 12 heads": "not measured: no time",
        "share of the copy: prefill 32k": "held",
        "share of the copy: 12 x 32768, 12 heads, backward": "not measured: no time",
        "share of the copy: prefill 32k, backward": "not measured: no time",
        "microseconds of the host: rotate_qk_, prepared": "held",
        "microseconds of the host: rotate_qk, prepared": "not measured: nobody came to it",
        "launches: rotate_qk_, prepared": "not held",
        "launches: rotate_qk, prepared": "not measured: the profiler saw none",
        "compilations over lengths and offsets": "held",
        "prefill 32k: torch.compile": "held",
        "all cases: definition, torch.compile": "not measured: nobody came to it",
        "prefill 32k: flash-attention": "not measured: it died",
        "all cases: xopes": "not measured: xopes is not there",
        "prefill 32k: FLA": "not measured: DifferentError: off by 1",
    }
    slow = said(recorded(1.3))
    assert slow["prefill 32k: torch.compile"] == "not held"
    assert slow["share of the copy: prefill 32k"] == "not held"


@pytest.mark.parametrize(
    "text, line",
    [
        ("Traceback:\n  File x\nValueError: no\n", "ValueError: no"),
        (
            "call: tests/x.py:3: in test\n    assert a\nE   AssertionError: off\nE    +  where a = 5",
            "AssertionError: off",
        ),
        ("", "?"),
    ],
)
def test_a_failure_in_a_line(text: str, line: str) -> None:
    assert summary.why_not({"failed": text, "kind": "raised"}) == line


def test_a_wrong_result_is_why_a_share_was_not_measured() -> None:
    data = recorded()
    case = cases.CASES[1].name
    data["stages"]["times"]["units"] = {}
    data["stages"]["prepare"]["units"][f"{case} | tightrope"] = {
        "failed": "DifferentError: off by 1"
    }
    found = said(data)
    assert found[f"share of the copy: {case}"] == "not measured: DifferentError: off by 1"
    assert found["no failure: prepare"] == "not held"


def test_units_that_were_not_run_leave_it_open() -> None:
    data = recorded()
    units = data["stages"]["prepare"]["units"]
    units[f"{cases.CASES[0].name} | tightrope"] = {"not run": "no time was left"}
    assert said(data)["no failure: prepare"] == "open"


def test_the_stage_of_the_budgets_stands_in_for_the_last() -> None:
    """A run that ended before all took turns has what was measured first."""
    data = recorded()
    stages = data["stages"]
    stages["budgets"] = {"units": stages["times"]["units"], "troubles": []}
    stages["times"] = {"units": {}, "troubles": ["no time was left"]}
    assert said(data)["share of the copy: prefill 32k"] == "held"
    assert said(data)["no failure: budgets"] == "open"


def test_a_case_that_was_cut_holds_nothing() -> None:
    data = recorded()
    case = cases.CASES[1]
    units = data["stages"]["times"]["units"]
    units[f"{case.name} | inputs"] = {"result": {"rows": 1, "tokens": case.tokens // 2}}
    (entry,) = summary.conclude(data)["cases"]
    assert entry["case"]["tokens"] == case.tokens // 2
    whole = recorded()["summary"]["cases"][0]["contenders"]["tightrope"]["GB/s"]
    assert entry["contenders"]["tightrope"]["GB/s"] == pytest.approx(whole / 2, abs=0.1)
    assert said(data)["share of the copy: prefill 32k"] == "open: to 1 x 16384"
    data["summary"] = summary.conclude(data)
    assert "prefill 32k (cut to 1 x 16384)" in table.printed(data)


def test_shapes_of_blocks_are_beside_the_one_of_the_table() -> None:
    data = recorded()
    assert data["summary"]["blocks"] == [
        {
            "name": "prefill 32k",
            "shapes": [
                {"shape": "warps 8", "ms": 0.9, "ratio": 0.9},
                {"shape": "as in the table", "ms": 1.0, "ratio": 1.0},
            ],
        }
    ]
    line = "prefill 32k: warps 8: 0.900; as in the table: 1.000"
    assert f"blocks, {line}" in table.printed(data)
    assert f"- {line}" in table.markdown(data)


def test_a_budget_within_the_spread_is_open() -> None:
    assert summary._beyond(0.92, [0.91, 0.93, 0.94]) is None
    assert summary._beyond(0.92, [0.92, 0.93, 0.94]) is True
    assert summary._beyond(0.92, [0.89, 0.90, 0.91]) is False


def test_tables_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = recorded()
    printed = table.printed(data)
    assert "prefill 32k" in printed
    assert "NOT HELD      launches: rotate_qk_, prepared: 2 (1)" in printed
    assert (
        "not measured  all cases: xopes: not measured (<= 1 of its time; xopes is not there)"
        in printed
    )
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps(data))
    assert report.report(results) == 0
    text = capsys.readouterr().out
    assert "| prefill 32k | 1 020.0 |" in text
    assert "| launches: rotate_qk_, prepared 1 | 2 | **not held** |" in text
    assert (
        "| all cases: xopes <= 1 of its time | not measured | not measured: xopes is not there |"
        in text
    )
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.report(results, page) == 0
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert "old" not in page.read_text()
    assert "commit aaaaaaaaaaaa" in page.read_text()
    page.write_text("no marks")
    assert report.report(results, page) == 2
    dry = {**data, "machine": {**data["machine"], "dry": True}}
    results.write_text(json.dumps(dry))
    assert report.report(results, page) == 2
    assert "dry run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"machine": 5}', '{"machine": {"dry": false}}'], ids=list("abcde")
)
def test_what_is_no_result_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "gpu.json"
    results.write_text(text)
    assert report.report(results) == 2
    assert "is no result of this benchmark" in capsys.readouterr().err
    assert report.report(tmp_path / "nothing") == 2


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_run_that_was_cut_off_is_summed_up(kept: int, tmp_path: Path) -> None:
    """By the command, of whatever stages there are, without torch."""
    data = recorded()
    del data["summary"]
    data["stages"] = dict(list(data["stages"].items())[:kept])
    data["machine"] = {"dry": False} if kept == 0 else data["machine"]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(data))
    without = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_module('benchmarks.gpu', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", without, "--report", str(path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| case | device, µs |" in done.stdout
    assert ("| prefill 32k |" in done.stdout) == (kept > 2)


def test_the_page_has_the_marks_of_the_table() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert text.index(report.BEGIN) < text.index(report.END)
