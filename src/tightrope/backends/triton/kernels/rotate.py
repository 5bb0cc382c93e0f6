"""The operator y = P · a · R(φ) · f(x), its transpose and its inverse, as one kernel.

Each program handles a tile of tokens, which may span rows, and a range of heads of q and of k. It
computes the cosines and sines of its tokens once and rotates all its heads by them, unless each head
has its own angles. If registers suffice, two heads are loaded at a time, so that the second does
not wait for the first.

An absent argument is None, which is a compile-time constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..groups import Angles, Common, Gate, Operand, Places, Positions, Turn
from .acts import RMS_NORM, SOFTMAX, act, add_up, highest, slope
from .angles import from_tables, from_words
from .elementary import exp
from .gates import SLOPE, factor, place_of
from .heads import encoded, load_pairs, load_segment, rounded, store_pairs, store_segment, turn
from .slots import slot_of, tile_of


@triton.jit
def load_head(x, at, channel, HEAD: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr):
    """Load the tiles of a head: both members of its pairs, and the channels before and after them.

    An absent tile is that of the first members once more: what is computed from it is not stored, so that the
    compiler leaves it out.
    """
    START: tl.constexpr = HEAD.START
    END: tl.constexpr = HEAD.START + 2 * HEAD.PAIRS
    u, v = load_pairs(x, at, channel, HEAD, WIDE)
    front = u
    back = u
    if REST and START > 0:
        front = load_segment(x, at, channel, 0, START, HEAD.BLOCK_F, WIDE)
    if REST and END < HEAD.DIM:
        back = load_segment(x, at, channel, END, HEAD.DIM - END, HEAD.BLOCK_B, WIDE)
    return u, v, front, back


@triton.jit
def store_head(
    x, at, inside, channel, tiles, HEAD: tl.constexpr, REST: tl.constexpr, BITS: tl.constexpr
):
    """Store the tiles of a head; the inverse of `load_head`."""
    u, v, front, back = tiles
    START: tl.constexpr = HEAD.START
    END: tl.constexpr = HEAD.START + 2 * HEAD.PAIRS
    store_pairs(x, at, inside, channel, u, v, HEAD, BITS)
    if REST and START > 0:
        store_segment(x, at, inside, channel, front, 0, START, HEAD.BLOCK_F, BITS)
    if REST and END < HEAD.DIM:
        store_segment(x, at, inside, channel, back, END, HEAD.DIM - END, HEAD.BLOCK_B, BITS)


@triton.jit
def times(tiles, by):
    """Multiply the tiles of a head by four others."""
    u, v, front, back = tiles
    wu, wv, wf, wb = by
    return u * wu, v * wv, front * wf, back * wb


@triton.jit
def plus(tiles, others):
    """Add four tiles to the tiles of a head."""
    u, v, front, back = tiles
    du, dv, df, db = others
    return u + du, v + dv, front + df, back + db


@triton.jit
def over_head(tiles, HEAD: tl.constexpr):
    """Sum over all channels of a head, [tokens, 1]."""
    u, v, front, back = tiles
    total = add_up(u + v)
    if HEAD.START > 0:
        total += add_up(front)
    if HEAD.START + 2 * HEAD.PAIRS < HEAD.DIM:
        total += add_up(back)
    return total


@triton.jit
def soft(tiles, HEAD: tl.constexpr):
    """Softmax over all channels of a head."""
    u, v, front, back = tiles
    START: tl.constexpr = HEAD.START
    BEHIND: tl.constexpr = HEAD.DIM - START - 2 * HEAD.PAIRS
    lowest = float("-inf")
    pair = tl.arange(0, HEAD.BLOCK_P)[None, :] < HEAD.PAIRS
    u = tl.where(pair, u, lowest)
    v = tl.where(pair, v, lowest)
    top = tl.maximum(highest(u), highest(v))
    if START > 0:
        front = tl.where(tl.arange(0, HEAD.BLOCK_F)[None, :] < START, front, lowest)
        top = tl.maximum(top, highest(front))
    if BEHIND > 0:
        back = tl.where(tl.arange(0, HEAD.BLOCK_B)[None, :] < BEHIND, back, lowest)
        top = tl.maximum(top, highest(back))
    tiles = exp(u - top), exp(v - top), exp(front - top), exp(back - top)
    total = over_head(tiles, HEAD)
    share = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
    return times(tiles, (share, share, share, share))


@triton.jit
def inverse_rms(tiles, eps, HEAD: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of the heads, [tokens, 1], four times."""
    mean = mean_of(over_head(times(tiles, tiles), HEAD), HEAD.DIM)
    r = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    return r, r, r, r


@triton.jit
def mean_of(total, HEAD_DIM: tl.constexpr):
    """Divide a sum over the channels of a head by their number; infinity stays infinity."""
    return tl.div_rn(total, tl.full(total.shape, HEAD_DIM, tl.float32))


@triton.jit
def gate_head(tiles, gate, HEAD: tl.constexpr, KIND: tl.constexpr):
    """Multiply all channels of a head by P, or divide them by P in an inverse call."""
    u, v, front, back = tiles
    START: tl.constexpr = HEAD.START
    PAIRS: tl.constexpr = HEAD.PAIRS
    BLOCK: tl.constexpr = HEAD.BLOCK_P
    WIDE: tl.constexpr = HEAD.WIDE
    END: tl.constexpr = START + 2 * PAIRS
    if HEAD.INTERLEAVED:
        # Like x: an address for each channel would spill.
        both = factor(gate, START, 2 * PAIRS, 2 * BLOCK, KIND, WIDE)
        pu, pv = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        pu = factor(gate, START, PAIRS, BLOCK, KIND, WIDE)
        pv = factor(gate, START + PAIRS, PAIRS, BLOCK, KIND, WIDE)
    u = u * pu
    v = v * pv
    if START > 0:
        front = front * factor(gate, 0, START, HEAD.BLOCK_F, KIND, WIDE)
    if END < HEAD.DIM:
        back = back * factor(gate, END, HEAD.DIM - END, HEAD.BLOCK_B, KIND, WIDE)
    return u, v, front, back


@triton.jit
def in_8_bits(x, scale, dtype: tl.constexpr, KIND: tl.constexpr):
    """Encode results; unless they round once, they round to the dtype of the rotated tensor first."""
    if KIND.ROUNDING != 0:
        x = rounded(x, dtype, KIND.BITS)
    return encoded(x, scale, KIND.EIGHT, KIND.BITS)


@triton.jit
def finish_head(
    tiles, inputs, by, operand, places, gate, inside, eps, HEAD: tl.constexpr, KIND: tl.constexpr
):
    """Compute and store the result of one head from its loaded tiles, and those of the forward call's input.

    Returns:
        The terms of the gradient of the norm weights; without that gradient, the loaded tiles.
    """
    by_weight = tiles
    ACT: tl.constexpr = KIND.ACT
    GATE: tl.constexpr = KIND.GATE
    DIRECTION: tl.constexpr = KIND.DIRECTION
    if ACT == RMS_NORM:
        # The weights of this head, loaded as a tile of one token.
        weights = load_head(operand.carried.norm, places.norm, None, HEAD, True, False)
    if DIRECTION == 0:
        if ACT == SOFTMAX:
            tiles = soft(tiles, HEAD)
        elif ACT == RMS_NORM:
            tiles = times(times(tiles, inverse_rms(tiles, eps, HEAD)), weights)
        elif ACT != 0:
            u, v, front, back = tiles
            tiles = act(u, ACT), act(v, ACT), act(front, ACT), act(back, ACT)
    elif GATE != 0:
        tiles = gate_head(tiles, gate, HEAD, KIND)
    u, v, front, back = tiles
    u, v = turn(u, v, by, operand.x.dtype.element_ty, KIND.ROUNDING, KIND.BITS)
    tiles = u, v, front, back
    if DIRECTION == 0:
        if GATE != 0:
            tiles = gate_head(tiles, gate, HEAD, KIND)
    elif ACT == SOFTMAX:
        shares = soft(inputs, HEAD)
        less = -over_head(times(tiles, shares), HEAD)
        tiles = times(shares, plus(tiles, (less, less, less, less)))
    elif ACT == RMS_NORM:
        r = inverse_rms(inputs, eps, HEAD)
        xs = times(inputs, r)
        by_weight = times(tiles, xs)
        tiles = times(tiles, weights)
        less = -mean_of(over_head(times(tiles, xs), HEAD), HEAD.DIM)
        tiles = times(r, plus(tiles, times(xs, (less, less, less, less))))
    elif ACT != 0:
        u, v, front, back = inputs
        tiles = times(tiles, (slope(u, ACT), slope(v, ACT), slope(front, ACT), slope(back, ACT)))
    if operand.scale is not None:
        u, v, front, back = tiles
        dtype: tl.constexpr = operand.x.dtype.element_ty
        tiles = (
            in_8_bits(u, places.scale, dtype, KIND),
            in_8_bits(v, places.scale, dtype, KIND),
            in_8_bits(front, places.scale, dtype, KIND),
            in_8_bits(back, places.scale, dtype, KIND),
        )
    channel = operand.steps.out.channel
    store_head(operand.out, places.out, inside, channel, tiles, HEAD, KIND.REST, KIND.BITS)
    return by_weight


@triton.jit
def store_sums(tiles, inside, partial, at, HEAD: tl.constexpr):
    """Sum the tiles of a head over tokens and store them as one float32 head at `at`."""
    u, v, front, back = tiles
    here = tl.full((1, 1), 1, tl.int1)
    sums = (
        _over_tokens(u, inside),
        _over_tokens(v, inside),
        _over_tokens(front, inside),
        _over_tokens(back, inside),
    )
    store_head(partial, at, here, None, sums, HEAD, True, False)


@triton.jit
def _over_tokens(x, inside):
    return tl.reduce(tl.where(inside, x, 0.0), 0, tl.standard._sum_combine)[None, :]


@triton.jit
def _turn_some(
    head,
    last,
    operand,
    starts,
    inside,
    common,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Rotate one head, and with TOGETHER 2 the next one too, unless it is `last`.

    Args:
        starts: where the tokens start in x, the result, the gate and the forward call's input.
        inside: [tokens], whether the result of a token is stored.

    Returns:
        The terms of the gradient of the norm weights of the first head; see finish_head.
    """
    steps = operand.steps
    at, out_at, gate_at, input_at = starts
    inputs = 0.0
    if KIND.ACT != 0 and KIND.DIRECTION == 1:
        # The compiler gives sums the layout of the last load: that is to be x's.
        input_at += head * steps.input.head
        channel = steps.input.channel
        inputs = load_head(operand.carried.input, input_at, channel, HEAD, True, HEAD.WIDE)
    at += head * steps.x.head
    tiles = load_head(operand.x, at, steps.x.channel, HEAD, KIND.REST, HEAD.WIDE)
    if KIND.TOGETHER == 2:
        # The last head of an odd number is loaded twice and stored once: with a mask, the second
        # load would wait for the arithmetic of the first.
        at += tl.where(last - head > 1, steps.x.head, 0)
        tiles2 = load_head(operand.x, at, steps.x.channel, HEAD, KIND.REST, HEAD.WIDE)
        # row * 0 makes the condition a tile: the interpreter would turn the result of a tile and a
        # scalar bool into integers.
        both = (inside & (common.tile.row * 0 + (last - head) > 1))[:, None]
    scale = 0.0
    scale2 = 0.0
    if operand.scale is not None:
        scale = tl.load(operand.scale + head * steps.scale)
        scale2 = tl.load(operand.scale + tl.minimum(head + 1, last - 1) * steps.scale)
    by = common.by
    if ANGLES.HEADS or KIND.FEW:
        # After the loads, which then do not wait for them.
        by = _angles(operand.x, common.angles, common.tile, head, HEAD, ANGLES, KIND)
    gate_channel = 0
    if KIND.GATE != 0:
        gate_channel = steps.gate.channel
        gate_at += head * steps.gate.head
    norm_at = 0
    if KIND.ACT == RMS_NORM:
        norm_at = head * steps.norm * HEAD.DIM
    places = Places(out_at + head * steps.out.head, norm_at, scale)
    gate = Gate(operand.carried.gate, gate_at, gate_channel, common.high, common.low)
    sums = finish_head(
        tiles, inputs, by, operand, places, gate, inside[:, None], common.eps, HEAD, KIND
    )
    if KIND.TOGETHER == 2:
        # TOGETHER is 2 only without activation and gate, so the norm and the input are not used.
        places2 = Places(out_at + (head + 1) * steps.out.head, 0, scale2)
        finish_head(tiles2, inputs, by, operand, places2, gate, both, common.eps, HEAD, KIND)
    return sums


@triton.jit
def _turn_heads(
    first,
    count,
    operand,
    common,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Rotate `count` heads of one operand, from `first` on, or those that there are.

    Gradients of norm weights are summed over the tokens and stored in `partial`, in float32: one sum for
    each head of the tile; or, with ONE_SUM, one sum over the heads.
    """
    steps = operand.steps
    last = tl.minimum(first + count, steps.heads)
    tile = common.tile
    row = tile.row
    token = tile.token
    at = (row * steps.x.row + token * steps.x.token)[:, None]
    inside = tile.inside
    if operand.slots is not None:
        block, entry, inside = slot_of(operand.slots, steps.slots, tile)
        out_at = (block * steps.out.row + entry * steps.out.token)[:, None]
        if steps.slots.in_place is not None:
            at = out_at
    else:
        out_at = (row * steps.out.row + token * steps.out.token)[:, None]
    gate_at = 0
    input_at = 0
    if KIND.GATE != 0 and KIND.GATE != SLOPE:
        gate_at = (row * steps.gate.row + token * steps.gate.token)[:, None]
    if KIND.ACT != 0 and KIND.DIRECTION == 1:
        input_at = (row * steps.input.row + token * steps.input.token)[:, None]
    starts = (at, out_at, gate_at, input_at)
    if KIND.ONE_SUM:
        su = tl.full((HEAD.BLOCK_T, HEAD.BLOCK_P), 0.0, tl.float32)
        sv = su
        sf = su
        sb = su
        if HEAD.START > 0:
            sf = tl.full((HEAD.BLOCK_T, HEAD.BLOCK_F), 0.0, tl.float32)
        if HEAD.START + 2 * HEAD.PAIRS < HEAD.DIM:
            sb = tl.full((HEAD.BLOCK_T, HEAD.BLOCK_B), 0.0, tl.float32)
    if KIND.FEW:
        _turn_some(first, last, operand, starts, inside, common, HEAD, ANGLES, KIND)
    else:
        for head in range(first, last, KIND.TOGETHER):
            sums = _turn_some(head, last, operand, starts, inside, common, HEAD, ANGLES, KIND)
            if KIND.ONE_SUM:
                su, sv, sf, sb = plus((su, sv, sf, sb), sums)
            elif KIND.ACT == RMS_NORM and KIND.DIRECTION == 1:
                to = (common.own * steps.heads + head) * HEAD.DIM
                store_sums(sums, inside[:, None], operand.carried.partial, to, HEAD)
    if KIND.ONE_SUM:
        to = common.sum_at * HEAD.DIM
        store_sums((su, sv, sf, sb), inside[:, None], operand.carried.partial, to, HEAD)


@triton.jit
def _angles(x, angles, tile, head, HEAD: tl.constexpr, ANGLES: tl.constexpr, KIND: tl.constexpr):
    """The Turn of the tokens, times the amplitude; a negative sine factor rotates backwards."""
    cosine = angles.amplitude.cosine
    sine = angles.amplitude.sine
    if HEAD.WIDE:
        # A scalar float argument is float32, so the bits of a float64 are passed as an integer.
        cosine = cosine.to(tl.int64).to(tl.float64, bitcast=True)
        sine = sine.to(tl.int64).to(tl.float64, bitcast=True)
    if ANGLES.TABLES:
        c, s, c2, s2 = from_tables(angles, tile, head, HEAD, ANGLES)
        by = Turn(c * cosine, s * sine, c2 * cosine, s2 * sine)
        if ANGLES.FULL == 2:
            by = Turn(by.c, by.s2, by.c2, by.s)
    else:
        c, s = from_words(angles, tile, head, HEAD, ANGLES)
        c = c * cosine
        s = s * sine
        if KIND.NARROW:
            c = rounded(c, x.dtype.element_ty, KIND.BITS)
            s = rounded(s, x.dtype.element_ty, KIND.BITS)
        by = Turn(c, s, c, s)
    return by


@triton.jit
def rotate(
    q,
    k,
    out_q,
    out_k,
    primary,
    secondary,
    positions,
    offset,
    carries,
    extent,
    position_steps,
    angle_steps,
    q_steps,
    k_steps,
    amplitude,
    eps,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Rotate q, and k unless it is None.

    Args:
        carries, extent, amplitude: Carries, Extent and Amplitude.
        position_steps, angle_steps: PositionSteps and AngleSteps.
        q_steps, k_steps: OperandSteps; the latter may be None.
        HEAD, ANGLES, KIND: Head, AngleKind and Kind.
    """
    own = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    sum_at = own * tl.num_programs(1) + part
    first = part * extent.chunk
    BLOCK: tl.constexpr = HEAD.BLOCK_T
    start = own * BLOCK
    if carries.first_tile is not None:
        start = (own + carries.first_tile) * BLOCK
    tile = tile_of(start, extent, BLOCK)
    places = Positions(positions, offset, position_steps)
    angles = Angles(primary, secondary, angle_steps, amplitude, places)
    by = 0.0
    if not ANGLES.HEADS and not KIND.FEW:
        by = _angles(q, angles, tile, 0, HEAD, ANGLES, KIND)
    high = 0.0
    low = 0.0
    if KIND.GATE == SLOPE:
        high, low = place_of(places, tile, ANGLES.POSITIONS, HEAD.WIDE)
    common = Common(tile, angles, by, high, low, eps, own, sum_at)
    count = extent.chunk
    if k is None:
        of_q = Operand(q, out_q, carries.q, q_steps, carries.slots, carries.scale)
        _turn_heads(first, count, of_q, common, HEAD, ANGLES, KIND)
    else:
        of_q = Operand(q, out_q, carries.q, q_steps, None, None)
        of_k = Operand(k, out_k, carries.k, k_steps, carries.slots, carries.scale)
        if not KIND.FEW:
            _turn_heads(first, count, of_q, common, HEAD, ANGLES, KIND)
            _turn_heads(first, count, of_k, common, HEAD, ANGLES, KIND)
        elif first < q_steps.heads:
            _turn_heads(first, count, of_q, common, HEAD, ANGLES, KIND)
        else:
            first = (part - extent.apart) * count
            _turn_heads(first, count, of_k, common, HEAD, ANGLES, KIND)
