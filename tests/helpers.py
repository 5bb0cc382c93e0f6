"""Helpers for many test files: random tensors, and exact matching of error messages."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import pytest
import torch


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normal random numbers; equal shapes and seeds give equal numbers in each dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def refused(kind: type[Exception], text: str) -> AbstractContextManager[object]:
    """Expect an error of this type with exactly this text."""
    return pytest.raises(kind, match=f"^{re.escape(text)}$")
