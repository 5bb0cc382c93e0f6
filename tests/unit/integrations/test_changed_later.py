"""Patched models when other code changes what `patch` found, and their pickles and exports."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import other_libraries
from tests.support.models.of_transformers import outputs, small_inputs, small_model
from tests.support.tolerances import assert_same_bits
from tightrope.integrations import patch

# --- functions and classes that another tool replaces ---------------------------------------------


def test_a_function_that_is_replaced_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `apply_liger_kernel_to_llama` does: the model calls the function that has the name now."""
    model, given = small_model("Llama"), small_inputs("Llama")
    report = patch(model)
    called = []

    def theirs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        called.append(unsqueeze_dim)
        return q, k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", theirs)
    with torch.no_grad():
        outputs(model, given)
    assert len(called) == model.config.num_hidden_layers
    assert report.calls()["modeling_llama.apply_rotary_pos_emb"].operator == 0
    monkeypatch.undo()
    with torch.no_grad():
        outputs(model, given)
    assert len(called) == model.config.num_hidden_layers
    assert report.calls()["modeling_llama.apply_rotary_pos_emb"].operator > 0


def test_counts_after_a_function_was_replaced_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report counts the replacement that the model calls, also if another was made meanwhile."""
    given, original = small_inputs("Llama"), modeling_llama.apply_rotary_pos_emb
    patch(small_model("Llama"))

    def same(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return original(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", same)
    patch(small_model("Llama"))
    monkeypatch.undo()
    model = small_model("Llama")
    report = patch(model)
    with torch.no_grad():
        outputs(model, given)
    assert report.calls()["modeling_llama.apply_rotary_pos_emb"].operator > 0


def test_a_function_that_is_replaced_before_the_model_is_compiled_runs(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    model, given = small_model("Llama"), small_inputs("Llama")
    patch(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    with torch.no_grad():
        want = outputs(model, given)
        got = outputs(torch.compile(model, backend="eager"), given)
        assert_same_bits(got, want)
        monkeypatch.undo()
        assert not torch.equal(outputs(model, given), want)


def test_a_method_that_is_replaced_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Unsloth does with `LlamaAttention.forward`: the model has a copy of the old one."""
    model, given = small_model("Llama"), small_inputs("Llama")
    patch(model)
    old = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda *a, **k: old(*a, **k))
    with pytest.raises(
        RuntimeError,
        match=r"\[patch\] forward was replaced after patch\(model\), and what patch made of LlamaAttention calls "
        r"the old one; call patch\(model\) again\.",
    ):
        outputs(model, given)
    patch(model)
    outputs(model, given)


class Method(torch.nn.Module):
    def apply_rope(self, x: torch.Tensor, freqs: Any) -> torch.Tensor:
        cos, sin = freqs
        return x * cos + other_libraries.swap(x) * sin

    def forward(self, x: torch.Tensor, freqs: Any) -> torch.Tensor:
        return self.apply_rope(x, freqs)


def test_a_rotary_method_that_is_replaced_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Method(), torch.randn(2, 3, 5, 16)
    angle = torch.rand(5, 8).repeat_interleave(2, -1)
    assert patch(model).replaced
    monkeypatch.setattr(Method, "apply_rope", lambda _self, x, _freqs: x + 1)
    assert torch.equal(model(x, (angle.cos(), angle.sin())), x + 1)


# --- pickles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"angles": "exact"}, {"stack": "sglang"}])
def test_pickles_hold_public_names_only(options: dict[str, str]) -> None:
    model = small_model("Llama", rope_parameters={"rope_type": "linear", "factor": 2.0})
    try:
        pickle.dumps(model)
    except AttributeError as error:
        pytest.skip(f"transformers' own model cannot be pickled: {error}")  # 5.20 with kernels
    patch(model, **options)  # type: ignore[arg-type]
    named = {str(arg) for _, arg, _ in pickletools.genops(pickle.dumps(model)) if arg is not None}
    ours = {name for name in named if name.partition(".")[0] == "tightrope"}
    assert ours == {"tightrope.integrations"}


def test_saved_models_are_loaded_patched_in_another_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given, files = small_inputs("Llama"), []
    every: list[dict[str, Any]] = [{}, {"angles": "exact"}, {"stack": "vllm"}]
    for options in every:
        model = small_model("Llama")
        patch(model, **options)
        with torch.no_grad():
            want = outputs(model, given)
        files.append(str(tmp_path / f"{len(files)}.pt"))
        torch.save((model, given, want), files[-1])
    code = f"""
import torch
for file in {files}:
    model, given, want = torch.load(file, weights_only=False)
    with torch.no_grad():
        got = model(**given).logits
    assert torch.equal(got, want), (file, (got - want).abs().max())
    from tightrope.integrations import patch, unpatch
    names = model.model.layers[0].self_attn.forward.__func__.__code__.co_names
    assert any(name.startswith("_tightrope_") for name in names), names
    unpatch(model)
    assert type(model.model.layers[0].self_attn).__bases__ == (torch.nn.Module,)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# --- exports --------------------------------------------------------------------------------------


class Bare(torch.nn.Module):
    """The layers of a small Llama, from embeddings to hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return made


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_models_hold_the_operator(strict: bool, fresh_compiler: None) -> None:
    model = Bare(small_model("Llama").model.eval())
    x = torch.randn(1, 9, model.model.config.hidden_size)
    patch(model)
    want = model(x)
    made = torch.export.export(model, (x,), strict=strict)
    assert "tightrope.rotate.default" in {str(node.target) for node in made.graph.nodes}
    assert torch.equal(made.module()(x), want)
