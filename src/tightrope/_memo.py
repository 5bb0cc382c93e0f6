"""A cache of facts about tensors, valid while a tensor lives and does not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ._tracing import outside_modes

# Maximum number of cached tensors: several times the number of tables that one model uses.
_MOST = 64


class TensorMemo:
    """Cached facts about tensors, such as whether a table holds each entry twice.

    A view is identified by its base, shape, strides and offset, so the same view made again is found.
    Inference tensors have no version counter; they are assumed never to change.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, dict[Hashable, Any]]] = {}

    def knows(self, x: torch.Tensor, key: Hashable) -> bool:
        """Return whether the fact is cached."""
        owner, key = _owned(x, key)
        known = self._known.get(id(owner))
        if known is None or known[0]() is not owner or key not in known[2]:
            return False
        return owner.is_inference() or known[1] == owner._version

    def find(
        self, x: torch.Tensor, key: Hashable, compute: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Return the cached fact about a tensor under a key, or compute it.

        Args:
            compute: called with ``arguments`` if the fact is not cached.
        """
        owner, key = _owned(x, key)
        version = 0 if owner.is_inference() else owner._version
        known = self._known.get(id(owner))
        if known is None or known[0]() is not owner or known[1] != version:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[id(owner)] = weakref.ref(owner), version, {}
        facts = known[2]
        if key not in facts:
            with outside_modes():
                facts[key] = compute(*arguments)
        return facts[key]


def _owned(x: torch.Tensor, key: Hashable) -> tuple[torch.Tensor, Hashable]:
    """Return the tensor that owns the memory, and the key of a fact about x among its facts."""
    base = x._base
    if base is None:
        return x, key
    return base, (key, x.shape, x.stride(), x.storage_offset())
