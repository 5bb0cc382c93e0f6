"""Test `recognise` on the structures of rotary functions of libraries other than transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tightrope.integrations import recognise
from tightrope.integrations._candidate import Candidate
from tightrope.integrations._recognise import to_the_bit
from tightrope.integrations._run import replacement
from tolerances import assert_same_bits

Function = Callable[..., Any]
F32, B16 = torch.float32, torch.bfloat16


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def adjacent(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def recognised(function: Function, **constants: Any) -> Candidate:
    """The candidate of a function; fails unless its bits can be equalled."""
    recognition = to_the_bit(recognise(function, constants=tuple(constants.items())))
    assert recognition.candidate is not None, recognition.reason
    return recognition.candidate


def refused(function: Function, **constants: Any) -> str:
    """The reason for which a function is refused."""
    recognition = to_the_bit(recognise(function, constants=tuple(constants.items())))
    assert recognition.candidate is None, str(recognition.candidate)
    return recognition.reason


class Calls:
    """Wraps a function and counts its calls."""

    def __init__(self, function: Function) -> None:
        self.function, self.count = function, 0
        self.__signature__ = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def assert_replaced(
    function: Function, candidate: Candidate, xs: dict[str, torch.Tensor], **others: Any
) -> None:
    """Assert equal bits of results and gradients, and that the operator computed them."""
    original = Calls(function)
    new = replacement(original, [candidate])
    runs = []
    for each in (function, new):
        leaves = {name: x.detach().requires_grad_() for name, x in xs.items()}
        result = each(**leaves, **others)
        ys = result if isinstance(result, tuple) else (result,)
        weights = [torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype) for y in ys]
        runs.append([*ys, *torch.autograd.grad(ys, list(leaves.values()), weights)])
    assert original.count == 0
    for got, wanted in zip(*reversed(runs)):
        assert_same_bits(got, wanted)
        assert got.stride() == wanted.stride()


def test_a_list_of_results_is_refused() -> None:
    def one(x: Any, cos: Any, sin: Any) -> Any:
        return x * cos + halves(x) * sin

    def several(x: Any, cos: Any, sin: Any) -> Any:
        return [one(each, cos, sin) for each in ([x] if isinstance(x, torch.Tensor) else x)]

    def pair(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return [one(q, cos, sin), one(k, cos, sin)]

    recognised(one)
    recognised(lambda q, k, cos, sin: tuple(pair(q, k, cos, sin)))
    assert "tuple" in refused(several)
    assert "tuple" in refused(pair)
