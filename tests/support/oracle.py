"""Reference results of rotations, computed with many digits.

Nothing here is imported or copied from the library under test: angles are products of exact positions
and many-digit frequencies, cosines and sines come from mpmath, and the rotation is written out channel
by channel in float64.

Positions are Python numbers or tensors, whose elements are taken as exact. Frequencies are many-digit
numbers in radians per position. Cosines and sines are rounded once, to float64, whose steps are 2^29
times finer than those of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mpmath
import torch

# A position below 2^63 uses up 19 of these digits, so at least 60 are correct in every angle.
MP = mpmath.mp.clone()
MP.dps = 80

Number = int | float
Real = Any  # a number of MP; mpmath has no types

# --- frequencies ----------------------------------------------------------------------------------


@cache
def frequencies(base: float, rotary_dim: int) -> tuple[Real, ...]:
    """Return ω of each pair, base^(-2k/rotary_dim), for the exact value of the float `base`."""
    return tuple(
        MP.power(MP.mpf(base), -MP.mpf(2 * k) / rotary_dim) for k in range(rotary_dim // 2)
    )


class Phase(NamedTuple):
    """ω in units of 2^-64 turn, rounded, split into a signed 64-bit phase word and whole turns."""

    word: int
    turns: int


def phase(omega: Real) -> Phase:
    """Round ω / 2π · 2^64, and split it into a signed 64-bit phase word and whole turns."""
    scaled = omega / (2 * MP.pi) * MP.mpf(2) ** 64
    count = int(MP.floor(scaled + MP.mpf(1) / 2))
    word = count % 2**64
    if word >= 2**63:
        word -= 2**64
    return Phase(word, (count - word) // 2**64)


# --- angles ---------------------------------------------------------------------------------------


@cache
def cos_sin_at(positions: tuple[Number, ...], omegas: tuple[Real, ...]) -> tuple[float, float]:
    """Return cosine and sine of Σ position · ω over the axes, each correctly rounded to float64.

    Both are NaN if a position is not finite.
    """
    if not all(math.isfinite(position) for position in positions):
        return math.nan, math.nan
    angle = MP.fsum(MP.mpf(p) * omega for p, omega in zip(positions, omegas, strict=True))
    cos, sin = MP.cos_sin(angle)
    return float(cos), float(sin)


def cos_sin(
    positions: Sequence[Number] | torch.Tensor, omegas: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of all angles, float64 ``[rows, tokens, pairs]``.

    Args:
        positions: ``[tokens]``, ``[rows, tokens]`` or ``[axes, rows, tokens]``.
        omegas: one per pair; for positions with axes, one sequence of them per axis.
    """
    if isinstance(positions, torch.Tensor):
        ids: Any = positions.tolist()
        dims = positions.dim()
        shape = tuple(positions.shape)
    else:
        ids, dims, shape = list(positions), 1, (len(positions),)
    axes = ids if dims == 3 else [ids] if dims == 2 else [[ids]]
    rows, tokens = (1, *shape)[-2:]
    per_axis = list(omegas) if dims == 3 else [omegas]
    by_pair = [tuple(pair) for pair in zip(*per_axis, strict=True)]
    values = [
        cos_sin_at(tuple(axis[r][t] for axis in axes), pair)
        for r in range(rows)
        for t in range(tokens)
        for pair in by_pair
    ]
    both = torch.tensor(values, dtype=torch.float64).reshape(rows, tokens, len(by_pair), 2)
    return both[..., 0], both[..., 1]


# --- rotation -------------------------------------------------------------------------------------


def channels(
    rotary_dim: int, start: int = 0, interleaved: bool = False
) -> tuple[list[int], list[int]]:
    """Return the first channels and the second channels of all pairs."""
    if interleaved:
        first = [start + 2 * k for k in range(rotary_dim // 2)]
        return first, [channel + 1 for channel in first]
    first = [start + k for k in range(rotary_dim // 2)]
    return first, [channel + rotary_dim // 2 for channel in first]


def as_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View x as [rows, heads, tokens, channels], of size 1 in dimensions that the layout lacks."""
    letters = layout.replace("t", "s")
    view = x.permute([letters.index(letter) for letter in "bhsd" if letter in letters])
    for dim, letter in enumerate("bhsd"):
        if letter not in letters:
            view = view.unsqueeze(dim)
    return view


def rotate(
    x: torch.Tensor,
    positions: Sequence[Number] | torch.Tensor,
    omegas: Sequence[Any],
    *,
    layout: str = "bhsd",
    start: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate a float64 copy of x by exact angles.

    Args:
        positions: ``[tokens]``, ``[rows, tokens]`` or ``[axes, rows, tokens]``.
        omegas: see :func:`cos_sin`; their number determines how many channels rotate.
    """
    cos, sin = (each[:, None] for each in cos_sin(positions, omegas))  # the same for all heads
    result = x.detach().to(torch.float64, copy=True)
    view = as_bhsd(result, layout)
    view.copy_(turned(view, cos, -sin if inverse else sin, start, interleaved))
    return result


def turned(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotate x [..., channels] in float64 by cosines and sines [..., pairs], differentiably."""
    first, second = channels(2 * cos.shape[-1], start, interleaved)
    x, cos, sin = x.double(), cos.double(), sin.double()
    u, v = x[..., first], x[..., second]
    rest = sorted({*range(x.shape[-1])} - {*first, *second})
    y = torch.cat((u * cos - v * sin, u * sin + v * cos, x[..., rest]), -1)
    return y[..., torch.tensor([*first, *second, *rest]).argsort()]


def pair_lengths(
    x: torch.Tensor, rotary_dim: int, *, start: int = 0, interleaved: bool = False
) -> torch.Tensor:
    """Return for each element the length of its pair, as float64; 0 for channels without a pair."""
    first, second = channels(rotary_dim, start, interleaved)
    exact = x.detach().double()
    result = torch.zeros_like(exact)
    length = torch.hypot(exact[..., first], exact[..., second])
    result[..., first] = length
    result[..., second] = length
    return result


# --- rounding -------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A binary floating-point format: digits of the significand and range of the exponent."""

    digits: int
    lowest: int  # the smallest normal number is 2^lowest
    highest: int  # no finite number reaches 2^(highest + 1)


FORMATS = {
    torch.bfloat16: Format(8, -126, 127),
    torch.float16: Format(11, -14, 15),
    torch.float32: Format(24, -126, 127),
}


def step_sizes(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the spacing of a dtype's numbers at each float64 value, as float64."""
    digits, lowest, _ = FORMATS[dtype]
    _, exponent = torch.frexp(exact)  # |exact| in [2^(exponent-1), 2^exponent)
    exponent = (exponent - 1).clamp(min=lowest) - (digits - 1)
    return torch.ldexp(torch.ones_like(exact), exponent)


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 values once to a narrower dtype, to nearest even, overflowing to infinity.

    A plain ``.to(dtype)`` may round twice, by way of float32.
    """
    # The step is a power of two, so only torch.round rounds.
    step = step_sizes(exact, dtype)
    value = torch.round(exact / step) * step
    over = value.abs() >= 2.0 ** (FORMATS[dtype].highest + 1)
    value = torch.where(over, torch.copysign(torch.full_like(exact, math.inf), exact), value)
    return torch.where(exact.isfinite(), value, exact).to(dtype)


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Count the steps between representable numbers from a to b, for two tensors of one dtype.

    Both zeros are the same number. Infinity is the neighbour of the largest finite number. NaN is at
    distance 0 from NaN, and at the largest distance from any number.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]

    def ordinal(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(integers).to(torch.int64)
        magnitude = bits & torch.iinfo(integers).max
        return torch.where(bits < 0, -magnitude, magnitude)

    apart = (ordinal(a) - ordinal(b)).abs()
    either, both = a.isnan() | b.isnan(), a.isnan() & b.isnan()
    apart = torch.where(either, torch.iinfo(torch.int64).max, apart)
    return torch.where(both, 0, apart)
