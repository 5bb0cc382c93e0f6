"""Exact angles in decimal arithmetic, independent of the kernels."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from decimal import Decimal

import torch

from tightrope.frequencies import CONTEXT, TWO_PI


def cos_sin(
    positions: Sequence[int], omegas: Sequence[Decimal]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of position · ω, float64 ``[positions, pairs]``, off by one or two roundings."""
    with decimal.localcontext(CONTEXT):
        angles = [
            [float((omega * p).remainder_near(TWO_PI)) for omega in omegas] for p in positions
        ]
    cos = [[math.cos(angle) for angle in row] for row in angles]
    sin = [[math.sin(angle) for angle in row] for row in angles]
    return (
        torch.tensor(cos, dtype=torch.float64).reshape(len(positions), len(omegas)),
        torch.tensor(sin, dtype=torch.float64).reshape(len(positions), len(omegas)),
    )


def decimals(omegas: torch.Tensor | Sequence[float]) -> tuple[Decimal, ...]:
    """Convert floats to decimals exactly."""
    values = omegas.tolist() if isinstance(omegas, torch.Tensor) else omegas
    return tuple(Decimal(value) for value in values)
