"""Test `patch()` without a model, which patches the models of transformers that are built later."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, PreTrainedModel
from transformers.models.llama import modeling_llama

from tests.support.models.of_transformers import (
    assert_calls_operator,
    assert_outputs,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.tolerances import assert_same_bits
from tightrope.integrations.transformers import patch, unpatch

pytestmark = pytest.mark.usefixtures("undone")


@pytest.fixture
def undone() -> Iterator[None]:
    yield
    unpatch()


def test_models_made_afterwards_are_served_and_undone() -> None:
    before, given = small_model("Llama"), small_inputs("Llama")
    hook = PreTrainedModel.post_init
    with torch.no_grad():
        want = outputs(before, given)
        report = patch()
        assert str(report).startswith("no model of transformers was built since patch()")
        after = small_model("Llama")
        assert type(before.model.layers[0].self_attn) is modeling_llama.LlamaAttention
        assert_outputs(outputs(after, given), want)
        assert_calls_operator(after, given)
        assert [entry.name for entry in report.replaced] == ["apply_rotary_pos_emb"]
        assert report.calls()["modeling_llama.apply_rotary_pos_emb"].operator > 0
        assert patch() is report
        assert patch(rounding="once") is not report
        unpatch()
        assert PreTrainedModel.post_init is hook
        assert_same_bits(outputs(after, given), want)
        assert type(after.model.layers[0].self_attn) is modeling_llama.LlamaAttention
        unpatch()


def test_loaded_models(tmp_path: Path) -> None:
    """A trainer loads its reference model later, on the meta device first."""
    small_model("Llama").save_pretrained(tmp_path)
    report = patch(stack="sglang")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {entry.name for entry in report.replaced} == {
        "apply_rotary_pos_emb",
        "LlamaRotaryEmbedding",
    }
    cos, _ = model.model.rotary_emb(model.lm_head.weight, torch.tensor([[1_000_000]]))
    assert cos.dtype == torch.float32
    twin = copy.deepcopy(model)
    unpatch()
    assert type(model.model.rotary_emb) is modeling_llama.LlamaRotaryEmbedding
    assert type(twin.model.rotary_emb) is not modeling_llama.LlamaRotaryEmbedding


def test_a_model_that_cannot_be_patched_is_built_and_listed() -> None:
    report = patch(stack="vllm")
    BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    assert [(entry.name, entry.replaced) for entry in report] == [("BertModel", False)]
    assert "stack='vllm'" in report.entries[0].reason


def test_a_model_patched_before_stays_patched() -> None:
    model, given = small_model("Llama"), small_inputs("Llama")
    patch(model)
    patch()
    unpatch()
    assert_calls_operator(model, given)
    unpatch(model)


def test_what_others_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PreTrainedModel.post_init
    patch()
    ours: Any = PreTrainedModel.post_init

    def theirs(self: Any, *args: Any) -> Any:
        return ours(self, *args)

    monkeypatch.setattr(PreTrainedModel, "post_init", theirs)
    unpatch()
    assert PreTrainedModel.post_init is theirs
    assert type(small_model("Llama").model.layers[0].self_attn) is modeling_llama.LlamaAttention
    monkeypatch.setattr(PreTrainedModel, "post_init", original)


def test_importing_the_integration_imports_no_transformers() -> None:
    code = (
        "import sys, tightrope.integrations.transformers; "
        "assert 'transformers' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
