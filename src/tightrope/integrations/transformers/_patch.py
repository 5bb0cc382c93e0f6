"""``patch`` and ``unpatch``: all rotations of a model, one call."""

from __future__ import annotations

from typing import Any

import torch

from ..._errors import sentence
from . import _find, _graft
from ._find import Found
from ._form import unwrapped
from ._recognise import Recognition, recognise
from ._report import Entry, Report

ANGLES = ("model", "exact")


def patch(model: torch.nn.Module | None = None, *, angles: str = "model") -> Report:
    """Replace the rotary functions of a model by the fused operator.

    Every function that rotates, as far as methods of the model's modules reach one, is tested
    numerically (see :func:`recognise`) and replaced where it is known what it computes. What is not
    recognised is left as it is, and listed. Only this model is affected.

    Args:
        model: a model of transformers, or any module built like one. On any device, meta too.
        angles: "model", the cosines and sines that the model makes.

    Returns:
        What was found and done, function by function.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(sentence("patch", f"model must be a torch.nn.Module but got {model!r}"))
    if angles not in ANGLES:
        raise ValueError(
            sentence("patch", f"angles must be one of {', '.join(ANGLES)} but got {angles!r}")
        )
    if model is None:
        raise NotImplementedError(sentence("patch", "patching the library is not there yet"))
    found = _found(model)
    swaps = tuple(
        _graft.Swap(each.module, each.name, recognition.candidate)
        for each, recognition in found
        if recognition.candidate is not None
    )
    for module in model.modules():
        _graft.apply(module, _graft.grafted(_graft.base_of(type(module)), swaps))
    return Report([_entry(each, recognition) for each, recognition in found])


def unpatch(model: torch.nn.Module | None = None) -> None:
    """Undo :func:`patch`: everything is as it was, to the bit."""
    if model is None:
        return
    for module in model.modules():
        _graft.apply(module, _graft.base_of(type(module)))


def _found(model: torch.nn.Module) -> list[tuple[Found, Recognition]]:
    """The rotary functions of a model, each once, with what they compute."""
    results: dict[tuple[str, str], tuple[Found, Recognition]] = {}
    examples: dict[type, Any] = {}
    for module in model.modules():
        examples.setdefault(_graft.base_of(type(module)), module)
    for cls, example in examples.items():

        def accepts(found: Found, example: Any = example) -> bool:
            key = found.module, found.name
            if key not in results:
                owner = example if found.method else None
                recognition = recognise(
                    unwrapped(found.value) if found.method else _callable(found.value), owner
                )
                results[key] = found, recognition
            return results[key][1].candidate is not None

        for found in _find.rotary(cls, accepts):
            accepts(found)
    return list(results.values())


def _callable(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


def _entry(found: Found, recognition: Recognition) -> Entry:
    candidate = recognition.candidate
    return Entry(
        found.module,
        found.name,
        None if candidate is None else str(candidate),
        candidate is not None,
        recognition.reason,
    )
