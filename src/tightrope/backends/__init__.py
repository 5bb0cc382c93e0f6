"""The backends: the PyTorch dispatcher chooses one, and this module registers and reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .._errors import bad_type, bad_value, describe, public
from ..ops import registry
from ..ops.registry import BACKENDS, add
from . import cpu, reference, triton

__all__ = ["use", "which", "why_not"]


def register() -> None:
    """Register the kernels of every available backend; called once, at import."""
    for name, backend in (("cpu", cpu), ("triton", triton), ("reference", reference)):
        add(name, backend)


def why_not() -> dict[str, str | None]:
    """Return for each backend why it cannot run here, or None if it can.

    >>> why_not()["reference"] is None
    True
    """
    return {name: backend.why_not() for name, backend in BACKENDS.items()}


@public("use")
def use(name: str) -> AbstractContextManager[None]:
    """Force a backend for all calls inside a with block, in all threads, to compare or to debug.

    Args:
        name: "cpu", "triton" or "reference".

    Raises:
        ValueError: an unknown name.
        NotImplementedError: raised by a call inside, if the backend cannot rotate its tensors; the message gives
            the reason.

    >>> from tightrope import RopeSpec, rotate
    >>> with use("reference"):
    ...     y = rotate(torch.ones(4, 8), RopeSpec(8), layout="sd")
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise bad_value(f"name must be one of {', '.join(BACKENDS)} but got {name!r}")
    return _forced(name)


# The names of the blocks that are open, the latest last.
_open: list[str] = []


@contextmanager
def _forced(name: str) -> Iterator[None]:
    _open.append(name)
    registry.forced = name
    try:
        yield
    finally:
        # Blocks of threads may overlap, so this one need not be the last.
        last = len(_open) - 1 - _open[::-1].index(name)
        del _open[last]
        registry.forced = _open[-1] if _open else None


@public("which")
def which(x: torch.Tensor) -> tuple[str, str | None]:
    """Return the backend that would rotate a tensor, and why no preferred one would.

    Args:
        x: a tensor; only its device is used.

    Returns:
        The name of the backend; and the reasons why the backends preferred to it are not used, as
        one string, or None if there are none. If a backend serves the device type of x, those that
        serve only other types are left out.

    >>> name, reason = which(torch.zeros(1, 1, 4, 8))
    """
    if not isinstance(x, torch.Tensor):
        raise bad_type(f"x must be a tensor but got {describe(x)}")
    reasons: list[str] = []
    own = any(x.device.type in backend.DEVICES for backend in BACKENDS.values())
    for name, backend in BACKENDS.items():
        if own and backend.DEVICES and x.device.type not in backend.DEVICES:
            continue
        reason = backend.why_not(x)
        if reason is None:
            return name, "; ".join(reasons) or None
        reasons.append(f"{name}: {reason}")
    raise AssertionError("the reference runs everything")
