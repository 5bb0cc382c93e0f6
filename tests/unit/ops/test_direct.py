"""Calls without the dispatcher: only for plain tensors of a GPU, while nothing watches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.helpers import Watcher
from tightrope.angles import words_from
from tightrope.backends import triton
from tightrope.ops import direct
from tightrope.ops.schema import IN_PLACE, NEW, Options

WORDS = words_from(torch.ones(1, 1, 1, 4, dtype=torch.float64))[0]
PACKED = (WORDS, None, None, 3, Options().pack(), 1.0)


class OnGpu(TorchFunctionMode):
    """Let tensors say that they are on a GPU, or that they are not."""

    answer = True

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == torch.Tensor.is_cuda.__get__:
            return self.answer
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that were called without the dispatcher."""
    names: list[str] = []
    for name in ("rotate", "rotate_"):
        kernel = lambda *_, name=name: names.append(name)  # noqa: E731
        monkeypatch.setitem(direct.ON_GPUS, name, kernel)
    with OnGpu():
        yield names


def test_the_kernel_of_the_operator_is_called(called: list[str]) -> None:
    x = torch.randn(1, 2, 3, 8)
    direct.launch(NEW, x, None, PACKED)
    direct.launch(IN_PLACE, x, x.clone(), PACKED)
    assert called == ["rotate", "rotate_"]


def test_kernels_have_the_names_of_operators() -> None:
    assert {"rotate", "rotate_"} <= triton.KERNELS.keys() or not triton.is_ready()


@pytest.mark.parametrize(
    "what", ["subclass", "subclass k", "negative", "extras", "mode", "profiler", "CPU"]
)
def test_what_the_dispatcher_must_see(
    what: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, k, packed = torch.randn(1, 2, 3, 8), None, PACKED
    watching: Any = contextlib.nullcontext()
    if what == "subclass":
        x = x.as_subclass(Own)
    elif what == "subclass k":
        k = x.clone().as_subclass(Own)
    elif what == "negative":
        x = torch.complex(x, x).conj().imag
        assert x.is_neg()
    elif what == "extras":
        packed = (*PACKED, (), 0.0)
    elif what == "mode":
        watching = Watcher()
    elif what == "profiler":
        watching = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    else:
        monkeypatch.setattr(OnGpu, "answer", False)
    with watching:
        y, *_ = direct.launch(NEW, x, k, packed)
    assert called == []
    assert y.shape == x.shape
