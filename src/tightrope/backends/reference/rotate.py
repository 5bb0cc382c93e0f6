"""The kernels of the definition, for every device that has no other."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import gradients, schema
from ...ops.autograd import overwrite
from ...ops.checks import shares_memory
from ...ops.definition import compose as compose
from ...ops.schema import form_of, library, present

#: The kinds of device whose tensors it rotates: none is left out.
DEVICES: tuple[str, ...] = ()


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Nothing that the operator takes is beyond its definition."""
    return None


def rotate(
    q: torch.Tensor, k: torch.Tensor | None, *arguments: Any, **named: Any
) -> list[torch.Tensor]:
    """As ``rotate`` of :mod:`tightrope.ops.schema`."""
    # Outputs have the strides that empty_like gives, as every backend's and the fake kernel's do.
    ys = compose(q, k, *arguments, **named)
    xs = present(q, k)
    return [torch.empty_like(x).copy_(y) for x, y in zip(xs, ys)] + ys[len(xs) :]


def rotate_(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any, **named: Any) -> None:
    """As ``rotate_`` of :mod:`tightrope.ops.schema`."""
    xs = present(q, k)
    if shares_memory(xs):
        raise RuntimeError("tightrope::rotate_: memory overlaps")
    overwrite(xs, compose(q, k, *arguments, **named)[: len(xs)])


def rotate_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    *arguments: Any,
    **named: Any,
) -> None:
    """As ``rotate_into`` of :mod:`tightrope.ops.schema`."""
    outs = present(out_q, out_k)
    if shares_memory(outs, present(q, k)):
        raise RuntimeError("tightrope::rotate_into: memory overlaps")
    overwrite(outs, compose(q, k, *arguments, **named)[: len(outs)])


def angle_gradients(
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``angle_gradients`` of :mod:`tightrope.ops.schema`."""
    ys, grads = present(y, z), present(grad_y, grad_z)
    at = (words, turns, positions, offset, form_of(form))
    return gradients.by_angles(ys, grads, *at, by_positions, by_frequencies)


def gate_gradients(
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    gate_q: torch.Tensor,
    gate_k: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
) -> list[torch.Tensor]:
    """As ``gate_gradients`` of :mod:`tightrope.ops.schema`."""
    tensors = present(y, z), present(grad_y, grad_z), present(gate_q, gate_k)
    return gradients.by_gates(*tensors, positions, offset, form_of(form))


def register() -> None:
    """Make this the kernel of every device that has no other."""
    for operator, kernel in (
        (schema.rotate, rotate),
        (schema.rotate_carried, rotate),
        (schema.rotate_, rotate_),
        (schema.rotate_carried_, rotate_),
        (schema.rotate_into, rotate_into),
        (schema.rotate_carried_into, rotate_into),
        (schema.angle_gradients, angle_gradients),
        (schema.gate_gradients, gate_gradients),
    ):
        library.impl(operator, kernel, "CompositeExplicitAutograd")
    # The vmap under is_grads_batched and vectorised jacobians, which knows no rules of ours.
    for operator, kernel in (
        (schema.rotate, compose),
        (schema.rotate_carried, compose),
        (schema.angle_gradients, angle_gradients),
        (schema.gate_gradients, gate_gradients),
    ):
        library.impl(operator, kernel, "Batched")
