"""What a function makes of one head of one row at positions 0 to 15, which predicts the results of other calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ._call import Subject

NEAR = 16
"""The positions whose matrices are measured: 0 to 15."""
_SAME = 4e-5
"""Largest difference from a predicted result: float32 products of numbers below 5, and factors below 2, give 1e-6."""


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if one value is NaN and the other is not."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    return float(difference.max()) if difference.numel() else 0.0


def matrices(subject: Subject, positions: Sequence[int]) -> torch.Tensor:
    """Measure the matrix at each position, float64 ``[positions, out, in]``: a call for each channel.

    Raises:
        CallFailed: as in :meth:`Subject.rotate`.
    """
    columns = []
    for channel in range(subject.head_dim):
        x = torch.zeros(1, 1, len(positions), subject.head_dim)
        x[..., channel] = 1.0
        y = subject.rotate(subject.laid_out(x), positions)
        columns.append(y[0, 0].detach().cpu().double())
    return torch.stack(columns, -1)


@dataclass(frozen=True)
class Near:
    """The matrices at positions 0 to 15, float64 ``[positions, out, in]``."""

    matrices: torch.Tensor

    @classmethod
    def of(cls, subject: Subject) -> Near:
        """Measure a function."""
        return cls(matrices(subject.fresh(), range(NEAR)))

    @property
    def is_finite(self) -> bool:
        """False if some entry is NaN or infinite."""
        return bool(self.matrices.isfinite().all())

    @property
    def tolerance(self) -> float:
        """The largest difference from a predicted result that is a matter of rounding."""
        return _SAME * max(1.0, float(self.matrices.abs().max()))

    def predicted(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what x ``[rows, heads, tokens, channels]`` should become at ids ``[rows, tokens]`` below 16."""
        maps = self.matrices[ids.cpu()]
        return torch.einsum("rtij,rhtj->rhti", maps, x.detach().cpu().double())

    def off(self, y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> float:
        """Return by how much a result differs from the predicted one; 0 if roundings explain it."""
        size = apart(y, self.predicted(x, ids))
        return size if size > self.tolerance else 0.0

    def matches(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """True where a token of a call comes out as if at a position from 0 to 15, ``[rows, tokens, positions]``."""
        every = torch.einsum("pij,rhtj->rhtpi", self.matrices, x.detach().cpu().double())
        gap = (y.detach().cpu().double()[..., None, :] - every).abs().amax((1, 4))
        return gap <= self.tolerance
