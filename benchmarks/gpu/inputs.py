"""The tensors of a case, and the call of ours that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightrope import Axes, RopeSpec, positions
from tightrope.activations import RMSNorm
from tightrope.functional import rotate_qk, rotate_qk_
from tightrope.ops import schema
from tightrope.ops.schema import Form

from .cases import Case


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


def sets(case: Case, device: torch.device, count: int) -> list[Inputs]:
    """So many sets, with values that differ."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def make(heads: int) -> torch.Tensor:
        shape = (case.rows, case.tokens, heads, case.head_dim)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return x.to(dtype).transpose(1, 2)

    found = []
    for _ in range(count):
        xs = [make(heads) for heads in (case.q_heads, case.k_heads) if heads]
        needs = case.work in ("backward", "training", "frequencies")
        grads = tuple(make(x.shape[1]) for x in xs) if needs else ()
        found.append(Inputs(xs[0], xs[1] if len(xs) > 1 else None, grads))
    return found


def count_of(case: Case, cache_bytes: int, free_bytes: int) -> int:
    """How many sets are together larger than twice the cache, and no more than half the memory."""
    each = 3 * case.moved
    fits = max(1, free_bytes // 2 // each)
    return int(min(fits, 64, max(2, -(-2 * cache_bytes // case.moved))))


def ids_of(case: Case, device: torch.device) -> torch.Tensor:
    """Ids: (rows, tokens), or (3, rows, tokens) for M-RoPE."""
    ids = torch.arange(case.tokens, device=device).expand(case.rows, -1)
    if case.positions == "ids per row":
        ids = ids + 17 * torch.arange(case.rows, device=device)[:, None]
    elif case.positions == "packed":
        ids = ids % (case.tokens // 3 + 1)
    elif case.positions == "M-RoPE":
        ids = torch.stack((ids, ids // 7, ids % 31))
    return ids.contiguous()


def spec_of(case: Case) -> RopeSpec:
    """The rotation."""
    axes = None
    if case.positions == "M-RoPE":
        side = case.head_dim // 2 * 3 // 8
        axes = Axes.sections((case.head_dim // 2 - 2 * side, side, side))
    return RopeSpec(case.head_dim, interleaved=case.interleaved, axes=axes)


def ours(case: Case, device: torch.device, backend: str | None = None) -> Callable[[Inputs], Any]:
    """The public function that does what a case says.

    Args:
        backend: None for the fastest; "reference" for the definition.
    """
    ids = ids_of(case, device)
    where = positions.multi_axis(ids) if ids.dim() == 3 else ids
    rotation = spec_of(case).at(None if case.positions == "0..n-1" else where, device=device)
    named: dict[str, Any] = {} if backend is None else {"backend": backend}
    if case.act == "rms_norm":
        named["act"] = RMSNorm(torch.ones(case.head_dim, device=device))
    elif case.act != "none":
        named["act"] = case.act
    if case.gate:
        return _gated(case, rotation, device, backend)
    if case.work == "in place":
        return lambda x: rotate_qk_(x.q, x.k, rotation, **named)
    if case.work == "out":
        return lambda x: rotate_qk(x.q, x.k, rotation, **named)
    if case.work == "frequencies":
        return _by_frequencies(case, rotation, backend)

    def backward(x: Inputs) -> tuple[torch.Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in x.xs]
        ys = rotate_qk(leaves[0], leaves[1] if x.k is not None else None, rotation, **named)
        return torch.autograd.grad([y for y in ys if y is not None], leaves, x.grads)

    if case.work == "training":
        return backward
    # The backward pass alone is the rotation back, of gradients.
    return lambda x: rotate_qk(*(*x.grads, None)[:2], rotation, inverse=True, **named)


def _operator(backend: str | None, name: str) -> Any:
    if backend != "reference":
        return getattr(schema, name)
    from tightrope.backends.reference import rotate as definition

    return getattr(definition, name)


def _gated(
    case: Case, rotation: Any, device: torch.device, backend: str | None
) -> Callable[[Inputs], Any]:
    """The operator with a gate, called as the layers above it do."""
    generator = torch.Generator(device).manual_seed(1)

    def gate(heads: int) -> torch.Tensor:
        shape = (heads, case.head_dim) if case.gate == "slopes" else (1, heads, 1, case.head_dim)
        scale = 1e-5 if case.gate == "slopes" else 0.5
        return scale * torch.randn(shape, generator=generator, device=device)

    kind = schema.SLOPE if case.gate == "slopes" else schema.LOG
    form = Form(interleaved=case.interleaved, gate=kind).pack()
    gates = [gate(heads) for heads in (case.q_heads, case.k_heads) if heads]
    rotate = _operator(backend, "rotate")
    words = rotation.words
    return lambda x: rotate(x.q, x.k, words, None, None, 0, form, 1.0, gates, 0.0)


def _by_frequencies(case: Case, rotation: Any, backend: str | None) -> Callable[[Inputs], Any]:
    form = Form(interleaved=case.interleaved).pack()
    gradients = _operator(backend, "angle_gradients")
    words = rotation.words

    def call(x: Inputs) -> Any:
        first, second = (*x.grads, None)[:2]
        return gradients(x.q, x.k, first, second, words, None, None, 0, form, False, True)

    return call
