"""The fake kernel: shapes, dtypes and strides of results, without data. Serves meta tensors too."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _rotate(xs: Sequence[torch.Tensor], *arguments: object, **named: object) -> list[torch.Tensor]:
    # A single meta tensor brings the dispatcher here, whatever the others are.
    for tensor in (*xs, *arguments):
        if isinstance(tensor, torch.Tensor) and tensor.device != xs[0].device:
            raise RuntimeError("tightrope::rotate: tensors on several devices")
    return [torch.empty_like(x) for x in xs]


def _in_memory(*arguments: object, **named: object) -> None:
    """Kernels that write into their arguments make nothing."""


def register() -> None:
    """Register the fake kernels; once, at import."""
    torch.library.register_fake("tightrope::rotate", _rotate)
    torch.library.register_fake("tightrope::rotate_", _in_memory)
    torch.library.register_fake("tightrope::rotate_into", _in_memory)
