"""``patch`` and ``unpatch`` of one model, or of all transformers models at once."""

from __future__ import annotations

import torch

from ..._errors import public
from .. import _patch
from .._summary import Report
from . import _library


@public("patch")
def patch(
    model: torch.nn.Module | None = None, *, angles: str = "model", rounding: str = "model"
) -> Report:
    """Replace the rotary functions of a transformers model, or of all, with the fused operator.

    ``unpatch(model)`` undoes the patch; to see its report again, call ``patch`` again.

    Args:
        model: the model; see :func:`tightrope.integrations.patch`. Without one, all models: every modeling
            file that is already imported or will be. Exact angles then apply only to models made after
            this call.
        angles: "model" or "exact"; see :func:`tightrope.integrations.patch`.
        rounding: "model" or "once"; see there.

    Returns:
        A report with one entry per function and, with exact angles, one per class that makes
        cosines and sines. Without a model it grows as files are imported.

    Raises:
        TypeError: model is not a Module.
        ValueError: an unknown value of angles or rounding.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(hidden_size=128, num_hidden_layers=1, vocab_size=9))
    >>> [entry.name for entry in patch(model).replaced]
    ['apply_rotary_pos_emb']
    >>> unpatch(model)
    """
    if model is not None:
        return _patch.patch(model, angles=angles, rounding=rounding)
    _patch.check(torch.nn.Identity(), angles, rounding)
    return _library.patch(angles, "once" if angles == "exact" else rounding)


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
