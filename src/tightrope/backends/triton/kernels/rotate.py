"""The operator: y = P · a · R(φ) · f(x), its transpose and its inverse.

A program has a tile of tokens, which may span rows, and a run of heads of q and of k. It computes the
cosines and sines of its tokens once and turns all these heads by them (unless heads have angles of their
own). Two heads are under way at a time, so that the loads of the second do not wait for the first.

An argument that a call does not have is None, which is a constant to the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .acts import RMS_NORM, SOFTMAX, act, add_up, highest, slope
from .angles import from_tables, from_words
from .elementary import exp
from .gates import SLOPE, factor, place_of
from .heads import load_pairs, load_segment, store_pairs, store_segment, turn


@triton.jit
def load_head(
    x, at, channel, HEAD_DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The tiles of a head: both members of its pairs, and what is in front of and behind them."""
    u, v = load_pairs(x, at, channel, START, PAIRS, BLOCK_T, BLOCK_P, INTERLEAVED, UNIT, WIDE)
    front = u
    back = u
    if REST and START > 0:
        front = load_segment(x, at, channel, 0, START, BLOCK_F, UNIT, WIDE)
    if REST and START + 2 * PAIRS < HEAD_DIM:
        back = load_segment(
            x, at, channel, START + 2 * PAIRS, HEAD_DIM - START - 2 * PAIRS, BLOCK_B, UNIT, WIDE,
        )  # fmt: skip
    return u, v, front, back


@triton.jit
def over_head(u, v, front, back, HAS_FRONT: tl.constexpr, HAS_BACK: tl.constexpr):
    """The sum over all channels of a head, [tokens, 1]."""
    total = add_up(u) + add_up(v)
    if HAS_FRONT:
        total += add_up(front)
    if HAS_BACK:
        total += add_up(back)
    return total


@triton.jit
def soft(
    u, v, front, back, START: tl.constexpr, PAIRS: tl.constexpr, BEHIND: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """softmax over all channels of a head."""
    lowest = float("-inf")
    pair = tl.arange(0, BLOCK_P)[None, :] < PAIRS
    u = tl.where(pair, u, lowest)
    v = tl.where(pair, v, lowest)
    top = tl.maximum(highest(u), highest(v))
    if START > 0:
        front = tl.where(tl.arange(0, BLOCK_F)[None, :] < START, front, lowest)
        top = tl.maximum(top, highest(front))
    if BEHIND > 0:
        back = tl.where(tl.arange(0, BLOCK_B)[None, :] < BEHIND, back, lowest)
        top = tl.maximum(top, highest(back))
    u = exp(u - top)
    v = exp(v - top)
    if START > 0:
        front = exp(front - top)
    if BEHIND > 0:
        back = exp(back - top)
    total = over_head(u, v, front, back, START > 0, BEHIND > 0)
    share = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
    u = u * share
    v = v * share
    if START > 0:
        front = front * share
    if BEHIND > 0:
        back = back * share
    return u, v, front, back


@triton.jit
def inverse_rms(
    u, v, front, back, eps, HEAD_DIM: tl.constexpr, HAS_FRONT: tl.constexpr, HAS_BACK: tl.constexpr
):
    """1 / sqrt(mean(x²) + eps) of the heads, [tokens, 1]."""
    total = over_head(u * u, v * v, front * front, back * back, HAS_FRONT, HAS_BACK)
    mean = mean_of(total, HEAD_DIM)
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def mean_of(total, HEAD_DIM: tl.constexpr):
    """A sum over the channels of a head over their number; infinity stays infinity."""
    return tl.div_rn(total, tl.full(total.shape, HEAD_DIM, tl.float32))


@triton.jit
def gate_head(
    u, v, front, back, gate, at, channel, high, low, HEAD_DIM: tl.constexpr,
    START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_B: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, INVERSE: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """All channels of a head times P."""
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    OTHER: tl.constexpr = START + (1 if INTERLEAVED else PAIRS)
    u = u * factor(
        gate, at, channel, high, low, START, STEP, PAIRS, BLOCK_P, KIND, INVERSE, WIDE, UNIT
    )
    v = v * factor(
        gate, at, channel, high, low, OTHER, STEP, PAIRS, BLOCK_P, KIND, INVERSE, WIDE, UNIT
    )
    if START > 0:
        front = front * factor(
            gate, at, channel, high, low, 0, 1, START, BLOCK_F, KIND, INVERSE, WIDE, UNIT
        )
    BEHIND: tl.constexpr = HEAD_DIM - START - 2 * PAIRS
    if BEHIND > 0:
        back = back * factor(
            gate, at, channel, high, low, START + 2 * PAIRS, 1, BEHIND, BLOCK_B, KIND, INVERSE,
            WIDE, UNIT,
        )  # fmt: skip
    return u, v, front, back


@triton.jit
def finish_head(
    u, v, front, back, c, s, out, out_at, inside, out_channel, norm, norm_at, gate, gate_at,
    gate_channel, high, low, x, x_at, x_channel, eps,
    HEAD_DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr,
    ACT: tl.constexpr, GATE: tl.constexpr, DIRECTION: tl.constexpr, WIDE: tl.constexpr,
    GATE_VECTOR: tl.constexpr, INPUT_VECTOR: tl.constexpr,
):  # fmt: skip
    """From the loaded tiles of a head to its stored ones.

    Returns:
        What the gradients by the weights of a norm are sums of.
    """
    by_weight = (u, v, front, back)
    BEHIND: tl.constexpr = HEAD_DIM - START - 2 * PAIRS
    HAS_FRONT: tl.constexpr = START > 0
    HAS_BACK: tl.constexpr = BEHIND > 0
    if ACT != 0 and DIRECTION == 1:
        # Beside the gradients, so that it does not wait for their rotation.
        xu, xv, xf, xb = load_head(
            x, x_at, x_channel, HEAD_DIM, START, PAIRS, BLOCK_T, BLOCK_P, BLOCK_F, BLOCK_B,
            INTERLEAVED, True, INPUT_VECTOR > 0, WIDE,
        )  # fmt: skip
    if ACT == RMS_NORM:
        # Loaded as a tile of one token: the weights of this head.
        wu, wv, wf, wb = load_head(
            norm, norm_at, 1, HEAD_DIM, START, PAIRS, 1, BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED,
            True, True, False,
        )  # fmt: skip
    if DIRECTION == 0:
        if ACT == SOFTMAX:
            u, v, front, back = soft(
                u, v, front, back, START, PAIRS, BEHIND, BLOCK_P, BLOCK_F, BLOCK_B
            )
        elif ACT == RMS_NORM:
            r = inverse_rms(u, v, front, back, eps, HEAD_DIM, HAS_FRONT, HAS_BACK)
            u = u * r * wu
            v = v * r * wv
            if HAS_FRONT:
                front = front * r * wf
            if HAS_BACK:
                back = back * r * wb
        elif ACT != 0:
            u = act(u, ACT)
            v = act(v, ACT)
            if HAS_FRONT:
                front = act(front, ACT)
            if HAS_BACK:
                back = act(back, ACT)
    elif GATE != 0:
        u, v, front, back = gate_head(
            u, v, front, back, gate, gate_at, gate_channel, high, low, HEAD_DIM, START,
            PAIRS, BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED, GATE, DIRECTION == 2, WIDE,
            GATE_VECTOR > 0,
        )  # fmt: skip
    u, v = turn(u, v, c, s)
    if DIRECTION == 0:
        if GATE != 0:
            u, v, front, back = gate_head(
                u, v, front, back, gate, gate_at, gate_channel, high, low, HEAD_DIM,
                START, PAIRS, BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED, GATE, False, WIDE,
                GATE_VECTOR > 0,
            )  # fmt: skip
    elif ACT != 0:
        if ACT == SOFTMAX:
            xu, xv, xf, xb = soft(xu, xv, xf, xb, START, PAIRS, BEHIND, BLOCK_P, BLOCK_F, BLOCK_B)
            mean = over_head(u * xu, v * xv, front * xf, back * xb, HAS_FRONT, HAS_BACK)
            u = xu * (u - mean)
            v = xv * (v - mean)
            if HAS_FRONT:
                front = xf * (front - mean)
            if HAS_BACK:
                back = xb * (back - mean)
        elif ACT == RMS_NORM:
            r = inverse_rms(xu, xv, xf, xb, eps, HEAD_DIM, HAS_FRONT, HAS_BACK)
            xu = xu * r
            xv = xv * r
            if HAS_FRONT:
                xf = xf * r
            if HAS_BACK:
                xb = xb * r
            by_weight = (u * xu, v * xv, front * xf, back * xb)
            u = u * wu
            v = v * wv
            if HAS_FRONT:
                front = front * wf
            if HAS_BACK:
                back = back * wb
            total = over_head(u * xu, v * xv, front * xf, back * xb, HAS_FRONT, HAS_BACK)
            mean = mean_of(total, HEAD_DIM)
            u = r * (u - xu * mean)
            v = r * (v - xv * mean)
            if HAS_FRONT:
                front = r * (front - xf * mean)
            if HAS_BACK:
                back = r * (back - xb * mean)
        else:
            u = u * slope(xu, ACT)
            v = v * slope(xv, ACT)
            if HAS_FRONT:
                front = front * slope(xf, ACT)
            if HAS_BACK:
                back = back * slope(xb, ACT)
    store_pairs(
        out, out_at, inside, out_channel, u, v, START, PAIRS, BLOCK_T, BLOCK_P, INTERLEAVED, UNIT,
        BITS,
    )  # fmt: skip
    if REST and HAS_FRONT:
        store_segment(out, out_at, inside, out_channel, front, 0, START, BLOCK_F, UNIT, BITS)
    if REST and HAS_BACK:
        store_segment(
            out, out_at, inside, out_channel, back, START + 2 * PAIRS, BEHIND, BLOCK_B, UNIT, BITS
        )
    return by_weight


@triton.jit
def store_sums(
    u, v, front, back, inside, partial, at, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The tiles of a head summed over tokens, as one head of float32 at `at`."""
    BEHIND: tl.constexpr = HEAD_DIM - START - 2 * PAIRS
    here = tl.full((1, 1), 1, tl.int1)
    u = _over_tokens(tl.where(inside, u, 0.0))
    v = _over_tokens(tl.where(inside, v, 0.0))
    store_pairs(partial, at, here, 1, u, v, START, PAIRS, 1, BLOCK_P, INTERLEAVED, True, False)
    if START > 0:
        front = _over_tokens(tl.where(inside, front, 0.0))
        store_segment(partial, at, here, 1, front, 0, START, BLOCK_F, True, False)
    if BEHIND > 0:
        back = _over_tokens(tl.where(inside, back, 0.0))
        store_segment(partial, at, here, 1, back, START + 2 * PAIRS, BEHIND, BLOCK_B, True, False)


@triton.jit
def _over_tokens(x):
    return tl.reduce(x, 0, tl.standard._sum_combine)[None, :]


@triton.jit
def _turn_heads(
    first, last, x, out, primary, secondary, positions, norm, gate, input, partial,
    row, token, inside, offset, ramp, length, word_rows, word_heads,
    position_axis, position_row, position_token,
    cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
    x_row, x_head, x_token, x_channel, out_row, out_head, out_token, out_channel,
    norm_head, gate_row, gate_head_stride, gate_token, gate_channel,
    input_row, input_head, input_token, input_channel, partial_at, sum_at, heads,
    c, s, high, low, amplitude, sine_amplitude, eps,
    HEAD_DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, TABLE_VECTOR: tl.constexpr,
    VECTOR: tl.constexpr, BITS: tl.constexpr, TABLES: tl.constexpr, AXES: tl.constexpr,
    POSITIONS: tl.constexpr, TURNS: tl.constexpr, ROW_ANGLES: tl.constexpr,
    HEAD_ANGLES: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, DIRECTION: tl.constexpr,
    TOGETHER: tl.constexpr, WIDE: tl.constexpr, GATE_VECTOR: tl.constexpr,
    INPUT_VECTOR: tl.constexpr, ONE_SUM: tl.constexpr,
):  # fmt: skip
    """Turn heads [first, last) of one operand.

    The gradients by the weights of a norm are summed over the tokens, and with ONE_SUM over the heads,
    into `partial`: heads of float32, at `partial_at` those of a tile, or at `sum_at` one.
    """
    at = ((row * x_row + token * x_token) * VECTOR)[:, None]
    out_at = ((row * out_row + token * out_token) * VECTOR)[:, None]
    there = inside[:, None]
    gate_at = 0
    input_at = 0
    # 0 says that nothing is known of strides, which then count elements.
    GATE_STEP: tl.constexpr = GATE_VECTOR if GATE_VECTOR > 0 else 1
    INPUT_STEP: tl.constexpr = INPUT_VECTOR if INPUT_VECTOR > 0 else 1
    if GATE != 0 and GATE != SLOPE:
        gate_at = ((row * gate_row + token * gate_token) * GATE_STEP)[:, None]
    if ACT != 0 and DIRECTION == 1:
        input_at = ((row * input_row + token * input_token) * INPUT_STEP)[:, None]
    if ONE_SUM:
        su = tl.full((BLOCK_T, BLOCK_P), 0.0, tl.float32)
        sv = su
        sf = su
        sb = su
        if START > 0:
            sf = tl.full((BLOCK_T, BLOCK_F), 0.0, tl.float32)
        if START + 2 * PAIRS < HEAD_DIM:
            sb = tl.full((BLOCK_T, BLOCK_B), 0.0, tl.float32)
    for head in range(first, last, TOGETHER):
        cosine = c
        sine = s
        if HEAD_ANGLES:
            cosine, sine = _angles(
                primary, secondary, positions, row, head, token, offset, ramp, length,
                word_rows, word_heads, position_axis, position_row, position_token,
                cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
                amplitude, sine_amplitude, PAIRS, BLOCK_P, TABLES, AXES, POSITIONS, TURNS,
                ROW_ANGLES, TABLE_VECTOR, WIDE,
            )  # fmt: skip
        u, v, front, back = load_head(
            x, at + head * x_head * VECTOR, x_channel, HEAD_DIM, START, PAIRS, BLOCK_T, BLOCK_P,
            BLOCK_F, BLOCK_B, INTERLEAVED, REST, UNIT, WIDE,
        )  # fmt: skip
        if TOGETHER == 2:
            # The last of an odd number is read twice and stored once: under a mask of its own this
            # load would wait behind the arithmetic of the first.
            step = tl.where(last - head > 1, x_head * VECTOR, 0)
            u2, v2, front2, back2 = load_head(
                x, at + head * x_head * VECTOR + step, x_channel, HEAD_DIM, START, PAIRS, BLOCK_T,
                BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED, REST, UNIT, WIDE,
            )  # fmt: skip
            # A vector, as the interpreter makes integers of a tile and a scalar truth.
            both = (inside & (row * 0 + (last - head) > 1))[:, None]
        own = gate_at
        if GATE != 0:
            own = gate_at + head * gate_head_stride * GATE_STEP
        of_input = input_at
        if ACT != 0 and DIRECTION == 1:
            of_input = input_at + head * input_head * INPUT_STEP
        norm_at = 0
        if ACT == RMS_NORM:
            norm_at = head * norm_head * HEAD_DIM
        du, dv, df, db = finish_head(
            u, v, front, back, cosine, sine, out, out_at + head * out_head * VECTOR, there, out_channel,
            norm, norm_at, gate, own, gate_channel, high, low, input, of_input, input_channel, eps,
            HEAD_DIM, START, PAIRS, BLOCK_T, BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED, REST, UNIT, BITS,
            ACT, GATE, DIRECTION, WIDE, GATE_VECTOR, INPUT_VECTOR,
        )  # fmt: skip
        if TOGETHER == 2:
            finish_head(
                u2, v2, front2, back2, cosine, sine, out, out_at + (head + 1) * out_head * VECTOR, both,
                out_channel, norm, 0, gate, gate_at, gate_channel, high, low, input, input_at,
                input_channel, eps, HEAD_DIM, START, PAIRS, BLOCK_T, BLOCK_P, BLOCK_F, BLOCK_B,
                INTERLEAVED, REST, UNIT, BITS, ACT, GATE, DIRECTION, WIDE, GATE_VECTOR, INPUT_VECTOR,
            )  # fmt: skip
        if ONE_SUM:
            su += du
            sv += dv
            if START > 0:
                sf += df
            if START + 2 * PAIRS < HEAD_DIM:
                sb += db
        elif ACT == RMS_NORM and DIRECTION == 1:
            store_sums(
                du, dv, df, db, there, partial, (partial_at * heads + head) * HEAD_DIM, HEAD_DIM,
                START, PAIRS, BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED,
            )  # fmt: skip
    if ONE_SUM:
        store_sums(
            su, sv, sf, sb, there, partial, sum_at * HEAD_DIM, HEAD_DIM, START, PAIRS, BLOCK_P,
            BLOCK_F, BLOCK_B, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _angles(
    primary, secondary, positions, row, head, token, offset, ramp, length,
    word_rows, word_heads, position_axis, position_row, position_token,
    cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
    amplitude, sine_amplitude, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, TABLES: tl.constexpr,
    AXES: tl.constexpr, POSITIONS: tl.constexpr, TURNS: tl.constexpr, ROW_ANGLES: tl.constexpr,
    TABLE_VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of the tokens, times the amplitude and, of sines, the direction."""
    if TABLES:
        c, s = from_tables(
            primary, secondary, positions, row, head, token, offset, ramp, length,
            position_row, position_token,
            cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
            PAIRS, BLOCK_P, POSITIONS, TABLE_VECTOR, WIDE,
        )  # fmt: skip
    else:
        c, s = from_words(
            primary, secondary, positions, row, head, token, offset, ramp, word_rows,
            word_heads, position_axis, position_row, position_token,
            PAIRS, BLOCK_P, AXES, POSITIONS, TURNS, ROW_ANGLES, WIDE,
        )  # fmt: skip
    if WIDE:
        # A scalar float argument is float32; its 64 bits come as an integer.
        amplitude = amplitude.to(tl.int64).to(tl.float64, bitcast=True)
        sine_amplitude = sine_amplitude.to(tl.int64).to(tl.float64, bitcast=True)
    return c * amplitude, s * sine_amplitude


@triton.jit
def rows_of(start, index, tokens, BLOCK_T: tl.constexpr):
    """The rows, and the places in them, of tokens `start + index`, with 0 <= index < BLOCK_T: one
    division of 64 bits for a program, not for each token of a thread."""
    row = start // tokens
    # From the end of that row, less than BLOCK_T: in 32 bits.
    beyond = index + (start - row * tokens - tokens)
    size = tl.minimum(tokens, BLOCK_T).to(tl.uint32)
    more = tl.maximum(beyond, 0).to(tl.uint32) // size
    passed = tl.where(beyond < 0, 0, more.to(tl.int64) + 1)
    return row + passed, beyond + tokens - passed * tokens


@triton.jit
def rotate(
    q, k, out_q, out_k, primary, secondary, positions, offset,
    norm_q, norm_k, gate_q, gate_k, input_q, input_k, partial_q, partial_k, first_tile,
    ramp, count, tokens, q_heads, k_heads, chunk, length, word_rows, word_heads,
    position_axis, position_row, position_token,
    cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
    q_row, q_head, q_token, q_channel, out_q_row, out_q_head, out_q_token, out_q_channel,
    k_row, k_head, k_token, k_channel, out_k_row, out_k_head, out_k_token, out_k_channel,
    norm_q_head, gate_q_row, gate_q_head, gate_q_token, gate_q_channel,
    input_q_row, input_q_head, input_q_token, input_q_channel,
    norm_k_head, gate_k_row, gate_k_head, gate_k_token, gate_k_channel,
    input_k_row, input_k_head, input_k_token, input_k_channel,
    amplitude, sine_amplitude, eps,
    HEAD_DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, TABLE_VECTOR: tl.constexpr,
    VECTOR: tl.constexpr, BITS: tl.constexpr, TABLES: tl.constexpr, AXES: tl.constexpr,
    POSITIONS: tl.constexpr, TURNS: tl.constexpr, ROW_ANGLES: tl.constexpr,
    HEAD_ANGLES: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, DIRECTION: tl.constexpr,
    TOGETHER: tl.constexpr, WIDE: tl.constexpr, GATE_VECTOR: tl.constexpr,
    INPUT_VECTOR: tl.constexpr, ONE_SUM: tl.constexpr,
):  # fmt: skip
    """Turn q, and k where there is one. Strides of rows, heads and tokens count VECTOR elements."""
    own = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    sum_at = own * tl.num_programs(1) + part
    first = part * chunk
    start = own * BLOCK_T
    if first_tile is not None:
        start = (own + first_tile) * BLOCK_T
    index = tl.arange(0, BLOCK_T)
    inside = start + index < count
    row, token = rows_of(start, tl.minimum(index, count - 1 - start), tokens, BLOCK_T)
    c = 0.0
    s = 0.0
    if not HEAD_ANGLES:
        c, s = _angles(
            primary, secondary, positions, row, 0, token, offset, ramp, length, word_rows,
            word_heads, position_axis, position_row, position_token,
            cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
            amplitude, sine_amplitude, PAIRS, BLOCK_P, TABLES, AXES, POSITIONS, TURNS,
            ROW_ANGLES, TABLE_VECTOR, WIDE,
        )  # fmt: skip
    high = 0.0
    low = 0.0
    if GATE == SLOPE:
        high, low = place_of(
            positions, row, token, position_row, position_token, offset, ramp, POSITIONS, WIDE
        )
    _turn_heads(
        first, tl.minimum(first + chunk, q_heads), q, out_q, primary, secondary, positions, norm_q,
        gate_q, input_q, partial_q, row, token, inside, offset, ramp, length, word_rows,
        word_heads, position_axis, position_row, position_token,
        cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
        q_row, q_head, q_token, q_channel, out_q_row, out_q_head, out_q_token, out_q_channel,
        norm_q_head, gate_q_row, gate_q_head, gate_q_token, gate_q_channel,
        input_q_row, input_q_head, input_q_token, input_q_channel, own, sum_at, q_heads,
        c, s, high, low, amplitude, sine_amplitude, eps, HEAD_DIM, START, PAIRS, BLOCK_T, BLOCK_P,
        BLOCK_F, BLOCK_B, INTERLEAVED, REST, UNIT, TABLE_VECTOR, VECTOR, BITS, TABLES, AXES,
        POSITIONS, TURNS, ROW_ANGLES, HEAD_ANGLES, ACT, GATE, DIRECTION, TOGETHER, WIDE,
        GATE_VECTOR, INPUT_VECTOR, ONE_SUM,
    )  # fmt: skip
    if k is not None:
        _turn_heads(
            first, tl.minimum(first + chunk, k_heads), k, out_k, primary, secondary, positions,
            norm_k, gate_k, input_k, partial_k, row, token, inside, offset, ramp, length,
            word_rows, word_heads, position_axis, position_row, position_token,
            cos_row, cos_head, cos_token, cos_pair, sin_row, sin_head, sin_token, sin_pair,
            k_row, k_head, k_token, k_channel, out_k_row, out_k_head, out_k_token, out_k_channel,
            norm_k_head, gate_k_row, gate_k_head, gate_k_token, gate_k_channel,
            input_k_row, input_k_head, input_k_token, input_k_channel, own, sum_at, k_heads,
            c, s, high, low, amplitude, sine_amplitude, eps, HEAD_DIM, START, PAIRS, BLOCK_T,
            BLOCK_P, BLOCK_F, BLOCK_B, INTERLEAVED, REST, UNIT, TABLE_VECTOR, VECTOR, BITS, TABLES,
            AXES, POSITIONS, TURNS, ROW_ANGLES, HEAD_ANGLES, ACT, GATE, DIRECTION, TOGETHER, WIDE,
            GATE_VECTOR, INPUT_VECTOR, ONE_SUM,
        )  # fmt: skip
