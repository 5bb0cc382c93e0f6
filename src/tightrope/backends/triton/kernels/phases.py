"""Phases from data: phase words of angles, their running sums over tokens, and the gradients of the sums.

Each lane of a program walks over one chunk of tokens of one row and head, for all pairs of a block. A
long sequence takes three launches: the sum of each chunk; the sums of these; and the results, for which
each chunk starts from the sum of those before it.

Phase words come from the same float64 operations as in the definition (words_from in
tightrope/angles.py), and integers add up to the same bits in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .angles import LARGEST, NO_PHASE, NO_TURNS

WHOLE = tl.constexpr(2.0**52)  # from here on every float64 is an integer
EXACT = tl.constexpr(2.0**50)
UNITS = tl.constexpr(2.0**64)  # of a turn
# 1 / 2π, and its parts of 24, 24 and 53 bits.
TURNS = tl.constexpr(0.15915494309189535)
FIRST = tl.constexpr(0.15915493667125702)
SECOND = tl.constexpr(6.4206382432985265e-09)
THIRD = tl.constexpr(7.34273885092955e-17)

# Kinds of sums.
GIVEN = tl.constexpr(0)
RUNNING = tl.constexpr(1)
BACK = tl.constexpr(2)
TOTALS = tl.constexpr(3)


@triton.jit
def _nearest(x):
    """Round to the nearest integer, ties to even."""
    size = tl.abs(x)
    whole = (size + WHOLE) - WHOLE
    return tl.where(size < WHOLE, tl.where(x < 0, -whole, whole), x)


@triton.jit
def words_of(value):
    """Phase words of angles in radians, and a mask of those that are NaN, infinite or too large.

    The products inside the multiply-adds are exact, so these round like the definition.
    """
    omega = value.to(tl.float64)
    scaled = omega * TURNS
    size = tl.abs(scaled)
    fraction = (scaled - _nearest(scaled)) * LARGEST
    units = _nearest(fraction)
    if value.dtype.primitive_bitwidth == 64:
        upper = omega.to(tl.float32).to(tl.float64)
        lower = omega - upper
        error = tl.fma(upper, FIRST, -scaled) + tl.fma(upper, SECOND, lower * FIRST)
        error += tl.fma(lower, SECOND, omega * THIRD)
    else:
        # No angle has a lower part.
        error = tl.fma(omega, SECOND, tl.fma(omega, FIRST, -scaled)) + omega * THIRD
    fine = _nearest(tl.fma(error, UNITS, (fraction - units) * 4))
    word = tl.where(size < LARGEST, units, 0.0).to(tl.int64) << 2
    word += tl.where(size < EXACT, fine, 0.0).to(tl.int64)
    return word, (size < LARGEST) == 0


@triton.jit
def marked(word, lost, BITS: tl.constexpr):
    """Round phases to BITS bits and mark those that are lost; half a turn moves up by one unit."""
    MARKER: tl.constexpr = NO_TURNS if BITS == 64 else NO_PHASE
    if BITS == 32:
        word = (word + 2147483648) >> 32
    return tl.where(lost, MARKER, word + (word == MARKER).to(tl.int64))


@triton.jit
def _add(
    x,
    out,
    place,
    total,
    lost,
    some,
    reset,
    row,
    walk,
    steps,
    mask,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Add up the next `COUNT` tokens of each lane and store their results; return what has changed."""
    x_step, out_step, reset_steps = steps
    values = ()
    news = ()
    for i in tl.static_range(COUNT):
        there = place + i < walk.tokens
        values += (tl.load(x + i * x_step, mask=mask & there, other=0),)
        if reset is not None:
            # Backwards, a sum ends with the token that a reset begins with.
            token = walk.tokens - place - i if KIND == BACK else place + i
            at = reset + row * reset_steps.row + token * reset_steps.token
            news += (tl.load(at, mask=there & (token < walk.tokens), other=0),)
    for i in tl.static_range(COUNT):
        if reset is not None:
            total = tl.where(news[i], 0, total)
            lost = lost & (news[i] == 0)
            some = some | news[i]
        if KIND == GIVEN or KIND == RUNNING:
            word, gone = words_of(values[i])
            if KIND == RUNNING:
                total += word
                lost = lost | gone
                word = total
                gone = lost
            if out is not None:
                result = marked(word, gone, out.dtype.element_ty.primitive_bitwidth)
        else:
            total += values[i].to(total.dtype)
            result = total
        if out is not None:
            there = mask & (place + i < walk.tokens)
            tl.store(out + i * out_step, result.to(out.dtype.element_ty), mask=there)
    return total, lost, some


@triton.jit
def add_tokens(
    x,
    start,
    reset,
    before,
    out,
    last,
    totals,
    restarts,
    walk,
    x_steps,
    start_steps,
    reset_steps,
    out_steps,
    KIND: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Store the phases of chunks of tokens, or the gradients of their increments, or sums of chunks.

    Args:
        x: what to add up, see KIND.
        start: the sum before the first token, or None.
        reset: where a new sum starts, or None.
        before: sums of all chunks up to each one, [rows, heads, chunks, parts, pairs]; None if there
            is one chunk. Phases have two parts: phase words, and how many are lost; gradients have one.
        out: the results, or None.
        last: the sum after the last token, or None.
        totals: the sum of each chunk since its last reset, like `before`, or None. That of the first
            chunk includes `start`.
        restarts: whether each chunk has a reset, [rows, chunks], or None.
        walk: Walk.
        x_steps, start_steps, reset_steps, out_steps: Steps.
        KIND: GIVEN for angles that are not added up, RUNNING for increments, BACK for gradients, which
            are added from the last token to the first, or TOTALS for the totals of chunks.
    """
    PARTS: tl.constexpr = 2 if KIND == RUNNING else 1
    FLOAT: tl.constexpr = KIND == BACK or (KIND == TOTALS and x.dtype.element_ty == tl.float64)
    lane = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)[:, None]
    pair = tl.program_id(1).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    inside = lane < walk.lanes
    mask = inside & (pair < walk.pairs)
    # A lane beyond the last one is that one again: resets are loaded without `mask`.
    lane = tl.minimum(lane, walk.lanes - 1)
    # Heads vary fastest, because they are usually adjacent in memory.
    rest = lane // walk.heads
    head = lane - rest * walk.heads
    row = rest // walk.chunks
    chunk = rest - row * walk.chunks
    # The place of a token is its distance from the token that is added first.
    place = chunk * walk.chunk
    token = place
    x_step = x_steps.token
    out_step = out_steps.token
    if KIND == BACK:
        token = walk.tokens - 1 - place
        x_step = -x_step
        out_step = -out_step
    x += row * x_steps.row + head * x_steps.head + token * x_steps.token + pair * x_steps.channel
    if out is not None:
        out += row * out_steps.row + head * out_steps.head + token * out_steps.token
        out += pair * out_steps.channel
    at = ((row * walk.heads + head) * walk.chunks + chunk) * (PARTS * walk.pairs) + pair
    total = tl.full((BLOCK_L, BLOCK_P), 0, tl.float64 if FLOAT else tl.int64)
    lost = total != 0  # of phases
    some = lane < 0  # resets
    if start is not None:
        start += row * start_steps.row + head * start_steps.head + pair * start_steps.channel
        total = tl.load(start, mask=mask & (chunk == 0), other=0).to(total.dtype)
        if KIND == RUNNING:
            lost = total == NO_TURNS
    if before is not None:
        later = mask & (chunk > 0)
        own = before + at - PARTS * walk.pairs
        total = tl.where(later, tl.load(own, mask=later, other=0), total)
        if KIND == RUNNING:
            lost = lost | (tl.load(own + walk.pairs, mask=later, other=0) != 0)
    # The loads of eight tokens come first, so that they do not wait for each other.
    steps = (x_step, out_step, reset_steps)
    for _ in range(walk.chunk // 8):
        total, lost, some = _add(
            x, out, place, total, lost, some, reset, row, walk, steps, mask, KIND, 8
        )
        x += 8 * x_step
        place += 8
        if out is not None:
            out += 8 * out_step
    for _ in range(walk.chunk % 8):
        total, lost, some = _add(
            x, out, place, total, lost, some, reset, row, walk, steps, mask, KIND, 1
        )
        x += x_step
        place += 1
        if out is not None:
            out += out_step
    if totals is not None:
        tl.store(totals + at, total, mask=mask)
        if KIND == RUNNING:
            tl.store(totals + at + walk.pairs, lost.to(tl.int64), mask=mask)
    if restarts is not None:
        here = inside & (head + tl.program_id(1) == 0)
        tl.store(restarts + row * walk.chunks + chunk, some, mask=here)
    if last is not None:
        if KIND == RUNNING:
            result = marked(total, lost, 64)
        else:
            result = total
            if reset is not None:
                # A state has no gradient beyond a reset at the first token.
                result = tl.where(tl.load(reset + row * reset_steps.row), 0, total)
        at = (row * walk.heads + head) * walk.pairs + pair
        end = mask & (chunk == walk.chunks - 1)
        tl.store(last + at, result.to(last.dtype.element_ty), mask=end)
