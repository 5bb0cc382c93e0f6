"""Slots of a cache: kernel parameters, and the copy of values, from cached launch plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...ops.eight import FORMATS
from ...ops.layouts import BY_CODE, Layout
from ...ops.slots import layout_of_cache
from . import blocks as shapes, kernels
from .arguments import require, unit_of
from .groups import Extent, OperandSteps, SlotSteps
from .launch import flat, handle_of, launcher, rounds_by_bits
from .views import ACCESS, View, address, view_of

_plans: dict[Any, tuple[Callable[..., None], tuple[Any, ...]] | None] = {}
_MOST = 4096
_UNKNOWN: Any = object()


class Eight(NamedTuple):
    """Caches in 8 bits, passed as bytes.

    Attributes:
        format: the code of their format.
        keys, values: what keys and values are divided by, float32 [1] or [heads]; None without values.
    """

    format: int
    keys: torch.Tensor
    values: torch.Tensor | None


def eight_of(
    cache: torch.Tensor, out_values: torch.Tensor | None, scales: tuple[Any, Any]
) -> Eight:
    """Check the caches and the scales of keys and values."""
    require(
        cache.dtype in FORMATS and (out_values is None or out_values.dtype == cache.dtype),
        "caches with a scale must be float8_e4m3fn or float8_e5m2, both alike",
    )
    require((out_values is None) == (scales[1] is None), "values must come with their scale")
    return Eight(FORMATS.index(cache.dtype) + 1, *scales)


def scale_step(scale: torch.Tensor, heads: int, device: torch.device) -> int:
    """Check a scale; return 1 if each head has its own, else 0."""
    require(
        scale.dtype == torch.float32
        and scale.device == device
        and scale.is_contiguous()
        and scale.shape in ((1,), (heads,)),
        "scales must be contiguous float32 [1] or [heads]",
    )
    return int(scale.shape[0] != 1)


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
    values: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor | None,
    keys: torch.Tensor,
    code: int,
    eight: Eight | None = None,
) -> None:
    """Copy values to the slots of their cache.

    Args:
        index: the slots; None if the cache has the shape of the values.
        keys: the cache of the keys, which has the same blocks and entries.
        code: the code of the layout of the keys and values.
        eight: the scales of caches in 8 bits.
    """
    where = address(values) | address(cache)
    scale = None if eight is None else eight.values
    tensors = values, cache, keys, index, scale
    key = (
        code,
        where % ACCESS,
        None if eight is None else eight.format,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
    )
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_plans) >= _MOST:
            _plans.clear()
        aligned = where % ACCESS == 0
        plan = _plans[key] = _plan(values, cache, index, keys, BY_CODE[code], aligned, eight)
    if plan is not None:
        run, fixed = plan
        run(*map(handle_of, (values, cache, index, scale)), *fixed)


def _plan(
    values: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor | None,
    keys: torch.Tensor,
    layout: Layout,
    aligned: bool,
    eight: Eight | None,
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    x, to, of_keys = (
        view_of(values, layout),
        view_of_cache(cache, layout),
        view_of_cache(keys, layout),
    )
    require(
        (eight is not None or values.dtype == cache.dtype)
        and values.device == cache.device
        and (to.rows, to.tokens) == (of_keys.rows, of_keys.tokens),
        "values must have the dtype of their cache, and it the blocks and entries of that of the keys",
    )
    if index is None:
        require(to.sizes == x.sizes, "a cache without slots must have the shape of its values")
    slots = None if index is None else steps_of_slots(index, x, to, values.device)
    if 0 in x.sizes or (slots is not None and slots.count == 0):
        return None
    scale, step = None if eight is None else eight.values, None
    if scale is not None:
        step = scale_step(scale, x.heads, values.device)
    element = values.element_size()
    unit = unit_of([x, to], element, aligned)
    blocks = shapes.PLAIN[element]._replace(registers=0)
    width = min(shapes.power_of_two(x.channels), 2 * blocks.pairs)
    tokens = max(1, 2 * blocks.pairs // width)
    kernel = kernels.copy_values
    given = {
        "values": values.dtype,
        "cache": cache.dtype,
        "slots": None if index is None else index.dtype,
        "scale": None if scale is None else torch.float32,
        "extent": Extent(x.rows * x.tokens, x.tokens, x.heads),
        "steps": OperandSteps(x.heads, x.steps, to.steps, slots=slots, scale=step),
        "WIDTH": x.channels,
        "BLOCK_T": tokens,
        "BLOCK_W": width,
        "EIGHT": 0 if eight is None else eight.format,
        "BITS": eight is not None and rounds_by_bits(),
    }
    arguments = [given[name] for name in kernel.arg_names]
    known = {"values": ACCESS if aligned else 0, "cache": ACCESS if aligned else 0}
    known |= {"x": unit, "out": unit}
    grid = (-(-x.rows * x.tokens // tokens), x.heads, -(-x.channels // width))
    launch = launcher(kernel, grid, arguments, known, blocks, values.device)
    return launch, flat(arguments[kernel.arg_names.index("extent") :])
