"""The vmap rule: it merges the mapped dimension into the rows, so most mapped calls are one launch."""

from __future__ import annotations

from typing import Any

import torch

from . import schema
from .call import Call, pack, unpack
from .layouts import BY_NAME


def _to_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def into_rows(x: torch.Tensor | None, dim: int | None, size: int, rows: int, axis: int) -> Any:
    """Merge the mapped dimension of a tensor into its dimension `axis`, which has size `rows|1`.

    The result has `size * rows` there; a tensor that is not mapped and has size 1 there stays as it is.
    """
    if x is None or (dim is None and x.shape[axis] == 1):
        return x
    x = _to_front(x, dim, size).movedim(0, axis)  # [..., size, rows|1, ...]
    shape = list(x.shape)
    shape[axis + 1] = rows
    return x.expand(shape).flatten(axis, axis + 1).contiguous()


def _rotate(
    info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[list[torch.Tensor], list[int]]:
    call = unpack(*arguments)
    dims, size, options = call.with_arguments(in_dims), info.batch_size, call.options
    parts, mapped = call.extras, dims.extras
    norm_back = bool(parts.weights) and options.direction == schema.TRANSPOSE
    slopes = mapped.gates if options.gate == schema.SLOPE else ()
    if norm_back or any(dim is not None for dim in (*mapped.weights, *slopes)):
        return _one_by_one(size, call, dims)
    layout = call.layout()

    def as_rows(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return layout.to_bhsd(_to_front(x, dim, size)).flatten(0, 1)

    xs = [as_rows(x, dim) for x, dim in zip(call.xs(), (dims.q, dims.k))]
    rows = xs[0].shape[0] // size if size else 0
    # Phase words and positions are [axes, rows, ...]; tables, phases and gates are [rows, ...].
    axis = 1 if options.source == schema.WORDS else 0
    phases = options.source == schema.PHASES

    def each(tensors: tuple[Any, ...], own: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
        return tuple(into_rows(t, dim, size, rows, axis) for t, dim in zip(tensors, own))

    primary = into_rows(call.primary, dims.primary, size, rows, axis)
    secondary = into_rows(call.secondary, dims.secondary, size, rows, 1 if phases else axis)
    # Tables or phase words and turns of which only one is mapped.
    if secondary is not None and not phases and primary.shape != secondary.shape:
        primary, secondary = (
            table.contiguous() for table in torch.broadcast_tensors(primary, secondary)
        )
    gates = parts.gates if options.gate == schema.SLOPE else each(parts.gates, mapped.gates, 0)
    packed = pack(
        call._replace(
            primary=primary,
            secondary=secondary,
            positions=into_rows(call.positions, dims.positions, size, rows, 1),
            options=options._replace(layout=BY_NAME["bhsd"].code),
            extras=parts._replace(
                frequencies=each(parts.frequencies, mapped.frequencies, 0 if phases else 1),
                gates=gates,
                inputs=tuple(as_rows(x, dim) for x, dim in zip(parts.inputs, mapped.inputs)),
            ),
        )
    )
    ys = schema.NEW.for_(packed)(*schema.pair(xs), *packed)
    return [layout.from_bhsd(y.unflatten(0, (size, rows))) for y in ys], [0] * len(ys)


def _one_by_one(size: int, call: Call, dims: Call) -> tuple[list[torch.Tensor], list[int]]:
    """Make one call per mapped index, because weights and slopes have no dimension for rows."""
    results = []
    for i in range(size):
        each = zip(call.tensors(), dims.tensors())
        one = call.with_tensors(t if dim is None else t.select(dim, i) for t, dim in each)
        packed = pack(one)
        results.append(schema.NEW.for_(packed)(one.q, one.k, *packed))
    return [torch.stack(ys) for ys in zip(*results)], [0] * len(results[0])


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
            "[rotate_] vmap: x is not mapped but another argument is, so one x cannot hold all results; "
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
        raise RuntimeError("[rotate_into] vmap: out is not mapped, so it cannot hold all results.")
    results, _ = _rotate(info, (*in_dims[:2], *in_dims[4:]), q, k, *arguments, **named)
    for out, dim, y in zip(outs, in_dims[2:], results):
        out.movedim(dim, 0).copy_(y)
    return None, None


def _rotate_slots(*_: Any, **__: Any) -> None:
    raise RuntimeError("[rotate_slots] vmap: slots cannot be mapped; call it outside of vmap.")


def register() -> None:
    """Register the vmap rules; called once, at import."""
    for operators, rule in (
        (schema.NEW, _rotate),
        (schema.IN_PLACE, _rotate_),
        (schema.OUT, _rotate_into),
        ((*schema.SLOTS, schema.rotate_slots_), _rotate_slots),
    ):
        for operator in operators:
            torch.library.register_vmap(operator, rule)
