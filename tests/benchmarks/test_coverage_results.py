"""The committed coverage: the rows are those of today, they are on the page, and none differs."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.coverage import __main__ as command, functions, models, report
from benchmarks.coverage.catalogue import LIBRARIES, Rotary, catalogued, rotary, table
from benchmarks.coverage.stand_ins import installed
from tests.support.helpers import ROOT

# Warnings of the libraries' models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = {name: report.read(command.RESULTS / f"{name}.json") for name in LIBRARIES}
MODELS = [(name, row) for name, data in DATA.items() for row in data.get("models", [])]
FUNCTIONS = [(name, row) for name, data in DATA.items() for row in data.get("functions", [])]
SERVED = ("equal", "close")
EQUAL = {name: [r for n, r in MODELS if n == name and r["status"] in SERVED] for name in DATA}
# One model for each set of functions that are replaced.
EVERY_SET = {str(row["replaced"]): row["model"] for row in EQUAL["diffusers"]}


def same_version(library: str) -> None:
    """Skip the test if another version than that of the committed results is installed."""
    pytest.importorskip(library.replace("-", "_"))
    if metadata.version(library) != DATA[library]["version"]:
        pytest.skip(f"the committed results are of {library} {DATA[library]['version']}")


def test_rows_that_are_not_equal_have_a_reason() -> None:
    for _, row in FUNCTIONS + MODELS:
        assert row["status"] != "different", row
        assert (row["status"] == "equal") == ("reason" not in row), row
    for _, row in MODELS:
        if row["status"] in SERVED:
            assert row["calls"], row
            assert row["replaced"], row
            assert row["fault"] > 1e-5, row


def test_files_have_a_row_per_line_and_no_place_of_a_machine() -> None:
    for path in command.RESULTS.iterdir():
        text = path.read_text("utf-8")
        assert "(/" not in text
        data = report.read(path)
        assert text.count('"model":') == len(data.get("models", []))
        assert max(len(line) for line in text.splitlines()) < 8000


def test_as_many_are_equal_as_were_asked_for() -> None:
    assert len(EQUAL["transformers"]) >= 305
    assert len(EQUAL["diffusers"]) >= 58
    for name, row in MODELS:
        if name == "transformers" and "bfloat16" in row:
            allowed = "does not run", "the original served every call"
            assert any(words in row["bfloat16"] for words in allowed), row


def test_the_page_is_written_from_the_numbers() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text("utf-8")
    assert report.page(list(DATA.values())) in page
    for _, row in MODELS:
        assert re.search(rf"[|,] {re.escape(row['model'])}[ ,]", page), row


def test_a_page_of_what_no_committed_row_has() -> None:
    here = {"library": "x", "version": "1", "torch": "2", "threads": 2}
    differs = {"model": "a", "file": "f", "status": "different", "reason": "at w | x", "calls": 2}
    page = report.page([{**here, "models": [differs], "functions": []}]).splitlines()
    assert "| a | at w \\| x |" in page


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_the_committed_rows_are_those_of_the_catalogue(library: str) -> None:
    same_version(library)
    known = LIBRARIES[library]
    assert [row["model"] for name, row in MODELS if name == library] == sorted(catalogued(known))
    found = {(each.file, each.name) for each in rotary(known)}
    assert {(r["file"], r["function"]) for name, r in FUNCTIONS if name == library} == found
    assert table(known).keys() <= catalogued(known).keys()


def test_every_library_and_small_model_has_a_row() -> None:
    for name in LIBRARIES.keys() - {"transformers", "diffusers"}:
        rows = DATA[name].get("models", [])
        assert {row["model"] for row in rows} == table(LIBRARIES[name]).keys()


@pytest.mark.parametrize(
    ("library", "files"),
    [
        ("x-transformers", ""),
        ("rotary-embedding-torch", ""),
        ("diffusers", "transformer_(wan|qwenimage)$"),
        *(
            ("transformers", f"^{name}/")
            for name in ("llama", "gptj", "deepseek_v2", "roformer", "gemma4")
        ),
    ],
)
def test_functions_of_today_are_those_committed(library: str, files: str) -> None:
    same_version(library)
    today = functions.run(LIBRARIES[library], files)
    then = [{**r} for name, r in FUNCTIONS if name == library and re.search(files, r["file"])]
    assert today
    assert sorted(today, key=str) == sorted(then, key=str)


# One type for each feature: plain heads, partial channels, three axes and images, latent attention, complex
# tables, a method, rows and columns, audio, a sliding window, partial width, two angles for each pair, learned
# tables, arithmetic in float64, …
ODD = """llama gptj qwen2_vl deepseek_v3 llama4_text roformer dinov3_vit glmasr gemma3 gpt_neox cohere
    pe_audio_encoder hunyuan_vl lightglue musicflamingo""".split()
AGAIN = [
    ("x-transformers", "TransformerWrapper"),
    ("rotary-embedding-torch", "Attention"),
    *(("diffusers", name) for name in EVERY_SET.values()),
    *(("transformers", name) for name in ODD),
]
# Other tests reach the functions of the others.
FAST = ("dinov3_vit", "hunyuan_vl", "lightglue", "WanVACETransformer3DModel")


@pytest.mark.parametrize(
    ("library", "name"),
    [one if one[1] in FAST else pytest.param(*one, marks=pytest.mark.slow) for one in AGAIN],
)
def test_models_of_today_are_those_committed(library: str, name: str) -> None:
    same_version(library)
    (then,) = (row for each, row in MODELS if each == library and row["model"] == name)
    today = models.row(LIBRARIES[library], name)
    for key in ("status", "reason", "bfloat16", "calls", "replaced", "given_back"):
        assert today.get(key) == then.get(key)


def measured(folder: Path, library: str, **options: Any) -> dict[str, Any]:
    """Measure a library with the command; return what its file holds."""
    given = {"functions": False, "models": False, "only": "", "missing": False, **options}
    command.measure(LIBRARIES[library], argparse.Namespace(results=folder, **given))
    return report.read(folder / f"{library}.json")


def test_a_lost_process_is_a_row_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    reason = ["the process ended with exit code -9"]

    class Lost(models.Worker):
        def ask(self, name: str) -> dict[str, Any]:
            return {"model": name, "file": "f", "status": "not built", "reason": reason[-1]}

    monkeypatch.setattr(models, "Worker", Lost)

    def run(only: str, **options: Any) -> dict[str, str]:
        data = measured(tmp_path, "transformers", models=True, only=only, **options)
        assert data["threads"] == torch.get_num_threads()
        return {row["model"]: row["reason"] for row in data["models"]}

    first = run("^llama")
    assert set(first) == {"llama", "llama4", "llama4_text", "llama4_vision_model"}
    assert set(first.values()) == set(reason)
    reason.append("again")
    # Models in the file run again, except with --missing.
    assert run("^(llama|gptj)$", missing=True) == {**first, "gptj": "again"}
    assert run("^llama$") == {**first, "gptj": "again", "llama": "again"}


def test_a_library_that_is_absent_keeps_its_results(tmp_path: Path) -> None:
    if importlib.util.find_spec("dinov3"):
        pytest.skip("the library is there")
    assert measured(tmp_path, "dinov3")["version"].startswith("absent")
    report.write(tmp_path / "dinov3.json", {"library": "dinov3", "models": []})
    assert measured(tmp_path, "dinov3") == {"library": "dinov3", "models": []}


def test_rows_of_functions_survive_their_file(tmp_path: Path) -> None:
    rows = [{"file": file, "function": "f", "status": "left"} for file in ("a", "b")]
    data = {"library": "x", "functions": rows, "models": [{"model": "m"}]}
    report.write(tmp_path / "x.json", data)
    assert report.read(tmp_path / "x.json") == data
    assert (tmp_path / "x.json").read_text().count('"function":') == 1


def test_without_a_library_the_page_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- coverage -->\n<!-- end of coverage -->\n")
    ran: list[str] = []
    monkeypatch.setattr(command, "measure", lambda library, _: ran.append(library.name))
    report.write(tmp_path / "timm.json", {"library": "timm", "version": "1"})
    to = ["--results", str(tmp_path), "--page", str(page)]
    command.main(to)
    assert ran == []
    assert "| timm | 1 |" in page.read_text()
    command.main([*to, "--library", "others"])
    assert ran == [name for name in LIBRARIES if name not in ("transformers", "diffusers")]


def told() -> None: ...


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


def test_a_file_that_cannot_be_imported_is_not_loaded() -> None:
    row = functions.row(Rotary(LIBRARIES["transformers"], "absent/modeling_absent", "f"))
    assert row["status"] == "not loaded"
    assert "absent" in row["reason"]
