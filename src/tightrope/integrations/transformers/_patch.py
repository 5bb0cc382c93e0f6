"""``patch`` and ``unpatch``: replace the rotary functions of a model in one call, and restore them."""

from __future__ import annotations

from typing import Any

import torch

from ..._errors import bad_type, bad_value, public
from ...forms import unwrapped
from . import _exact, _find, _graft, _library
from ._classes import base_of
from ._find import Found
from ._recognise import Recognition, recognise, recognise_method, to_the_bit
from ._run import ROUNDINGS
from ._summary import Entry, Report, entry_of

ANGLES = ("model", "exact")


@public("patch")
def patch(
    model: torch.nn.Module | None = None, *, angles: str = "model", rounding: str = "model"
) -> Report:
    """Replace the rotary functions of a transformers model with the fused operator.

    Every rotary function that the methods of the model's modules call is tested numerically (see
    :func:`recognise`) and replaced if it is recognised. Other functions are left unchanged and listed
    in the report. Other models are not affected.

    Args:
        model: a transformers model, or any module built like one, on any device including meta. None
            patches all models: every modeling file that is already imported or will be. Exact
            angles then apply only to models made after this call.
        angles: "model" keeps the cosines and sines that the model makes. "exact" uses this library's,
            which are exact at any position and computed in float32 (float64 for a float64 model).
        rounding: "model" keeps every bit of results and gradients: each function's own roundings are
            found by comparing bits, and calls whose bits cannot be equalled run the original. "once"
            rounds results only when they are stored, which is more exact. With exact angles, which
            change bits anyway, results always round once.

    Returns:
        A report with one entry per function and, with exact angles, one per class that makes
        cosines and sines. With model None it grows as files are imported.

    Raises:
        TypeError: model is not a Module.
        ValueError: an unknown value of angles or rounding.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(hidden_size=128, num_hidden_layers=1, vocab_size=9))
    >>> [entry.name for entry in patch(model).replaced]
    ['apply_rotary_pos_emb']
    >>> unpatch(model)
    """
    _check(model)
    if angles not in ANGLES:
        raise bad_value(f"angles must be one of {', '.join(ANGLES)} but got {angles!r}")
    if rounding not in ROUNDINGS:
        raise bad_value(f"rounding must be one of {', '.join(ROUNDINGS)} but got {rounding!r}")
    if angles == "exact":
        rounding = "once"
    if model is None:
        return _library.patch(angles, rounding)
    found = _found(model)
    if rounding == "model":
        found = [(each, to_the_bit(recognition)) for each, recognition in found]
    # Return float32 tables only if every function that reads them is replaced: a function that is
    # left, or was not found, may rely on the dtype.
    wide = angles == "exact" and bool(found) and all(recognition for _, recognition in found)
    swaps = tuple(
        _graft.Swap(each.module, each.name, recognition.candidate, wide, rounding)
        for each, recognition in found
        if recognition.candidate is not None
    )
    report = Report([entry_of(each.module, each.name, recognition) for each, recognition in found])
    lines: list[Entry] = []
    unpatch(model)  # angles are read from the original modules
    for module in model.modules():
        made = None
        if angles == "exact" and _exact.makes_angles(type(module)):
            made, reason = _exact.read(module, wide)
            lines.append(_exact.entry(module, made, reason))
        recipe = _graft.Recipe(swaps, angles=made is not None)
        _graft.apply(module, _graft.grafted(type(module), recipe))
        if made is not None:
            _exact.keep(module, made, by_library=False)
    if angles == "exact" and not lines:
        cls, reason = type(model), f"none of its modules {_exact.NO_ANGLES}"
        lines.append(Entry(cls.__module__, cls.__qualname__, None, False, reason))
    report.entries.extend(dict.fromkeys(lines))
    return report


@public("unpatch")
def unpatch(model: torch.nn.Module | None = None) -> None:
    """Undo :func:`patch`: the model computes what it did before, bit for bit.

    Args:
        model: a patched model; None undoes ``patch(None)``, but not the patches of single models.
    """
    _check(model)
    if model is None:
        _library.unpatch()
        return
    for module in model.modules():
        _graft.apply(module, base_of(type(module)))
        _exact.forget(module)


def _check(model: object) -> None:
    if model is not None and not isinstance(model, torch.nn.Module):
        raise bad_type(f"model must be a torch.nn.Module but got {model!r}")


def _found(model: torch.nn.Module) -> list[tuple[Found, Recognition]]:
    """The rotary functions of a model, each once, with their recognition."""
    results: dict[tuple[str, str], tuple[Found, Recognition]] = {}
    for cls in dict.fromkeys(base_of(type(module)) for module in model.modules()):

        def accepts(found: Found, cls: type = cls) -> bool:
            key = found.module, found.name
            if key not in results:
                if found.method:
                    recognition = recognise_method(unwrapped(found.value), cls)
                else:
                    recognition = recognise(_callable(found.value))
                results[key] = found, recognition
            return results[key][1].candidate is not None

        for found in _find.rotary(cls, accepts):
            accepts(found)
    return list(results.values())


def _callable(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value
