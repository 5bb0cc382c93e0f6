"""Gradients of angles and of gates: the first of two stages.

Each program sums one tile of tokens of one row and stores the sum separately. The second stage adds
these sums in float64, in the order of the tiles, which depends only on the shapes. Within a tile
everything is float32 (float64 for float64 tensors); sums over heads are compensated for rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..groups import Positions, Tile
from .acts import add_up
from .angles import HALF_RANGE, RADIANS, TURN, position_of
from .gates import place_of
from .heads import load_pairs, load_segment


@triton.jit
def _add(high, low, x):
    """Add x to (high, low), where low collects the rounding errors of high."""
    total = high + x
    part = total - high
    return total, low + ((high - (total - part)) + (x - part))


@triton.jit
def _tile(tiling, BLOCK_T: tl.constexpr):
    """Number of this program's tile, its row and its tokens; places beyond the end repeat the last token."""
    number = tl.program_id(0).to(tl.int64)
    row = number // tiling.tiles
    token = (number - row * tiling.tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tiling.tokens
    token = tl.minimum(token, tiling.tokens - 1)
    return number, row, Tile(row + token * 0, token, inside)


@triton.jit
def _angle_heads(
    high,
    low,
    first,
    last,
    y,
    grad,
    tile,
    y_steps,
    grad_steps,
    HEAD: tl.constexpr,
):
    """Add u·dv − v·du over heads [first, last) of one operand, for each pair (u, v)."""
    row = tile.row
    token = tile.token
    at = (row * y_steps.row + token * y_steps.token)[:, None]
    grad_at = (row * grad_steps.row + token * grad_steps.token)[:, None]
    for head in range(first, last):
        own = at + head * y_steps.head
        by_own = grad_at + head * grad_steps.head
        u, v = load_pairs(y, own, y_steps.channel, HEAD, HEAD.WIDE)
        du, dv = load_pairs(grad, by_own, grad_steps.channel, HEAD, HEAD.WIDE)
        high, low = _add(high, low, tl.fma(u, dv, -(v * du)))
    return high, low


@triton.jit
def add_angles(
    y,
    z,
    grad_y,
    grad_z,
    primary,
    secondary,
    positions,
    offset,
    by_position,
    by_frequency,
    tiling,
    position_steps,
    angle_steps,
    y_heads,
    z_heads,
    y_steps,
    grad_y_steps,
    z_steps,
    grad_z_steps,
    sign,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
):
    """Sum the gradients of angles over a tile of tokens, and over all heads that share their angles.

    Args:
        primary, secondary: phase words and turns.
        by_position: [axes, heads with own angles, rows, tokens], or None.
        by_frequency: [rows, tiles, axes, heads with own angles, pairs], or None; with phases, their
            gradient, [rows, heads of phases, tokens, pairs].
        tiling, position_steps, angle_steps: Tiling, PositionSteps and AngleSteps.
        y_steps, grad_y_steps, z_steps, grad_z_steps: Steps.
        HEAD, ANGLES: Head and AngleKind.
    """
    # A variable, because before Triton 3.8 a field of a group is a number and not a constexpr.
    AXES: tl.constexpr = ANGLES.AXES
    PAIRS: tl.constexpr = HEAD.PAIRS
    BLOCK_P: tl.constexpr = HEAD.BLOCK_P
    WIDE: tl.constexpr = HEAD.WIDE
    own = tl.program_id(1).to(tl.int64)
    number, at_row, tile = _tile(tiling, HEAD.BLOCK_T)
    inside = tile.inside
    word_rows = angle_steps.rows
    word_heads = angle_steps.heads
    heads = tl.num_programs(1)
    first = 0
    y_last = y_heads
    z_last = z_heads
    if ANGLES.HEADS:
        first = own
        y_last = own + 1
        z_last = own + 1
    high = tl.full((HEAD.BLOCK_T, BLOCK_P), 0.0, tl.float64 if WIDE else tl.float32)
    low = high
    high, low = _angle_heads(high, low, first, y_last, y, grad_y, tile, y_steps, grad_y_steps, HEAD)
    if z is not None:
        high, low = _angle_heads(
            high, low, first, z_last, z, grad_z, tile, z_steps, grad_z_steps, HEAD
        )
    total = (high + low) * sign
    pair = tl.arange(0, BLOCK_P)[None, :]
    if ANGLES.PHASES:
        to = (at_row * heads + own) * tiling.tokens + tile.token
        to = to[:, None] * PAIRS + pair
        tl.store(by_frequency + to, total, mask=inside[:, None] & (pair < PAIRS))
    # Padded pairs have sums of 0, but their phase words would lie out of bounds.
    for axis in tl.static_range(0 if ANGLES.PHASES else AXES):
        at = (axis * word_rows * word_heads + tl.minimum(own, word_heads - 1)) * PAIRS + pair
        if ANGLES.ROWS:
            at = at + at_row * word_heads * PAIRS
        if by_position is not None:
            word = tl.load(primary + at, mask=pair < PAIRS, other=0)
            if WIDE:
                omega = word.to(tl.float64) * RADIANS
            else:
                omega = word.to(tl.float32) * RADIANS
            if ANGLES.TURNS:
                turn = tl.load(secondary + at, mask=pair < PAIRS, other=0)
                omega = omega + turn.to(omega.dtype) * TURN
            to = ((axis * heads + own) * tiling.rows + at_row) * tiling.tokens + tile.token
            tl.store(by_position + to[:, None], add_up(total * omega), mask=inside[:, None])
        if by_frequency is not None:
            whole, fraction, lost = position_of(
                Positions(positions, offset, position_steps),
                axis,
                tile.row,
                tile.token,
                own,
                ANGLES.POSITIONS,
            )
            place = whole.to(total.dtype) + fraction.to(total.dtype) * (1.0 / HALF_RANGE)
            if ANGLES.POSITIONS == 2:
                place = tl.where(lost & inside, float("nan"), place)
            parts = tl.where(inside[:, None], total * place[:, None], 0.0)
            sums = tl.reduce(parts, 0, tl.standard._sum_combine)[None, :]
            to = ((number * ANGLES.AXES + axis) * heads + own) * PAIRS + pair
            tl.store(by_frequency + to, sums, mask=pair < PAIRS)


@triton.jit
def add_gates(
    y,
    grad,
    positions,
    offset,
    sums,
    tiling,
    heads,
    position_steps,
    y_steps,
    grad_steps,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    POSITIONS: tl.constexpr,
    SLOPES: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    OVER_TOKENS: tl.constexpr,
    OVER_CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum y·dy, or position·y·dy for slopes, over a tile of tokens, for one head or over all heads.

    Args:
        sums: [rows, tiles or tokens, heads or 1, channels or 1].
        tiling, position_steps: Tiling and PositionSteps.
        y_steps, grad_steps: Steps.
    """
    own = tl.program_id(1).to(tl.int64)
    number, _, tile = _tile(tiling, BLOCK_T)
    row = tile.row
    token = tile.token
    there = tile.inside[:, None]
    at = (row * y_steps.row + token * y_steps.token)[:, None]
    grad_at = (row * grad_steps.row + token * grad_steps.token)[:, None]
    first = own
    last = own + 1
    if OVER_HEADS:
        last = own + heads
    high = tl.full((BLOCK_T, BLOCK_D), 0.0, tl.float64 if WIDE else tl.float32)
    low = high
    for head in range(first, last):
        value = load_segment(
            y, at + head * y_steps.head, y_steps.channel, 0, HEAD_DIM, BLOCK_D, WIDE
        )
        by_value = load_segment(
            grad,
            grad_at + head * grad_steps.head,
            grad_steps.channel,
            0,
            HEAD_DIM,
            BLOCK_D,
            WIDE,
        )
        high, low = _add(high, low, value * by_value)
    total = high + low
    if SLOPES:
        places = Positions(positions, offset, position_steps)
        one, other = place_of(places, tile, POSITIONS, WIDE)
        total = total * one + total * other
    total = tl.where(there, total, 0.0)
    heads_kept = heads
    if OVER_HEADS:
        heads_kept = heads * 0 + 1
    if OVER_CHANNELS:
        total = add_up(total)
        channel = tl.arange(0, 1)[None, :]
        width = 1
        mask = there
    else:
        channel = tl.arange(0, BLOCK_D)[None, :]
        width = HEAD_DIM
        mask = there & (channel < HEAD_DIM)
    if OVER_TOKENS:
        total = tl.reduce(total, 0, tl.standard._sum_combine)[None, :]
        tl.store(sums + (number * heads_kept + own) * width + channel, total, mask=channel < width)
    else:
        to = ((row * tiling.tokens + token) * heads_kept + own)[:, None] * width + channel
        tl.store(sums + to, total, mask=mask)
