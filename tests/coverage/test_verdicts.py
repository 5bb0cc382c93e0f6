"""A measured row has the right verdict, and a fault changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.coverage import rows, small
from tests.coverage.libraries import LIBRARIES, TRANSFORMERS, Rotary
from tests.coverage.runs import Run, Subject, difference, faulty, relative, spoilt
from tightrope import patch, unpatch
from tightrope.patching import _patch

pytest.importorskip("transformers")

# Warnings of transformers models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


def row_of(name: str) -> rows.Row:
    return rows.of_model(TRANSFORMERS, name)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Change all replacements."""
    real = _patch.replacement
    monkeypatch.setattr(_patch, "replacement", lambda *given: change(real(*given)))


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "dinov3_vit"])
def test_a_replacement_that_is_wrong_is_different(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, spoilt)
    row = row_of(name)
    assert row["status"] == "different", row
    assert "at output" in row["reason"] or "at gradient" in row["reason"]


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


def test_a_gradient_that_alone_is_wrong_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda real: lambda *a, **k: tuple(map(Halved.apply, real(*a, **k))))
    row = row_of("llama")
    assert row["status"] == "different"
    assert " at gradient of " in row["reason"]


def test_a_type_whose_calls_all_go_back_to_the_original_is_not_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, lambda real: real.__wrapped__)
    row = row_of("llama")
    assert row["status"] == "not exercised"
    assert row["reason"] == "the original served every call: llama.apply_rotary_pos_emb"


def test_a_fault_that_is_not_seen_makes_a_model_not_exercised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.coverage.runs.spoilt", lambda function: function)
    row = row_of("llama")
    assert row["status"] == "not exercised"
    assert row["reason"] == "no output depends on the rotation"


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("jamba", "does not rotate", "no method of its modules reaches a rotary function"),
        (
            "idefics_perciever",
            "does not rotate",
            "no method of its modules reaches a rotary function",
        ),
        (
            "moshi_depth",
            "does not rotate",
            "no method of its modules computes a cosine to rotate by",
        ),
        ("clvp_decoder", "not exercised", "no rotary function ran"),
    ],
)
def test_a_type_without_rotation_is_not_equal(name: str, status: str, reason: str) -> None:
    row = row_of(name)
    assert (row["status"], row["reason"]) == (status, reason)


@pytest.mark.parametrize("name", ["llama", "gptj", "roformer", "vjepa2", "llama4_text"])
def test_code_of_a_model_that_rotates_reaches_its_rotary_function(name: str) -> None:
    assert not rows.why_none(TRANSFORMERS, small.prepare(name)[0].model)


def test_a_model_that_is_not_the_same_twice_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Subject.run
    seen: Counter[str] = Counter()

    def noisy(self: Subject) -> Run:
        result = real(self)
        seen["runs"] += 1
        for value in result.values.values():
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

    monkeypatch.setattr(small, "small_model", broken)
    row = row_of("llama")
    assert row["status"] == "not built"
    assert row["reason"] == "RuntimeError: Titles come first: the sentence last"


def test_a_table_that_does_not_fit_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("diffusers")
    library, name = LIBRARIES["diffusers"], "WanTransformer3DModel"
    monkeypatch.setitem(library.small, name, {"config": {"no": 1}})
    row = rows.of_model(library, name)
    assert row["status"] == "not built"
    assert row["reason"].startswith("TypeError")


def test_a_fault_is_undone() -> None:
    ready, before = small.prepare("roformer")
    with faulty():
        patch(ready.model)
    assert difference(before, ready.run())[0] > 0
    unpatch(ready.model)
    assert difference(before, ready.run()) == (0, "")


def test_differences_are_relative_and_nan_is_never_equal() -> None:
    a = torch.tensor([1.0, -4.0])
    assert relative(a, a + torch.tensor([0.0, 1.0])) == 0.25
    assert relative(a, a) == 0.0
    calls: Counter[str] = Counter()
    run = Run({"y": a}, calls)
    for broken in (torch.tensor([1.0]), torch.tensor([1.0, float("nan")])):
        assert difference(run, Run({"y": broken}, calls))[0]
    assert difference(run, Run({}, calls))[0]
    assert difference(Run({"y": a, "gradient of w": a}, calls), run)[0]
    infinite = torch.tensor([float("-inf"), 2.0])
    same = [Run({"y": infinite.clone()}, calls) for _ in range(2)]
    assert difference(*same) == (0, "")


def test_small_configurations_fit_together() -> None:
    from transformers import CONFIG_MAPPING

    assert small.sections([16, 24, 24], 8) == [2, 3, 3]
    assert small.sections([22, 22, 20], 3) == [1, 1, 1]
    assert small.sized("hidden_size", 4096) == 64
    assert small.sized("num_key_value_heads", 32) == 2
    assert small.sized("num_experts_per_tok", 1) == 1
    config = small.small_config(CONFIG_MAPPING["qwen2_vl"], {})
    assert config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert config.image_token_id >= small.SPECIAL
    # One layer of each type remains.
    kinds = small.small_config(CONFIG_MAPPING["gemma3_text"], {}).layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}


def test_code_of_a_function_stays_that_of_the_original_while_it_is_replaced() -> None:
    (own,) = (each for each in TRANSFORMERS.functions if each.file == "llama/modeling_llama")
    with patch(small.prepare("llama")[0].model):
        assert Rotary(own.library, own.file, own.name).place == own.place
