"""Cosines and sines of a tile of tokens, from tables or from phase words.

Phase words use the arithmetic of the definition (tightrope/angles.py).

Tiles are [tokens, pairs]. Phases are 64-bit integers; float64 is used only if the rotated tensors or the
positions are float64. Multiply-adds are explicit and the compiler adds no others, so a value has the
same bits in every kernel that computes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .heads import widen

# Globals that kernels read must be tl.constexpr.
NO_TURNS = tl.constexpr(-(2**63))  # a frequency that is NaN or too large (tightrope/angles.py)
NO_PHASE = tl.constexpr(-(2**31))  # a phase in int32 that is NaN; in int64, NO_TURNS
EIGHTH = tl.constexpr(2**61)  # of a turn
HALF_RANGE = tl.constexpr(2.0**63)
LARGEST = tl.constexpr(2.0**62)  # positions must be smaller
RADIANS = tl.constexpr(3.40612158008655459e-19)  # 2π / 2^64
TURN = tl.constexpr(6.283185307179586)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def position_of(positions, axis, row, token, head, POSITIONS: tl.constexpr):
    """Positions of the tokens in a head: an integer part, a fraction in [-1/2, 1/2] in units of 2^-63, and whether
    the position is invalid (NaN, infinite or too large for an integer)."""
    steps = positions.steps
    whole = token * steps.add_index + positions.offset
    fraction = token * 0
    lost = token < 0
    if POSITIONS != 0:
        at = axis * steps.axis + row * steps.row + token * steps.token + head * steps.head
        value = tl.load(positions.ids + at)
        if POSITIONS == 2:
            lost = (tl.abs(value) < LARGEST) == 0
            value = tl.where(lost, 0.0, value)
            # Round to nearest even; the difference to the truncated integer is exact.
            nearest = value.to(tl.int64)
            rest = value - nearest.to(value.dtype)
            odd = (nearest & 1) != 0
            up = (rest > 0.5) | ((rest == 0.5) & odd)
            down = (rest < -0.5) | ((rest == -0.5) & odd)
            step = up.to(tl.int64) - down.to(tl.int64)
            nearest += step
            rest -= step.to(value.dtype)
            fraction = (rest * HALF_RANGE).to(tl.int64)
            whole += nearest
        else:
            whole += value.to(tl.int64)
    return whole, fraction, lost


@triton.jit
def high_product(a, b):
    """floor(a * b / 2^64), at most 2 too small, with the arithmetic of the definition."""
    a_high = a >> 32
    a_low = a & 0xFFFFFFFF
    b_high = b >> 32
    b_low = b & 0xFFFFFFFF
    return a_high * b_high + ((a_high * b_low) >> 32) + ((a_low * b_high) >> 32)


@triton.jit
def cos_sin(phase, WIDE: tl.constexpr):
    """Cosine and sine of phases given in units of 2^-64 turn.

    The remainder after the nearest quarter turn lies in [-π/4, π/4]. In float32 its 48 leading bits are
    split into two numbers without rounding; only the constants and the sum are rounded. The polynomials
    are minimax on that range; before rounding, their errors for sine and cosine are 9.2e-9 and
    7e-10 in float32, and 9e-18 and 4e-19 in float64.
    """
    quarter = (phase + EIGHTH) >> 62
    remainder = phase - (quarter << 62)
    if WIDE:
        x = remainder.to(tl.float64) * RADIANS
        z = x * x
        s = z * 1.59181152632659752e-10 - 2.50511316502351815e-8
        s = z * s + 2.75573161016178744e-6
        s = z * s - 1.98412698367567725e-4
        s = z * s + 8.33333333333094729e-3
        s = z * s - 1.66666666666666646e-1
        c = z * -1.13826236474746046e-11 + 2.08761461465586116e-9
        c = z * c - 2.7557317271145146e-7
        c = z * c + 2.48015872987645608e-5
        c = z * c - 1.38888888888873965e-3
        c = z * c + 4.16666666666666654e-2
        s = x * z * s + x
        c = z * z * c + (z * -0.5 + 1.0)
    else:
        # Convert in 32-bit parts, because converting 64-bit integers is slow.
        high = ((remainder >> 32).to(tl.int32) >> 8).to(tl.float32)
        low = ((remainder >> 16).to(tl.int32) & 0xFFFFFF).to(tl.float32)
        lower = tl.fma(high, -1.04216075e-14, low * 2.23223584e-14)
        x = tl.fma(high, 3.74507039e-07, lower)
        z = x * x
        s = tl.fma(z, -1.95878657e-4, 8.33274815e-3)
        s = tl.fma(z, s, -1.66666647e-1)
        c = tl.fma(z, 2.45479169e-5, -1.38883029e-3)
        c = tl.fma(z, c, 4.16666647e-2)
        s = tl.fma(x * z, s, x)
        c = tl.fma(z * z, c, tl.fma(z, -0.5, 1.0))
    turned = quarter.to(tl.int32)
    swap = (turned & 1) != 0
    one = tl.where(swap, s, c)
    other = tl.where(swap, c, s)
    cosine = tl.where(((turned + 1) & 2) != 0, -one, one)
    sine = tl.where((turned & 2) != 0, -other, other)
    return cosine, sine


@triton.jit
def from_words(angles, tile, head, HEAD: tl.constexpr, ANGLES: tl.constexpr):
    """Cosines and sines from phase words and phases; NaN where a position, frequency or phase is invalid."""
    # A variable, because before Triton 3.8 a field of a group is a number and not a constexpr.
    AXES: tl.constexpr = ANGLES.AXES
    steps = angles.steps
    pair = tl.arange(0, HEAD.BLOCK_P)[None, :]
    there = pair < HEAD.PAIRS
    gone = (tile.token < 0)[:, None]
    words = angles.primary
    # The heads may share phase words but neither phases nor positions.
    word_head = tl.minimum(head, steps.heads - 1)
    if ANGLES.PHASES:
        words = angles.secondary
        of = steps.phase
        start = (tile.row * of.row + tile.token * of.token)[:, None] + head * of.head
        given = tl.load(angles.primary + start + pair * of.channel, mask=there, other=0)
        phase = given.to(tl.int64)
        if given.dtype.primitive_bitwidth == 32:
            gone = gone | (phase == NO_PHASE)
            phase = phase << 32
        else:
            gone = gone | (phase == NO_TURNS)
    for axis in tl.static_range(AXES):
        whole, fraction, lost = position_of(
            angles.positions, axis, tile.row, tile.token, head, ANGLES.POSITIONS
        )
        at = axis * steps.rows * steps.heads * HEAD.PAIRS + word_head * HEAD.PAIRS + pair
        if ANGLES.ROWS:
            at = at + (tile.row * steps.heads * HEAD.PAIRS)[:, None]
        word = tl.load(words + at, mask=there, other=0)
        part = whole[:, None] * word
        if ANGLES.POSITIONS == 2:
            part += 2 * high_product(fraction[:, None], word)
            gone = gone | lost[:, None]
        if ANGLES.TURNS:
            turn = tl.load(angles.secondary + at, mask=there, other=0)
            gone = gone | (turn == NO_TURNS)
            if ANGLES.POSITIONS == 2:
                part += 2 * (fraction[:, None] * turn)
        if axis == 0 and not ANGLES.PHASES:
            phase = part
        else:
            phase += part
    c, s = cos_sin(phase, HEAD.WIDE)
    if ANGLES.TURNS or ANGLES.POSITIONS == 2 or ANGLES.PHASES:
        nan = float("nan")
        c = tl.where(gone, nan, c)
        s = tl.where(gone, nan, s)
    return c, s


@triton.jit
def from_tables(angles, tile, head, HEAD: tl.constexpr, ANGLES: tl.constexpr):
    """Cosines and sines of both channels of the pairs from tables; NaN where a position lies outside the tables."""
    steps = angles.steps
    at, _, _ = position_of(angles.positions, 0, tile.row, tile.token, 0, ANGLES.POSITIONS)
    found = (at >= 0) & (at < steps.length)
    pair = tl.arange(0, HEAD.BLOCK_P)[None, :]
    mask = found[:, None] & (pair < HEAD.PAIRS)
    cos_at = _entry(steps.cos, tile.row, head, at, pair)
    sin_at = _entry(steps.sin, tile.row, head, at, pair)
    c = _entries(angles.primary + cos_at, found, mask, HEAD.WIDE)
    s = _entries(angles.secondary + sin_at, found, mask, HEAD.WIDE)
    c2 = c
    s2 = s
    if ANGLES.FULL > 0:
        # Neighbours are read with a stride of two entries.
        if HEAD.INTERLEAVED:
            cos_at += steps.cos.channel // 2
            sin_at += steps.sin.channel // 2
        else:
            cos_at = _entry(steps.cos, tile.row, head, at, pair + HEAD.PAIRS)
            sin_at = _entry(steps.sin, tile.row, head, at, pair + HEAD.PAIRS)
        c2 = _entries(angles.primary + cos_at, found, mask, HEAD.WIDE)
        s2 = _entries(angles.secondary + sin_at, found, mask, HEAD.WIDE)
    return c, s, c2, s2


@triton.jit
def _entry(steps, row, head, at, channel):
    """Offset of entries of a table."""
    if steps.channel is not None:
        channel = channel * steps.channel
    return (row * steps.row + head * steps.head + at * steps.token)[:, None] + channel


@triton.jit
def _entries(at, found, mask, WIDE: tl.constexpr):
    """Load entries of a table; NaN where the position lies outside it."""
    # Padding must not be NaN, because sums over a head include it.
    value = widen(tl.load(at, mask=mask, other=0.0), WIDE)
    return tl.where(found[:, None], value, float("nan"))
