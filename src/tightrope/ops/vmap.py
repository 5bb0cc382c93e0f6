"""The vmap rule: a mapped dimension becomes rows, so a mapped call is one launch too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import schema
from .arguments import Carried, carried_of
from .autograd import pair
from .layouts import BY_CODE, BY_NAME


def _to_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _in_rows(x: torch.Tensor | None, dim: int | None, size: int, rows: int, axis: int) -> Any:
    """Angles with `rows|1` in dimension `axis`, with or without a mapped dimension: with
    `size * rows` there, or as they are."""
    if x is None or (dim is None and x.shape[axis] == 1):
        return x
    x = _to_front(x, dim, size).movedim(0, axis)  # [..., size, rows|1, ...]
    shape = list(x.shape)
    shape[axis + 1] = rows
    return x.expand(shape).flatten(axis, axis + 1).contiguous()


def _rotate(
    info: Any,
    in_dims: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> tuple[list[torch.Tensor], list[int]]:
    size, dims = info.batch_size, in_dims[2:]
    what = schema.form_of(form)
    parts = carried_of(what, carried)
    mapped = carried_of(what, schema.carried(dims) or ())
    norm_back = bool(parts.weights) and what.direction == schema.TRANSPOSE
    slopes = mapped.gates if what.gate == schema.SLOPE else ()
    if norm_back or any(dim is not None for dim in (*mapped.weights, *slopes)):
        fixed = (q, k, primary, secondary, positions, offset, form, amplitude)
        return _one_by_one(size, in_dims, (*fixed, carried, eps))
    layout = BY_CODE[what.layout]

    def in_rows(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return layout.to_bhsd(_to_front(x, dim, size)).flatten(0, 1)

    xs = [in_rows(x, dim) for x, dim in zip(schema.present(q, k), in_dims)]
    rows = xs[0].shape[0] // size if size else 0
    # Words are [axes, rows, ...] and positions too; tables and gates are [rows, ...].
    axis = 1 if what.source == schema.WORDS else 0
    gate_axis = None if what.gate == schema.SLOPE else 0
    there = Carried(
        _each(parts.frequencies, mapped.frequencies, size, rows, 1),
        parts.weights,
        parts.gates
        if gate_axis is None
        else _each(parts.gates, mapped.gates, size, rows, gate_axis),
        tuple(in_rows(x, dim) for x, dim in zip(parts.inputs, mapped.inputs)),
    )
    arguments = (
        _in_rows(primary, dims[0], size, rows, axis),
        _in_rows(secondary, dims[1], size, rows, axis),
        _in_rows(positions, dims[2], size, rows, 1),
        offset,
        what._replace(layout=BY_NAME["bhsd"].code).pack(),
        amplitude,
        *there.packed(eps),
    )
    ys = schema.rotation(arguments)(*pair(xs), *arguments)
    return [layout.from_bhsd(y.unflatten(0, (size, rows))) for y in ys], [0] * len(ys)


def _each(
    tensors: tuple[Any, ...], dims: tuple[Any, ...], size: int, rows: int, axis: int
) -> tuple[Any, ...]:
    return tuple(_in_rows(t, dim, size, rows, axis) for t, dim in zip(tensors, dims))


def _one_by_one(
    size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[list[torch.Tensor], list[int]]:
    """A call for each, where a weight or a slope is mapped, of which the operator takes one."""

    def of(value: Any, dim: Any, i: int) -> Any:
        if isinstance(value, (list, tuple)):
            dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
            return [of(one, own, i) for one, own in zip(value, dims)]
        return (
            value.select(dim, i) if isinstance(value, torch.Tensor) and dim is not None else value
        )

    calls = [
        schema.rotate_carried(*(of(a, dim, i) for a, dim in zip(arguments, in_dims)))
        for i in range(size)
    ]
    return [torch.stack(ys) for ys in zip(*calls)], [0] * len(calls[0])


def _rotate_(
    info: Any,
    in_dims: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor | None,
    *arguments: Any,
    **named: Any,
) -> tuple[None, None]:
    xs = schema.present(q, k)
    if any(dim is None for _, dim in zip(xs, in_dims)):
        raise RuntimeError(
            "[rotate_] vmap: x is not mapped but its angles are, so one x cannot hold the results; "
            "call rotate."
        )
    results, _ = _rotate(info, in_dims, q, k, *arguments, **named)
    for x, dim, y in zip(xs, in_dims, results):
        x.movedim(dim, 0).copy_(y)
    return None, None


def _rotate_into(
    info: Any,
    in_dims: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    *arguments: Any,
    **named: Any,
) -> tuple[None, None]:
    outs = schema.present(out_q, out_k)
    if any(dim is None for _, dim in zip(outs, in_dims[2:])):
        raise RuntimeError("[rotate_into] vmap: out is not mapped, so it cannot hold the results.")
    results, _ = _rotate(info, (*in_dims[:2], *in_dims[4:]), q, k, *arguments, **named)
    for out, dim, y in zip(outs, in_dims[2:], results):
        out.movedim(dim, 0).copy_(y)
    return None, None


def register() -> None:
    """Register the vmap rules; once, at import."""
    for operator, rule in (
        (schema.rotate, _rotate),
        (schema.rotate_carried, _rotate),
        (schema.rotate_, _rotate_),
        (schema.rotate_carried_, _rotate_),
        (schema.rotate_into, _rotate_into),
        (schema.rotate_carried_into, _rotate_into),
    ):
        torch.library.register_vmap(operator, rule)
