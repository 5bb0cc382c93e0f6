"""The registration for vLLM, and the hook on SGLang's rotary method, against stand-ins of their classes.

The stand-ins have the parts that are used: of vLLM the registry of custom ops, and rotary modules that keep cosines
and sines in one table; of SGLang the registry of hooks. SGLang itself runs on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import oracle_rounding
from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.functional import apply_rotary_pos_emb, rotate_qk
from tightrope.integrations import plugins, vllm as ours

# --- vLLM -----------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("vllm")
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
            heads, adjacent = x.reshape(len(table), -1, self.head_size), not self.is_neox_style
            tables = [oracle_rounding.join(t, t, adjacent) for t in (cos, sin)]
            turned = oracle_rounding.rotate(
                heads[..., : self.rotary_dim], *tables, adjacent, "each"
            )
            return torch.cat([turned, heads[..., self.rotary_dim :]], -1).reshape(x.shape)

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


@pytest.fixture
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


# --- SGLang ---------------------------------------------------------------------------------------

Hook = Callable[..., Any]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    """The hook that `register` gives to a stand-in for SGLang's registry."""
    given: list[tuple[str, Hook, str]] = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda *each: given.append(each))
    registry.HookType = SimpleNamespace(AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    plugins.for_sglang()
    assert given == []
    monkeypatch.setenv("TIGHTROPE_PLUGINS", "sglang")
    plugins.for_sglang()
    ((target, found, kind),) = given
    assert (kind, target.rsplit(".", 2)[1:]) == ("around", ["RotaryEmbedding", "forward_cuda"])
    return found


def module(spec: RopeSpec, **other: Any) -> Any:
    table = torch.cat(spec.cos_sin(seq_len=50, tables="half"), -1)[0]
    values = {"use_fallback_kernel": False, "head_size": spec.head_dim, "cos_sin_cache": table}
    return SimpleNamespace(**values, is_neox_style=not spec.interleaved, **other)


def rotated(q: Any, k: Any, spec: RopeSpec, positions: torch.Tensor) -> Any:
    """The rotation by float32 tables, rounded once."""
    tables = (table[0] for table in spec.cos_sin(seq_len=50, tables="half"))
    return apply_rotary_pos_emb(
        q, k, *tables, position_ids=positions, interleaved=spec.interleaved, tables="half"
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_and_into_the_cache(
    hook: Hook, interleaved: bool, rotary_dim: int, dtype: torch.dtype
) -> None:
    spec = RopeSpec(64, rotary_dim=rotary_dim, interleaved=interleaved)
    torch.manual_seed(0)
    q, k, v = torch.randn(7, (4 + 2 + 2) * 64).to(dtype).split([256, 128, 128], -1)
    positions, slots = torch.randint(50, (7,)), torch.randperm(20)[:7]
    want = rotated(q.unflatten(-1, (4, 64)), k.unflatten(-1, (2, 64)), spec, positions)
    caches = torch.zeros(2, 20, 128, dtype=dtype)
    written = SimpleNamespace(value=v, k_buffer=caches[0], v_buffer=caches[1], cache_loc=slots)
    got = hook(None, module(spec), positions, q, k, fused_set_kv_buffer_arg=written)
    assert (got[0] is q, got[1] is k) == (True, True)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one.contiguous(), other.flatten(1))
    assert_same_bits(caches[0, slots], k.contiguous())
    assert_same_bits(caches[1, slots], v.contiguous())
    assert int((caches != 0).any(-1).sum()) == 14


def test_without_a_cache(hook: Hook) -> None:
    q, k = torch.randn(3, 128), torch.randn(3, 64)
    want = rotated(q.view(3, 2, 64), k.view(3, 1, 64), RopeSpec(64), torch.arange(3))
    hook(None, module(RopeSpec(64)), torch.arange(3), q, k)
    assert_same_bits(q, want[0].flatten(1))
    assert_same_bits(k, want[1].flatten(1))


def test_what_stays_with_sglang(hook: Hook) -> None:
    calls: list[Any] = []
    other = module(RopeSpec(64))
    other.use_fallback_kernel = True
    for each, positions in (
        (other, torch.arange(3)),
        (module(RopeSpec(64)), torch.zeros(3, 3, dtype=torch.int64)),
    ):
        given = (each, positions, "q", "k", None, "cache")
        hook(lambda *them: calls.append(them), *given)
        assert calls.pop() == given
