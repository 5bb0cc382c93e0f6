"""``patch`` and ``unpatch`` of one model, or of all models of transformers that are built later."""

from __future__ import annotations

import torch

from ..._errors import public
from .. import _patch
from .._report import Report
from . import _library


@public("patch")
def patch(
    model: torch.nn.Module | None = None,
    *,
    angles: str = "model",
    rounding: str = "model",
    stack: str | None = None,
) -> Report:
    """Replace the rotary functions of a transformers model, or of all that are built later, with the fused operator.

    Without a model, each model of transformers that is built after this call is patched as if it were given to
    :func:`tightrope.integrations.patch`: also those that a trainer or a server builds in this process. Models that
    exist already are not. ``unpatch()`` undoes this, for the models that were built meanwhile too.

    Args:
        model: the model; see :func:`tightrope.integrations.patch`. Without one, all models that are built later.
        angles: "model" or "exact"; see there.
        rounding: "model" or "once"; see there.
        stack: "vllm", "vllm-native" or "sglang"; see there.

    Returns:
        A report with one entry per function and, with exact angles or a stack, one per class that makes
        cosines and sines. Without a model it grows as models are built; a model that cannot be patched as
        required has an entry with the reason.

    Raises:
        TypeError: model is not a Module.
        ValueError: see :func:`tightrope.integrations.patch`; without a model, only an unknown value.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> report = patch()
    >>> model = LlamaModel(LlamaConfig(hidden_size=128, num_hidden_layers=1, vocab_size=9))
    >>> [entry.name for entry in report.replaced]
    ['apply_rotary_pos_emb']
    >>> unpatch()
    """
    if model is not None:
        return _patch.patch(model, angles=angles, rounding=rounding, stack=stack)
    _patch.check(torch.nn.Identity(), angles, rounding, stack)
    return _library.patch({"angles": angles, "rounding": rounding, "stack": stack})


@public("unpatch")
def unpatch(model: torch.nn.Module | None = None) -> None:
    """Undo :func:`patch`: the model computes what it did before, bit for bit.

    Args:
        model: a patched model; without one, ``patch()`` is undone, but not the patches of single models.

    Raises:
        TypeError: model is not a Module.
    """
    if model is None:
        _library.unpatch()
    else:
        _patch.unpatch(model)
