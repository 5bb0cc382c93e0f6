"""The vmap rule: a mapped dimension becomes rows, so a mapped call is one launch too."""

from __future__ import annotations

from collections.abc import Sequence
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


# Tensors among the arguments that follow xs, and which dimension of each is its rows.
_ROWS = {0: 1, 1: 1, 2: 1, 11: 0, 12: 0}


def _rotate(
    info: Any, in_dims: tuple[Any, ...], xs: Sequence[torch.Tensor], *arguments: Any, **named: Any
) -> tuple[list[torch.Tensor], list[int]]:
    size = info.batch_size
    layout = BY_CODE[arguments[5]]
    views = [layout.to_bhsd(_to_front(x, dim, size)) for x, dim in zip(xs, in_dims[0], strict=True)]
    rows = views[0].shape[1]
    flat = list(arguments)
    flat[5] = BY_NAME["bhsd"].code
    for at, axis in _ROWS.items():
        if at < len(flat):
            flat[at] = _in_rows(flat[at], in_dims[1 + at], size, rows, axis)
    ys = schema.rotate([x.flatten(0, 1) for x in views], *flat, **named)
    return [layout.from_bhsd(y.unflatten(0, (size, rows))) for y in ys], [0] * len(ys)


def _rotate_(
    info: Any, in_dims: tuple[Any, ...], xs: Sequence[torch.Tensor], *arguments: Any, **named: Any
) -> tuple[None, None]:
    if any(dim is None for dim in in_dims[0]):
        raise RuntimeError(
            "[rotate_] vmap: x is not mapped but its angles are, so one x cannot hold the results; "
            "call rotate."
        )
    results, _ = _rotate(info, in_dims, xs, *arguments, **named)
    for x, dim, y in zip(xs, in_dims[0], results, strict=True):
        x.movedim(dim, 0).copy_(y)
    return None, None


def _rotate_into(
    info: Any,
    in_dims: tuple[Any, ...],
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    *arguments: Any,
    **named: Any,
) -> tuple[None, None]:
    if any(dim is None for dim in in_dims[1]):
        raise RuntimeError("[rotate_into] vmap: out is not mapped, so it cannot hold the results.")
    results, _ = _rotate(info, (in_dims[0], *in_dims[2:]), xs, *arguments, **named)
    for out, dim, y in zip(outs, in_dims[1], results, strict=True):
        out.movedim(dim, 0).copy_(y)
    return None, None


def register() -> None:
    """Register the vmap rules; once, at import."""
    torch.library.register_vmap("tightrope::rotate", _rotate)
    torch.library.register_vmap("tightrope::rotate_", _rotate_)
    torch.library.register_vmap("tightrope::rotate_into", _rotate_into)
