"""Check the arguments of an operator and derive the kernel parameters that depend on their shapes.

These checks keep a direct call of the raw operator from reading or writing outside its tensors. The
errors that users see are raised in tightrope.ops.checks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ops.layouts import BY_CODE
from ...ops.schema import EACH, FORWARD, INVERSE, PHASES, SLOPE, SOURCES, WORDS, Options, scale
from . import blocks as shapes
from .groups import Amplitude, AngleKind, AngleSteps, Head, PositionSteps, Steps
from .views import ACCESS, View, broadcast_strides, is_aligned, steps_of, vector_of, view_of

_FLOATING = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_POSITIONS = {torch.int32: 1, torch.int64: 1, torch.float32: 2, torch.float64: 2}


@dataclass(frozen=True)
class Source:
    """Kernel parameters for the source of the angles.

    Attributes:
        positions: strides of the positions.
        steps: sizes and strides of the phase words or tables.
        kind: compile-time constants for the phase words or tables, and for the positions.
        pairs, rows: sizes of the phase words, tables or phases.
        heads: number of heads that have angles of their own, or 1; with phases, that of the phases.
        axes: number of position axes.
        vector: elements of the tables per 16-byte access; 0 if such accesses are impossible, or without tables.
    """

    positions: PositionSteps
    steps: AngleSteps
    kind: AngleKind
    pairs: int
    rows: int
    heads: int
    axes: int
    vector: int

    @property
    def values(self) -> dict[str, Any]:
        """The kernel parameters by name."""
        return {
            "position_steps": self.positions,
            "angle_steps": self.steps,
            "ANGLES": self.kind,
        }


def require(condition: bool, rule: str) -> None:
    """Raise a RuntimeError that states the rule, unless the condition holds."""
    if not condition:
        raise RuntimeError(f"tightrope: {rule}")


def views_of(xs: Sequence[torch.Tensor], options: Options) -> list[View]:
    """Return views of q and k; check that they have equal rows, tokens and channels."""
    require(options.layout < len(BY_CODE), "the layout must be known")
    require(options.direction <= 2, "the direction must be known")
    layout = BY_CODE[options.layout]
    first = xs[0]
    require(first.dtype in _FLOATING, "x must be float16, bfloat16, float32 or float64")
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
    options: Options,
    views: Sequence[View],
    device: torch.device,
) -> Source:
    """Check phase words or tables, and positions, against q and k; derive the kernel parameters."""
    vector = full = 0
    require(options.source < len(SOURCES), "the source must be known")
    require(max(options.rounding, options.back) <= EACH, "the rounding must be known")
    own_rows = own_heads = 1  # of the phases of each token
    if options.source == WORDS:
        axes, rows, heads, pairs = _words(primary, device)
        require(
            secondary is None or _words(secondary, device) == primary.shape,
            "turns must have the shape of phase words",
        )
        steps = AngleSteps(rows=rows, heads=heads)
    elif options.source == PHASES:
        require(
            primary.dim() == 4
            and primary.dtype in (torch.int32, torch.int64)
            and primary.device == device
            and primary.shape[2] == views[0].tokens,
            "phases must be int32 or int64 [rows|1, heads|1, tokens, pairs]",
        )
        own_rows, own_heads, _, pairs = primary.shape
        axes, rows, heads = 0, 1, 1
        if secondary is not None:
            axes, rows, heads, width = _words(secondary, device)
            require(width == pairs, "phases must have the pairs of the phase words")
        steps = AngleSteps(rows=rows, heads=heads, phase=Steps(*broadcast_strides(primary)))
    else:
        if secondary is None:
            raise RuntimeError("tightrope: cosines must come with sines")
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
        kind = SOURCES[options.source]
        pairs = width if kind == "half" else width // 2
        full = 0 if kind != "full" else 1 if options.direction == FORWARD else 2
        require(not full or options.direction != INVERSE, "full tables have no inverse")
        step = 2 if kind == "repeat" or (full and options.interleaved) else 1
        both = [broadcast_strides(table) for table in (primary, secondary)]
        # If the two entries of a pair are neighbours, entries are read with a stride of two.
        both = [(*steps[:3], (steps[3] or 1) * step) for steps in both]
        vector = vector_of((primary, secondary), both)
        cos, sin = map(steps_of, both)
        steps = AngleSteps(length=length, cos=cos, sin=sin)
    require({rows, own_rows} <= {1, views[0].rows}, "angles must have 1 row or those of q")
    require(
        all({heads, own_heads} <= {1, view.heads} for view in views),
        "angles must have 1 head or those of q and k",
    )
    require(options.start + 2 * pairs <= views[0].channels, "rotated channels lie outside the head")
    places = PositionSteps(None, None, None, None, int(options.add_index))
    place_heads = 1
    kind_of = 0
    if positions is not None:
        tokens = 1 if options.add_index else views[0].tokens
        require(
            (positions.dim() == 3 or (positions.dim() == 4 and not options.add_index))
            and positions.device == device
            and positions.shape[0] == axes,
            "positions must be [axes, rows|1, tokens|1] or [axes, rows|1, tokens, heads|1]",
        )
        place_heads = (*positions.shape, 1)[3]
        require(
            all(place_heads in (1, view.heads) for view in views),
            "positions must have 1 head or those of q and k",
        )
        require(
            positions.dim() == 3 or (options.gate != SLOPE and options.source in (WORDS, PHASES)),
            "positions of slopes, or in a table, must have no heads",
        )
        require(positions.shape[1] in (1, views[0].rows), "positions must have 1 row or those of q")
        require(
            positions.shape[2] == tokens, "positions must have the tokens of q, or 1 with add_index"
        )
        require(positions.dtype in _POSITIONS, "positions must be int32, int64, float32 or float64")
        kind_of = _POSITIONS[positions.dtype]
        require(
            options.source in (WORDS, PHASES) or kind_of == 1,
            "positions in a table must be integers",
        )
        axis, row, token, head = (*broadcast_strides(positions), 0)[:4]
        places = PositionSteps(axis, row, token, head, places.add_index)
    angles = AngleKind(
        TABLES=options.source not in (WORDS, PHASES),
        AXES=axes,
        POSITIONS=kind_of,
        TURNS=options.source == WORDS and secondary is not None,
        ROWS=rows != 1,
        HEADS=max(heads, own_heads, place_heads) != 1,
        FULL=full,
        PHASES=options.source == PHASES,
    )
    if options.source == PHASES:
        rows, heads = own_rows, own_heads
    else:
        heads = max(heads, place_heads)
    return Source(places, steps, angles, pairs, rows, heads, axes, vector)


def _words(words: torch.Tensor, device: torch.device) -> torch.Size:
    """Check phase words or turns and return their shape."""
    require(
        words.dim() == 4
        and words.dtype == torch.int64
        and words.is_contiguous()
        and words.device == device,
        "phase words must be contiguous int64 [axes, rows|1, heads|1, pairs]",
    )
    require(words.shape[0] >= 1, "phase words must have an axis")
    return words.shape


def unit_of(views: Sequence[View], element: int, pointers_aligned: bool) -> int:
    """Return a number that divides all strides: the elements of 16 bytes if every head is aligned, else 1."""
    return ACCESS // element if pointers_aligned and is_aligned(views, element) else 1


def head_of(options: Options, pairs: int, head_dim: int) -> Head:
    """Return the constants of a head; the caller fills in BLOCK_T and WIDE."""
    return Head(
        DIM=head_dim,
        START=options.start,
        PAIRS=pairs,
        BLOCK_T=None,
        BLOCK_P=shapes.power_of_two(pairs),
        BLOCK_F=shapes.power_of_two(options.start),
        BLOCK_B=shapes.power_of_two(head_dim - options.start - 2 * pairs),
        INTERLEAVED=options.interleaved,
        WIDE=None,
    )


def amplitudes_of(options: Options, amplitude: float, wide: bool) -> Amplitude:
    """Return the factors of the cosines and of the sines.

    A float parameter of a kernel is float32, so a float64 is passed as an integer with the same bits.
    """
    factor = scale(options.direction, float(amplitude))
    both = factor, factor if options.direction == FORWARD else -factor
    if wide:
        return Amplitude(*struct.unpack("<2q", struct.pack("<2d", *both)))
    return Amplitude(*both)
