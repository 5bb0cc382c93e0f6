"""What a contender is, and what several of them need: the spec, the angles, forward and backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import positions
from ...axes import Axes
from ...positions import PositionsLike
from ...spec import RopeSpec
from .case import Case
from .method import Call

Pair = tuple[torch.Tensor, torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor], Pair]


class Made(NamedTuple):
    """A contender ready to be timed.

    Attributes:
        call: what is timed.
        result: rotated q and k of a first call, followed in training by the gradients of q and of k;
            None for floors, which rotate nothing.
    """

    call: Call
    result: tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class Contender:
    """Somebody to measure.

    Attributes:
        name: unique.
        why_not: why it cannot take part in a case; None if it can.
        make: from a case, its q, k and ids to something to time.
        own_threads: whether it computes on threads of its own, not on torch's.
    """

    name: str
    why_not: Callable[[Case], str | None]
    make: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Made]
    own_threads: bool = False


def spec_of(case: Case) -> RopeSpec:
    """The rotation of a case."""
    axes = None
    if case.positions == "M-RoPE":
        pairs = (case.rotary_dim or case.head_dim) // 2
        side = pairs * 3 // 8  # 16, 24, 24 of 64, as in Qwen2-VL
        axes = Axes.sections((pairs - 2 * side, side, side))
    return RopeSpec(
        case.head_dim,
        rotary_dim=case.rotary_dim or case.head_dim,
        interleaved=case.interleaved,
        axes=axes,
    )


def positions_of(case: Case, ids: torch.Tensor) -> PositionsLike:
    """The positions of a case.

    Args:
        ids: ``(rows, tokens)``, or ``(axes, rows, tokens)`` for M-RoPE.
    """
    if case.positions == "0..n-1":
        return None
    return positions.multi_axis(ids) if ids.dim() == 3 else ids


def angles_of(case: Case, ids: torch.Tensor) -> torch.Tensor:
    """Angles in float64, from plain frequencies: ``[…, tokens, pairs]``."""
    spec = spec_of(case)
    where = ids[..., None].double()
    if spec.axes is not None:
        where = torch.cat([where[axis] for axis, _, _ in spec.axes.pairs], -1)
    return where * spec.frequencies().inv_freq.to(ids.device)


def tables_of(case: Case, ids: torch.Tensor, dtype: torch.dtype) -> Pair:
    """cos and sin of a case as model files have them, in the dtype of x, the pairs duplicated."""
    angle = angles_of(case, ids.unsqueeze(-2))
    if case.interleaved:
        angle = angle.repeat_interleave(2, -1)
    else:
        angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def cotangents(q: torch.Tensor, k: torch.Tensor) -> Pair:
    """Random gradients of the rotated q and k, laid out as these; the same for every contender."""
    generator = torch.Generator(q.device).manual_seed(2)
    y, z = (torch.empty_like(x).normal_(generator=generator) for x in (q.detach(), k.detach()))
    return y, z


def between(case: Case, rotate: Rotate) -> Rotate:
    """A rotation with the neighbours that a case gives it; without any, the rotation itself."""
    if not case.neighbours:
        return rotate

    def scaled(q: torch.Tensor, k: torch.Tensor) -> Pair:
        y, z = rotate(q * 1.25 + 0.5, k * 1.25 + 0.5)
        return y * 1.25, z * 1.25

    return scaled


def _training(
    rotate: Rotate, q: torch.Tensor, k: torch.Tensor, learned: Sequence[torch.Tensor]
) -> Made:
    """Forward and backward. The leaves' gradients are handed over and dropped, not accumulated."""
    grads = cotangents(q, k)
    a, b = q.detach().requires_grad_(), k.detach().requires_grad_()
    for parameter in learned:
        parameter.requires_grad_()

    def call() -> None:
        torch.autograd.grad(rotate(a, b), (a, b, *learned), grads)

    y, z = rotate(a, b)
    # Some kernels write into the gradients that they are given.
    found = torch.autograd.grad((y, z), (a, b, *learned), [grad.clone() for grad in grads])
    return Made(call, (y.detach(), z.detach(), *found[:2]))


def functional(
    rotate: Rotate,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    learned: Sequence[torch.Tensor] = (),
) -> Made:
    """Something out of place to time: forward alone, or with its backward.

    Args:
        learned: what besides q and k has a gradient in training.
    """
    if case.work == "training":
        return _training(rotate, q, k, learned)

    # Nothing here requires grad, so nobody's call has to enter no_grad: that is 2 us.
    return Made(lambda: rotate(q, k), rotate(q, k))


def missing(module: str) -> str | None:
    """Why a module cannot be imported; None if it is there."""
    found = importlib.util.find_spec(module.partition(".")[0])
    return None if found else f"{module.partition('.')[0]} is not installed"
