"""`patch(model, stack=…)`: a model of transformers rotates with the bits of a server."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GptOssConfig
from transformers.models.llama import modeling_llama

from tests.support.models.of_transformers import TEXT, outputs, small_inputs, small_model
from tests.support.oracle_rounding import rotate
from tests.support.tolerances import assert_each, assert_same_bits
from tightrope import RopeSpec
from tightrope.functional import rotate_qk
from tightrope.integrations import patch

DIM, F32, BF16 = 16, torch.float32, torch.bfloat16
IDS = torch.tensor([[0, 1, 5, 63, 900, 4095, 100_000]])
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}
#: Family -> its own rule, with the constants of its published configurations except for the length.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"rope_type": "default", "rope_theta": 1e6},
    "gpt-oss": {**YARN, "rope_theta": 1.5e5, "factor": 32.0, "truncate": False},
    "DeepSeek-V3": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


# --- the arithmetic of the servers, written from their descriptions --------------------------------


def frequencies(rope: dict[str, Any]) -> tuple[torch.Tensor, float, float]:
    """(Radians per position, factor on the tables, divisor of positions), in float32 as vLLM and SGLang."""
    base, kind = rope["rope_theta"], rope["rope_type"]
    powers = base ** (torch.arange(0, DIM, 2, dtype=F32) / DIM)
    inv = 1.0 / powers
    if kind == "linear":
        return inv, 1.0, rope["factor"]
    if kind == "yarn":
        length = rope["original_max_position_embeddings"]

        def at(turns: float) -> float:
            return DIM * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = at(32), at(1)
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, DIM - 1)
        ramp = ((torch.arange(DIM // 2, dtype=F32) - low) / (high - low)).clamp(0, 1)
        mask = 1 - ramp
        inv = 1.0 / (rope["factor"] * powers) * (1 - mask) + inv * mask
        # Both mscales are 1 in DeepSeek's configurations, so their quotient is 1.
        return inv, 1.0 if "mscale" in rope else 0.1 * math.log(rope["factor"]) + 1.0, 1.0
    if kind == "llama3":
        length, low, high = 64, rope["low_freq_factor"], rope["high_freq_factor"]
        wave = 2 * math.pi / inv
        smooth = (length / wave - low) / (high - low)
        new = torch.where(wave > length / low, inv / rope["factor"], inv)
        blend = (1 - smooth) * new / rope["factor"] + smooth * new
        middle = ~(wave > length / low) & ~(wave < length / high)
        return torch.where(middle, blend, new), 1.0, 1.0
    return inv, 1.0, 1.0


def tables(rope: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (1, 1, tokens, DIM) in the dtype of a server's cache."""
    inv, factor, divisor = frequencies(rope)
    angle = (IDS[0].to(F32) / divisor)[:, None] * inv
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return tuple(torch.cat((t, t), -1).to(dtype)[None, None] for t in (cos, sin))  # type: ignore[return-value]


def once(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Products and sums in more digits than float32 has, rounded to float32 and to the dtype of x."""
    return rotate(x.double(), cos.double(), sin.double(), False, "wide").float().to(x.dtype)


SERVERS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "vllm": (once, False),
    "vllm-native": (lambda x, cos, sin: rotate(x, cos, sin, False, "each"), False),
    "sglang": (once, True),
}


def model_of(family: str, rope: dict[str, Any]) -> Any:
    if family == "gpt-oss":
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        return AutoModelForCausalLM.from_config(
            GptOssConfig(**TEXT, **experts, rope_parameters=rope)
        )
    size = {"qk_rope_head_dim": DIM} if family == "DeepSeek-V3" else {"head_dim": DIM}
    return small_model(family, rope_parameters=rope, **size)


def rotated(model: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rotate q and k as the attention of a model does: by its tables and the function that it calls."""
    tables_ = model.model.rotary_emb(xs[0], IDS)
    forward = model.model.layers[0].self_attn.forward.__func__
    names = [name for name in forward.__code__.co_names if name.startswith("_tightrope_")]
    known = [forward.__globals__[name] for name in names]
    if len(known) > 1:  # DeepSeek's attention has a function for each pairing
        known = [each for each in known if each.__name__.endswith("_interleave")]
    (function,) = known or [modeling_llama.apply_rotary_pos_emb]
    return list(function(*xs, *tables_))


def assert_served(got: torch.Tensor, want: torch.Tensor, stack: str) -> None:
    """Assert equal bits, except where a fused multiply-add rounds one product less than the oracle."""
    if stack == "vllm-native":
        assert_same_bits(got, want)
        return
    off = (got.double() - want.double()).abs()
    assert float((off - torch.finfo(got.dtype).eps * want.double().abs()).max()) <= 2**-21
    assert got.dtype == F32 or int((off > 0).sum()) <= 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize(
    ("family", "rope"),
    [*(("Llama", rope) for rope in ROPES.values()), *FAMILIES.items()],
    ids=[*ROPES, *FAMILIES],
)
@pytest.mark.parametrize("stack", SERVERS)
def test_the_bits_of_a_server(
    stack: str, family: str, rope: dict[str, Any], dtype: torch.dtype
) -> None:
    turn, wide = SERVERS[stack]
    model = model_of(family, rope).to(dtype)
    report = patch(model, stack=stack)
    assert not report.left, str(report)
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(1, h, 7, DIM, generator=generator).to(dtype).requires_grad_() for h in (4, 2)]
    weights = [torch.randn(x.shape, generator=generator).to(dtype) for x in xs]
    cos, sin = tables(rope, F32 if wide else dtype)
    # transformers returns the channels of DeepSeek's adjacent pairs as two halves.
    adjacent = family == "DeepSeek-V3"
    order = torch.arange(DIM).view(-1, 2).T.flatten() if adjacent else torch.arange(DIM)
    got = rotated(model, xs)
    grads = torch.autograd.grad(got, xs, weights)
    for x, weight, y, grad in zip(xs, weights, got, grads, strict=True):
        assert y.dtype == dtype
        want, back = turn(x.detach()[..., order], cos, sin), turn(weight, cos, -sin)
        assert_served(y.detach(), want, stack)
        assert_served(grad[..., order], back, stack)


@pytest.mark.parametrize("stack", SERVERS)
def test_a_model_rotates_as_the_library_does_for_that_stack(stack: str) -> None:
    model = small_model("Llama", rope_parameters=LLAMA3, head_dim=DIM).to(BF16)
    spec = RopeSpec.from_config(model.config)
    assert isinstance(spec, RopeSpec)
    patch(model, stack=stack)
    xs = [torch.randn(1, h, 7, DIM).to(BF16) for h in (4, 2)]
    want = rotate_qk(*xs, spec.at(IDS, stack=stack))
    assert_each(assert_same_bits, rotated(model, xs), want)


def test_the_model_differs_from_its_own_and_is_restored() -> None:
    model, given = small_model("Llama").to(BF16), small_inputs("Llama")
    with torch.no_grad():
        own = outputs(model, given)
        with patch(model, stack="vllm") as report:
            assert not torch.equal(outputs(model, given), own)
            (tables_,) = (entry for entry in report if entry.name == "LlamaRotaryEmbedding")
            assert str(tables_.recognised).endswith("in dtype of x, by the arithmetic of vllm")
        assert_same_bits(outputs(model, given), own)


# --- what is refused ------------------------------------------------------------------------------


def test_rules() -> None:
    own = small_model("Llama", rope_parameters={**YARN, "attention_factor": 2.0}, head_dim=DIM)
    assert patch(own, stack="vllm").replaced
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = small_model("Llama", rope_parameters=rope, head_dim=DIM)
    with pytest.raises(ValueError, match="depend on the length, which stack 'vllm' fixes"):
        patch(model, stack="vllm")
    assert type(model.model.rotary_emb) is modeling_llama.LlamaRotaryEmbedding


def test_frequencies_that_the_configuration_does_not_give() -> None:
    """A server computes them from the configuration, so it would not have those of the model."""
    model = small_model("Llama")
    model.model.rotary_emb.inv_freq.mul_(0.5)
    start = r"\[patch\] model must make cosines and sines that stack='vllm' can exchange, but does not \("
    with pytest.raises(ValueError, match=f"^{start}by its config: the cosines and sines differ"):
        patch(model, stack="vllm")


def test_other_stacks_and_options() -> None:
    model = small_model("Llama")
    with pytest.raises(ValueError, match="stack must be one of vllm, vllm-native, sglang but got"):
        patch(model, stack="flashinfer")
    with pytest.raises(ValueError, match="angles and rounding must not be given with stack='vllm'"):
        patch(model, stack="vllm", rounding="once")
    with pytest.raises(ValueError, match="no module of it makes them"):
        patch(
            BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)),
            stack="vllm",
        )


def test_a_part_that_can_be_patched_alone_is_named() -> None:
    """The vision part of Qwen2-VL takes a coordinate per column of its positions, which no server's table has."""
    model = small_model("Qwen2-VL")
    text = (
        r"Qwen2VLVisionRotaryEmbedding \(by its config: its position_ids do not have shape \(rows, tokens\)\); .* or "
        r"patch\(model.model.language_model, stack='vllm'\) for that part alone.$"
    )
    with pytest.raises(ValueError, match=text):
        patch(model, stack="vllm")
    assert patch(model.model.language_model, stack="vllm").replaced
