"""The tensors of a case, and the call of ours that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightrope import Axes, RopeSpec, gates, positions
from tightrope.activations import RMSNorm
from tightrope.functional import rotate_qk, rotate_qk_
from tightrope.ops import schema
from tightrope.ops.schema import Form

from .cases import Case

Call = Callable[["Inputs"], Any]

#: Sets of inputs are together so many times as large as the L2 cache, where that is not too many.
BEYOND_CACHE = 3
MOST_SETS = 768

# The tokens before the first of a row, and how much further each row is.
PAST, STEP = 1000, 17

# What is beside the rotation where it has neighbours.
SCALE, SHIFT = 1.25, 0.5


@dataclass
class Inputs:
    """One set of tensors: q and k as (batch, heads, sequence, channels) views, and gradients like them."""

    q: torch.Tensor
    k: torch.Tensor | None
    grads: tuple[torch.Tensor, ...]

    @property
    def xs(self) -> tuple[torch.Tensor, ...]:
        """q, and k where there is one."""
        return (self.q,) if self.k is None else (self.q, self.k)

    def clone(self) -> Inputs:
        """The same values elsewhere, with the same strides."""
        k = None if self.k is None else self.k.clone()
        return Inputs(self.q.clone(), k, tuple(grad.clone() for grad in self.grads))


def sets(case: Case, device: torch.device, count: int) -> list[Inputs]:
    """So many sets, with values that differ."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def make(heads: int) -> torch.Tensor:
        shape = (case.rows, case.tokens, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    found = []
    for _ in range(count):
        xs = [make(heads) for heads in (case.q_heads, case.k_heads) if heads]
        needs = case.work in ("backward", "training", "frequencies")
        grads = tuple(make(x.shape[1]) for x in xs) if needs else ()
        found.append(Inputs(xs[0], xs[1] if len(xs) > 1 else None, grads))
    return found


def poison(inputs: Inputs) -> None:
    """Leave NaN in memory that results of such a call will lie in: who writes nothing is found out."""
    for x in [torch.empty_like(x) for x in (*inputs.xs, *inputs.grads)]:
        x.fill_(float("nan"))


def count_of(case: Case, cache_bytes: int, free_bytes: int) -> int:
    """How many sets exceed the cache well, and fill no more than a quarter of the memory with results."""
    wanted = max(2, -(-BEYOND_CACHE * cache_bytes // case.one_pass))
    fits = max(1, free_bytes // 4 // (3 * case.moved))
    return int(min(wanted, fits, MOST_SETS))


def row_starts(case: Case) -> range | None:
    """The first position of each row, where they differ: at 0 nothing would be rotated."""
    if case.positions != "ids per row":
        return None
    return range(PAST, PAST + STEP * case.rows, STEP)


def packed_length(case: Case) -> int:
    """Of a packed sequence; the last is shorter."""
    return case.tokens // 3 + 1


def ids_of(case: Case, device: torch.device) -> torch.Tensor:
    """Ids: (rows, tokens), or (3, rows, tokens) for M-RoPE."""
    ids = torch.arange(case.tokens, device=device).expand(case.rows, -1)
    starts = row_starts(case)
    if starts is not None:
        ids = ids + torch.tensor(starts, device=device)[:, None]
    if case.positions == "packed":
        ids = ids % packed_length(case)
    elif case.positions == "M-RoPE":
        ids = torch.stack((ids, ids // 7, ids % 31))
    return ids.contiguous()


def sections(case: Case) -> tuple[int, int, int]:
    """Pairs of the three axes of M-RoPE."""
    side = case.head_dim // 2 * 3 // 8
    return case.head_dim // 2 - 2 * side, side, side


def gate_values(case: Case, device: torch.device) -> list[torch.Tensor]:
    """What P is made of, for q and for k: float32 (heads, channels)."""
    generator = torch.Generator(device).manual_seed(1)
    scale = 1e-5 if case.gate == "slopes" else 0.5
    return [
        scale * torch.randn((heads, case.head_dim), generator=generator, device=device)
        for heads in (case.q_heads, case.k_heads)
        if heads
    ]


def spec_of(case: Case) -> RopeSpec:
    """The rotation."""
    axes = Axes.sections(sections(case)) if case.positions == "M-RoPE" else None
    return RopeSpec(case.head_dim, interleaved=case.interleaved, axes=axes)


def prepared(case: Case, device: torch.device) -> Any:
    """The rotation at the positions of a case, as all layers of a model share it."""
    if case.positions == "0..n-1":
        return spec_of(case).at(None, device=device)
    ids = ids_of(case, device)
    return spec_of(case).at(positions.multi_axis(ids) if ids.dim() == 3 else ids, device=device)


def named_of(case: Case, device: torch.device) -> dict[str, Any]:
    """f and P, as the public functions take them."""
    named: dict[str, Any] = {}
    if case.act == "rms_norm":
        named["act"] = RMSNorm(torch.ones(case.head_dim, device=device))
    elif case.act != "none":
        named["act"] = case.act
    if case.gate:
        kind = gates.Slope if case.gate == "slopes" else gates.Exp
        both = [kind(value) for value in gate_values(case, device)]
        named["gate"] = tuple(both) if len(both) > 1 else both[0]
    return named


def trained(rotate: Callable[..., Any]) -> Call:
    """Forward and backward of a function of q and k, or of q alone."""

    def call(x: Inputs) -> Any:
        leaves = [y.detach().requires_grad_() for y in x.xs]
        return torch.autograd.grad(tensors(rotate(*leaves)), leaves, x.grads)

    return call


def between(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """A function of q and k between neighbours that a compiler may fuse with it."""

    def call(*xs: torch.Tensor) -> Any:
        return tuple(y * SCALE for y in tensors(rotate(*(x * SCALE + SHIFT for x in xs))))

    return call


def tensors(found: Any) -> tuple[torch.Tensor, ...]:
    """The results of a call, without those that are None."""
    every: Sequence[Any] = [found] if isinstance(found, torch.Tensor) else list(found)
    return tuple(x for x in every if x is not None)


def ours(case: Case, device: torch.device, backend: str | None = None) -> Callable[..., Any]:
    """The public function of q and k, out of place, that does what a case says."""
    rotation, named = prepared(case, device), named_of(case, device)
    named |= {} if backend is None else {"backend": backend}
    return lambda q, k=None: rotate_qk(q, k, rotation, **named)


def our_call(case: Case, device: torch.device, backend: str | None = None) -> Call:
    """What a case stands for, by the public functions.

    Args:
        backend: None for the fastest; "reference" for the definition.
    """
    if case.work == "frequencies":
        return _by_frequencies(case, device, backend)
    rotate = ours(case, device, backend)
    if case.neighbours:
        rotate = torch.compile(between(rotate), dynamic=False)
    if case.work == "training":
        return trained(rotate)
    if case.work == "out":
        return lambda x: rotate(*x.xs)
    rotation, named = prepared(case, device), named_of(case, device)
    named |= {} if backend is None else {"backend": backend}
    if case.work == "in place":
        return lambda x: rotate_qk_(x.q, x.k, rotation, **named)
    # The backward pass alone is the rotation back, of gradients.
    return lambda x: rotate_qk(*(*x.grads, None)[:2], rotation, inverse=True, **named)


def _by_frequencies(case: Case, device: torch.device, backend: str | None) -> Call:
    """The operator beneath the gradient by learned frequencies: q and k stand for results."""
    form = Form(interleaved=case.interleaved).pack()
    if backend == "reference":
        from tightrope.backends.reference import rotate as definition

        gradients: Any = definition.angle_gradients
    else:
        gradients = schema.angle_gradients
    words = prepared(case, device).words

    def call(x: Inputs) -> Any:
        first, second = (*x.grads, None)[:2]
        return gradients(x.q, x.k, first, second, words, None, None, 0, form, False, True)

    return call
