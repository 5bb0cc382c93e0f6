"""Rules whose frequencies are one geometric row: unchanged, divided, with another base, or truncated."""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import ClassVar

from .._errors import bad_value, public
from .._value import checked_calls
from ._rule import CONTEXT, Frequencies, Keys, Length, Rule


@lru_cache(maxsize=256)
def default(rotary_dim: int, base: float) -> Frequencies:
    r"""Return the frequencies of the original RoPE paper, :math:`\omega_k = base^{-2k/rotary\_dim}`.

    Args:
        rotary_dim: number of channels that rotate; even.
        base: positive; the wavelengths run from 2π to nearly 2π · base positions.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    >>> [round(float(omega), 6) for omega in default(4, 10000.0).exact]
    [1.0, 0.01]
    """
    with decimal.localcontext(CONTEXT):
        return Frequencies(_stretched(rotary_dim, base, Decimal(1)))


def _stretched(rotary_dim: int, base: float, scale: Decimal) -> tuple[Decimal, ...]:
    """Return the geometric row ω_k = base^(−2k/d) · scale^(−2k/(d−2)): its base is base · scale^(d/(d−2)).

    Only one exponential is computed; each product adds an error of at most one unit in the 60th
    digit.
    """
    if rotary_dim == 0:
        return ()
    step = Decimal(base).ln() * -2 / rotary_dim
    if rotary_dim > 2:
        step -= 2 * scale.ln() / (rotary_dim - 2)
    ratio, row = step.exp(), [Decimal(1)]
    while len(row) < rotary_dim // 2:
        row.append(row[-1] * ratio)
    return tuple(row)


@checked_calls
@dataclass(frozen=True)
class Linear(Rule):
    """Position interpolation: every pair turns ``factor`` times slower, ω' = ω / factor.

    Frequencies are divided instead of positions. The angle is the same, and integer positions stay
    integers for any factor.

    Args:
        factor: ratio of the extended length to the training length.

    Raises:
        ValueError, TypeError: a factor that is not a positive number.

    Source: Chen et al., Position Interpolation (arXiv 2306.15595), equation 4.

    >>> Linear(4.0).frequencies(4, 10000.0).inv_freq.tolist()
    [0.25, 0.0025]
    """

    names = ("linear",)

    factor: float

    def __post_init__(self) -> None:
        self._positive("factor")

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        factor = Decimal(self.factor)
        return Frequencies(tuple(omega / factor for omega in default(rotary_dim, base).exact))


@checked_calls
@dataclass(frozen=True)
class NTK(Rule):
    """NTK-aware scaling: a changed base, so that fast pairs keep their speed and slow ones slow down.

    base' = base · factor^(d / (d − 2)) with d = ``rotary_dim``. The exponent is chosen so that the
    slowest pair, k = d/2 − 1, is divided by exactly ``factor`` and the fastest, k = 0, is unchanged.
    With d = 2 there is only one pair, whose frequency is 1 for any base.

    Details that implementations get wrong: d is the number of channels that rotate, not the width of
    the head; and "alpha" in configurations (Hunyuan, ExLlama) is this factor, not a new base.

    Args:
        factor: the divisor of the slowest pair.

    Raises:
        ValueError, TypeError: a factor that is not a positive number.

    Source: bloc97, 2023, as in Peng et al., YaRN (arXiv 2309.00071), section 3.1, definition 1.

    >>> NTK(8.0).frequencies(4, 10000.0).inv_freq.tolist()
    [1.0, 0.00125]
    """

    names = ("ntk",)
    keys: ClassVar[Keys] = {"factor": ("factor", "alpha")}

    factor: float

    def __post_init__(self) -> None:
        self._positive("factor")

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        return Frequencies(_stretched(rotary_dim, base, Decimal(self.factor)))


@checked_calls
@dataclass(frozen=True)
class DynamicNTK(Rule):
    """Dynamic NTK-aware scaling: the scale grows with the length of the sequence.

    Up to ``original_max_position`` = L0 the frequencies are the default ones. For a length L above
    L0 the frequencies are those of :class:`NTK` with the scale ``factor · L / L0 − (factor − 1)``,
    which grows from 1 at L0. With ``factor=1`` the scale is L / L0, the rule of the paper.

    Details that implementations get wrong: L is the length of the row itself, so the result for a row
    does not depend on the other rows of a batch or on earlier calls (transformers 5.23 keeps the
    frequencies of the longest sequence seen until one below L0 comes); and keys cached under
    another length must be re-rotated before queries of this length attend to them.

    Args:
        factor: growth of the scale per L0 tokens.
        original_max_position: L0, the training length.

    Raises:
        ValueError, TypeError: a factor or a length that is not a positive number.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.3 and appendix A.2 (factor 1); emozilla,
    2023, for the factor, as in transformers.

    >>> rule = DynamicNTK(2.0, original_max_position=4096)
    >>> rule.frequencies(4, 10000.0, seq_len=4096) == rule.frequencies(4, 10000.0)
    True
    >>> rule.frequencies(4, 10000.0, seq_len=8192).inv_freq.tolist()[1] * 3
    0.01
    """

    names = ("dynamic",)
    by_length = True

    factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        self._positive("factor")
        self._length()

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
        if seq_len is None:
            return default(rotary_dim, base)
        excess = Decimal(seq_len - self.original_max_position) / self.original_max_position
        return Frequencies(_stretched(rotary_dim, base, 1 + Decimal(self.factor) * excess))

    def scale_beyond(self, length: Length) -> Length:
        return (length - self.original_max_position) * (
            self.factor / self.original_max_position
        ) + 1.0

    def scale_exponents(self, pairs: int) -> list[float]:
        # 2k / (d − 2), which is k / (d/2 − 1)
        return [k / max(pairs - 1, 1) for k in range(pairs)]


@checked_calls
@dataclass(frozen=True)
class Proportional(Rule):
    """p-RoPE: only the fastest pairs rotate; the others have frequency zero.

    ω_k = base^(−2k/d) / factor for the first ``rotary_fraction · d / 2`` pairs, rounded down, and 0
    for the others; d is the whole width, over which channels are paired.

    Details that implementations get wrong: this is not partial rotation. The exponents of the rotating pairs
    have the whole width d as denominator, and channel i is paired with i + d/2, not within a narrower
    slice. So a spec with this rule has ``rotary_dim`` = the width of the head.

    Args:
        rotary_fraction: fraction of the pairs that rotate, from 0 to 1. ``rotary_fraction · d`` is rounded
            to float64 before it is halved and rounded down, as the models' code does: 0.6 of 10
            channels are 3 pairs.
        factor: the divisor of the frequencies of rotating pairs.

    Raises:
        ValueError, TypeError: a fraction outside [0, 1], a factor that is not a positive number.

    Source: Barbero et al., Round and Round We Go (arXiv 2410.06205), section 6; Gemma 4 in
    transformers for the factor.

    >>> Proportional(0.5).frequencies(8, 10000.0).inv_freq.tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    names = ("proportional",)
    keys: ClassVar[Keys] = {"rotary_fraction": ("partial_rotary_factor",)}

    rotary_fraction: float
    factor: float = 1.0

    @public("Proportional")
    def __post_init__(self) -> None:
        self._positive("rotary_fraction", zero=True)
        if self.rotary_fraction > 1:
            raise bad_value(f"rotary_fraction must be at most 1 but got {self.rotary_fraction}")
        self._positive("factor")

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        turning = int(self.rotary_fraction * rotary_dim // 2)
        factor = Decimal(self.factor)
        row = default(rotary_dim, base).exact
        still = (Decimal(0),) * (len(row) - turning)
        return Frequencies(tuple(omega / factor for omega in row[:turning]) + still)
