"""A layer for the mapping of the ``kernels`` package, under the name that transformers gives its slot."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..._errors import sentence
from ._recognise import recognise
from ._run import replacement

LAYER = "rotary_pos_emb"
DEVICES = ("cpu", "cuda")

# The class of a function in the slot -> what is called in its place: the replacement, or the function
# where it is not recognised.
_served: dict[type, Any] = {}


def serve(cls: type) -> bool:
    """Find out what the function behind a class computes, once.

    The ``kernels`` package makes a class of each function that has the slot; what the layer is called
    with says which function it stands for, since one layer serves them all.
    """
    if cls not in _served:
        module = cls()
        original = cls.forward.__get__(module)  # type: ignore[attr-defined]
        recognition = recognise(original)
        candidate = recognition.candidate
        _served[cls] = original if candidate is None else replacement(original, candidate)
    return True


# Dynamo is to run it while it traces, and to take its answer for a constant.
serve._dynamo_marked_constant = True  # type: ignore[attr-defined]


class RotaryPosEmb(torch.nn.Module):
    """Queries and keys rotated by given tables, for every function that has the slot.

    Each is tested as :func:`patch` does, and served under its own pairing, width and dtypes; one that
    is not recognised stays as it is.
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
        """As the function in the slot."""
        serve(type(self))
        return _served[type(self)](q, k, cos, sin, unsqueeze_dim)


class Repository:
    """What the mapping holds: where others name a place to download from, this has the layer."""

    def load(self) -> type[torch.nn.Module]:
        """The layer."""
        return RotaryPosEmb

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repository)

    def __hash__(self) -> int:
        return hash(Repository)

    def __str__(self) -> str:
        return "tightrope"


def mapping() -> dict[str, Any]:
    """The mapping itself, for ``kernels.use_kernel_mapping`` or one's own."""
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


def register() -> None:
    """Register the rotation for the slot that transformers has for it, in every mode.

    After it, ``model.kernelize()`` and ``from_pretrained(..., use_kernels=True)`` take this library's
    rotation, for training too, on CPU and CUDA. Nothing is downloaded for it. As ``kernels`` replaces
    functions for the whole process, models of one family share the choice; :func:`patch` changes one
    model alone.

    Raises:
        ImportError: the ``kernels`` package is not installed.
    """
    known = mapping()
    # transformers registers its own when its module is first imported; ours comes after it.
    try:
        from transformers.integrations import hub_kernels
    except ImportError:
        pass
    else:
        defaults = getattr(hub_kernels, "get_kernel_mapping_transformers", None)
        if defaults is not None:
            defaults()[LAYER] = {**defaults().get(LAYER, {}), **known[LAYER]}
    importlib.import_module("kernels").register_kernel_mapping(known)
