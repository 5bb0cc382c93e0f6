"""A cache of facts about tensors, valid while a tensor lives and does not change."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch

# Maximum number of cached tensors: several times the number of tables that one model uses.
_MOST = 64


class TensorMemo:
    """Known facts about tensors, such as that a table holds each entry twice.

    A view is identified by its base, shape, strides and offset, so the same view made again is found.
    Inference tensors have no version counter; they are assumed never to change.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, set[Hashable]]] = {}

    def knows(self, x: torch.Tensor, fact: Hashable) -> bool:
        """Return whether the fact is known."""
        facts, key = self._about(x, fact)
        return key in facts

    def learn(self, x: torch.Tensor, fact: Hashable) -> None:
        """Note a fact about a tensor."""
        facts, key = self._about(x, fact)
        facts.add(key)

    def _about(self, x: torch.Tensor, fact: Hashable) -> tuple[set[Hashable], Hashable]:
        """Return what is known about the tensor that owns the memory of x, and the fact as one about it."""
        owner: torch.Tensor = x if x._base is None else x._base
        key = fact if owner is x else (fact, x.shape, x.stride(), x.storage_offset())
        version = 0 if owner.is_inference() else owner._version
        known = self._known.get(id(owner))
        if known is None or known[0]() is not owner or known[1] != version:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[id(owner)] = weakref.ref(owner), version, set()
        return known[2], key
