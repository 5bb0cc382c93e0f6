"""The vmap rule of a rotation: it merges the mapped dimension into the rows, so a mapped call is one launch.

The definition runs all other calls that public functions make in a transform; these operators refuse them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import schema
from .call import pack, unpack
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
    if not call.is_plain():
        _refuse("rotate")
    dims, size, options = call.with_arguments(in_dims), info.batch_size, call.options
    layout = call.layout()
    xs = [
        layout.to_bhsd(_to_front(x, dim, size)).flatten(0, 1)
        for x, dim in zip(call.xs(), (dims.q, dims.k))
    ]
    rows = xs[0].shape[0] // size if size else 0
    # Phase words and positions are [axes, rows, ...]; tables and phases are [rows, ...].
    axis = 1 if options.source == schema.WORDS else 0
    phases = options.source == schema.PHASES
    primary = into_rows(call.primary, dims.primary, size, rows, axis)
    secondary = into_rows(call.secondary, dims.secondary, size, rows, 1 if phases else axis)
    # Tables or phase words and turns of which only one is mapped.
    if secondary is not None and not phases and primary.shape != secondary.shape:
        primary, secondary = (
            table.contiguous() for table in torch.broadcast_tensors(primary, secondary)
        )
    learned = zip(call.extras.frequencies, dims.extras.frequencies)
    packed = pack(
        call._replace(
            primary=primary,
            secondary=secondary,
            positions=into_rows(call.positions, dims.positions, size, rows, 1),
            options=options._replace(layout=BY_NAME["bhsd"].code),
            extras=call.extras.like([into_rows(t, d, size, rows, axis) for t, d in learned]),
        )
    )
    ys = schema.NEW.for_(packed)(*schema.pair(xs), *packed)
    return [layout.from_bhsd(y.unflatten(0, (size, rows))) for y in ys], [0] * len(ys)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"[{name}] vmap: this call of the raw operator cannot be mapped; call tightrope.functional.rotate."
    )


def register() -> None:
    """Register the vmap rules; called once, at import."""
    for operators, rule in (
        (schema.NEW, _rotate),
        (schema.IN_PLACE, partial(_refuse, "rotate_")),
        (schema.OUT, partial(_refuse, "rotate_into")),
        ((*schema.SLOTS, schema.rotate_slots_), partial(_refuse, "rotate_slots")),
    ):
        for operator in operators:
            torch.library.register_vmap(operator, rule)
