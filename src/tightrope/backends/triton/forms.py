"""From a call of the operator to its launch: everything that its shapes decide, worked out once.

What is checked here, before anything is launched, keeps a direct call of the raw operator from reading
or writing outside its tensors; sentences for users are worded in tightrope.ops.checks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ops.layouts import BY_CODE
from ...ops.schema import FORWARD, SOURCES, WORDS, Form, scale
from . import blocks as shapes
from .groups import Amplitude, AngleKind, AngleSteps, Head, PositionSteps, Steps
from .views import ACCESS, View, broadcast_strides, is_aligned, vector_of, view_of

_FLOATING = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_POSITIONS = {torch.int32: 1, torch.int64: 1, torch.float32: 2, torch.float64: 2}


@dataclass(frozen=True)
class Source:
    """Where the angles of a call come from, as kernels take it.

    Attributes:
        positions, steps, kind: of positions and of angles.
        pairs, rows, heads: of the words or tables.
        axes: of the words.
    """

    positions: PositionSteps
    steps: AngleSteps
    kind: AngleKind
    pairs: int
    rows: int
    heads: int
    axes: int

    @property
    def values(self) -> dict[str, Any]:
        """Parameters of the kernels, by name."""
        return {
            "position_steps": self.positions,
            "angle_steps": self.steps,
            "ANGLES": self.kind,
        }


def require(condition: bool, what: str) -> None:
    """Refuse a direct call of the operator that does not fit its schema."""
    if not condition:
        raise RuntimeError(f"tightrope: {what}")


def views_of(xs: Sequence[torch.Tensor], form: Form) -> list[View]:
    """q and k as their layout sees them, which share rows, tokens and channels."""
    require(form.layout < len(BY_CODE), "layout")
    require(form.direction <= 2, "direction")
    layout = BY_CODE[form.layout]
    first = xs[0]
    require(first.dtype in _FLOATING, "dtype of x")
    for x in xs:
        require(
            x.dim() == layout.dims and x.dtype == first.dtype and x.device == first.device,
            "q and k must share a dtype and fit the layout",
        )
    views = [view_of(x, layout) for x in xs]
    rows, _, tokens, channels = views[0].sizes
    for view in views:
        require(
            (view.rows, view.tokens, view.channels) == (rows, tokens, channels),
            "q and k must share rows, tokens and channels",
        )
    return views


def source_of(
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    form: Form,
    views: Sequence[View],
    device: torch.device,
) -> Source:
    """Words or tables, and positions, checked against what they turn."""
    vector = 0
    if form.source == WORDS:
        for words in (primary, secondary):
            require(
                words is None
                or (
                    words.dim() == 4
                    and words.dtype == torch.int64
                    and words.is_contiguous()
                    and words.device == device
                    and words.shape == primary.shape
                ),
                "words must be contiguous int64 [axes, rows|1, heads|1, pairs]",
            )
        axes, rows, heads, pairs = primary.shape
        require(axes >= 1, "words must have an axis")
        steps = AngleSteps(rows=rows, heads=heads)
    else:
        if secondary is None:
            raise RuntimeError("tightrope: cosines without sines")
        for table in (primary, secondary):
            require(
                table.dim() == 4
                and table.dtype in _FLOATING
                and table.dtype == primary.dtype
                and table.device == device,
                "tables must be [rows|1, heads|1, length, width] of one dtype",
            )
        require(primary.shape == secondary.shape, "tables must share a shape")
        axes = 1
        rows, heads, length, width = primary.shape
        kind = SOURCES[form.source]
        pairs = width if kind == "half" else width // 2
        step = 2 if kind == "repeat" else 1
        both = [broadcast_strides(table) for table in (primary, secondary)]
        # Neighbours that hold the same are a stride of two.
        both = [(*steps[:3], (steps[3] or 1) * step) for steps in both]
        vector = vector_of((primary, secondary), both)
        cos, sin = [steps_of(found, vector or 1) for found in both]
        steps = AngleSteps(length=length, cos=cos, sin=sin)
    require(rows in (1, views[0].rows), "rows of angles")
    require(all(heads in (1, view.heads) for view in views), "heads of angles")
    require(form.start + 2 * pairs <= views[0].channels, "rotated channels lie outside the head")
    places = PositionSteps(None, None, None, int(form.ramp))
    kind_of = 0
    if positions is not None:
        tokens = 1 if form.ramp else views[0].tokens
        require(
            positions.dim() == 3 and positions.device == device and positions.shape[0] == axes,
            "positions must be [axes, rows|1, tokens|1]",
        )
        require(positions.shape[1] in (1, views[0].rows), "rows of positions")
        require(positions.shape[2] == tokens, "tokens of positions")
        require(positions.dtype in _POSITIONS, "dtype of positions")
        kind_of = _POSITIONS[positions.dtype]
        require(form.source == WORDS or kind_of == 1, "positions in a table must be integers")
        axis, row, token = broadcast_strides(positions)
        places = PositionSteps(axis, row, token, places.ramp)
    is_words = form.source == WORDS
    angles = AngleKind(
        TABLES=not is_words,
        TABLE_VECTOR=vector,
        AXES=axes,
        POSITIONS=kind_of,
        TURNS=is_words and secondary is not None,
        ROWS=rows != 1,
        HEADS=heads != 1,
    )
    return Source(places, steps, angles, pairs, rows, heads, axes)


def steps_of(strides: Sequence[int], unit: int = 1) -> Steps:
    """Strides, of which all but that of channels count so many elements."""
    row, head, token, channel = strides
    return Steps(row // unit, head // unit, token // unit, channel)


def unit_of(views: Sequence[View], element: int, pointers_aligned: bool) -> int:
    """How many elements strides count: those of an access, where every head begins at one."""
    return ACCESS // element if pointers_aligned and is_aligned(views, element) else 1


def head_of(form: Form, pairs: int, head_dim: int) -> Head:
    """What of a head rotates, and the blocks that hold it; the rest is for the caller to say."""
    return Head(
        DIM=head_dim,
        START=form.start,
        PAIRS=pairs,
        BLOCK_T=None,
        BLOCK_P=shapes.power_of_two(pairs),
        BLOCK_F=shapes.power_of_two(form.start),
        BLOCK_B=shapes.power_of_two(head_dim - form.start - 2 * pairs),
        INTERLEAVED=form.interleaved,
        UNIT=None,
        WIDE=None,
    )


def amplitudes_of(form: Form, amplitude: float, wide: bool) -> Amplitude:
    """The factors of cosines and of sines.

    A float parameter is float32, so float64 crosses as the integer with its bits.
    """
    factor = scale(form.direction, float(amplitude))
    both = factor, factor if form.direction == FORWARD else -factor
    if wide:
        return Amplitude(*struct.unpack("<2q", struct.pack("<2d", *both)))
    return Amplitude(*both)
