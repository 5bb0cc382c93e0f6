"""Register the kernels with the dispatcher; Triton is imported only when one is first called."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import torch

from ...ops.schema import ROTATIONS, SLOTTED, library

#: Device types that this backend serves, and the dispatch key of each.
DEVICES = {"cuda": "CUDA"}

#: The oldest version of Triton that the kernels support.
OLDEST = (3, 4)

_registered = False

#: The functions that are registered, by operator.
KERNELS: dict[str, Any] = {}

#: Every operator overload, and the name of the function in :mod:`.operators` that implements it.
OPERATORS = {name: name.partition(".")[0] for name in ROTATIONS} | {
    name: name.replace(".", "_")
    for name in (
        *SLOTTED,
        "rotate_slots_",
        "angle_gradients",
        "gate_gradients",
        "phase_words",
        "phase_sums",
    )
}


def _missing() -> str | None:
    if os.environ.get("TIGHTROPE_TRITON") == "0":
        return "it is switched off by TIGHTROPE_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with torch for GPUs on Linux: pip install triton"
    return None


def _too_old() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("triton")
    except PackageNotFoundError:
        # Builds for AMD and Intel GPUs have other package names; the module has the version.
        import triton

        found = triton.__version__
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"triton {found} is older than {OLDEST[0]}.{OLDEST[1]}; pip install -U triton"
    return None


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Return the reason why this backend cannot run, or None if it can.

    Args:
        x: the tensor to rotate; None to check only whether the backend can run at all.
    """
    reason = _missing() or _too_old()
    if reason is not None:
        return reason
    if x is not None:
        if x.device.type not in DEVICES:
            return f"the tensor is on {x.device}"
        from . import trial

        return trial.why_not(x.device)
    if not any(getattr(torch, kind).is_available() for kind in DEVICES):
        return "torch sees no GPU here"
    return None


@cache
def is_ready() -> bool:
    """Return whether the kernels are registered and the installed Triton is new enough."""
    return _registered and _too_old() is None


def _kernel(name: str) -> Any:
    """Return a function that runs the kernel of that name, or the definition on a device that failed its trial.

    Triton is imported on the first call.
    """
    # By the index of the device, because each is tried; the first argument of every operator is a tensor.
    found: dict[int, Any] = {}

    def call(*arguments: Any) -> Any:
        index = arguments[0].get_device()
        function = found.get(index)
        if function is None:
            from . import operators, trial

            device = arguments[0].device
            reason = trial.why_not(device)
            function = getattr(operators, name) if reason is None else trial.definition_of(name)
            if trial.is_known(device):
                found[index] = function
        return function(*arguments)

    return call


def register() -> None:
    """Register the kernels for the devices of :data:`DEVICES`; called once, at import."""
    global _registered
    if _missing() is not None:
        return
    _registered = True
    for name, function in OPERATORS.items():
        KERNELS[name] = _kernel(function)
        for key in DEVICES.values():
            library.impl(name, KERNELS[name], key)
