"""Slots of a cache: kernel parameters, and the copy of values, from cached launch plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops.layouts import BY_CODE, Layout
from ...ops.slots import layout_of_cache
from . import blocks as shapes, kernels
from .arguments import require, unit_of
from .groups import Extent, OperandSteps, SlotSteps
from .launch import flat, handle_of, launcher
from .views import ACCESS, View, address, view_of

_plans: dict[Any, tuple[Callable[..., None], tuple[Any, ...]] | None] = {}
_MOST = 4096
_UNKNOWN: Any = object()


def view_of_cache(cache: torch.Tensor, layout: Layout) -> View:
    """Return the view of a cache for keys in a layout: its rows are blocks, its tokens are entries."""
    own = layout_of_cache(layout, cache.dim())
    require(
        cache.dim() == own.dims,
        "a cache must have the dimensions of its keys, or one of blocks more",
    )
    return view_of(cache, own)


def entries_of(cache: View, index: torch.Tensor) -> View:
    """Return the view of a cache with the rows and tokens of slots."""
    require(1 <= index.dim() <= 2, "slots must be [rows, tokens] or [tokens]")
    return cache._replace(rows=index.shape[0] if index.dim() == 2 else 1, tokens=index.shape[-1])


def steps_of_slots(index: torch.Tensor, x: View, cache: View, device: torch.device) -> SlotSteps:
    """Check slots and their cache against the tensor that goes to them; return the kernel parameters."""
    require(
        index.dtype in (torch.int32, torch.int64)
        and index.device == device
        and index.shape in ((x.rows, x.tokens), (x.tokens,))
        and (index.dim() == 2 or x.rows == 1),
        "slots must be int32 or int64 [rows, tokens], or [tokens] for one row",
    )
    require(
        (cache.heads, cache.channels) == (x.heads, x.channels),
        "a cache must have the heads and channels of its keys",
    )
    row, token = (0, *index.stride())[-2:]
    return SlotSteps(row, token, max(cache.tokens, 1), cache.rows * cache.tokens)


def copy_values(
    values: torch.Tensor, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, code: int
) -> None:
    """Copy values to the slots of their cache.

    Args:
        index: the slots.
        keys: the cache of the keys, which has the same blocks and entries.
        code: the code of the layout of the keys and values.
    """
    where = address(values) | address(cache)
    tensors = values, cache, index, keys
    key = (
        code,
        where % ACCESS,
        values.dtype,
        index.dtype,
        *[(x.shape, x.stride()) for x in tensors],
    )
    key = (*key, *[x.device for x in tensors], cache.dtype)
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = _plan(values, cache, index, keys, BY_CODE[code], where % ACCESS == 0)
    if plan is not None:
        run, fixed = plan
        run(*map(handle_of, (values, cache, index)), *fixed)


def _plan(
    values: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    keys: torch.Tensor,
    layout: Layout,
    aligned: bool,
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    x, to, of_keys = (
        view_of(values, layout),
        view_of_cache(cache, layout),
        view_of_cache(keys, layout),
    )
    require(
        values.dtype == cache.dtype
        and values.device == cache.device
        and (to.rows, to.tokens) == (of_keys.rows, of_keys.tokens),
        "values must have the dtype of their cache, and it the blocks and entries of that of the keys",
    )
    slots = steps_of_slots(index, x, to, values.device)
    if 0 in (*x.sizes, slots.count):
        return None
    element = values.element_size()
    unit = unit_of([x, to], element, aligned)
    blocks = shapes.PLAIN[element]._replace(registers=0)
    width = min(shapes.power_of_two(x.channels), 2 * blocks.pairs)
    tokens = max(1, 2 * blocks.pairs // width)
    kernel = kernels.copy_values
    given = {
        "values": values.dtype,
        "cache": values.dtype,
        "slots": index.dtype,
        "extent": Extent(x.rows * x.tokens, x.tokens, x.heads),
        "steps": OperandSteps(x.heads, x.steps, to.steps, slots=slots),
        "WIDTH": x.channels,
        "BLOCK_T": tokens,
        "BLOCK_W": width,
    }
    arguments = [given[name] for name in kernel.arg_names]
    known = {"values": ACCESS if aligned else 0, "cache": ACCESS if aligned else 0}
    known |= {"x": unit, "out": unit}
    grid = (-(-x.rows * x.tokens // tokens), x.heads, -(-x.channels // width))
    launch = launcher(kernel, grid, arguments, known, blocks, values.device)
    return launch, flat(arguments[kernel.arg_names.index("extent") :])
