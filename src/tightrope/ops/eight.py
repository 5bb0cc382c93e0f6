"""Numbers in 8 bits: divided by a scale, limited to the range of a float8 format, and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .call import Call
from .layouts import Layout
from .schema import ONCE

#: The formats; the code of one in the kernels is its index plus 1.
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def encoded(
    y: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype, layout: Layout
) -> torch.Tensor:
    """Return y / scale in a float8 format: divided in float32, then limited to its range and rounded once.

    NaN stays NaN.

    Args:
        y: floating, in the layout.
        scale: a number, or a floating tensor ``()``, ``(1,)`` or ``(heads,)``.
        dtype: one of :data:`FORMATS`.
        layout: the order of the dimensions of y.
    """
    most = torch.finfo(dtype).max
    if isinstance(scale, torch.Tensor):
        scale = scale.to(torch.float32).reshape(-1)
        if scale.numel() != 1:
            scale = scale.reshape([-1 if d == layout.head else 1 for d in range(layout.dims)])
    return (y.to(torch.float32) / scale).clamp(-most, most).to(dtype)


def encoded_keys(
    call: Call,
    scale: float | torch.Tensor,
    dtype: torch.dtype,
    rotate: Callable[[Call], Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Return the result of a call of one tensor in a float8 format.

    Args:
        call: the call. With the rounding "once" its result is not rounded before.
        scale, dtype: see :func:`encoded`.
        rotate: rotates into new tensors.
    """
    x = call.q
    if call.options.rounding == ONCE and x.dtype != torch.float64:
        x = x.float()
    return encoded(rotate(call.on([x]))[0], scale, dtype, call.layout())
