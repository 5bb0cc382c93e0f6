"""Tensors that a kernel could not read as they are: negated views, and wrappers without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return a negated view with the values of x: its memory holds their negatives."""
    view = torch.complex(x, -x).conj().imag
    assert view.is_neg()
    return view


class Wrapper(torch.Tensor):
    """A wrapper subclass without memory of its own; operations on it return plain tensors."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Wrapper:
        self: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        self.inside = inside
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.inside if isinstance(value, Wrapper) else value

        return func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
