"""The coverage run gives the right verdicts on models and functions, and a fault changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch

from benchmarks.coverage import models, report, transformers
from benchmarks.coverage.__main__ import RESULTS
from benchmarks.coverage.catalogue import LIBRARIES, TRANSFORMERS, Rotary, catalogued, rotary, table
from benchmarks.coverage.comparing import Run, Subject, difference, faulty, relative, spoilt
from benchmarks.coverage.inputs import SPECIAL
from benchmarks.coverage.transformers import sections, sized, small_config
from tightrope import patch, unpatch
from tightrope.patching import _patch

pytest.importorskip("transformers")

# Warnings of transformers models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

# The committed results are of the newest transformers, which does not support Python 3.10.
COUNTED = report.read(RESULTS / "transformers.json")["version"]
same_transformers = pytest.mark.skipif(
    all(found.version != COUNTED for found in metadata.distributions(name="transformers")),
    reason=f"the committed results are of transformers {COUNTED}",
)


def row_of(name: str) -> dict[str, Any]:
    return models.row(TRANSFORMERS, name)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Change all replacements."""
    real = _patch.replacement
    monkeypatch.setattr(_patch, "replacement", lambda *given: change(real(*given)))


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "dinov3_vit"])
def test_a_replacement_that_is_wrong_is_reported_as_different(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, spoilt)
    row = row_of(name)
    assert row["status"] == "different", row
    assert row["differences"][0] > 0


def test_last_bits_of_complex_products_alone_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(value: Any) -> Any:
        return tuple(x * (1 + 1e-7) for x in value)

    plant(monkeypatch, lambda real: lambda *a, **k: last(real(*a, **k)))
    assert row_of("llama4_text")["status"] == "close"
    assert row_of("llama")["status"] == "different"


class Halved(torch.autograd.Function):
    """Return x unchanged, with half of the gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


def test_a_gradient_that_alone_is_wrong_is_reported_as_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, lambda real: lambda *a, **k: tuple(map(Halved.apply, real(*a, **k))))
    row = row_of("llama")
    assert row["status"] == "different"
    assert row["differences"][0] == 0
    assert row["differences"][1] > 0


def test_a_type_whose_calls_all_go_back_to_the_original_is_not_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, lambda real: real.__wrapped__)
    row = row_of("llama")
    assert row["status"] == "not exercised"
    assert row["reason"] == "the original served every call: llama.apply_rotary_pos_emb"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("jamba", "no method of its modules reaches a rotary function"),
        ("idefics_perciever", "no method of its modules reaches a rotary function"),
        ("moshi_depth", "no method of its modules computes a cosine to rotate by"),
    ],
)
def test_a_type_without_rotation_is_not_equal(name: str, reason: str) -> None:
    row = row_of(name)
    assert (row["status"], row["reason"]) == ("does not rotate", reason)


def test_a_type_that_could_rotate_but_did_not_is_not_exercised() -> None:
    row = row_of("clvp_decoder")
    assert (row["status"], row["reason"]) == ("not exercised", "no rotary function ran")


@pytest.mark.parametrize("name", ["llama", "gptj", "roformer", "vjepa2", "llama4_text"])
def test_code_of_a_model_that_rotates_reaches_its_rotary_function(name: str) -> None:
    ready, _ = transformers.prepare(name)
    assert not models.why_none(TRANSFORMERS, ready.model)


def test_a_model_that_is_not_the_same_twice_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Subject.run
    seen: Counter[str] = Counter()

    def noisy(self: Subject) -> Run:
        result = real(self)
        seen["runs"] += 1
        for value in result.outputs.values():
            value.view(-1)[0] += seen["runs"]
        return result

    monkeypatch.setattr(Subject, "run", noisy)
    row = row_of("llama")
    assert row["status"] == "different"
    assert row["reason"].startswith("not deterministic by itself")


def test_a_model_that_cannot_be_built_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Titles come first:\n    the sentence last")

    monkeypatch.setattr(transformers, "small_model", broken)
    row = row_of("llama")
    assert row["status"] == "not built"
    assert row["reason"] == "RuntimeError: Titles come first: the sentence last"


def test_fault_is_undone() -> None:
    ready, before = transformers.prepare("roformer")
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
def test_the_catalogue_is_every_type_of_a_folder_that_rotates() -> None:
    types = catalogued(TRANSFORMERS)
    assert len(types) >= 360
    assert len(set(types.values())) >= 205
    assert types["qwen2_vl_vision"] == types["qwen2_vl"]
    found = [each.name for each in rotary(TRANSFORMERS) if each.file == types["jamba"]]
    assert found == ["apply_rotary_pos_emb"]
    files = {each.file for each in rotary(TRANSFORMERS)}
    assert len(files) >= 205
    assert {"llama/modeling_llama", "vjepa2/modeling_vjepa2", "gemma4/modeling_gemma4"} <= files


def test_small_configurations_fit_together() -> None:
    from transformers import CONFIG_MAPPING

    assert sections([16, 24, 24], 8) == [2, 3, 3]
    assert sections([22, 22, 20], 3) == [1, 1, 1]
    assert sized("hidden_size", 4096) == 64
    assert sized("num_key_value_heads", 32) == 2
    assert sized("num_experts_per_tok", 1) == 1
    config = small_config(CONFIG_MAPPING["qwen2_vl"], {})
    assert config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert config.image_token_id >= SPECIAL
    # One layer of each type remains.
    kinds = small_config(CONFIG_MAPPING["gemma3_text"], {}).layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}


def test_code_of_a_function_stays_that_of_the_original_while_it_is_replaced() -> None:
    (own,) = (each for each in rotary(TRANSFORMERS) if each.file == "llama/modeling_llama")
    with patch(transformers.prepare("llama")[0].model):
        assert Rotary(own.library, own.file, own.name).place == own.place


WAN = LIBRARIES["diffusers"], "WanTransformer3DModel"


def test_a_table_that_does_not_fit_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setitem(table(WAN[0]), WAN[1], {"config": {"no": 1}})
    row = models.row(*WAN)
    assert row["status"] == "not built"
    assert row["reason"].startswith("TypeError")
