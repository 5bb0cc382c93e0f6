"""Gradients by angles and by gates: the first of two stages.

A program sums one tile of tokens of one row into a place of its own, and the second stage adds these up
in float64, in the order of the tiles: which the shapes alone decide. Within a tile all is float32 (float64
for float64); sums over heads keep what each addition rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .acts import add_up
from .angles import HALF_RANGE, RADIANS, TURN, position_of
from .gates import place_of
from .heads import load_pairs, load_segment


@triton.jit
def _add(high, low, x):
    """(high, low) + x, of which low is what high has no digits for."""
    total = high + x
    part = total - high
    return total, low + ((high - (total - part)) + (x - part))


@triton.jit
def _angle_heads(
    high, low, first, last, y, grad, row, token, y_row, y_head, y_token, y_channel,
    grad_row, grad_head, grad_token, grad_channel,
    START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr, UNIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add y·dz − z·dy of heads [first, last) of one operand."""
    at = ((row * y_row + token * y_token) * VECTOR)[:, None]
    grad_at = ((row * grad_row + token * grad_token) * VECTOR)[:, None]
    for head in range(first, last):
        u, v = load_pairs(
            y, at + head * y_head * VECTOR, y_channel, START, PAIRS, BLOCK_T, BLOCK_P, INTERLEAVED,
            UNIT, WIDE,
        )  # fmt: skip
        du, dv = load_pairs(
            grad, grad_at + head * grad_head * VECTOR, grad_channel, START, PAIRS, BLOCK_T, BLOCK_P,
            INTERLEAVED, UNIT, WIDE,
        )  # fmt: skip
        high, low = _add(high, low, tl.fma(u, dv, -(v * du)))
    return high, low


@triton.jit
def add_angles(
    y, z, grad_y, grad_z, words, turns, positions, offset, by_position, by_frequency,
    ramp, rows, tokens, tiles, y_heads, z_heads, word_rows, word_heads,
    position_axis, position_row, position_token,
    y_row, y_head, y_token, y_channel, grad_y_row, grad_y_head, grad_y_token, grad_y_channel,
    z_row, z_head, z_token, z_channel, grad_z_row, grad_z_head, grad_z_token, grad_z_channel,
    sign,
    START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr, UNIT: tl.constexpr, VECTOR: tl.constexpr, AXES: tl.constexpr,
    POSITIONS: tl.constexpr, TURNS: tl.constexpr, ROW_ANGLES: tl.constexpr,
    HEAD_ANGLES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums by angles of a tile of tokens and, where they have angles of their own, one head.

    by_position [axes, word_heads, rows, tokens] and by_frequency [rows, tiles, axes, word_heads, pairs]
    may be None.
    """
    tile = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1).to(tl.int64)
    at_row = tile // tiles
    token = (tile - at_row * tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    row = at_row + token * 0
    first = 0
    y_last = y_heads
    z_last = z_heads
    if HEAD_ANGLES:
        first = own
        y_last = own + 1
        z_last = own + 1
    high = tl.full((BLOCK_T, BLOCK_P), 0.0, tl.float64 if WIDE else tl.float32)
    low = high
    high, low = _angle_heads(
        high, low, first, y_last, y, grad_y, row, token, y_row, y_head, y_token, y_channel,
        grad_y_row, grad_y_head, grad_y_token, grad_y_channel,
        START, PAIRS, BLOCK_T, BLOCK_P, INTERLEAVED, UNIT, VECTOR, WIDE,
    )  # fmt: skip
    if z is not None:
        high, low = _angle_heads(
            high, low, first, z_last, z, grad_z, row, token, z_row, z_head, z_token, z_channel,
            grad_z_row, grad_z_head, grad_z_token, grad_z_channel,
            START, PAIRS, BLOCK_T, BLOCK_P, INTERLEAVED, UNIT, VECTOR, WIDE,
        )  # fmt: skip
    total = (high + low) * sign
    pair = tl.arange(0, BLOCK_P)[None, :]
    # A padded pair has sums of 0, but its words lie beyond their end.
    for axis in tl.static_range(AXES):
        at = (axis * word_rows * word_heads + own) * PAIRS + pair
        if ROW_ANGLES:
            at = at + at_row * word_heads * PAIRS
        if by_position is not None:
            word = tl.load(words + at, mask=pair < PAIRS, other=0)
            if WIDE:
                omega = word.to(tl.float64) * RADIANS
            else:
                omega = word.to(tl.float32) * RADIANS
            if TURNS:
                turn = tl.load(turns + at, mask=pair < PAIRS, other=0)
                omega = omega + turn.to(omega.dtype) * TURN
            to = ((axis * word_heads + own) * rows + at_row) * tokens + token
            tl.store(by_position + to[:, None], add_up(total * omega), mask=inside[:, None])
        if by_frequency is not None:
            whole, fraction, lost = position_of(
                positions, axis, row, token, position_axis, position_row, position_token,
                offset, ramp, POSITIONS,
            )  # fmt: skip
            place = whole.to(total.dtype) + fraction.to(total.dtype) * (1.0 / HALF_RANGE)
            if POSITIONS == 2:
                place = tl.where(lost & inside, float("nan"), place)
            parts = tl.where(inside[:, None], total * place[:, None], 0.0)
            sums = tl.reduce(parts, 0, tl.standard._sum_combine)[None, :]
            to = ((tile * AXES + axis) * word_heads + own) * PAIRS + pair
            tl.store(by_frequency + to, sums, mask=pair < PAIRS)


@triton.jit
def add_gates(
    y, grad, positions, offset, sums, ramp, rows, tokens, tiles, heads, position_row, position_token,
    y_row, y_head, y_token, y_channel, grad_row, grad_head, grad_token, grad_channel,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    VECTOR: tl.constexpr, POSITIONS: tl.constexpr, SLOPES: tl.constexpr,
    OVER_HEADS: tl.constexpr, OVER_TOKENS: tl.constexpr, OVER_CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Σ y·dy or, of slopes, Σ p·y·dy of a tile of tokens, and of one head or of all.

    sums is [rows, tiles or tokens, heads or 1, channels or 1].
    """
    tile = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1).to(tl.int64)
    at_row = tile // tiles
    token = (tile - at_row * tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    row = at_row + token * 0
    there = inside[:, None]
    at = ((row * y_row + token * y_token) * VECTOR)[:, None]
    grad_at = ((row * grad_row + token * grad_token) * VECTOR)[:, None]
    first = own
    last = own + 1
    if OVER_HEADS:
        last = own + heads
    high = tl.full((BLOCK_T, BLOCK_D), 0.0, tl.float64 if WIDE else tl.float32)
    low = high
    for head in range(first, last):
        value = load_segment(
            y, at + head * y_head * VECTOR, y_channel, 0, HEAD_DIM, BLOCK_D, UNIT, WIDE
        )
        by_value = load_segment(
            grad, grad_at + head * grad_head * VECTOR, grad_channel, 0, HEAD_DIM, BLOCK_D, UNIT,
            WIDE,
        )  # fmt: skip
        high, low = _add(high, low, value * by_value)
    total = high + low
    if SLOPES:
        one, other = place_of(
            positions, row, token, position_row, position_token, offset, ramp, POSITIONS,
            WIDE,
        )  # fmt: skip
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
        tl.store(sums + (tile * heads_kept + own) * width + channel, total, mask=channel < width)
    else:
        to = ((row * tokens + token) * heads_kept + own)[:, None] * width + channel
        tl.store(sums + to, total, mask=mask)
