"""The registry of backends, by name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

#: Every backend by name, in order of preference; the definition last. A backend is a module that defines
#:
#: * ``DEVICES``, the device types that it serves; empty for all;
#: * ``register()``, which registers its kernels if it is available;
#: * ``is_ready()``, which returns whether its kernels are registered; cheap;
#: * ``why_not(x)``, which returns the reason why it cannot rotate a tensor; without an argument, the
#:   reason why it cannot run at all; None if it can;
#: * ``KERNELS``, if its kernels are functions in Python, the functions by operator.
BACKENDS: dict[str, ModuleType] = {}

#: Kernels for GPUs that are functions in Python, by operator.
ON_GPUS: dict[str, Callable[..., Any]] = {}

#: The backend that :func:`tightrope.backends.use` forces, by name; None if each call chooses.
forced: str | None = None

_ready_on: dict[str, Callable[[], bool]] = {}


def add(name: str, backend: ModuleType) -> None:
    """Register a backend, after those that are preferred to it."""
    backend.register()
    BACKENDS[name] = backend
    _ready_on.update(dict.fromkeys(backend.DEVICES, backend.is_ready))
    if "cuda" in backend.DEVICES:
        ON_GPUS.update(getattr(backend, "KERNELS", {}))


def takes_on(device: torch.device) -> bool:
    """Return whether kernels are registered for a device.

    >>> takes_on(torch.device("meta"))
    False
    """
    is_ready = _ready_on.get(device.type)
    return is_ready is not None and is_ready()
