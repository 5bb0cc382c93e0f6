"""Registered backends by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch


class Backend(NamedTuple):
    """What a backend provides.

    Attributes:
        why_not: why it cannot rotate a tensor, or nothing at all, in a sentence; None if it can.
        devices: the types of the devices that it serves; none for all.
        is_ready: whether its kernels are registered; cheap.
    """

    why_not: Callable[..., str | None]
    devices: Collection[str]
    is_ready: Callable[[], bool]


#: Every backend by name, fastest first.
BACKENDS: dict[str, Backend] = {}

_ready_on: dict[str, Callable[[], bool]] = {}


def add(name: str, backend: Backend) -> None:
    """Add a backend; slower ones later."""
    BACKENDS[name] = backend
    _ready_on.update(dict.fromkeys(backend.devices, backend.is_ready))


def takes(x: torch.Tensor) -> bool:
    """Whether x would go to a kernel rather than to the definition.

    >>> takes(torch.zeros(1, device="meta"))
    False
    """
    is_ready = _ready_on.get("cpu" if x.is_cpu else x.device.type)
    return is_ready is not None and is_ready()
