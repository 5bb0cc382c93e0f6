"""The backends, fastest first. The PyTorch dispatcher chooses among them; this names its choice."""

from __future__ import annotations

from types import ModuleType

import torch

from . import cpu, reference, triton

#: Every backend by name, fastest first. A backend module offers ``register()``, ``why_not(x=None)`` and
#: ``DEVICES``, the types of the devices that it is for (none: all); :func:`takes` asks those with kernels
#: besides, and nothing else is looked at.
BY_NAME: dict[str, ModuleType] = {"cpu": cpu, "triton": triton, "reference": reference}


def register() -> None:
    """Register the kernels of every backend that is there; once, at import."""
    for backend in reversed(BY_NAME.values()):
        backend.register()


def backends() -> dict[str, str | None]:
    """Which backends are there.

    Returns:
        For each backend, fastest first, None if it is usable and else why it is not.

    >>> backends()["reference"] is None
    True
    """
    return {name: backend.why_not() for name, backend in BY_NAME.items()}


def takes(x: torch.Tensor) -> bool:
    """Whether a kernel would rotate a tensor, and not the definition.

    What :func:`which` says, for every call of a prepared rotation, to which a walk over all backends would
    add a tenth.

    >>> takes(torch.zeros(1, device="meta"))
    False
    """
    return cpu.why_not(x) is None if x.is_cpu else triton.takes(x)


def which(x: torch.Tensor) -> tuple[str, str | None]:
    """Which backend would rotate a tensor, and why no faster one would.

    Args:
        x: the tensor; only its device matters.

    Returns:
        The name of the backend, and None or the reasons of every faster one: of those for its kind of
        device or, where there are none, of all.

    >>> name, reason = which(torch.zeros(1, 1, 4, 8))
    """
    reasons: list[str] = []
    own = any(x.device.type in backend.DEVICES for backend in BY_NAME.values())
    for name, backend in BY_NAME.items():
        if own and backend.DEVICES and x.device.type not in backend.DEVICES:
            continue
        reason = backend.why_not(x)
        if reason is None:
            return name, "; ".join(reasons) or None
        reasons.append(f"{name}: {reason}")
    raise AssertionError("the reference runs everything")
