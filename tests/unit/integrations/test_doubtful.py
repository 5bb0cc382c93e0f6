"""Code of which `patch` must not be sure: it is left and listed, and nothing of it breaks the patch."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DogeConfig, LlamaConfig, LlamaModel
from transformers.models.llama import modeling_llama

from tests.support.models.of_transformers import TEXT, small_inputs, small_model
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.integrations import patch, recognise, transformers as for_transformers, unpatch

X = torch.randn(2, 3, 9, 16, generator=torch.Generator().manual_seed(1))
ANGLES = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def half(x: torch.Tensor) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos[:, None] + half(x) * sin[:, None]


def limited(longest: int) -> Callable[..., torch.Tensor]:
    def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x if x.shape[2] > longest else turn(x, cos, sin)

    return apply_rotary


def test_the_same_source_may_compute_something_else() -> None:
    """A variable of an enclosing function decides, so knowing the source does not."""
    assert recognise(limited(10**9))
    assert not recognise(limited(200))


STYLE = "half"


def styled(x: torch.Tensor) -> torch.Tensor:
    if STYLE == "half":
        return half(x)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class Styled(nn.Module):
    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos[:, None] + styled(x) * sin[:, None]

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.apply_rotary(x, cos, sin)


def test_a_global_that_changes_between_two_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Styled()
    assert patch(model).replaced
    unpatch(model)
    monkeypatch.setitem(globals(), "STYLE", "interleaved")
    wanted = model(X, COS, SIN)
    assert "adjacent pairs" in str(patch(model))
    assert_same_bits(model(X, COS, SIN), wanted)


def apply_rotary_prefix(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first = x.shape[-2] - cos.shape[-2]
    front, back = x[..., :first, :], x[..., first:, :]
    return torch.cat((front, back * cos + half(back) * sin), -2)


class Prefix(nn.Module):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_prefix(x, cos, sin)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tables", [(1, 16), (1, 1, 1, 16), (2, 1, 1, 16), (2, -1, 1, 16)])
def test_a_prefix_before_one_row_of_tables(heads: int, tables: tuple[int, ...]) -> None:
    """With as many table rows as heads or rows, that dimension is not one of tokens."""
    shape = [heads if size == -1 else size for size in tables]
    cos, sin = torch.randn(shape), torch.randn(shape)
    x, model = X[:, :heads].contiguous(), Prefix()
    wanted = model(x, cos, sin)
    assert patch(model).replaced
    assert_same_bits(model(x, cos, sin), wanted)


SCALES: dict[int, float] = {}
MEMBERS: set[Any] = set()


class ByIdentity(nn.Module):
    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return turn(x, cos, sin) * SCALES.get(id(self), 1.0)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.apply_rotary(x, cos, sin)


class ByMembership(ByIdentity):
    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return turn(x, cos, sin) * (2.0 if self in MEMBERS else 1.0)


class OfTheClass(ByIdentity):
    @classmethod
    def apply_rotary(  # type: ignore[override]
        cls, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return turn(x, cos, sin)


CALLS = 0


class Strict(ByIdentity):
    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        assert x.is_contiguous()
        return turn(x, cos, sin)


class WithoutGradients(ByIdentity):
    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise NotImplementedError
        return turn(x, cos, sin)


@pytest.mark.parametrize(
    "cls, reason",
    [
        (ByIdentity, "reads attributes of its object"),
        (ByMembership, "it matches no known rotation"),
        (OfTheClass, "a method of the class itself"),
        (Strict, "raises an error for some strides"),
        (WithoutGradients, "or where gradients are needed"),
    ],
)
def test_a_method_is_left_with_the_reason(cls: type[nn.Module], reason: str) -> None:
    model = cls()
    SCALES[id(model)] = 3.0
    MEMBERS.add(model)
    wanted, calls = model(X, COS, SIN), CALLS
    report = patch(model)
    assert calls == CALLS
    (entry,) = report.left
    assert reason in entry.reason, str(report)
    assert_same_bits(model(X, COS, SIN), wanted)


class Rotary:
    """A processor that cannot be copied."""

    def __copy__(self) -> Any:
        raise RuntimeError("no copies")

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return turn(x, cos, sin)


class WithProcessor(Styled):
    def __init__(self) -> None:
        super().__init__()
        self.first = Styled()
        self.processor = Rotary()


def test_an_error_halfway_leaves_nothing_patched() -> None:
    model = WithProcessor()
    with pytest.raises(RuntimeError, match="no copies"):
        patch(model)
    assert type(model) is WithProcessor
    assert type(model.first) is Styled


# --- methods of base classes ----------------------------------------------------------------------


class MyAttention(modeling_llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_my_attention(*layers: int) -> Any:
    model = small_model("Llama")
    for layer in layers:
        model.model.layers[layer].self_attn.__class__ = MyAttention
    return model


def test_a_method_that_is_called_by_super_is_listed() -> None:
    """The operator does not run there."""
    model = with_my_attention(0)
    report = patch(model)
    assert [entry.name for entry in report.replaced] == ["apply_rotary_pos_emb"]
    assert [(entry.name, "super()" in entry.reason) for entry in report.left] == [
        ("LlamaAttention.forward", True)
    ]
    every = range(model.config.num_hidden_layers)
    assert not patch(with_my_attention(*every)).replaced


@pytest.mark.parametrize("options", [{"angles": "exact"}, {"stack": "vllm"}])
def test_a_method_that_is_called_by_super_keeps_tables_from_being_exchanged(
    options: dict[str, str],
) -> None:
    with pytest.raises(ValueError, match=r"LlamaAttention\.forward \(it rotates, but a method"):
        patch(with_my_attention(0), **options)


class Inherits(modeling_llama.LlamaAttention):
    pass


def test_a_method_that_a_subclass_gets_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Llama")
    model.model.layers[0].self_attn.__class__ = Inherits
    patch(model)
    monkeypatch.setattr(Inherits, "forward", lambda *_, **__: None, raising=False)
    with pytest.raises(RuntimeError, match=r"forward was replaced after patch\(model\)"):
        model(**small_inputs("Llama"))


# --- reports, stacks and all models ---------------------------------------------------------------


PART = """
import torch
from torch import nn

def apply_rotary(x, cos, sin):
    u, v = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-v, u), -1) * sin[:, None]

class Part(nn.Module):
    def forward(self, x, cos, sin):
        return apply_rotary(x, cos, sin)
"""


def test_functions_of_one_name_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for name in ("one.rope", "two.rope"):
        module: Any = types.ModuleType(name)
        exec(compile(PART, name, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        parts.append(module.Part())
    model = nn.ModuleList(parts)
    report = patch(model)
    model[0](X, COS, SIN)
    counts = {place: calls.operator for place, calls in report.calls().items()}
    assert counts == {"one.rope.apply_rotary": 1, "two.rope.apply_rotary": 0}


def test_the_tables_of_a_stack_have_the_dtype_of_autocast() -> None:
    """Under autocast the hidden state may be float32, while the server's is bfloat16."""
    model = small_model("Llama")
    patch(model, stack="vllm")
    rotary, ids = model.model.rotary_emb, torch.arange(9)[None]
    hidden = torch.zeros(1, 9, model.config.hidden_size)
    wanted = rotary(hidden.bfloat16(), ids)
    with torch.autocast("cpu", torch.bfloat16):
        seen = rotary(hidden, ids)
    for mine, theirs in zip(seen, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_same_bits(mine, theirs)


def test_a_block_of_all_models_ends() -> None:
    with for_transformers.patch() as report:
        inside = LlamaModel(LlamaConfig(**TEXT))
        assert report.replaced
        RopeSpec.from_config(DogeConfig())  # runs a small model of its own
        assert all("doge" not in entry.module for entry in report)
    outside = LlamaModel(LlamaConfig(**TEXT))
    for model in (inside, outside):
        assert type(model.layers[0].self_attn) is modeling_llama.LlamaAttention


def test_the_end_for_all_models_keeps_later_patches() -> None:
    for_transformers.patch()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TEXT))
    patch(model, stack="vllm")
    for_transformers.unpatch()
    assert type(model.model.layers[0].self_attn) is not modeling_llama.LlamaAttention
    unpatch(model)
