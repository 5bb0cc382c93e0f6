"""Test the coverage of other libraries: stand-ins, and that the committed rows are those of today."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from importlib import metadata
from typing import Any

import pytest
import torch

from benchmarks.coverage import __main__ as command, functions, models, report
from benchmarks.coverage.catalogue import LIBRARIES, model_classes, sizes
from benchmarks.coverage.stand_ins import installed
from tests.support.helpers import ROOT

# Warnings of the libraries' models are not tested here.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("recognised_once")]

RESULTS = ROOT / "benchmarks/results/coverage-others.json"
DATA: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
BY_NAME = {each["library"]: each for each in DATA}
HERE = ("x-transformers", "rotary-embedding-torch")


def committed(library: str) -> dict[str, Any]:
    """The results of a library; skips the test if another version is installed."""
    pytest.importorskip(library.replace("-", "_"))
    if metadata.version(library) != BY_NAME[library]["version"]:
        pytest.skip(f"the committed results are of {library} {BY_NAME[library]['version']}")
    return BY_NAME[library]


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    """The name of a function with its constants, and what the row says about it."""
    constants = tuple(row["constants"].items())
    return row["file"], row["function"], constants, row["status"], row["recognised"], row["reason"]


@pytest.mark.parametrize("library", HERE)
def test_functions_of_today_are_those_committed(library: str) -> None:
    then = committed(library)["functions"]
    assert list(map(told, functions.run(LIBRARIES[library]))) == list(map(told, then))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"), [("x-transformers", "TransformerWrapper"), (HERE[1], "Attention")]
)
def test_models_of_today_are_those_committed(library: str, name: str) -> None:
    (then,) = (row for row in committed(library)["models"] if row["model"] == name)
    today = models.row(LIBRARIES[library], name, model_classes(LIBRARIES[library])[name])
    for key in ("status", "reason", "bfloat16", "calls"):
        assert today[key] == then[key]


def test_every_library_and_small_model_has_a_row() -> None:
    assert BY_NAME.keys() == LIBRARIES.keys() - {"diffusers"}
    for name, each in BY_NAME.items():
        assert {row["model"] for row in each.get("models", [])} == sizes(LIBRARIES[name]).keys()


def test_rows_that_are_not_equal_have_a_reason_and_no_place_of_a_machine() -> None:
    for each in DATA:
        for row in [*each.get("functions", []), *each.get("models", [])]:
            assert row["status"] == "equal" or row["reason"], row
    assert "(/" not in RESULTS.read_text(encoding="utf-8")


def test_the_number_of_threads_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the run, and on the page."""
    monkeypatch.setattr(functions, "run", lambda _: [])
    torch.set_num_threads(2)
    options = argparse.Namespace(functions=True, models=False, only="")
    data = command.measured(LIBRARIES[HERE[0]], {"threads": 1}, options)
    assert data["threads"] == 2
    assert "on a CPU, with 2 threads of torch." in report.section([data])


def test_page_is_written_from_the_numbers() -> None:
    page = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    assert report.section(DATA).strip() in page


def test_stand_ins_replace_packages_that_are_not_installed_until_the_end() -> None:
    with installed(["absent_package", "torch"]):
        absent = importlib.import_module("absent_package.part")
        assert not isinstance(1, absent.Kind)

        class Mine(absent.Kind):  # type: ignore[misc, name-defined, unused-ignore]
            pass

        assert isinstance(Mine("any", arguments=1), Mine)
        assert absent.decorator(told) is told
        assert absent.decorator("option")(told) is told
        with absent.context() as entered:
            assert list(entered) == []
        assert importlib.import_module("torch").Tensor
    assert "absent_package" not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module("absent_package")
