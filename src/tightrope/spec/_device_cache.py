"""Tensors that one spec keeps on each device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import torch

from .._tracing import is_tracing, may_keep

T = TypeVar("T")

# All that a value depends on besides the spec and the device: the length of a sequence, None where the
# length does not matter, or a name.
Key: TypeAlias = "int | str | None"

# Decoding under a rule that depends on the length makes a value for every token, so lengths are
# forgotten from time to time.
_MOST = 64


class DeviceCache:
    """Tensors of one spec, made once for each device and key.

    It holds no fake or wrapped tensor, none of inference mode and none in the memory pool of a graph,
    and nothing is added while compiling.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, Key], Any] = {}

    def get(self, device: torch.device, key: Key, make: Callable[[torch.device, Any], T]) -> T:
        """The kept value, or a new one.

        A fake or transformed program always makes its own. The compiler reads what was kept.

        Args:
            device: where the value lives.
            key: see :data:`Key`.
            make: makes the value from device and key.
        """
        if not is_tracing() or torch.compiler.is_dynamo_compiling():
            kept: T | None = self._kept.get((device, key))
            if kept is not None:
                return kept
        with outside_inference():
            made = make(device, key)
        if may_keep(device):
            if len(self._kept) >= _MOST:
                for each in list(self._kept):  # a copy: other threads may add
                    if isinstance(each[1], int):
                        self._kept.pop(each, None)
            self._kept[device, key] = made
        return made


def outside_inference() -> AbstractContextManager[object]:
    """Leave inference mode, so that autograd may save what is made."""
    if is_tracing() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)
