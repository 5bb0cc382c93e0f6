"""A cache of the tensors that one spec needs on each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from .._tracing import is_tracing, may_keep, needs_plain, outside_modes

T = TypeVar("T")

# The key of a value for one spec and device: a sequence length above the rule's original length, None
# for all other lengths, or a name.
Key: TypeAlias = "int | str | None"

# Decoding with a rule that depends on the length makes one value per token, so entries for lengths are
# dropped when the cache has this many entries.
_MOST = 64


class DeviceCache:
    """Tensors of one spec, made once for each device and key.

    It never holds fake or wrapped tensors, inference tensors, or tensors in the memory pool of a CUDA
    graph, and nothing is added while compiling.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, Key], Any] = {}

    def get(self, device: torch.device, key: Key, make: Callable[[torch.device, Any], T]) -> T:
        """Return the cached value, or make it.

        Under fake tensors and functorch transforms the value is always made anew; Dynamo reads the
        cache, and so does an export for a runtime that lacks the operators, which needs the values.

        Args:
            device: device of the value.
            key: see :data:`Key`.
            make: called with device and key to make the value.
        """
        if not is_tracing() or torch.compiler.is_dynamo_compiling() or needs_plain():
            kept: T | None = self._kept.get((device, key))
            if kept is not None:
                return kept
        with outside_modes():
            made = make(device, key)
        if may_keep(device):
            if len(self._kept) >= _MOST:
                for each in list(self._kept):  # a copy: other threads may add
                    if isinstance(each[1], int):
                        self._kept.pop(each, None)
            self._kept[device, key] = made
        return made
