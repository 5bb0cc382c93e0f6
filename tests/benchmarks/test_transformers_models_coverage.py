"""Test how the coverage run compares models: its verdicts, and that a fault changes them."""

from __future__ import annotations

import functools
import json
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.transformers_coverage import __main__ as command, models, report, trial
from benchmarks.transformers_coverage.building import SPECIAL, sections, sized, small_config
from benchmarks.transformers_coverage.catalogue import (
    ModelType,
    catalogue,
    models_folder,
    rotary_names,
)
from benchmarks.transformers_coverage.comparing import (
    Run,
    difference,
    faulty,
    relative,
    spoilt,
)
from tests.support.helpers import ROOT
from tightrope.integrations import _graft, patch, unpatch

# Warnings of transformers models are not tested here.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("recognised_once")]

# One type for each feature: plain heads, partial channels, three axes and images, latent attention,
# complex tables, a method, rows and columns, audio, a sliding window, partial width, …
ODD = (
    "llama", "gptj", "qwen2_vl", "deepseek_v3", "llama4_text", "roformer", "dinov3_vit", "glmasr",
    "gemma3", "gpt_neox", "cohere", "pe_audio_encoder",
)  # fmt: skip


RESULTS = ROOT / "benchmarks" / "results" / "transformers-coverage.json"

# The committed results are of the newest transformers, which does not support Python 3.10.
COUNTED = json.loads(RESULTS.read_text(encoding="utf-8"))["transformers"]
same_transformers = pytest.mark.skipif(
    all(found.version != COUNTED for found in metadata.distributions(name="transformers")),
    reason=f"the committed results are of transformers {COUNTED}",
)


@pytest.fixture(scope="module")
def types() -> dict[str, ModelType]:
    return {each.name: each for each in catalogue()}


# The tests below reach functions in other ways.
FAST = ("dinov3_vit",)


@pytest.mark.parametrize(
    "name", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in ODD]
)
def test_patched_models_are_equal_and_their_rotations_were_served(
    name: str, types: dict[str, ModelType]
) -> None:
    row = models.row(types[name])
    assert row["status"] == "equal", row
    assert row["calls"]
    assert row["replaced"]


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Change all replacements, and drop the cached classes."""
    real = _graft.replacement_of

    def changed(*args: Any) -> Any:
        made = real(*args)
        other = change(made)
        return functools.wraps(made)(lambda *a, **k: other(*a, **k))

    monkeypatch.setattr(_graft, "_classes", {})
    monkeypatch.setattr(_graft, "replacement_of", changed)


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "dinov3_vit"])
def test_a_replacement_that_is_wrong_is_reported_as_different(
    name: str, types: dict[str, ModelType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, spoilt)
    row = models.row(types[name])
    assert row["status"] == "different", row
    assert row["differences"][0] > 0


class Halved(torch.autograd.Function):
    """Return x unchanged, with half of the gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


def test_a_gradient_that_alone_is_wrong_is_reported_as_different(
    types: dict[str, ModelType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda real: lambda *a, **k: tuple(map(Halved.apply, real(*a, **k))))
    row = models.row(types["llama"])
    assert row["status"] == "different"
    assert row["differences"][0] == 0
    assert row["differences"][1] > 0


def test_a_type_whose_calls_all_go_back_to_the_original_is_not_equal(
    types: dict[str, ModelType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda real: real.__wrapped__)
    row = models.row(types["llama"])
    assert row["status"] == "not exercised"
    assert row["reason"] == "the original served every call: llama.apply_rotary_pos_emb"


@pytest.mark.parametrize("name", ["hunyuan_vl", "lightglue"])
def test_two_angles_per_pair_and_learned_tables_are_served(
    name: str, types: dict[str, ModelType]
) -> None:
    assert models.row(types[name])["status"] == "equal"


@pytest.mark.slow
def test_arithmetic_in_float64_is_served(types: dict[str, ModelType]) -> None:
    row = models.row(types["musicflamingo"])
    assert row["status"] == "equal", row
    assert row["bfloat16"] == "equal"
    assert not row["left"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("jamba", "no method of its modules reaches a rotary function"),
        ("idefics_perciever", "no method of its modules reaches a rotary function"),
        ("moshi_depth", "no method of its modules computes a cosine to rotate by"),
    ],
)
def test_a_type_without_rotation_is_not_equal(
    name: str, reason: str, types: dict[str, ModelType]
) -> None:
    row = models.row(types[name])
    assert (row["status"], row["reason"]) == ("does not rotate", reason)


def test_a_type_that_could_rotate_but_did_not_is_not_exercised(types: dict[str, ModelType]) -> None:
    row = models.row(types["clvp_decoder"])
    assert (row["status"], row["reason"]) == ("not exercised", "no rotary function ran")


@pytest.mark.parametrize("name", ["llama", "gptj", "roformer", "vjepa2", "llama4_text"])
def test_code_of_a_model_that_rotates_reaches_its_rotary_function(
    name: str, types: dict[str, ModelType]
) -> None:
    ready, _ = trial.prepare(types[name])
    assert not trial.why_none(ready.model)


def test_a_model_that_is_not_the_same_twice_is_different(
    types: dict[str, ModelType], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trial.run
    seen: Counter[str] = Counter()

    def noisy(*args: Any) -> Run:
        result = real(*args)
        seen["runs"] += 1
        for value in result.outputs.values():
            value.view(-1)[0] += seen["runs"]
        return result

    monkeypatch.setattr(trial, "run", noisy)
    row = models.row(types["llama"])
    assert row["status"] == "different"
    assert row["reason"].startswith("not deterministic by itself")


def test_a_model_that_cannot_be_built_is_listed_with_the_reason(
    types: dict[str, ModelType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Titles come first:\n    the sentence last")

    monkeypatch.setattr(trial, "small_model", broken)
    row = models.row(types["llama"])
    assert row["status"] == "not built"
    assert row["reason"] == "RuntimeError: Titles come first: the sentence last"


def test_fault_is_undone(types: dict[str, ModelType]) -> None:
    ready, before = trial.prepare(types["roformer"])
    with faulty():
        patch(ready.model)
    assert not difference(before, ready.run()).none
    unpatch(ready.model)
    after = difference(before, ready.run())
    assert (after.output, after.gradient) == (0, 0)


def test_differences_are_relative_and_nan_is_never_equal() -> None:
    a = torch.tensor([1.0, -4.0])
    assert relative(a, a + torch.tensor([0.0, 1.0])) == 0.25
    assert relative(a, a) == 0.0
    for broken in (torch.tensor([1.0]), torch.tensor([1.0, float("nan")])):
        assert not difference(Run({"y": a}, {}), Run({"y": broken}, {})).none
    assert not difference(Run({"y": a}, {}), Run({}, {})).none
    assert not difference(Run({"y": a}, {"w": a}), Run({"y": a}, {})).none
    infinite = torch.tensor([float("-inf"), 2.0])
    assert difference(Run({"y": infinite}, {}), Run({"y": infinite.clone()}, {})).none


@same_transformers
def test_the_catalogue_is_every_type_of_a_folder_that_rotates(types: dict[str, ModelType]) -> None:
    assert len(types) >= 360
    assert len({each.file for each in types.values()}) >= 205
    assert types["qwen2_vl_vision"].file == types["qwen2_vl"].file
    path = models_folder() / types["jamba"].file
    assert rotary_names(path) == ("apply_rotary_pos_emb",)


def test_small_configurations_fit_together(types: dict[str, ModelType]) -> None:
    assert sections([16, 24, 24], 8) == [2, 3, 3]
    assert sections([22, 22, 20], 3) == [1, 1, 1]
    assert sized("hidden_size", 4096) == 64
    assert sized("num_key_value_heads", 32) == 2
    assert sized("num_experts_per_tok", 1) == 1
    config = small_config(types["qwen2_vl"].config_class, {})
    assert config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert config.image_token_id >= SPECIAL
    # One layer of each type remains.
    kinds = small_config(types["gemma3_text"].config_class, {}).layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}


def test_a_lost_process_is_a_row_and_the_run_goes_on(
    types: dict[str, ModelType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Lost:
        def ask(self, model_type: ModelType) -> dict[str, Any]:
            return {**models.blank(model_type), "reason": "the process ended with exit code -9"}

        def stop(self) -> None:
            pass

    monkeypatch.setattr(models, "Worker", Lost)
    out, page = tmp_path / "rows.json", tmp_path / "page.md"
    to = ["--models", "--results", str(out), "--page", str(page)]

    def run(*arguments: str) -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            command.main([*to, *arguments])
        return {row["model_type"]: row["reason"] for row in json.loads(out.read_text())["models"]}

    first = run("--only", "^llama")
    assert set(first) == {"llama", "llama4", "llama4_text", "llama4_vision_model"}
    assert set(first.values()) == {"the process ended with exit code -9"}
    assert "| llama | the process ended with exit code -9 |" in page.read_text()
    assert json.loads(out.read_text())["threads"] == models.THREADS == torch.get_num_threads()
    assert ", on a CPU, with 2 threads of torch; " in page.read_text()
    monkeypatch.setattr(Lost, "ask", lambda _, t: {**models.blank(t), "reason": "again"})
    # Types in the file run again, except with --missing.
    assert run("--only", "^(llama|gptj)$", "--missing") == {**first, "gptj": "again"}
    assert run("--only", "^llama$") == {**first, "gptj": "again", "llama": "again"}


@pytest.fixture(scope="module")
def committed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    return rows


def test_committed_models_are_as_many_as_asked_for(committed: list[dict[str, Any]]) -> None:
    counts = Counter(row["status"] for row in committed)
    assert counts["equal"] >= 311
    assert counts["different"] == 0
    for row in committed:
        if row["status"] in ("equal", "does not rotate"):
            assert bool(row["calls"]) == (row["status"] == "equal"), row
        if row["status"] == "equal":
            assert (
                row["bfloat16"] == "equal"
                or "does not run" in row["bfloat16"]
                or row["model_type"].startswith("llama4")
            ), row
        else:
            assert row["reason"], row


@same_transformers
def test_the_committed_models_are_those_of_the_catalogue(
    committed: list[dict[str, Any]], types: dict[str, ModelType]
) -> None:
    assert [row["model_type"] for row in committed] == sorted(types)


def test_every_type_is_on_the_page_with_its_numbers_or_its_reason(
    committed: list[dict[str, Any]],
) -> None:
    page = report.page({"transformers": "5", "torch": "2", "threads": 1, "models": committed})
    words = set(page.replace(",", " ").split())
    assert {row["model_type"] for row in committed} <= words
    (gptj,) = [row for row in committed if row["model_type"] == "gptj"]
    assert gptj["bfloat16"] == "equal"
    assert "| gptj | gptj |  |" in page
    assert "| jamba | no method of its modules reaches a rotary function |" in page
    changed = [{**gptj, "status": "different", "reason": "at lm_head | weight"}]
    page = report.page({"transformers": "5", "torch": "2", "threads": 2, "models": changed})
    assert "| different | 1 |" in page
    assert "with 2 threads of torch" in page
    assert "| gptj | at lm_head \\| weight |" in page
