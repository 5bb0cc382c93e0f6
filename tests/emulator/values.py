"""Numbers of PTX as arrays: their bits, and sums and products that are rounded once.

Values are arrays with one element per thread. Integers, float32 and float64 have numpy's types.
bfloat16 and float16 are computed in float64 and rounded once. An array of a packed type, such as
"bf16x2", has another dimension, of two elements.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: The bits of each type, as numpy names them.
BITS = {f"{kind}{bits}": f"u{bits // 8}" for kind in "sub" for bits in (8, 16, 32, 64)} | {
    "f16": "u2",
    "bf16": "u2",
    "f32": "u4",
    "f64": "u8",
    "pred": "?",
    "f16x2": "u4",
    "bf16x2": "u4",
    "s16x2": "u4",
    "u16x2": "u4",
    "f32x2": "u8",
}
VIEWS = {f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)} | {"f32": "f4", "f64": "f8"}


def read(bits: Array, kind: str) -> Array:
    """Return the values that bits mean."""
    if kind.endswith("x2"):
        half = kind[:-2]
        return read(np.ascontiguousarray(bits).view(BITS[half]).reshape(-1, 2), half)
    if kind == "bf16":
        return (bits.astype("u4") << 16).view("f4").astype("f8")
    if kind == "f16":
        return bits.view("f2").astype("f8")
    return bits.view(VIEWS[kind]) if kind in VIEWS else bits


def write(values: Array, kind: str) -> Array:
    """Return the bits of values; bfloat16 and float16 are rounded to nearest, ties to even."""
    if kind.endswith("x2"):
        return np.ascontiguousarray(write(values, kind[:-2])).view(BITS[kind])[:, 0]
    if kind == "f16":
        return np.where(np.isnan(values), 0x7FFF, values.astype("f2").view("u2")).astype("u2")
    if kind == "bf16":
        near = values.astype("f4")
        wide = odd(near, values - near).view("u4").astype("u8")
        rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        return np.where(np.isnan(values), 0x7FFF, rounded).astype("u2")
    return values if kind == "pred" else np.ascontiguousarray(values).view(BITS[kind])


def odd(total: Array, rest: Array) -> Array:
    """Return total + rest rounded to odd, where `total` is the nearest number to it.

    A second rounding, to at least two bits less, then has the result of a single one.
    """
    bits = total.view(f"i{total.dtype.itemsize}")
    change = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    moved = np.where((rest > 0) == (total > 0), bits | 1, bits - 1)
    least = np.where(rest > 0, 1, np.iinfo(bits.dtype).min + 1)
    moved = np.where(total == 0, least, moved).astype(bits.dtype)
    return np.where(change, moved, bits).view(total.dtype)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum and its error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def odd_sum(a: Array, b: Array) -> Array:
    total, rest = two_sum(a, b)
    return odd(total, np.where(np.isfinite(total), rest, 0))


def fma_narrow(a: Array, b: Array, c: Array) -> Array:
    """Return a · b + c in float64, rounded to odd; products of float32 are exact in float64."""
    return odd_sum(a.astype("f8") * b.astype("f8"), c.astype("f8"))


def fma_wide(a: Array, b: Array, c: Array) -> Array:
    """Return a · b + c of float64, rounded once."""
    a, b, c = (np.array(x) for x in np.broadcast_arrays(a, b, c))

    def halves(x: Array) -> tuple[Array, Array]:
        high = x * (2.0**27 + 1)
        high = high - (high - x)
        return high, x - high

    product = a * b
    (a1, a2), (b1, b2) = halves(a), halves(b)
    error = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2
    low, lower = two_sum(c, error)
    high, middle = two_sum(product, low)
    result = high + odd_sum(middle, lower)
    sizes = np.abs([a, b, product, c])
    # Elsewhere an error may underflow, or an intermediate result overflow.
    usual = ((sizes < 2.0**900) & ((sizes > 2.0**-900) | (sizes == 0))).all(0) & (product != 0)
    for i in np.nonzero(~usual & np.isfinite(sizes[[0, 1, 3]]).all(0))[0]:
        result[i] = fma_exact(float(a[i]), float(b[i]), float(c[i]))
    endless = ~np.isfinite(sizes[[0, 1, 3]]).all(0)
    return np.where(endless, product + c, result)


def fma_exact(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of zero
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def flushed(x: Array) -> Array:
    """Return float32 with subnormal numbers replaced by zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
