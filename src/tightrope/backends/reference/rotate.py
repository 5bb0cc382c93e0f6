"""The definition, registered as the kernel of every device that has no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops import gradients, schema
from ...ops.call import Call, unpack
from ...ops.cosines import cos_sin
from ...ops.definition import define
from ...ops.memory import shares_memory
from ...ops.phases import phase_drift, phase_sums, phase_words
from ...ops.schema import library, new_like, options_of, present

#: Device types that this backend serves; empty for all.
DEVICES: tuple[str, ...] = ()


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Return None: the definition can run every call of the operator."""
    return None


def is_ready() -> bool:
    """Return True: this backend needs only torch."""
    return True


def compose(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    """Compute the definition from the schema's arguments."""
    return define(unpack(*arguments, **named))


def rotate(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any) -> list[torch.Tensor]:
    """Implement ``rotate``; see :mod:`tightrope.ops.schema`."""
    call = unpack(q, k, *arguments)
    ys, xs = define(call), call.xs()
    # Results have the same strides in every backend and in the fake kernel.
    return [new_like(x, call.options).copy_(y) for x, y in zip(xs, ys)] + ys[len(xs) :]


def rotate_(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any) -> None:
    """Implement ``rotate_``; see :mod:`tightrope.ops.schema`."""
    xs = present(q, k)
    if shares_memory(xs):
        raise RuntimeError("tightrope::rotate_: memory overlaps")
    for x, y in zip(xs, compose(q, k, *arguments)):
        x.copy_(y)


def rotate_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    *arguments: Any,
) -> None:
    """Implement ``rotate_into``; see :mod:`tightrope.ops.schema`."""
    outs = present(out_q, out_k)
    if shares_memory(outs, present(q, k)):
        raise RuntimeError("tightrope::rotate_into: memory overlaps")
    for out, y in zip(outs, compose(q, k, *arguments)):
        out.copy_(y)


def angle_gradients(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``angle_gradients``; see :mod:`tightrope.ops.schema`."""
    call = Call(y, z, words, turns, positions, offset, options_of(options), 1.0)
    return gradients.by_angles(
        call, call.xs(), present(grad_y, grad_z), by_positions, by_frequencies
    )


def gate_gradients(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    gate_q: torch.Tensor,
    gate_k: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
) -> list[torch.Tensor]:
    """Implement ``gate_gradients``; see :mod:`tightrope.ops.schema`."""
    call = Call(y, z, None, None, positions, offset, options_of(options), 1.0)
    return gradients.by_gates(call, call.xs(), present(grad_y, grad_z), present(gate_q, gate_k))


def _unless_negated(operator: Any) -> Callable[..., None]:
    """Make the kernel of an in-place operator for arguments of which some are negated views.

    torch resolves such views before other kernels. From 2.12 on, it fails at a negated q or k, but at
    a k after q was written.
    """

    def kernel(q: torch.Tensor, k: torch.Tensor | None, *others: Any) -> None:
        if q.is_neg() or (k is not None and k.is_neg()):
            raise RuntimeError(f"[{operator.name()}] q and k must not be negated views")
        operator(q, k, *torch.utils._pytree.tree_map_only(torch.Tensor, torch.resolve_neg, others))

    return kernel


def register() -> None:
    """Register the definition for every device that has no other kernel; called once, at import."""
    for operator, kernel in (
        (schema.rotate, rotate),
        (schema.rotate_extras, rotate),
        (schema.rotate_, rotate_),
        (schema.rotate_extras_, rotate_),
        (schema.rotate_into, rotate_into),
        (schema.rotate_extras_into, rotate_into),
        (schema.angle_gradients, angle_gradients),
        (schema.gate_gradients, gate_gradients),
        (schema.phase_words, phase_words),
        (schema.phase_drift, phase_drift),
        (schema.phase_sums, phase_sums),
        (schema.cos_sin, cos_sin),
    ):
        library.impl(operator, kernel, "CompositeExplicitAutograd")
    # is_grads_batched and vectorised jacobians use torch's legacy vmap, which ignores registered vmap rules.
    for operator, kernel in (
        (schema.rotate, compose),
        (schema.rotate_extras, compose),
        (schema.angle_gradients, angle_gradients),
        (schema.gate_gradients, gate_gradients),
    ):
        library.impl(operator, kernel, "Batched")
    if torch.__version__ >= (2, 12):  # type: ignore[operator]
        for operator in (schema.rotate_, schema.rotate_extras_):
            library.impl(operator, _unless_negated(operator), "Negative")
