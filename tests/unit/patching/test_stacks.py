"""`patch(model, stack=…)`: a model rotates with the bits of `tightrope.stacks`, forward and backward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.support.models.of_transformers import (
    DEFAULT,
    DIM,
    DYNAMIC,
    LLAMA3,
    LONGROPE,
    YARN,
    outputs,
    small_model,
)
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, patch, unpatch
from tightrope.functional import rotate_qk
from tightrope.positions import multi_axis

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
IDS = torch.tensor([[0, 1, 5, 63, 900, 4095, 100_000], [7, 6, 5, 4, 3, 2, 1]])
STACKS = ("vllm", "vllm-native", "sglang")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("Llama", DEFAULT),
    "linear": ("Llama", {**DEFAULT, "rope_type": "linear", "factor": 4.0}),
    "yarn": ("Llama", YARN),
    "llama3": ("Llama", LLAMA3),
    "some channels": ("GPT-NeoX", {**DEFAULT, "partial_rotary_factor": 0.5}),
    "adjacent pairs": (
        "DeepSeek-V3",
        {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "three axes": ("Qwen2.5-VL", {**DEFAULT, "mrope_section": [2, 3, 3]}),
}


def rotated(model: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    """Rotate q and k as the attention of a model does: by its tables and the function that it calls."""
    body = getattr(model, "model", getattr(model, "gpt_neox", model))
    file = sys.modules[type(model).__module__]
    function = getattr(file, "apply_rotary_pos_emb_interleave", file.apply_rotary_pos_emb)
    return function(q, k, *body.rotary_emb(q, IDS))


def runs(function: Any, dtype: torch.dtype, order: torch.Tensor) -> list[torch.Tensor]:
    """Results, with their channels in an order, and gradients."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, h, 7, DIM, generator=generator).to(dtype).requires_grad_() for h in (4, 2)]
    weights = [torch.randn(x.shape, generator=generator).to(dtype) for x in xs]
    ys = [y[..., order] for y in function(*xs)]
    return [*ys, *torch.autograd.grad(ys, xs, weights)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stack", STACKS)
def test_the_bits_of_a_stack(stack: str, name: str, dtype: torch.dtype) -> None:
    family, rope = MODELS[name]
    model = small_model(family, rope_parameters=rope).to(dtype)
    spec = RopeSpec.from_config(model.config)
    assert isinstance(spec, RopeSpec)
    report = patch(model, stack=stack)
    assert not report.left, str(report)
    where = IDS if spec.axes is None else multi_axis(IDS.expand(3, *IDS.shape))
    rope_ = spec.at(where, stack=stack)
    # DeepSeek's spec has channels before those that turn, and transformers returns adjacent pairs as two halves.
    front, plain = spec.start, torch.arange(DIM)
    order = plain.view(2, -1).T.flatten() if spec.interleaved else plain

    def wanted(*xs: torch.Tensor) -> Any:
        ys = rotate_qk(*(torch.nn.functional.pad(x, (front, 0)) for x in xs), rope_)
        return [y[..., front:] for y in ys]

    got = runs(lambda q, k: rotated(model, q, k), dtype, order)
    assert_same_bits(got, runs(wanted, dtype, plain))


@torch.no_grad()
def test_a_model_differs_from_its_own_and_is_restored() -> None:
    model = small_model("Llama").to(BF16)
    own = outputs(model)
    with patch(model, stack="vllm") as report:
        assert not torch.equal(outputs(model), own)
        assert "LlamaRotaryEmbedding: cosines and sines of vllm" in str(report)
        assert outputs(model).dtype == BF16
    assert_same_bits(outputs(model), own)


def test_tables_have_the_dtype_of_autocast() -> None:
    """There the hidden state may be float32, while the server's is bfloat16."""
    model = small_model("Llama")
    patch(model, stack="vllm")
    hidden = torch.zeros(1, 9, 64)
    wanted = model.model.rotary_emb(hidden.to(BF16), IDS)
    with torch.autocast("cpu", BF16):
        seen = model.model.rotary_emb(hidden, IDS)
    assert wanted[0].dtype == BF16
    assert_same_bits(seen, wanted)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_rules_by_length_are_refused(rope: dict[str, Any]) -> None:
    """A server fixes the length for all rows, and the model does not know it."""
    with pytest.raises(ValueError, match="depend on the length, which stack 'vllm' fixes; call"):
        patch(small_model("Llama", rope_parameters=rope), stack="vllm")


@pytest.mark.parametrize("change", ["frequencies", "factor", "configuration"])
def test_values_that_the_configuration_does_not_give_are_refused(change: str) -> None:
    """A server computes its tables from the configuration, so it would not have those of the model."""
    model = small_model("Llama")
    if change == "frequencies":
        model.model.rotary_emb.inv_freq.mul_(0.5)
    elif change == "factor":
        model.model.rotary_emb.attention_scaling = 2.0
    else:
        model.config.rope_parameters = {**DEFAULT, "rope_theta": 7e6}
    with pytest.raises(
        ValueError, match="those of neither its configuration nor its inv_freq; call"
    ):
        patch(model, stack="vllm")
    outputs(model)


def test_a_part_that_can_be_patched_alone_is_named() -> None:
    """The vision part takes positions of two axes, which no server's table has."""
    whole = torch.nn.ModuleDict({"text": small_model("Llama"), "vision": small_model("Phi-3")})
    words = r"Phi3RotaryEmbedding keeps its own .* or patch\(model.text, stack='vllm'\) for that part alone"
    with pytest.raises(ValueError, match=words):
        patch(whole, stack="vllm")
    assert patch(whole["text"], stack="vllm").replaced
    unpatch(whole)
