"""`patch()` without a model: models of transformers that are built or loaded later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, DogeConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from tests.support.models.of_transformers import outputs, small_model
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, patch, unpatch
from tightrope.patching import Report

PLACE = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
FUNCTION, HOOK = modeling_llama.apply_rotary_pos_emb, PreTrainedModel.post_init


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    return outputs(model)


def names(report: Report) -> set[str]:
    return {entry.name for entry in report.replaced}


def test_models_that_are_built_afterwards_are_served_until_the_end() -> None:
    before = small_model("Llama")
    want = run(before)
    report = patch()
    assert str(report).startswith("no model of transformers was built since patch()")
    assert_same_bits(run(before), want)
    assert not report.calls()
    after = small_model("Llama")
    assert_same_bits(run(after), want)
    assert names(report) == {"apply_rotary_pos_emb"}
    assert report.calls()[PLACE].operator == 2
    assert patch() is report
    unpatch()
    assert (PreTrainedModel.post_init, modeling_llama.apply_rotary_pos_emb) == (HOOK, FUNCTION)
    assert_same_bits(run(after), want)


def test_other_options_start_anew() -> None:
    first = patch()
    one = small_model("Llama")
    assert patch(rounding="once") is not first
    two = small_model("Llama")
    with pytest.raises(ValueError, match="LlamaAttention must belong to a patched model"):
        run(one)
    run(two)
    unpatch()
    assert_same_bits(run(one), run(two))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"angles": "exact"}, {"stack": "sglang"}], ids=str)
def test_loaded_models(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """They are on the meta device when they are built, and in the dtype of the files."""
    first, second = tmp_path / "first", tmp_path / "second"
    plain = small_model("Llama").to(dtype)
    plain.save_pretrained(first)
    with patch(plain, **options):
        want = run(plain)
    report = patch(**options)
    for folder in (first, second):
        how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
        assert_same_bits(run(model), want)
        model.save_pretrained(second)
        for name in ("config.json", "model.safetensors"):
            assert (second / name).read_bytes() == (first / name).read_bytes()
    assert names(report) == {"apply_rotary_pos_emb", "LlamaRotaryEmbedding"}


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_and_device_do_not_matter(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    report = patch(angles="exact")
    with torch.device("meta"):
        model = small_model("Llama")
    assert not report.left, str(report)
    assert torch.get_default_dtype() == default
    assert model.lm_head.weight.is_meta


def test_copies_outlive_the_patch_and_models_that_are_gone_leave_nothing() -> None:
    forward = modeling_llama.LlamaRotaryEmbedding.forward
    patch(stack="sglang")
    twin = copy.deepcopy(small_model("Llama"))
    unpatch()
    cos, _ = twin.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[5]]))
    assert cos.dtype == torch.float32  # as SGLang's
    unpatch(twin)
    patch(stack="vllm")
    small_model("Llama")
    unpatch()
    run(small_model("Llama"))
    assert modeling_llama.LlamaRotaryEmbedding.forward is forward


def test_a_model_that_cannot_be_patched_is_built_and_listed() -> None:
    report = patch(stack="vllm")
    BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    (entry,) = report
    assert (entry.name, entry.replaced) == ("BertModel", False)
    assert "stack='vllm'" in entry.reason


def test_a_model_that_was_patched_before_stays_patched() -> None:
    model = small_model("Llama")
    report = patch(model)
    patch()
    unpatch()
    run(model)
    assert report.calls()[PLACE].operator == 2


def test_a_block_ends_and_sees_no_models_that_answer_questions() -> None:
    with patch() as report:
        inside = small_model("Llama")
        RopeSpec.from_config(DogeConfig())  # runs a small model of its own
        assert all("doge" not in entry.module for entry in report)
    run(inside)
    assert report.calls()[PLACE].operator == 0


def test_what_others_put_around_the_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "post_init", HOOK)
    patch()
    ours: Callable[..., Any] = PreTrainedModel.post_init
    PreTrainedModel.post_init = theirs = lambda self, *args: ours(self, *args)
    unpatch()
    assert PreTrainedModel.post_init is theirs
    small_model("Llama")
    assert modeling_llama.apply_rotary_pos_emb is FUNCTION
