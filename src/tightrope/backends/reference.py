"""The reference backend: the definition of the operator in plain torch, for every device that has no other.

The other backends are optimisations of this one and are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops import gradients, schema
from ..ops.call import Slots, unpack
from ..ops.cosines import cos_sin
from ..ops.definition import define
from ..ops.layouts import BY_CODE
from ..ops.memory import shares_memory, shares_slots
from ..ops.phases import phase_drift, phase_sums, phase_words
from ..ops.scaled import in_bytes
from ..ops.schema import library, new_like, options_of, present
from ..ops.slots import check_distinct, check_range, gather, write, write_all

#: Device types that this backend serves; empty for all.
DEVICES: tuple[str, ...] = ()


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Return None: the definition can run every call of the operator."""
    return None


def is_ready() -> bool:
    """Return True: this backend needs only torch."""
    return True


def compose(*arguments: Any) -> list[torch.Tensor]:
    """Compute the definition from the schema's arguments."""
    return define(unpack(*arguments))


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


def rotate_slots(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    index: torch.Tensor,
    *arguments: Any,
) -> None:
    """Implement ``rotate_slots``; see :mod:`tightrope.ops.schema`."""
    rotate_slots_extras(q, k, None, out_q, out_k, None, index, None, None, *arguments)


def rotate_slots_extras(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    q: torch.Tensor,
    k: torch.Tensor | None,
    values: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    out_values: torch.Tensor | None,
    index: torch.Tensor | None,
    scale: torch.Tensor | None,
    values_scale: torch.Tensor | None,
    *arguments: Any,
) -> None:
    """Implement ``rotate_slots.extras``; see :mod:`tightrope.ops.schema`."""
    scales = None if scale is None else (scale, values_scale)
    slots, outs = Slots(index, values, out_values, scales), present(out_q, out_k)
    call = unpack(q, k, *arguments)._replace(outs=outs, slots=slots)
    layout = call.layout()
    if shares_slots(call.xs(), outs, slots):
        raise RuntimeError("tightrope::rotate_slots: memory overlaps")
    check_range(slots, outs[-1], layout)
    if scales is not None:
        write_all(*in_bytes(call, define), layout)
    else:
        write_all(define(call), outs, slots, layout)


def rotate_slots_(cache: torch.Tensor, index: torch.Tensor, *arguments: Any) -> None:
    """Implement ``rotate_slots_``; see :mod:`tightrope.ops.schema`."""
    slots, layout = Slots(index), BY_CODE[options_of(arguments[4]).layout]
    if shares_memory([cache]):
        raise RuntimeError("tightrope::rotate_slots_: memory overlaps")
    check_range(slots, cache, layout)
    check_distinct(index)
    (y,) = define(unpack(gather(cache, index, layout), None, *arguments))
    write(y, cache, index, layout)


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
    for operators, kernel in (
        (schema.NEW, rotate),
        (schema.IN_PLACE, rotate_),
        (schema.OUT, rotate_into),
        ((schema.rotate_slots,), rotate_slots),
        ((schema.rotate_slots_extras,), rotate_slots_extras),
        ((schema.rotate_slots_,), rotate_slots_),
        ((schema.angle_gradients,), gradients.angle_gradients),
        ((schema.gate_gradients,), gradients.gate_gradients),
        ((schema.phase_words,), phase_words),
        ((schema.phase_drift,), phase_drift),
        ((schema.phase_sums,), phase_sums),
        ((schema.cos_sin,), cos_sin),
    ):
        for operator in operators:
            library.impl(operator, kernel, "CompositeExplicitAutograd")
    # is_grads_batched and vectorised jacobians use torch's legacy vmap, which ignores registered vmap rules.
    for operator, batched in (
        (schema.rotate, compose),
        (schema.rotate_extras, compose),
        (schema.angle_gradients, gradients.angle_gradients),
        (schema.gate_gradients, gradients.gate_gradients),
    ):
        library.impl(operator, batched, "Batched")
    if torch.__version__ >= (2, 12):  # type: ignore[operator]
        for operator in schema.IN_PLACE:
            library.impl(operator, _unless_negated(operator), "Negative")
