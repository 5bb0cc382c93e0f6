"""exp and related functions in float32, with errors of about two units in the last place.

Triton's own versions are less accurate, because they round the argument times log2 e and use the fast
instructions of the device; and some of these functions are missing. Each polynomial is fitted to the
function named next to it, on the whole range on which it is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .angles import LOG2_E


@triton.jit
def _reduced(x, SHIFT: tl.constexpr):
    """Split x, in [-150, 150], into n·ln 2 + r, where |r| is at most slightly above ln 2 / 2.

    Returns an integer with n + SHIFT in its lowest bits, then n, then r. Adding 1.5 · 2^23
    rounds to an integer, because a float32 of that size has no fractional digits.
    """
    sum_ = tl.fma(x, LOG2_E, 12582912.0 + SHIFT)
    n = sum_ - (12582912.0 + SHIFT)
    # ln 2 in two parts; the first has so few digits that its product with n is exact.
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    return sum_.to(tl.int32, bitcast=True), n, r


@triton.jit
def _beyond_first(r):
    """(exp(r) - 1 - r) / r², with an error of 8e-9 in exp(r)."""
    p = tl.fma(r, 1.3926926767453551e-3, 8.363774046301842e-3)
    p = tl.fma(r, p, 4.166654869914055e-2)
    p = tl.fma(r, p, 1.6666573286056519e-1)
    return tl.fma(r, p, 0.5)


@triton.jit
def _raised(y, n):
    """y · 2^n, if y and the result are normal numbers; only the 9 lowest bits of n are used."""
    return (y.to(tl.int32, bitcast=True) + (n << 23)).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e^x, including subnormal results, 0 and infinity; NaN if x is NaN."""
    bits, _, r = _reduced(tl.minimum(tl.maximum(x, -104.0), 89.0), 0.0)
    y = tl.fma(tl.fma(_beyond_first(r), r, 1.0), r, 1.0)
    # Scale in two steps so that neither overflows the exponent too early.
    n = bits - 0x4B400000
    half = n >> 1
    y = _raised(y, half) * ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, y)


@triton.jit
def _exp_down(x):
    """e^x for x <= 0, including subnormal results and 0; unspecified if x is NaN."""
    # The result is computed 2^24 times as large, so that it is a normal number until the last step.
    bits, _, r = _reduced(tl.maximum(x, -104.0), 24.0)
    y = tl.fma(tl.fma(_beyond_first(r), r, 1.0), r, 1.0)
    return _raised(y, bits) * 5.9604644775390625e-08


@triton.jit
def expm1_negative(x):
    """e^x - 1 for x <= 0."""
    bits, _, r = _reduced(tl.maximum(x, -80.0), 127.0)
    scale = (bits << 23).to(tl.float32, bitcast=True)
    y = tl.fma(scale, tl.fma(r * r, _beyond_first(r), r), scale - 1.0)
    return tl.where(x != x, x, y)


@triton.jit
def inverse_after_one(z):
    """1 / (1 + z) for z in [0, 1], cheaper than a division.

    A polynomial, whose error is a Chebyshev polynomial, has an error of 1.7e-3; one third-order
    step cubes it.
    """
    y = tl.fma(z, -0.22183708846569061, 0.66551125049591064)
    y = tl.fma(z, y, -0.94280761480331421)
    y = tl.fma(z, y, 0.99826687574386597)
    rest = tl.fma(-(z + 1.0), y, 1.0)
    return tl.fma(y, tl.fma(rest, rest, rest), y)


@triton.jit
def log1p_unit(z):
    """log(1 + z) for z in [0, 1], as 2 atanh(z / (2 + z))."""
    half = 0.5 * z
    s = half * inverse_after_one(half)
    w = s * s
    # (2 atanh(s) / s - 2) / s²
    p = tl.fma(w, 2.3224329948425293e-1, 2.170657515525818e-1)
    p = tl.fma(w, p, 2.85923570394516e-1)
    p = tl.fma(w, p, 3.999970555305481e-1)
    p = tl.fma(w, p, 6.666666865348816e-1)
    return tl.fma(s * w, p, s + s)


@triton.jit
def normal_tail(x):
    """½ erfc(|x| / √2), the tail of the normal distribution."""
    t = tl.abs(x) * 0.7071067811865476
    w = tl.div_rn((t >= 0).to(tl.float32), tl.fma(t, 0.4, 1.0))
    # erfc(t) · exp(t²) / w, with an error of 1.5e-8
    p = tl.fma(w, -1.5730949118733406e-2, 6.182640418410301e-2)
    p = tl.fma(w, p, -3.4846026450395584e-2)
    p = tl.fma(w, p, -1.5711067616939545e-1)
    p = tl.fma(w, p, 2.281290888786316e-1)
    p = tl.fma(w, p, -8.6185984313488e-2)
    p = tl.fma(w, p, 1.8946927785873413e-1)
    p = tl.fma(w, p, 1.5247154235839844e-1)
    p = tl.fma(w, p, 2.1093852818012238e-1)
    p = tl.fma(w, p, 2.253490686416626e-1)
    p = tl.fma(w, p, 2.2568973898887634e-1)
    return 0.5 * (w * p) * normal_exponential(x)


@triton.jit
def normal_exponential(x):
    """exp(-x² / 2), including subnormal results and 0; unspecified if x is NaN.

    For results near e^-80 the rounding error of x² would be visible. A fused multiply-add could correct
    it, but that of Triton's interpreter rounds twice before version 3.9. Instead, x is split into a nearby number
    whose square is exact and a remainder.
    """
    t = tl.minimum(tl.abs(x), 14.5)
    # A multiple of 2^-8 has 12 bits here, so its square fits in the 24 bits of a float32.
    near = (t + 49152.0) - 49152.0
    # The result is computed 2^32 times as large, so that it is a normal number until the last step.
    bits, _, r = _reduced(-0.5 * near * near, 32.0)
    r = tl.fma(near - t, 0.5 * (near + t), r)
    y = tl.fma(tl.fma(_beyond_first(r), r, 1.0), r, 1.0)
    return _raised(y, bits) * 2.3283064365386963e-10


@triton.jit
def logistics(x):
    """1 / (1 + e^-x) and 1 / (1 + e^x), without overflow; unspecified if x is NaN."""
    z = _exp_down(-tl.abs(x))
    greater = inverse_after_one(z)
    less = z * greater
    return tl.where(x >= 0, greater, less), tl.where(x >= 0, less, greater)


@triton.jit
def logistic(x):
    """1 / (1 + e^-x), without overflow; unspecified if x is NaN."""
    first, _ = logistics(x)
    return first


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without overflow; NaN if x is NaN."""
    return tl.where(x != x, x, logistic(x))


@triton.jit
def tanh(x):
    """tanh x, also accurate near 0."""
    e = expm1_negative(-2.0 * tl.abs(x))
    y = -e * inverse_after_one(e + 1.0)
    return tl.where(x < 0, -y, y)
