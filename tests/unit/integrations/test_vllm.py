"""The registration for vLLM, against a stand-in of its classes.

The stand-in has the parts of vLLM that the registration uses: the registry of custom ops, and rotary
modules that keep cosines and sines in one table.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope.functional import rotate_qk
from tightrope.integrations import vllm as ours

registry: dict[str, type] = {}


class CustomOp(torch.nn.Module):
    name: str
    method = "forward_native"

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(registry.get(cls.__name__, cls))

    def forward(self, *arguments: Any) -> Any:
        return getattr(self, self.method)(*arguments)

    @classmethod
    def register_oot(cls, replacement: Any) -> None:
        assert cls.__name__ not in registry
        replacement.name = cls.__name__
        registry[cls.__name__] = replacement


class RotaryEmbedding(CustomOp):
    name = "rotary_embedding"

    def __init__(
        self, head_size: int, rotary_dim: int, base: float, is_neox_style: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.is_neox_style = is_neox_style
        angles = torch.arange(100)[:, None] * self.inv_freq()
        table = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def inv_freq(self) -> torch.Tensor:
        return self.base ** -(torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)

    def _match_cos_sin_cache_dtype(self, query: torch.Tensor) -> torch.Tensor:
        return self.cos_sin_cache.to(query.dtype)

    def forward_native(self, positions: Any, query: Any, key: Any = None) -> Any:
        table = self._match_cos_sin_cache_dtype(query)[positions.flatten()]
        cos, sin = table[:, None].chunk(2, -1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            heads = x.reshape(len(table), -1, self.head_size)
            part, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
            if self.is_neox_style:
                a, b = part.chunk(2, -1)
            else:
                a, b = part.unflatten(-1, (-1, 2)).unbind(-1)
            pair = a * cos - b * sin, b * cos + a * sin
            turned = (
                torch.cat(pair, -1) if self.is_neox_style else torch.stack(pair, -1).flatten(-2)
            )
            return torch.cat([turned, rest], -1).reshape(x.shape)

        return rotate(query), None if key is None else rotate(key)

    def forward_cuda(self, positions: Any, query: Any, key: Any = None) -> Any:
        raise NotImplementedError

    forward_hip = forward_xpu = forward_cpu = forward_cuda


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    def inv_freq(self) -> torch.Tensor:
        return super().inv_freq() / 3


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    def __init__(self, scaling_factors: list[float], *arguments: Any) -> None:
        self.scaling_factors = scaling_factors
        super().__init__(*arguments)

    def inv_freq(self) -> torch.Tensor:
        return super().inv_freq() / self.scaling_factors[0]


class MRotaryEmbedding(RotaryEmbedding):
    def forward_native(self, *arguments: Any) -> Any:
        return arguments[1:]


CLASSES = (
    RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    MRotaryEmbedding,
)
REPLACED = sorted(cls.__name__ for cls in CLASSES[:3])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    registry.clear()
    package: Any = ModuleType("rotary_embedding")
    vars(package).update({cls.__name__: cls for cls in CLASSES}, get_rope=print)
    layers = "vllm.model_executor.layers"
    for name in ("vllm", "vllm.model_executor", layers):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{layers}.rotary_embedding", package)
    custom_op: Any = SimpleNamespace(op_registry_oot=registry)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.custom_op", custom_op)
    yield
    registry.clear()


def inputs(dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> list[torch.Tensor]:
    """Return positions, query and key of 7 tokens, the latter two as slices of one tensor."""
    torch.manual_seed(0)
    packed = torch.randn(7, sum(heads) * 64).to(dtype)
    return [torch.randint(100, (7,)), *packed.split([n * 64 for n in heads], -1)]


def pair(cls: Any, *arguments: Any, exact: bool = False) -> tuple[Any, Any]:
    """Build vLLM's module and ours."""
    registry.clear()
    theirs = cls(*arguments)
    ours.register(exact)
    return theirs, cls(*arguments)


def test_classes_that_change_only_the_table_are_replaced() -> None:
    """Registering again replaces ours, and leaves those of others."""
    registry["RotaryEmbedding"] = theirs = type("Theirs", (RotaryEmbedding,), {})
    assert ours.register() == REPLACED[:2]
    assert ours.register(exact=True) == REPLACED[:2]
    assert registry.pop("RotaryEmbedding") is theirs
    assert ours.register() == REPLACED
    for cls in CLASSES[:3]:
        assert issubclass(registry[cls.__name__], cls)
        assert registry[cls.__name__].name == "rotary_embedding"  # type: ignore[attr-defined]
    assert "MRotaryEmbedding" not in registry


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_code_keeps_its_bits(neox: bool, rotary_dim: int, dtype: torch.dtype) -> None:
    theirs, module = pair(RotaryEmbedding, 64, rotary_dim, 1e4, neox, dtype)
    assert isinstance(module, ours._Rotated)
    positions, query, key = inputs(dtype)
    before = query.clone()
    for ids, q, k in (
        (positions, query, key),
        (positions[None], query[None], key[None]),
        (positions, query, None),
    ):
        for one, other in zip(module(ids, q, k), theirs(ids, q, k)):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same_bits(one, other)
    assert_same_bits(query, before)


@pytest.mark.parametrize("method", ["forward_cuda", "forward_hip", "forward_xpu", "forward_cpu"])
def test_kernels_are_replaced_in_place(method: str) -> None:
    theirs, module = pair(NTKScalingRotaryEmbedding, 64, 32, 1e4, False, torch.float32)
    module.method = method
    positions, query, key = inputs(torch.float32)
    wanted = theirs(positions, query, key)
    found = module(positions, query, key)
    assert (found[0] is query, found[1] is key) == (True, True)
    assert_each(assert_near, found, wanted, "patched outputs")
    assert module(positions, query)[1] is None


@pytest.mark.parametrize("method", ["forward_native", "forward_cuda"])
def test_exact_angles_need_no_table(method: str) -> None:
    theirs, module = pair(
        LinearScalingRotaryEmbedding, [4.0], 64, 32, 1e4, True, torch.float32, exact=True
    )
    module.method = method
    positions, query, key = inputs(torch.float32)
    wanted = theirs(positions, query, key)
    assert_each(
        assert_near, module(positions, query.clone(), key.clone()), wanted, "exact angles outputs"
    )
    far = positions + 1_000_000
    q, k = (x.unflatten(-1, (-1, 64)) for x in (query, key))
    wanted = rotate_qk(q, k, module._spec, far, layout="thd")
    for one, other in zip(module(far, query.clone(), key.clone()), wanted):
        assert_same_bits(one, other.flatten(-2))


def test_a_rule_that_is_unknown_reads_the_table() -> None:
    theirs, module = pair(NTKScalingRotaryEmbedding, 64, 64, 1e4, True, torch.bfloat16, exact=True)
    assert module._spec is None
    several = pair(
        LinearScalingRotaryEmbedding, [1.0, 4.0], 64, 64, 1e4, True, torch.bfloat16, exact=True
    )
    assert several[1]._spec is None
    assert_each(assert_same_bits, module(*inputs(torch.bfloat16)), theirs(*inputs(torch.bfloat16)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", ["forward_native", "forward_cuda"])
def test_a_compiled_module_is_one_graph(exact: bool, method: str) -> None:
    _, module = pair(RotaryEmbedding, 64, 32, 1e4, True, torch.bfloat16, exact=exact)
    module.method = method
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_each(
        assert_same_bits, compiled(*inputs(torch.bfloat16)), module(*inputs(torch.bfloat16))
    )
