"""The activations f and their derivatives, by the codes of tightrope.activations.ACTS.

Element-wise activations work on one tile; softmax and rms_norm need all tiles of a head. Everything is
float32; the definition handles float64 with an activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import elementary as of

# The codes; a test compares them with tightrope.activations.
RELU = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
SILU = tl.constexpr(3)
GELU = tl.constexpr(4)
ELU = tl.constexpr(5)
RELU2 = tl.constexpr(6)
SOFTPLUS = tl.constexpr(7)
EXP = tl.constexpr(8)
LEAKY_RELU = tl.constexpr(9)
TANH = tl.constexpr(10)
SIN = tl.constexpr(11)
COS = tl.constexpr(12)
SOFTMAX = tl.constexpr(13)
RMS_NORM = tl.constexpr(14)
LEAK = tl.constexpr(0.01)
MOST_LEVELS = tl.constexpr(
    11
)  # of sums over a tile; the base 2 logarithm of WIDEST in tightrope.backends.triton.blocks
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / √(2π)


@triton.jit
def act(x, ACT: tl.constexpr):
    """f(x) of an element-wise activation."""
    if ACT == RELU:
        return tl.where(x <= 0, 0.0, x)
    elif ACT == SIGMOID:
        return of.sigmoid(x)
    elif ACT == SILU:
        return x * of.logistic(x)
    elif ACT == GELU:
        return x * _normal(x)
    elif ACT == ELU:
        return tl.where(x > 0, x, of.expm1_negative(tl.where(x > 0, 0.0, x)))
    elif ACT == RELU2:
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive
    elif ACT == SOFTPLUS:
        return tl.where(x <= 0, 0.0, x) + of.log1p_unit(of.exp(-tl.abs(x)))
    elif ACT == EXP:
        return of.exp(x)
    elif ACT == LEAKY_RELU:
        return tl.where(x > 0, x, x * LEAK)
    elif ACT == TANH:
        return of.tanh(x)
    elif ACT == SIN:
        return _sine(x)
    elif ACT == COS:
        return tl.cos(x)
    return x


@triton.jit
def slope(x, ACT: tl.constexpr):
    """f'(x) of an element-wise activation; uses products of two sigmoids to avoid cancellation."""
    # A tile of zeros; x * 0.0 would be NaN for infinities.
    zero = (x != x).to(tl.float32) * 0.0
    if ACT == RELU:
        return tl.where(x <= 0, 0.0, 1.0 + zero)
    elif ACT == SIGMOID:
        one, other = of.logistics(x)
        return tl.where(x != x, x, one * other)
    elif ACT == SILU:
        one, other = of.logistics(x)
        return one * tl.fma(x, other, 1.0)
    elif ACT == GELU:
        return tl.fma(x * of.normal_exponential(x), DENSITY, _normal(x))
    elif ACT == ELU:
        return of.exp(tl.where(x > 0, 0.0, x))
    elif ACT == RELU2:
        return 2.0 * tl.where(x <= 0, 0.0, x)
    elif ACT == SOFTPLUS:
        return of.sigmoid(x)
    elif ACT == EXP:
        return of.exp(x)
    elif ACT == LEAKY_RELU:
        return tl.where(x > 0, 1.0 + zero, LEAK)
    elif ACT == TANH:
        one, other = of.logistics(2.0 * x)
        return tl.where(x != x, x, 4.0 * one * other)
    elif ACT == SIN:
        return tl.cos(x)
    elif ACT == COS:
        return -_sine(x)
    return 1.0 + zero


@triton.jit
def _sine(x):
    """sin(x); where it rounds to x, x itself, because the device's function takes subnormal numbers for zero."""
    return tl.where(tl.abs(x) < 0.000244140625, x, tl.sin(x))  # 2^-12


@triton.jit
def _normal(x):
    tail = of.normal_tail(x)
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def add_up(x):
    """Sum over the channels of a tile, [tokens, 1].

    Neighbours are added first, then neighbours of these sums, and so on: a sum of many would have the order
    of the threads, which the compiler arranges by strides and alignment.
    """
    TOKENS: tl.constexpr = x.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if x.shape[1] > 2:
            x = tl.reduce(tl.reshape(x, (TOKENS, x.shape[1] // 2, 2)), 2, tl.standard._sum_combine)
    return tl.reduce(x, 1, tl.standard._sum_combine)[:, None]


@triton.jit
def highest(x):
    """Maximum over the channels of a tile, [tokens, 1]."""
    return tl.reduce(x, 1, tl.standard._elementwise_max)[:, None]
