"""The nearest of all numbers of a format of 8 bits."""

from __future__ import annotations

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 0x7E, E5M2: 0x7B}  # codes of the largest numbers
EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def codes(y: torch.Tensor, scale: float | torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Encode y / scale by the code of the nearest number, of two that are as near by the even one; -1 for NaN."""
    quotient = (y.float() / torch.as_tensor(scale, dtype=torch.float32)).double()
    numbers = torch.arange(LARGEST[to] + 1, dtype=torch.uint8).view(to).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    low, high = (
        torch.searchsorted(middles, quotient.abs(), right=right) for right in (False, True)
    )
    found = torch.where(low % 2 == 0, low, high) + 0x80 * quotient.signbit()
    return torch.where(quotient.isnan(), -1, found)


def stored(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of a float8 tensor; -1 for NaN."""
    found = x.contiguous().view(torch.uint8).long()
    return torch.where(x.float().isnan(), -1, found)
