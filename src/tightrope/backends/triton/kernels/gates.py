"""P, the positive factors of the channels of a head, by the codes of tightrope.ops.schema."""

from __future__ import annotations

import triton
import triton.language as tl

from . import elementary as of
from .angles import HALF_RANGE, position_of

LOG = tl.constexpr(1)
SLOPE = tl.constexpr(2)


@triton.jit
def place_of(
    positions, row, token, inside, row_stride, token_stride, offset, ramp,
    POSITIONS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Positions of one axis as numbers, in two parts that add up to them, [tokens, 1] each; NaN where
    they are none."""
    whole, fraction, lost = position_of(
        positions, 0, row, token, inside, 0, row_stride, token_stride, offset, ramp, POSITIONS
    )
    if WIDE:
        high = whole.to(tl.float64)
        low = fraction.to(tl.float64) * (1.0 / HALF_RANGE)
    else:
        high = whole.to(tl.float32)
        # What rounding took from an integer is an integer of its own.
        low = (whole - high.to(tl.int64)).to(tl.float32)
        low += fraction.to(tl.float32) * (1.0 / HALF_RANGE)
    if POSITIONS == 2:
        high = tl.where(lost, float("nan"), high)
    return high[:, None], low[:, None]


@triton.jit
def factor(
    gate, at, inside, channel, high, low, FIRST: tl.constexpr, STEP: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, INVERSE: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """P of channels FIRST, FIRST + STEP, …: [tokens, BLOCK].

    Args:
        gate, at, channel: logarithms at [tokens, 1] or slopes at a scalar, and their channel
            stride, unless UNIT.
        high, low: positions, of slopes.
    """
    index = tl.arange(0, BLOCK)[None, :]
    if KIND == SLOPE:
        # The same for every token: a mask of tokens would only make them be loaded for each, and
        # Triton 3.4 refuses a mask that is larger than what it masks.
        mask = index < SIZE
    elif SIZE != BLOCK:
        mask = inside & (index < SIZE)
    else:
        mask = inside
    index = FIRST + index * STEP
    if not UNIT:
        index = index * channel
    value = tl.load(gate + (at + index), mask=mask, other=0.0)
    if INVERSE:
        value = -value
    if WIDE:
        value = value.to(tl.float64)
        if KIND == SLOPE:
            value = value * high + value * low
        y = tl.exp(value)
    else:
        first = value.to(tl.float32)
        rest = first * 0.0
        if value.dtype == tl.float64:
            rest = (value - first.to(tl.float64)).to(tl.float32)
        if KIND == SLOPE:
            # A product of slope and position has more digits than float32, and all of them count.
            product = first * high
            rest = tl.fma(first, high, -product) + tl.fma(first, low, rest * high)
            first = product
        y = of.exp(first)
        # Beyond the range of exp there is nothing to put right, and infinities would make NaN.
        rest = tl.where(tl.abs(first) < 150.0, rest, 0.0)
        y = tl.fma(y, rest, y)
    return y
