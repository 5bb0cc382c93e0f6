"""The rotation as a layer of the ``kernels`` package, under the layer name of transformers."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import torch

from ..._errors import sentence
from ...patching import replaced

LAYER = "rotary_pos_emb"
#: All that kernels knows. Where this library has no kernel, its operator runs plain torch.
DEVICES = ("cpu", "cuda", "mps", "neuron", "npu", "rocm", "tpu", "xpu")

# Class that kernels makes for a function -> the replacement of the function, or the function
# itself if it is of no known kind.
_served: dict[type, Any] = {}


def serve(cls: type) -> bool:
    """Verify the function behind a class, once per class.

    The ``kernels`` package makes one class for each function with this layer name, and all of them
    use the same layer. The class identifies the function that it replaces.
    """
    if cls not in _served:
        original = cls.forward.__get__(cls())  # type: ignore[attr-defined]
        _served[cls] = replaced(original) or original
    return True


# Dynamo runs `serve` while tracing and treats the result as a constant.
serve._dynamo_marked_constant = True  # type: ignore[attr-defined]


class RotaryPosEmb(torch.nn.Module):
    """Rotate queries and keys by given cos/sin, for every function with this layer name.

    Each function is verified as in :func:`tightrope.patch`, and its replacement runs the original in the same calls. A
    function of no known kind is called unchanged.
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        """Compute what the replaced function computes."""
        serve(type(self))
        return _served[type(self)](q, k, cos, sin, unsqueeze_dim)


class Repository:
    """The entry of the mapping: it holds the layer itself, so nothing is downloaded."""

    def load(self) -> type[torch.nn.Module]:
        """Return the layer class."""
        return RotaryPosEmb

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repository)

    def __hash__(self) -> int:
        return hash(Repository)

    def __str__(self) -> str:
        return "tightrope"


def mapping() -> dict[str, Any]:
    """The mapping that :func:`register` registers, for ``kernels.use_kernel_mapping``."""
    try:
        kernels: Any = importlib.import_module("kernels")
    except ImportError as error:
        raise ImportError(
            sentence("register", "needs the kernels package: pip install kernels")
        ) from error
    repository, mode = Repository(), kernels.Mode
    modes = (
        mode.TRAINING,
        mode.INFERENCE,
        mode.TRAINING | mode.TORCH_COMPILE,
        mode.INFERENCE | mode.TORCH_COMPILE,
    )
    return {LAYER: {device: dict.fromkeys(modes, repository) for device in DEVICES}}


def _check_versions() -> None:
    """Raise an error if transformers treats the installed version of kernels as absent."""
    try:
        from transformers import __version__
        from transformers.utils import import_utils
    except ImportError:
        return
    if import_utils.is_kernels_available():
        return
    ends = [getattr(import_utils, f"KERNELS_{end}_VERSION", "?") for end in ("MIN", "MAX")]
    raise ImportError(
        sentence(
            "register",
            f"needs a version of kernels that transformers {__version__} takes, from {ends[0]} to below {ends[1]}, "
            f"but {version('kernels')} is installed; transformers 5.20 to 5.22 takes kernels 0.17.2",
        )
    )


def register() -> None:
    """Register this library as the kernel for rotations in transformers, in every mode.

    Afterwards ``model.set_use_kernels(True)`` and ``from_pretrained(..., use_kernels=True)`` use this library's
    rotation, for inference and training, on every device, except in calls in which a replacement of
    :func:`tightrope.patch` runs the original. Nothing is downloaded. ``kernels`` replaces functions for the whole
    process, so all models of a family change together.

    Raises:
        ImportError: the ``kernels`` package is not installed, or its version is none that transformers takes.
    """
    known = mapping()
    _check_versions()
    # This import makes transformers register its own mapping; ours must come later.
    try:
        from transformers.integrations import hub_kernels
    except ImportError:
        pass
    else:
        defaults = getattr(hub_kernels, "get_kernel_mapping_transformers", None)
        if defaults is not None:
            defaults()[LAYER] = {**defaults().get(LAYER, {}), **known[LAYER]}
    importlib.import_module("kernels").register_kernel_mapping(known)
