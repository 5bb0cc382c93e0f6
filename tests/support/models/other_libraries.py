"""Small models written as other libraries write them: processors, functions in bodies, imports in bodies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightrope import unpatch


def swap(x: torch.Tensor) -> torch.Tensor:
    """Return (−v, u) for adjacent pairs (u, v)."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Return (−v, u) for the halves u and v of each head."""
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def turn(x: Any, freqs: Any, by_halves: bool = False, axis_of_heads: int = 1) -> Any:
    """Rotate by a tuple of tables; a keyword selects one of two rotations, another the layout."""
    cos, sin = (t[None].unsqueeze(axis_of_heads) for t in freqs)
    other = halves(x) if by_halves else swap(x)
    return (x.float() * cos + other.float() * sin).to(x.dtype)


def spin(t: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Rotate, under names that do not tell."""
    return t * c + halves(t) * s


def tables(tokens: int, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, (tokens, dim), with the same entry for both channels of an adjacent pair."""
    angle = torch.arange(tokens)[:, None] * 0.5 ** torch.arange(dim // 2)
    angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


class Processor:
    """A plain object that attends; it calls a global function with a constant."""

    def __call__(self, attn: Any, x: torch.Tensor, freqs: Any) -> torch.Tensor:
        q, k = turn(attn.q(x), freqs, axis_of_heads=1), turn(attn.k(x), freqs)
        return q @ k.mT


class ByHalves(Processor):
    """The same with the other rotation."""

    def __call__(self, attn: Any, x: torch.Tensor, freqs: Any) -> torch.Tensor:
        angle = tuple(torch.cat((t[..., ::2], t[..., ::2]), -1) for t in freqs)
        return turn(attn.q(x), angle, by_halves=True) @ attn.k(x).mT


class WithInner(Processor):
    """A processor whose rotary function is defined in its body and writes into a new tensor."""

    def __call__(self, attn: Any, x: torch.Tensor, freqs: Any) -> torch.Tensor:
        def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            u, v = states.unflatten(-1, (-1, 2)).unbind(-1)
            c, s = cos[..., 0::2], sin[..., 1::2]
            out = torch.empty_like(states)
            out[..., 0::2] = u * c - v * s
            out[..., 1::2] = u * s + v * c
            return out.type_as(states)

        cos, sin = (t[None, :, None] for t in freqs)
        q, k = (rotated(each(x).transpose(1, 2), cos, sin) for each in (attn.q, attn.k))
        return q.transpose(1, 2) @ k.transpose(1, 2).mT


class WithImport(Processor):
    """A processor that imports the function in its body."""

    def __call__(self, attn: Any, x: torch.Tensor, freqs: Any) -> torch.Tensor:
        from other_libraries import turn

        return turn(attn.q(x), freqs) @ turn(attn.k(x), freqs).mT


class Attention(nn.Module):
    """A module that lets its processor attend."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.processor = processor

    def q(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, (batch, heads, tokens, dim)."""
        return self.to_q(x).unflatten(-1, (2, 16)).transpose(1, 2)

    def k(self, x: torch.Tensor) -> torch.Tensor:
        """Keys like the queries."""
        return self.to_k(x).unflatten(-1, (2, 16)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of x, (batch, heads, tokens, tokens)."""
        result: torch.Tensor = self.processor(self, x, tables(x.shape[1]))
        return result


class Model(nn.Module):
    """Two layers."""

    def __init__(self, *processors: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(each) for each in processors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the scores of both layers."""
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


class Spy(TorchDispatchMode):
    """Count calls of the operator."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket is torch.ops.tightrope.rotate
        return func(*args, **(kwargs or {}))


def assert_served_until_unpatched(
    model: torch.nn.Module, x: torch.Tensor, before: torch.Tensor
) -> None:
    """Assert that a patched model calls the operator until `unpatch`, and keeps its bits."""
    with torch.no_grad(), Spy() as spy:
        assert torch.equal(model(x), before)
    assert spy.calls
    unpatch(model)
    with torch.no_grad(), Spy() as spy:
        assert torch.equal(model(x), before)
    assert not spy.calls


def calls_of(function: Any, run: Callable[[], Any]) -> int:
    """The number of calls of a Python function while another runs."""
    found = []
    sys.setprofile(
        lambda frame, event, _: found.append(event == "call" and frame.f_code is function.__code__)
    )
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(found)
