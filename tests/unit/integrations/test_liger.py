"""The implementation of `rope` for Liger: its bits, and Liger's own dispatcher where Liger is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as of_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_llama

from tests.support.helpers import noise
from tests.support.tolerances import assert_each, assert_same_bits
from tightrope.integrations import liger

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Liger's dispatcher after `register`, with its own implementations of `rope` beside ours."""
    found: Any = pytest.importorskip("liger_kernel.backends")
    importlib.import_module("liger_kernel.functional")  # says where Liger's own are
    monkeypatch.delenv("LIGER_KERNEL_IMPL_ROPE", raising=False)
    liger.register()
    yield found
    registry: Any = importlib.import_module("liger_kernel.backends.registry")
    del registry._REGISTRY["rope", "tightrope"]
    importlib.import_module("liger_kernel.backends.dispatch").clear_available_cache()


def runs(function: Any, q: torch.Tensor, k: torch.Tensor, tables: Any) -> list[torch.Tensor]:
    """Results and gradients of a function."""
    xs = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    ys = [y.to(x.dtype) for x, y in zip(xs, function(*xs, *tables), strict=True)]
    return [*ys, *torch.autograd.grad(ys, xs, [y.detach() * 2 + 1 for y in ys])]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "dtype, kept", [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32)], ids=str
)
def test_the_bits_of_llama(dtype: torch.dtype, kept: torch.dtype, rows: int) -> None:
    """Tables in the dtype of q, and float32 tables; Liger passes ids, which nothing reads."""
    q, k = noise(2, 4, 7, 16, dtype=dtype), noise(2, 2, 7, 16, seed=1, dtype=dtype)
    angles = 9 * noise(rows, 7, 8, seed=2).repeat(1, 1, 2)
    tables = angles.cos().to(kept), angles.sin().to(kept)
    assert_each(assert_same_bits, runs(liger._rope, q, k, tables), runs(of_llama, q, k, tables))
    others = {"position_ids": torch.arange(7), "unsqueeze_dim": 1, "mode": "default"}
    again = runs(lambda *given: liger._rope(*given, **others), q, k, tables)
    assert_each(assert_same_bits, again, runs(of_llama, q, k, tables))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_bits_of_gpt_oss(dtype: torch.dtype) -> None:
    """Liger tells the width of the rotation, as the tables have one entry for each pair."""
    q, k = noise(2, 4, 7, 16, dtype=dtype), noise(2, 2, 7, 16, seed=1, dtype=dtype)
    angles = 9 * noise(2, 7, 8, seed=2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    found = runs(lambda *given: liger._rope(*given, rotary_dim=16), q, k, tables)
    assert_each(assert_same_bits, found, runs(of_gpt_oss, q, k, tables))


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[rope\] mode must be None or 'default' but got 'fast'"):
        liger._rope(*[torch.zeros(1, 1, 1, 2)] * 2, *[torch.zeros(1, 1, 2)] * 2, mode="fast")


def test_liger_takes_the_lowest_rank_and_the_one_that_the_environment_names(
    backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> str:
        return backends.resolve_impl("rope").impl_name  # type: ignore[no-any-return]

    assert chosen() == "tightrope"
    liger.register(rank=60)
    assert chosen() != "tightrope"
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "tightrope")
    assert chosen() == "tightrope"
    with pytest.raises(TypeError, match=r"\[register\] rank must be an int but got 'first'"):
        liger.register("first")  # type: ignore[arg-type]


def test_what_liger_calls_rotates(backends: Any) -> None:
    """Liger's own function, without CUDA; the example trains a model with it."""
    rope = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    q, k = noise(2, 4, 7, 16, dtype=F32), noise(2, 2, 7, 16, seed=1, dtype=F32)
    angles = noise(1, 7, 8, seed=2, dtype=F32).repeat(1, 1, 2)
    tables = angles.cos(), angles.sin()
    assert_each(assert_same_bits, runs(rope, q, k, tables), runs(of_llama, q, k, tables))
