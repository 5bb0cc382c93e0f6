"""exp and its kin in float32, within about two units in the last place.

Triton's own round their argument times log2 e and use what a device has of fast instructions, and some
of these it has not at all. The polynomials are fitted to the functions named beside them, on the whole
range that they are used on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .angles import LOG2_E


@triton.jit
def _power_of_two(n):
    """2^n as float32, for n in [-126, 127]."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _reduced(x):
    """x as n·ln 2 + r with |r| <= ln 2 / 2; exp(r) - 1, off by 8e-9; x lies in [-150, 150]."""
    n = tl.floor(tl.fma(x, LOG2_E, 0.5))
    # ln 2 in two parts, of which the first has so few digits that n times it is exact.
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    # (exp(r) - 1 - r) / r²
    p = tl.fma(r, 1.3926926767453551e-3, 8.363774046301842e-3)
    p = tl.fma(r, p, 4.166654869914055e-2)
    p = tl.fma(r, p, 1.6666573286056519e-1)
    p = tl.fma(r, p, 0.5)
    return n.to(tl.int32), tl.fma(r * r, p, r)


@triton.jit
def exp(x):
    """e^x, through subnormals to 0 and to infinity; NaN of NaN."""
    bounded = tl.where(x > -150.0, tl.where(x < 150.0, x, 150.0), -150.0)
    n, less_one = _reduced(bounded)
    # In two steps, neither of which leaves the range of the exponent too early.
    half = n >> 1
    y = (less_one + 1.0) * _power_of_two(half) * _power_of_two(n - half)
    return tl.where(x != x, x, y)


@triton.jit
def expm1_negative(x):
    """e^x - 1 for x <= 0."""
    n, less_one = _reduced(tl.where(x > -80.0, x, -80.0))
    scale = _power_of_two(n)
    y = tl.fma(scale, less_one, scale - 1.0)
    return tl.where(x != x, x, y)


@triton.jit
def log1p_unit(z):
    """log(1 + z) for z in [0, 1], as 2 atanh(z / (2 + z))."""
    s = tl.div_rn(z, z + 2.0)
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
    # erfc(t) · exp(t²) / w, 1.5e-8 off
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
    """exp(-x² / 2): what the square rounds is put back, as e^-80 would show it."""
    square = x * x
    rest = tl.fma(x, x, -square)
    rest = tl.where(square < 1000.0, rest, 0.0)
    y = exp(-0.5 * square)
    return tl.fma(y, -0.5 * rest, y)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without overflow."""
    z = exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0 + z * 0.0, z), 1.0 + z)


@triton.jit
def tanh(x):
    """tanh x, as good beside 0 as elsewhere."""
    e = expm1_negative(-2.0 * tl.abs(x))
    y = tl.div_rn(-e, e + 2.0)
    return tl.where(x < 0, -y, y)
