"""The roundings of a rotation, written out with PyTorch's elementwise functions.

Nothing here is imported from the library under test.
"""

from __future__ import annotations

import torch

ROUNDINGS = ("once", "wide", "each")


def split(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second channels of the pairs."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def join(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Undo `split`."""
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    rounding: str,
    back: bool = False,
) -> torch.Tensor:
    """Rotate all channels of x by tables with an entry for each channel.

    Args:
        rounding: "each" rounds the products and the result to the dtype of x; "wide" rounds only
            the result, and its products are float32 (float64 if x is). "once" is not modelled.
        back: whether to apply the transpose of the rotation instead.
    """
    u, v = split(x, interleaved)
    c, c2 = split(cos, interleaved)
    s, s2 = split(sin, interleaved)
    if back:
        s, s2 = -s2, -s
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = a.to(wide) * b.to(wide)
        return found.to(x.dtype) if rounding == "each" else found

    y = join(product(u, c) - product(v, s), product(v, c2) + product(u, s2), interleaved)
    return y.to(x.dtype)


def eager(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate like most models, by x·cos + rotate_half(x)·sin, which PyTorch differentiates."""
    first, second = split(x, interleaved)
    return x * cos + join(-second, first, interleaved) * sin
