"""The fake kernel: shapes, dtypes and strides of results, without data. Serves meta tensors too."""

from __future__ import annotations

import torch

from .schema import present


def _rotate(
    q: torch.Tensor, k: torch.Tensor | None, *arguments: object, **named: object
) -> list[torch.Tensor]:
    # A single meta tensor brings the dispatcher here, whatever the others are.
    for tensor in (k, *arguments):
        if isinstance(tensor, torch.Tensor) and tensor.device != q.device:
            raise RuntimeError("tightrope::rotate: tensors on several devices")
    return [torch.empty_like(x) for x in present(q, k)]


def _in_memory(*arguments: object, **named: object) -> None:
    """Kernels that write into their arguments make nothing."""


def register() -> None:
    """Register the fake kernels; once, at import."""
    torch.library.register_fake("tightrope::rotate", _rotate)
    torch.library.register_fake("tightrope::rotate_", _in_memory)
    torch.library.register_fake("tightrope::rotate_into", _in_memory)
