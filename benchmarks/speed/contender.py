"""The `Contender` type, and helpers for contenders: spec, angles, forward and backward calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from tightrope import positions
from tightrope.axes import Axes
from tightrope.frequencies import Proportional
from tightrope.positions import PositionsLike
from tightrope.spec import RopeSpec

from .case import Case
from .method import Call

Value = TypeVar("Value")
QK = tuple[torch.Tensor, torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor], QK]


#: Contenders that only touch memory: in each pass they read and write each byte once, `neg_` in
#: place and `clone` into a copy.
FLOORS = ("neg_", "clone")


def floor_of(values: Mapping[str, Value]) -> Value:
    """Return the value (such as seconds) of the contender that only touches memory: `neg_`, else `clone`."""
    return next(values[name] for name in FLOORS if name in values)


class Made(NamedTuple):
    """A contender ready to be timed.

    Attributes:
        call: the function to time.
        result: rotated q and k of a first call, followed in training by the gradients of q and of k;
            None if it is not compared, as for floors, which do not rotate.
    """

    call: Call
    result: tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class Contender:
    """An implementation to measure.

    Attributes:
        name: a unique name.
        why_not: returns why the contender cannot take part in a case; None if it can.
        make: prepares the timed call from a case and its q, k and ids.
        own_threads: whether it computes on its own threads, not on torch's.
    """

    name: str
    why_not: Callable[[Case], str | None]
    make: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Made]
    own_threads: bool = False


def spec_of(case: Case) -> RopeSpec:
    """Return the spec of a case; its frequencies are 0 if the angles are those of phases."""
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
        scaling=None if case.phases is None else Proportional(0.0),
    )


def positions_of(case: Case, ids: torch.Tensor) -> PositionsLike:
    """Return the positions of a case; None for 0..n-1.

    Args:
        ids: ``(rows, tokens)``, ``(rows, heads, tokens)``, or ``(axes, rows, tokens)`` for M-RoPE.
    """
    if case.positions == "0..n-1":
        return None
    if case.positions == "ids per head":
        return positions.per_head(ids)
    return positions.multi_axis(ids) if ids.dim() == 3 else ids


def angles_of(case: Case, ids: torch.Tensor) -> torch.Tensor:
    """Return angles in radians, float64 ``[…, tokens, pairs]``, from unscaled frequencies."""
    spec = spec_of(case)
    where = ids[..., None].double()
    if spec.axes is not None:
        where = torch.cat([where[axis] for axis, _, _ in spec.axes.pairs], -1)
    return where * spec.frequencies().inv_freq.to(ids.device)


def tables_of(case: Case, ids: torch.Tensor, dtype: torch.dtype) -> QK:
    """Return cos and sin as model files make them: in `dtype`, with an entry for each channel."""
    angle = angles_of(case, ids if case.positions == "ids per head" else ids.unsqueeze(-2))
    if case.interleaved:
        angle = angle.repeat_interleave(2, -1)
    else:
        angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def cotangents(q: torch.Tensor, k: torch.Tensor) -> QK:
    """Return random gradients of the rotated q and k, strided like q and k; equal for all contenders."""
    generator = torch.Generator(q.device).manual_seed(2)
    y, z = (torch.empty_like(x).normal_(generator=generator) for x in (q.detach(), k.detach()))
    return y, z


def between(case: Case, rotate: Rotate) -> Rotate:
    """Return the rotation, with elementwise operations around it if the case has neighbours."""
    if not case.neighbours:
        return rotate

    def scaled(q: torch.Tensor, k: torch.Tensor) -> QK:
        y, z = rotate(q * 1.25 + 0.5, k * 1.25 + 0.5)
        return y * 1.25, z * 1.25

    return scaled


def _training(
    rotate: Rotate, q: torch.Tensor, k: torch.Tensor, learned: Sequence[torch.Tensor]
) -> Made:
    """Prepare forward and backward. The gradients of the leaves are returned, not accumulated."""
    grads = cotangents(q, k)
    a, b = q.detach().requires_grad_(), k.detach().requires_grad_()
    for parameter in learned:
        parameter.requires_grad_()

    def call() -> None:
        torch.autograd.grad(rotate(a, b), (a, b, *learned), grads)

    y, z = rotate(a, b)
    # Some kernels overwrite the gradients that they are given.
    found = torch.autograd.grad((y, z), (a, b, *learned), [grad.clone() for grad in grads])
    return Made(call, (y.detach(), z.detach(), *found[:2]))


def functional(
    rotate: Rotate,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    learned: Sequence[torch.Tensor] = (),
) -> Made:
    """Prepare an out-of-place rotation: forward alone, or with its backward in training.

    Args:
        learned: tensors besides q and k that require gradients in training.
    """
    if case.work == "training":
        return _training(rotate, q, k, learned)

    # Nothing here requires grad, so no call has to enter no_grad, which takes 2 us.
    return Made(lambda: rotate(q, k), rotate(q, k))


def missing(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    found = importlib.util.find_spec(module.partition(".")[0])
    return None if found else f"{module.partition('.')[0]} is not installed"
