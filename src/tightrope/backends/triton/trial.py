"""The first launch on a device: a small tensor is rotated and compared with the definition.

No GPU was at hand when the kernels were written, so a device whose results are wrong, or on which nothing compiles,
must not be trusted: there the definition runs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...ops import gradients, phases
from ...ops.schema import Options
from .. import reference

# Largest error of the trial, as a share of the largest value; the kernel is within 1e-6.
_BOUND = 1e-5

# Why kernels are not used on a device, or None.
_reasons: dict[torch.device, str | None] = {}


def why_not(device: torch.device) -> str | None:
    """Return why the kernels cannot be trusted on a device, or None; the first call tries them and may warn.

    While a CUDA graph is captured nothing is tried.
    """
    if device in _reasons:
        return _reasons[device]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    _reasons[device] = None  # what the trial itself launches is not tried
    reason = _reasons[device] = _try(device)
    if reason is not None:
        warnings.warn(f"tightrope runs on plain torch on {device}: {reason}", stacklevel=2)
    return reason


def is_known(device: torch.device) -> bool:
    """Return whether the kernels were tried on a device."""
    return device in _reasons


def _try(device: torch.device) -> str | None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, 16, generator=generator)
    words = torch.arange(1, 9).mul(0x123456789ABCDEF).view(1, 1, 1, 8)
    options = Options().pack()
    (want,) = reference.compose(q.double(), None, words, None, None, 1000, options, 1.0)
    try:
        from . import operators

        (got,) = operators.rotate(
            q.to(device), None, words.to(device), None, None, 1000, options, 1.0
        )
        error = float((got.cpu().double() - want).abs().max() / want.abs().max())
    except Exception as failure:  # noqa: BLE001  (of any compiler, driver or version)
        first, *_ = str(failure).strip().splitlines() or [""]
        return f"the first launch of its Triton kernel failed ({type(failure).__name__}: {first[:200]})"
    if not error < _BOUND:
        return f"the first result of its Triton kernel is off by {error:.1e} of the largest value"
    return None


def definition_of(name: str) -> Any:
    """Return the function of the definition with the name of a function of :mod:`.operators`."""
    for module in (reference, gradients, phases):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)
