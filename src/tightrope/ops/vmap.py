"""The vmap rule: a mapped dimension becomes rows, so a mapped call is one launch too."""

from __future__ import annotations

from typing import Any

import torch

from . import schema
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
    *rest: Any,
    **named: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    size, dims = info.batch_size, in_dims[2:]
    what = schema.form_of(form)
    layout = BY_CODE[what.layout]
    views = [
        layout.to_bhsd(_to_front(x, dim, size)) for x, dim in zip(schema.present(q, k), in_dims)
    ]
    rows = views[0].shape[1]
    # Words are [axes, rows, ...] and positions too; tables are [rows, ...].
    axis = 1 if what.source == schema.WORDS else 0
    ys = schema.rotate(
        views[0].flatten(0, 1),
        views[1].flatten(0, 1) if len(views) > 1 else None,
        _in_rows(primary, dims[0], size, rows, axis),
        _in_rows(secondary, dims[1], size, rows, axis),
        _in_rows(positions, dims[2], size, rows, 1),
        offset,
        what._replace(layout=BY_NAME["bhsd"].code).pack(),
        *rest,
        **named,
    )
    return [layout.from_bhsd(y.unflatten(0, (size, rows))) for y in ys], [0] * len(ys)


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
    torch.library.register_vmap("tightrope::rotate", _rotate)
    torch.library.register_vmap("tightrope::rotate_", _rotate_)
    torch.library.register_vmap("tightrope::rotate_into", _rotate_into)
