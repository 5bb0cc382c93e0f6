"""The hook on SGLang's rotary method, on a stand-in for its class; SGLang itself runs on GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.functional import apply_rotary_pos_emb
from tightrope.integrations import plugins

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
