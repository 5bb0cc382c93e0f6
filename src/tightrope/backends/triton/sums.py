"""Gradients of angles and gates: kernels sum within each tile of tokens, then torch adds up the tiles in order."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...ops.schema import FORWARD, PHASES, SLOPE, WORDS, Options, options_of, present
from . import blocks as shapes, kernels
from .arguments import Source, head_of, require, source_of, unit_of, views_of
from .groups import Tiling
from .launch import INTERPRETED, flat, handle_of, launcher
from .views import ACCESS, View, starts_aligned


def _run(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: dict[str, torch.Tensor | None],
    values: dict[str, Any],
    aligned: dict[str, int],
    blocks: shapes.Blocks,
    device: torch.device,
) -> None:
    """Launch a kernel once."""
    types = {name: None if x is None else x.dtype for name, x in tensors.items()}
    by_type = [{**values, **types}.get(name) for name in kernel.arg_names]
    handles = {name: handle_of(x) for name, x in tensors.items()}
    arguments = [{**values, **handles}.get(name) for name in kernel.arg_names]
    elsewhere = (
        contextlib.nullcontext() if INTERPRETED else torch.accelerator.device_index(device.index)
    )
    with elsewhere:
        launcher(kernel, grid, by_type, aligned, blocks, device)(*flat(arguments))


def _views(
    xs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], options: Options
) -> tuple[list[View], list[View]]:
    require(len(xs) == len(grads), "one gradient for each result")
    views, grad_views = views_of(xs, options), views_of(grads, options)
    require(
        [view.sizes for view in views] == [view.sizes for view in grad_views]
        and xs[0].dtype == grads[0].dtype
        and xs[0].device == grads[0].device,
        "gradients must have the shapes, dtype and device of results",
    )
    return views, grad_views


def angle_sums(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    packed: int,
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute ``angle_gradients`` of :mod:`tightrope.ops.schema`; None if the definition must do it."""
    options = options_of(packed)
    phases = options.source == PHASES
    require(
        options.source == WORDS or phases,
        "angle_gradients takes phase words or phases, not tables",
    )
    require(not phases or not by_positions, "phases have no gradient by positions")
    ys, grads = present(y, z), present(grad_y, grad_z)
    views, grad_views = _views(ys, grads, options)
    source = source_of(words, turns, positions, options, views, y.device)
    rows, _, tokens, head_dim = views[0].sizes
    block = shapes.power_of_two(source.pairs)
    if source.pairs == 0 or 2 * block > shapes.WIDEST or source.heads > shapes.MOST_ACROSS:
        return None
    if rows * tokens * head_dim * max(view.heads for view in views) == 0:
        return None
    wide = y.dtype == torch.float64
    element = y.element_size()
    blocks = shapes.SUMS[element]
    block_tokens = shapes.tokens_of(blocks, block)
    tiles = -(-tokens // block_tokens)
    each = torch.float64 if wide else torch.float32
    by_position = by_frequency = None
    if by_positions:
        by_position = y.new_empty((source.axes, source.heads, rows, tokens), dtype=each)
    if phases:
        if not by_frequencies:
            return _of_phases(None, source, rows, tokens, y)
        # A call may share phases among the heads but not phase words.
        source = replace(source, kind=source.kind._replace(HEADS=source.heads != 1))
    if by_frequencies:
        shape: tuple[int, ...] = (rows, tiles, source.axes, source.heads, source.pairs)
        if phases:
            shape = rows, source.heads, tokens, source.pairs
        by_frequency = y.new_empty(shape, dtype=each)
    every = [*views, *grad_views]
    aligned = all(map(starts_aligned, [*ys, *grads]))
    unit = unit_of(every, element, aligned)
    head = head_of(options, source.pairs, head_dim)
    values: dict[str, Any] = {
        "offset": offset,
        "tiling": Tiling(rows, tokens, tiles),
        "sign": 1.0 if options.direction == FORWARD else -1.0,
        **source.values,
        "HEAD": head._replace(BLOCK_T=block_tokens, WIDE=wide),
    }
    for name, view, grad_view in zip("yz", views, grad_views):
        values |= {f"{name}_heads": view.heads, f"{name}_steps": view.steps}
        values[f"grad_{name}_steps"] = grad_view.steps
    tensors = {
        "y": y,
        "z": z,
        "grad_y": grad_y,
        "grad_z": grad_z,
        "primary": words,
        "secondary": turns,
        "positions": positions,
        "by_position": by_position,
        "by_frequency": by_frequency,
    }
    grid = (rows * tiles, source.heads, 1)
    large = dict.fromkeys(("y", "z", "grad_y", "grad_z"), ACCESS if aligned else 0)
    large |= dict.fromkeys(("y_steps", "z_steps", "grad_y_steps", "grad_z_steps"), unit)
    _run(kernels.add_angles, grid, tensors, values, large, blocks, y.device)
    if phases:
        return _of_phases(by_frequency, source, rows, tokens, y)
    own_heads = () if positions is None else positions.shape[3:]
    if by_position is None:
        of_positions = words.new_empty((0, rows, tokens, *own_heads), dtype=torch.float64)
    elif own_heads and own_heads[0] != 1:
        of_positions = by_position.movedim(1, -1).to(torch.float64).contiguous()
    else:
        of_positions = by_position.sum(1, dtype=torch.float64)
        of_positions = of_positions.reshape(*of_positions.shape, *own_heads)
    return of_positions, _added(by_frequency, words.shape, y.device)


def _of_phases(
    found: torch.Tensor | None, source: Source, rows: int, tokens: int, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the gradients of phases over the rows that share them."""
    none = torch.empty((0, rows, tokens), dtype=torch.float64, device=y.device)
    if found is None:
        dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
        return none, y.new_empty((0, source.heads, tokens, source.pairs), dtype=dtype)
    if source.rows != rows:
        found = found.sum(0, keepdim=True, dtype=torch.float64).to(found.dtype)
    return none, found


def _added(
    by_frequency: torch.Tensor | None, shape: torch.Size, device: torch.device
) -> torch.Tensor:
    """Add up the sums of the tiles for frequencies in float64, in the shape of the phase words."""
    if by_frequency is None:
        return torch.empty((0, *shape[1:]), dtype=torch.float64, device=device)
    found = by_frequency.sum(1, dtype=torch.float64)  # rows, axes, heads, pairs
    if shape[1] == 1:
        found = found.sum(0, keepdim=True)
    if shape[2] == 1:
        found = found.sum(2, keepdim=True)
    return found.movedim(1, 0).contiguous()


def gate_sums(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    gate_q: torch.Tensor,
    gate_k: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    packed: int,
) -> list[torch.Tensor] | None:
    """Compute ``gate_gradients`` of :mod:`tightrope.ops.schema`; None if the definition must do it."""
    options = options_of(packed)
    ys, grads, gates = present(y, z), present(grad_y, grad_z), present(gate_q, gate_k)
    views, grad_views = _views(ys, grads, options)
    require(len(gates) == len(ys), "one gate for each result")
    if views[0].channels > shapes.WIDEST or any(0 in view.sizes for view in views):
        return None
    if any(view.heads > shapes.MOST_ACROSS for view in views):
        return None
    return [
        _one_gate(*one, positions, offset, options)
        for one in zip(ys, grads, gates, views, grad_views, strict=True)
    ]


def _one_gate(
    y: torch.Tensor,
    grad: torch.Tensor,
    gate: torch.Tensor,
    view: View,
    grad_view: View,
    positions: torch.Tensor | None,
    offset: int,
    options: Options,
) -> torch.Tensor:
    rows, heads, tokens, channels = view.sizes
    slopes = options.gate == SLOPE
    shape = (1, gate.shape[0], 1, gate.shape[1]) if slopes else tuple(gate.shape)
    require(
        len(shape) == 4 and all(size in (1, full) for size, full in zip(shape, view.sizes)),
        "gates must be [rows|1, heads|1, tokens|1, channels|1], slopes [heads|1, channels|1]",
    )
    wide = y.dtype == torch.float64
    element = y.element_size()
    blocks = shapes.SUMS[element]
    block = shapes.power_of_two(channels)
    block_tokens = shapes.tokens_of(blocks, block)
    tiles = -(-tokens // block_tokens)
    # Sum over heads and tokens where the gate broadcasts.
    over_heads, over_tokens = shape[1] == 1, shape[2] == 1
    kept = (rows, tiles if over_tokens else tokens, 1 if over_heads else heads, shape[3])
    sums = y.new_empty(kept, dtype=torch.float64 if wide else torch.float32)
    aligned = starts_aligned(y) and starts_aligned(grad)
    unit = unit_of([view, grad_view], element, aligned)
    # A placeholder: only the positions of the source are used.
    words = torch.empty((1, 1, 1, 0), dtype=torch.int64, device=y.device)
    plain = options._replace(source=WORDS, start=0)
    places = source_of(words, None, positions if slopes else None, plain, [view], y.device)
    values: dict[str, Any] = {
        "offset": offset,
        "tiling": Tiling(rows, tokens, tiles),
        "heads": heads,
        "position_steps": places.positions,
        "y_steps": view.steps,
        "grad_steps": grad_view.steps,
        "HEAD_DIM": channels,
        "BLOCK_T": block_tokens,
        "BLOCK_D": block,
        "POSITIONS": places.kind.POSITIONS,
        "SLOPES": slopes,
        "OVER_HEADS": over_heads,
        "OVER_TOKENS": over_tokens,
        "OVER_CHANNELS": shape[3] == 1,
        "WIDE": wide,
    }
    tensors = {"y": y, "grad": grad, "positions": positions if slopes else None, "sums": sums}
    grid = (rows * tiles, 1 if over_heads else heads, 1)
    large = dict.fromkeys(("y", "grad"), ACCESS if aligned else 0)
    large |= {"y_steps": unit, "grad_steps": unit}
    _run(kernels.add_gates, grid, tensors, values, large, blocks, y.device)
    if over_tokens:
        sums = sums.sum(1, keepdim=True, dtype=torch.float64)
    if shape[0] == 1 and rows != 1:
        sums = sums.sum(0, keepdim=True, dtype=torch.float64)
    # Kernels put tokens before heads. The fake kernel promises contiguous results.
    found = sums.transpose(1, 2).reshape(gate.shape).contiguous()
    return found.to(torch.float64 if wide else torch.float32)
