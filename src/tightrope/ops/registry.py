"""The registry of backends, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch


class Backend(NamedTuple):
    """The interface of a backend.

    Attributes:
        why_not: returns the reason why the backend cannot rotate a given tensor; without an argument,
            the reason why it cannot run at all; None if it can.
        devices: the device types that it serves; empty for all.
        is_ready: returns whether its kernels are registered; cheap.
    """

    why_not: Callable[..., str | None]
    devices: Collection[str]
    is_ready: Callable[[], bool]


#: Every backend by name, in order of preference; the definition last.
BACKENDS: dict[str, Backend] = {}

_ready_on: dict[str, Callable[[], bool]] = {}


def add(name: str, backend: Backend) -> None:
    """Register a backend, after those that are preferred to it."""
    BACKENDS[name] = backend
    _ready_on.update(dict.fromkeys(backend.devices, backend.is_ready))


def takes(x: torch.Tensor) -> bool:
    """Return whether kernels are registered for the device of x.

    >>> takes(torch.zeros(1, device="meta"))
    False
    """
    is_ready = _ready_on.get("cpu" if x.is_cpu else x.device.type)
    return is_ready is not None and is_ready()
