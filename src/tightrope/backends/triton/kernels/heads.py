"""Load and store the channels of one head for a tile of tokens.

A head consists of up to four tiles: the first and the second members of its pairs, and the channels
before and after the rotated slice. `at` is the offset of the head for each token, [tokens, 1]; `channel` the
stride of the channels, None for 1. Loads have no token mask to wait for: places beyond the last token read that
token again. Stores are masked by `inside`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x, WIDE: tl.constexpr):
    """Convert to the dtype of the computation: float64 if WIDE, otherwise float32."""
    # A single return, because the compiler also compiles what follows a constant `if`.
    if WIDE:
        value = x.to(tl.float64)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def narrow(x, dtype: tl.constexpr, BITS: tl.constexpr):
    """Convert to the dtype of the result, rounding to nearest even.

    Under Triton's interpreter a conversion to bfloat16 truncates; BITS then selects rounding by integer
    operations.
    """
    if BITS and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        # A NaN keeps its upper half, and stays one.
        kept = tl.where(x != x, bits | 0x400000, up)
        stored = (kept >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        stored = x.to(dtype)
    return stored


@triton.jit
def encoded(x, scale, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Divide by a scale, limit to the range of a format of 8 bits, and round to nearest even, as bytes.

    Args:
        FORMAT: 1 for float8_e4m3fn, 2 for float8_e5m2.
        BITS: whether to round with integer operations, for targets that cannot convert.
    """
    FRACTION: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    MOST: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0
    NORMAL: tl.constexpr = 0.015625 if FORMAT == 1 else 0.00006103515625
    # 2^23 of the least number: adding them rounds to multiples of it.
    UNITS: tl.constexpr = 16384.0 if FORMAT == 1 else 128.0
    y = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 1.0, tl.float32) * scale)
    if BITS:
        y = tl.where(y > MOST, MOST, tl.where(y < -MOST, -MOST, y))
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        DROPPED: tl.constexpr = 23 - FRACTION
        half = (1 << (DROPPED - 1)) - 1 + ((size >> DROPPED) & 1)
        code = ((size + half) >> DROPPED) - ((127 - BIAS) << FRACTION)
        few = (tl.abs(y) + UNITS).to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(tl.abs(y) < NORMAL, few, code)
        code = tl.where(y != y, 0x7F, code | ((bits >> 24) & 0x80))
        found = code.to(tl.uint8)
    elif FORMAT == 1:
        # The only instructions for this limit the result: cvt.rn.satfinite.
        found = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        found = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return found


@triton.jit
def load_segment(
    x,
    at,
    channel,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Load channels [FIRST, FIRST + SIZE), padded with 0: [tokens, BLOCK]."""
    index = tl.arange(0, BLOCK)[None, :]
    there = index < SIZE
    index = index + FIRST
    if channel is not None:
        index = index * channel
    if SIZE != BLOCK:
        value = tl.load(x + (at + index), mask=there, other=0.0)
    else:
        value = tl.load(x + (at + index))
    return widen(value, WIDE)


@triton.jit
def store_segment(
    x,
    at,
    inside,
    channel,
    value,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """Store channels [FIRST, FIRST + SIZE); the inverse of `load_segment`."""
    index = tl.arange(0, BLOCK)[None, :]
    mask = inside
    if SIZE != BLOCK:
        mask = inside & (index < SIZE)
    index = index + FIRST
    if channel is not None:
        index = index * channel
    tl.store(x + (at + index), narrow(value, x.dtype.element_ty, BITS), mask=mask)


@triton.jit
def load_pairs(x, at, channel, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """Load the first and second members of the pairs; interleaved pairs are split in registers."""
    START: tl.constexpr = HEAD.START
    PAIRS: tl.constexpr = HEAD.PAIRS
    BLOCK: tl.constexpr = HEAD.BLOCK_P
    if HEAD.INTERLEAVED:
        both = load_segment(x, at, channel, START, 2 * PAIRS, 2 * BLOCK, WIDE)
        u, v = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        u = load_segment(x, at, channel, START, PAIRS, BLOCK, WIDE)
        v = load_segment(x, at, channel, START + PAIRS, PAIRS, BLOCK, WIDE)
    return u, v


@triton.jit
def store_pairs(x, at, inside, channel, u, v, HEAD: tl.constexpr, BITS: tl.constexpr):
    """Store the members of the pairs; the inverse of `load_pairs`."""
    START: tl.constexpr = HEAD.START
    PAIRS: tl.constexpr = HEAD.PAIRS
    BLOCK: tl.constexpr = HEAD.BLOCK_P
    if HEAD.INTERLEAVED:
        both = tl.reshape(tl.join(u, v), (u.shape[0], 2 * BLOCK))
        store_segment(x, at, inside, channel, both, START, 2 * PAIRS, 2 * BLOCK, BITS)
    else:
        store_segment(x, at, inside, channel, u, START, PAIRS, BLOCK, BITS)
        store_segment(x, at, inside, channel, v, START + PAIRS, PAIRS, BLOCK, BITS)


@triton.jit
def turn(u, v, by, dtype: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr):
    """Rotate the pairs (u, v) by a Turn.

    Args:
        dtype: the dtype of the rotated tensor, to which products round with ROUNDING 2.
        ROUNDING: index into ROUNDINGS of tightrope._rounding.
    """
    if ROUNDING == 0:
        y = tl.fma(u, by.c, -(v * by.s))
        z = tl.fma(v, by.c2, u * by.s2)
    elif ROUNDING == 1:
        y = u * by.c - v * by.s
        z = v * by.c2 + u * by.s2
    else:
        y = rounded(u * by.c, dtype, BITS) - rounded(v * by.s, dtype, BITS)
        z = rounded(v * by.c2, dtype, BITS) + rounded(u * by.s2, dtype, BITS)
    return y, z


@triton.jit
def rounded(x, dtype: tl.constexpr, BITS: tl.constexpr):
    """Round to a narrower dtype; the result keeps the dtype of x."""
    return narrow(x, dtype, BITS).to(x.dtype)
