"""Frequency rules: how fast each channel pair turns.

A rule is a pure function from (rotary dimension, base, ...) to :class:`Frequencies`. Frequencies are
kept as exact decimals, with far more digits than a float64 has, because a phase word has 64
significant bits and its last bit must be right.
"""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from functools import lru_cache

import torch

# 64 bits are 20 digits; the rest is head room for the rounding of up to thousands of products.
CONTEXT = decimal.Context(prec=60)


@dataclass(frozen=True)
class Frequencies:
    """What a frequency rule yields.

    Attributes:
        exact: angular frequency of each pair in radians per position, to 60 digits.
        attention_scaling: factor on the rotated channels (YaRN, LongRoPE); 1.0 for most rules.
    """

    exact: tuple[decimal.Decimal, ...]
    attention_scaling: float = 1.0

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies as float64 ``[pairs]`` on the CPU, in radians per position."""
        return torch.tensor(
            [float(omega) for omega in self.exact], dtype=torch.float64, device="cpu"
        )


@lru_cache(maxsize=256)
def default(rotary_dim: int, base: float) -> Frequencies:
    r"""The rule of the first RoPE paper, :math:`\omega_k = base^{-2k/rotary\_dim}`.

    Args:
        rotary_dim: number of channels that rotate; even.
        base: positive; the wavelengths run from 2π to nearly 2π · base positions.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    >>> [round(float(omega), 6) for omega in default(4, 10000.0).exact]
    [1.0, 0.01]
    """
    if rotary_dim == 0:
        return Frequencies(())
    # One logarithm and one exponential in all; the products that follow lose one digit in the
    # sixtieth place each.
    step = CONTEXT.divide(
        CONTEXT.multiply(CONTEXT.ln(decimal.Decimal(base)), decimal.Decimal(-2)),
        decimal.Decimal(rotary_dim),
    )
    ratio = CONTEXT.exp(step)
    omega = decimal.Decimal(1)
    exact = []
    for _ in range(rotary_dim // 2):
        exact.append(omega)
        omega = CONTEXT.multiply(omega, ratio)
    return Frequencies(tuple(exact))
