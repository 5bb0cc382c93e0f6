"""`patch(model, stack=…)`: a model rotates with the bits of `tightrope.stacks`, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
MSCALES = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("Llama", DEFAULT),
    "linear": ("Llama", {**DEFAULT, "rope_type": "linear", "factor": 4.0}),
    "yarn": ("Llama", YARN),
    "llama3": ("Llama", LLAMA3),
    "some channels": ("GPT-NeoX", {**DEFAULT, "partial_rotary_factor": 0.5}),
    "adjacent pairs": ("DeepSeek-V3", MSCALES),
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
@pytest.mark.parametrize("stack", ["vllm", "vllm-native", "sglang"])
def test_the_bits_of_a_stack(stack: str, name: str, dtype: torch.dtype) -> None:
    family, rope = MODELS[name]
    model = small_model(family, rope_parameters=rope).to(dtype)
    spec = RopeSpec.from_config(model.config)
    assert isinstance(spec, RopeSpec)
    report = patch(model, stack=stack)
    assert not report.left, str(report)
    assert f"RotaryEmbedding: cosines and sines of {stack}" in str(report)
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


def with_rope(rope: dict[str, Any]) -> Callable[[Any], None]:
    return lambda model: model.__init__(small_model("Llama", rope_parameters=rope).config)


# A server fixes the length for all rows, and the model does not know it; and it computes its tables from the
# configuration, so it would not have those of a model that holds others.
LENGTH, OTHER = "depend on the length, which stack 'vllm' fixes; call", "those of neither its conf"
REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "longrope": (LENGTH, with_rope(LONGROPE)),
    "dynamic": (LENGTH, with_rope(DYNAMIC)),
    "frequencies": (OTHER, lambda model: model.model.rotary_emb.inv_freq.mul_(0.5)),
    "factor": (OTHER, lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0)),
    "configuration": (OTHER, lambda m: m.config.rope_parameters.update(rope_theta=7e6)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_no_server_would_rotate_so_are_refused(what: str) -> None:
    words, change = REFUSED[what]
    model = small_model("Llama")
    change(model)
    with pytest.raises(ValueError, match=words):
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
