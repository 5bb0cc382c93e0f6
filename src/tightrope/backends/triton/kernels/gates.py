"""The factors of P, by the gate codes of tightrope.ops.schema."""

from __future__ import annotations

import triton
import triton.language as tl

from . import elementary as of
from .angles import HALF_RANGE, position_of
from .heads import widen

LOG = tl.constexpr(1)
SLOPE = tl.constexpr(2)
FACTOR = tl.constexpr(3)


@triton.jit
def place_of(positions, tile, POSITIONS: tl.constexpr, WIDE: tl.constexpr):
    """Positions of one axis as a sum of two floats, [tokens, 1] each; NaN where they are invalid."""
    whole, fraction, lost = position_of(positions, 0, tile.row, tile.token, 0, POSITIONS)
    if WIDE:
        high = whole.to(tl.float64)
        low = fraction.to(tl.float64) * (1.0 / HALF_RANGE)
    else:
        high = whole.to(tl.float32)
        # The rounding error of an integer is an integer.
        low = (whole - high.to(tl.int64)).to(tl.float32)
        low += fraction.to(tl.float32) * (1.0 / HALF_RANGE)
        # The exponential is corrected for `low` to first order, so it must be small: a fraction goes into `high`.
        total = high + low
        low -= total - high
        high = total
    if POSITIONS == 2:
        high = tl.where(lost, float("nan"), high)
    return high[:, None], low[:, None]


@triton.jit
def factor(
    gate,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """P, or 1 / P for an inverse call, of channels [FIRST, FIRST + SIZE), padded: [tokens, BLOCK].

    Args:
        gate: a Gate whose offset is a scalar for slopes, and else [tokens, 1].
    """
    index = tl.arange(0, BLOCK)[None, :]
    there = index < SIZE
    index = FIRST + index
    if gate.channel is not None:
        index = index * gate.channel
    if SIZE != BLOCK:
        # What may divide must not be 0.
        PADDING: tl.constexpr = 1.0 if KIND.GATE == FACTOR else 0.0
        value = tl.load(gate.of + (gate.at + index), mask=there, other=PADDING)
    else:
        value = tl.load(gate.of + (gate.at + index))
    if KIND.DIRECTION == 2 and KIND.GATE != FACTOR:
        value = -value
    if KIND.GATE == FACTOR:
        y = widen(value, WIDE)
        if KIND.DIRECTION == 2:
            if WIDE:
                y = 1.0 / y
            else:
                y = tl.div_rn(tl.full(y.shape, 1.0, tl.float32), y)
    elif WIDE:
        value = value.to(tl.float64)
        if KIND.GATE == SLOPE:
            value = value * gate.high + value * gate.low
        y = tl.exp(value)
    elif KIND.GATE == SLOPE or value.dtype == tl.float64:
        first = value.to(tl.float32)
        if value.dtype == tl.float64:
            rest = (value - first.to(tl.float64)).to(tl.float32)
        if KIND.GATE == SLOPE:
            # The exponent, slope times position, needs more digits than float32 has.
            product = first * gate.high
            lower = first * gate.low
            if value.dtype == tl.float64:
                lower = tl.fma(first, gate.low, rest * gate.high)
            rest = tl.fma(first, gate.high, -product) + lower
            first = product
        y = of.exp(first)
        # Outside the range of exp no correction is needed, and infinities would give NaN.
        rest = tl.where(tl.abs(first) < 150.0, rest, 0.0)
        y = tl.where(y < float("inf"), tl.fma(y, rest, y), y)
    else:
        y = of.exp(value.to(tl.float32))
    return y
