"""Test the coverage run over functions: it finds wrong replacements; committed rows are current."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.transformers_coverage import functions, report
from benchmarks.transformers_coverage.catalogue import models_folder, rotary_names
from tests.support.helpers import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "transformers-coverage.json"
PAGE = ROOT / "docs" / "transformers-coverage.md"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return data


def test_committed_functions_are_as_many_as_asked_for(committed: dict[str, Any]) -> None:
    rows = committed["functions"]
    statuses = report.file_status(rows)
    assert sum(status == "equal" for status in statuses.values()) >= 195
    assert "different" not in statuses.values()
    assert all(row["reason"] for row in rows if row["status"] != "equal")


def test_page_is_written_from_the_numbers(committed: dict[str, Any]) -> None:
    assert PAGE.read_text(encoding="utf-8") == report.page(committed)


@pytest.mark.parametrize("name", ["llama", "gptj", "deepseek_v2", "vjepa2", "roformer", "gemma4"])
def test_rows_of_today_are_those_committed(name: str, committed: dict[str, Any]) -> None:
    file = f"{name}/modeling_{name}"
    # `functions.files` reads all files of transformers, which takes seconds; it includes this one.
    path = models_folder() / f"{file}.py"
    assert rotary_names(path)
    today = {row["function"]: (row["status"], row["recognised"]) for row in functions.rows(path)}
    then = {
        row["function"]: (row["status"], row["recognised"])
        for row in committed["functions"]
        if row["file"] == file
    }
    assert today == then


@pytest.mark.slow
def test_the_run_reads_every_file_with_a_rotary_function() -> None:
    found = {p.relative_to(models_folder()).with_suffix("").as_posix() for p in functions.files()}
    assert len(found) >= 205
    assert {"llama/modeling_llama", "vjepa2/modeling_vjepa2", "gemma4/modeling_gemma4"} <= found


def plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin


def arguments(dtype: torch.dtype, table_dtype: torch.dtype, _: functions.Shape) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(2, 4, 5, 16, dtype=dtype),
        "cos": torch.rand(5, 8).repeat(1, 2).to(table_dtype),
        "sin": torch.rand(5, 8).repeat(1, 2).to(table_dtype),
    }


def test_a_wrong_replacement_is_different() -> None:
    def wrong(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return plain(x, cos, 1.001 * sin)

    assert functions.compare(plain, wrong, arguments, ("x",))["status"] == "different"


def test_a_replacement_that_calls_the_original_does_not_count() -> None:
    assert functions.compare(plain, plain, arguments, ("x",))["status"] == "different"
