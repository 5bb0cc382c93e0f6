"""Test the coverage run over diffusers: models are equal, faults are found, committed rows are current."""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any

import pytest
import torch

from benchmarks.coverage import functions, models, report
from benchmarks.coverage.catalogue import LIBRARIES, model_classes, rotary, sizes
from benchmarks.transformers_coverage.comparing import faulty
from tests.support.helpers import ROOT
from tightrope.integrations import patch

pytest.importorskip("diffusers")

# Warnings of the library's models are not tested here.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("recognised_once")]

ALL: list[dict[str, Any]] = json.loads(
    (ROOT / "benchmarks/results/coverage-diffusers.json").read_text(encoding="utf-8")
)
RESULTS = ALL[0]
DIFFUSERS = LIBRARIES["diffusers"]
same_version = pytest.mark.skipif(
    metadata.version("diffusers") != RESULTS["version"],
    reason=f"the committed results are of diffusers {RESULTS['version']}",
)

# A function with constants, and one in a body.
FAST = ("WanTransformer3DModel",)
EQUAL = [row["model"] for row in RESULTS["models"] if row["status"] == "equal"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in EQUAL]
)
@same_version
def test_patched_models_are_equal_and_their_rotations_were_served(name: str) -> None:
    row = models.row(DIFFUSERS, name, model_classes(DIFFUSERS)[name])
    assert row["status"] == "equal", row
    assert row["calls"]
    assert row["replaced"]
    assert max(row["fault"]) > 1e-5


def test_a_model_that_the_replacement_would_change_is_reported_as_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(model: torch.nn.Module) -> Any:
        with faulty():
            return patch(model)

    monkeypatch.setattr(models, "patch", wrong)
    name = "WanTransformer3DModel"
    row = models.row(DIFFUSERS, name, model_classes(DIFFUSERS)[name])
    assert row["status"] == "different"
    assert row["reason"].startswith("at ")


def test_a_model_that_cannot_be_built_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sizes(DIFFUSERS), "WanTransformer3DModel", {"config": {"no": 1}})
    row = models.row(DIFFUSERS, "WanTransformer3DModel", "transformers/transformer_wan")
    assert row["status"] == "not built"
    assert row["reason"].startswith("TypeError")


@same_version
def test_the_committed_rows_are_those_of_the_catalogue() -> None:
    assert {row["model"] for row in RESULTS["models"]} == model_classes(DIFFUSERS).keys()
    found = {(each.file, each.name) for each in rotary(DIFFUSERS)}
    assert {(row["file"], row["function"]) for row in RESULTS["functions"]} == found
    assert set(sizes(DIFFUSERS)) <= model_classes(DIFFUSERS).keys()


def test_committed_rows_differ_nowhere_and_others_have_a_reason() -> None:
    for row in [*RESULTS["models"], *RESULTS["functions"]]:
        assert row["status"] != "different", row
        assert row["status"] == "equal" or row["reason"], row
    assert len(EQUAL) >= 45


def test_every_function_and_model_is_on_the_page() -> None:
    page = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    assert report.section(ALL).strip() in page
    for row in RESULTS["models"]:
        assert re.search(rf"^\| {row['model']} \|", page, re.MULTILINE)


@same_version
def test_a_function_in_a_body_and_one_with_constants_are_equal() -> None:
    wanted = ("WanAttnProcessor.__call__.<locals>.apply_rotary_emb", "apply_rotary_emb_qwen")
    chosen = {each.name: each for each in rotary(DIFFUSERS) if each.name in wanted}
    rows = [row for each in chosen.values() for row in functions.rows(each)]
    assert len(rows) >= 2
    assert {row["status"] for row in rows} == {"equal"}, rows
