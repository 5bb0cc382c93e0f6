"""Positions with several coordinates: ids, text, grids, and text mixed with images and video."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from .._errors import bad_type, bad_value, integer, public
from ._canonical import (
    Positions,
    PositionsLike,
    as_positions,
    check_dtype,
    check_fits,
    count,
    number,
)

_Number: TypeAlias = "int | float"


@public("multi_axis")
def multi_axis(ids: torch.Tensor) -> Positions:
    """Return positions with several coordinates per token; the angles of all coordinates add up.

    Args:
        ids: int32, int64, float32 or float64, shape ``(axes, tokens)`` or ``(axes, rows, tokens)``;
            the latter is the shape of ``position_ids`` in multimodal models of transformers, where a
            fourth row before the three coordinates holds positions of the text: pass ``ids[1:]``.

    Raises:
        ValueError: ids with another number of dimensions.
        TypeError: ids of another dtype.

    >>> multi_axis(torch.zeros(2, 9, dtype=torch.int64)).ids.shape
    torch.Size([2, 1, 9])
    """
    check_dtype(ids, "ids", sharded=True)
    if ids.dim() not in (2, 3):
        raise bad_value("ids must have shape (axes, tokens) or (axes, rows, tokens)", ids=ids)
    return Positions(ids if ids.dim() == 3 else ids[:, None], add_index=False)


@public("text")
def text(
    positions: PositionsLike = None, *, axes: int, device: torch.device | str | None = None
) -> Positions:
    """Return positions of text for a spec with several axes: all coordinates of a token are equal.

    Args:
        positions: positions with one axis: None, an int offset, ids or a :class:`Positions`. Ids are
            not copied.
        axes: number of coordinates.
        device: device of the rotated tensors, used if ``positions`` is None or an int. By default
            the ids are on the CPU, and each rotation on another device copies them there.

    Raises:
        ValueError: positions that have several axes already, or ``axes`` below 1.
        TypeError: positions of another type, or ``axes`` that is no int.

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1.

    >>> text(7, axes=3).ids.shape
    torch.Size([3, 1, 1])
    >>> text(torch.tensor([3, 1]), axes=2).ids.tolist()
    [[[3, 1]], [[3, 1]]]
    """
    where = as_positions(positions)
    axes = count("axes", axes, least=1)
    ids = where.ids
    if ids is None:
        ids = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    if ids.shape[0] != 1:
        raise bad_value(f"positions must have 1 axis but got {ids.shape[0]}", positions=ids)
    ids = ids.expand(axes, -1, -1)
    return Positions(ids, where.offset, where.add_index, where.packed, where.part)


@public("grid")
def grid(
    *sizes: int,
    start: _Number | Sequence[_Number] = 0,
    step: _Number | Sequence[_Number] = 1,
    span: tuple[float, float] | Sequence[tuple[float, float]] | None = None,
    merge: int | Sequence[int] = 1,
    device: torch.device | str | None = None,
) -> Positions:
    """Return the coordinates of a grid's cells in row-major order: patches of an image or a video.

    Args:
        sizes: number of cells along each axis, such as ``grid(height, width)`` or ``grid(time, height,
            width)``. The last axis varies fastest.
        start, step: the coordinate of cell ``i`` is ``start + step · i``; one number, or one for
            each axis. Coordinates are int64 if all of these are ints, else float64.
        span: normalised coordinates, instead of start and step: ``(low, high)``, or one such
            pair for each axis. The coordinate of cell ``i`` of ``n`` is the middle of the ``i``-th of
            ``n`` equal parts, ``low + (high − low)·(i + 1/2)/n``.
        merge: number of cells of a block along each axis: one number, or one for each axis. The
            tokens of a block follow each other in row-major order, and so do the blocks; for models
            that later merge each block into one token.
        device: device of the rotated tensors.

    Returns:
        Positions ``[axes, 1, tokens]``.

    Raises:
        ValueError, TypeError: no size, a negative one, or one that is not an int; other arguments that are no
            numbers, or not one for each axis; a merge that does not divide a size.

    Source: span: DINOv3 (arXiv 2508.10104), whose span is ``(-1, 1)`` in turns: its spec has
    ``scaling=Linear(1 / (2 * math.pi))``; merge: Qwen2-VL (arXiv 2409.12191).

    >>> grid(2, 3).ids.tolist()
    [[[0, 0, 0, 1, 1, 1]], [[0, 1, 2, 0, 1, 2]]]
    >>> grid(4, span=(-1, 1)).ids.tolist()
    [[[-0.75, -0.25, 0.25, 0.75]]]
    >>> grid(2, 4, merge=2).ids[1].tolist()
    [[0, 1, 0, 1, 2, 3, 2, 3]]
    """
    hint = "; pass each as an int: grid(*sizes) of a tuple, or of sizes.tolist()"
    counts = tuple(count("a size", size, hint) for size in sizes)
    if not counts:
        raise bad_value("a grid must have at least one size but got none")
    axes = len(counts)
    merges = tuple(count("merge", value) for value in _each("merge", merge, axes))
    if any(cells < 1 or size % cells for size, cells in zip(counts, merges, strict=True)):
        raise bad_value(f"sizes must be multiples of merge but got {counts} and {merges}")
    if span is None:
        starts = [number("start", value) for value in _each("start", start, axes)]
        steps = [number("step", value) for value in _each("step", step, axes)]
    else:
        if start != 0 or step != 1:
            raise bad_value(f"span must be None if start or step is given but got {span}")
        starts, steps = [], []
        for (low, high), size in zip(_spans(span, axes), counts, strict=True):
            starts.append(low + (high - low) / (2 * max(size, 1)))
            steps.append((high - low) / max(size, 1))
    ids = _cells(counts, starts, steps, merges, device)[:, None]
    return Positions(ids, add_index=False, packed=False)


def _cells(
    sizes: Sequence[int],
    starts: Sequence[int | float],
    steps: Sequence[int | float],
    merges: Sequence[int],
    device: torch.device | str | None,
) -> torch.Tensor:
    """Return the coordinates of cells in the order of :func:`grid`, ``[axes, cells]``."""
    axes = len(sizes)
    floating = any(isinstance(value, float) for value in (*starts, *steps))
    dtype = torch.float64 if floating else torch.int64
    lines = []
    for axis, size in enumerate(sizes):
        line = torch.arange(size, dtype=dtype, device=device) * steps[axis] + starts[axis]
        shape = [1] * axes
        shape[axis] = size
        lines.append(line.reshape(shape).expand(sizes))
    cells = torch.stack(lines)
    if any(merge != 1 for merge in merges):
        split = [part for size, m in zip(sizes, merges, strict=True) for part in (size // m, m)]
        cells = cells.reshape(axes, *split).permute(
            0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2)
        )
    return cells.reshape(axes, math.prod(sizes))


Segment: TypeAlias = "int | tuple[int, int, int] | tuple[int, int, int, float]"


@public("mrope")
def mrope(
    segments: Iterable[Segment],
    *,
    start: int = 0,
    next_from: str = "all",
    device: torch.device | str | None = None,
) -> Positions:
    """Return M-RoPE positions (time, height, width) of text mixed with images and video.

    Text advances all three coordinates together. An image or a video starts at one position, which
    is added to all three coordinates of its cells; the cells are in row-major order. By default,
    the next segment starts one past the largest coordinate so far; see ``next_from``.

    Args:
        segments: content of the row, in order: an int for that many text tokens; ``(t, h, w)`` for
            an image (t = 1) or a video, in cells after merging; ``(t, h, w, time_step)`` if frame ``i``
            starts ``i · time_step`` positions after the first one, rounded down (in Qwen2.5-VL,
            ``time_step`` is tokens per second times seconds per frame). For a model that puts text
            between frames, like Qwen3-VL, give one ``(1, h, w)`` per frame.
        start: first position of the row, on all axes.
        next_from: "all": the segment after an image or a video starts after its largest coordinate on
            any axis, as in the paper and the models' own code. "space": it starts after the largest
            coordinate in height and width, as in transformers 5. The two differ only for videos
            whose coordinates in time are larger than those in height and width.
        device: device of the rotated tensors.

    Returns:
        Positions ``[3, 1, tokens]``. For a batch, ``concatenate(rows, along="rows")``.

    Raises:
        ValueError: sizes below 1, a negative time step, or another ``next_from``.
        TypeError: segments of another kind.

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1; time steps: Qwen2.5-VL (arXiv 2502.13923).

    >>> mrope([2, (1, 2, 2), 1]).ids.squeeze(1).tolist()
    [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    """
    ids, _ = placed(segments, next_from, start, device)
    return Positions(ids[:, None], add_index=False, packed=False)


@public("mrope_next")
def mrope_next(segments: Iterable[Segment], *, start: int = 0, next_from: str = "all") -> int:
    """Return the position, on all axes, of the first token to generate after the segments of :func:`mrope`.

    It is one past the largest coordinate. Subtract the number of tokens to get ``rope_deltas`` of
    transformers.

    Args: see :func:`mrope`.

    >>> mrope_next([2, (1, 2, 2), 1])
    5
    """
    return _walk(segments, start, next_from)[1]


def placed(
    segments: Iterable[Segment],
    next_from: str,
    start: int = 0,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, int]:
    """Return the ids ``[3, tokens]`` of segments, and the position of the token after them."""
    walk, after = _walk(segments, start, next_from)
    parts = [torch.zeros(3, 0, dtype=torch.int64, device=device)]
    for begin, sizes, time_step in walk:
        if len(sizes) == 1:
            parts.append(torch.arange(begin, begin + sizes[0], device=device).expand(3, -1))
            continue
        cells = _cells(sizes, (0, 0, 0), (1, 1, 1), (1, 1, 1), device)
        if time_step != 1:
            # In float32, like the models' own code, to round products near an integer the same way.
            time = (cells[:1].to(torch.float32) * time_step).to(torch.int64)
            cells = torch.cat((time, cells[1:]))
        parts.append(cells + begin)
    return torch.cat(parts, 1), after


def _walk(
    segments: object, start: object, next_from: object
) -> tuple[list[tuple[int, tuple[int, ...], float]], int]:
    """Return start, sizes and time step of each segment, and one past the largest position."""
    if next_from not in ("all", "space"):
        raise bad_value(f"next_from must be 'all' or 'space' but got {next_from!r}")
    begin = integer("start", start)
    check_fits("start", begin)
    largest = begin - 1
    kinds = "ints and tuples (t, h, w) or (t, h, w, time_step)"
    if isinstance(segments, str) or not isinstance(segments, Iterable):
        raise bad_type(f"segments must be an iterable of {kinds} but got {segments!r}")
    walk = []
    for segment in segments:
        if not isinstance(segment, (tuple, list)):
            sizes: tuple[int, ...] = (count("a number of text tokens", segment),)
            time_step, last = 1.0, sizes[0] - 1
            advance = sizes[0]
        else:
            if len(segment) not in (3, 4):
                raise bad_value(f"segments must be {kinds} but got {segment!r}")
            sizes = tuple(count("each of t, h and w", size) for size in segment[:3])
            if min(sizes) < 1:
                raise bad_value(f"t, h and w must be positive but got {tuple(segment)}")
            time_step = number("time_step", segment[3]) if len(segment) == 4 else 1.0
            if not 0 <= time_step * sizes[0] < 2.0**63:
                raise bad_value(
                    f"time_step must not be negative, and t · time_step below 2^63, but got {time_step}"
                )
            space = max(sizes[1:])
            last = max(int(_float32((sizes[0] - 1) * _float32(time_step))), space - 1)
            advance = last + 1 if next_from == "all" else space
        walk.append((begin, sizes, time_step))
        largest = max(largest, begin + last)
        begin += advance
    check_fits("the position after the last", largest + 1)
    return walk, largest + 1


def _each(name: str, value: object, axes: int) -> tuple[object, ...]:
    """Expand one value for all axes, or a sequence with one per axis, to a tuple with one per axis."""
    if not isinstance(value, (tuple, list)):
        return (value,) * axes
    if len(value) != axes:
        raise bad_value(
            f"{name} must be one number, or one for each of {axes} axes, but got {value}"
        )
    return tuple(value)


def _spans(span: object, axes: int) -> list[tuple[float, float]]:
    rule = f"span must be (low, high), or one such pair for each of {axes} axes, but got {span!r}"
    if not isinstance(span, (tuple, list)) or not span:
        raise bad_type(rule)
    pairs = list(span) if isinstance(span[0], (tuple, list)) else [span] * axes
    if len(pairs) != axes:
        raise bad_value(rule)
    result = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise bad_value(rule)
        low, high = (float(number("an end of span", end)) for end in pair)
        result.append((low, high))
    return result


def _float32(value: float) -> float:
    # While compiling, an argument of the function is a symbol; its digits make it a constant.
    constant = float.fromhex(float(value).hex())
    return float(struct.unpack("f", struct.pack("f", constant))[0])
