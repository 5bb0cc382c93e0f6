"""What many test files need: random tensors, and errors matched to the letter."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import pytest
import torch


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal random numbers, the same for the same shape and seed in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def refused(kind: type[Exception], text: str) -> AbstractContextManager[object]:
    """Expects an error of this type with exactly this text."""
    return pytest.raises(kind, match=f"^{re.escape(text)}$")
