"""Run every model class of a library before and after `patch`.

The status of a row is:

- equal: no bit of any output or gradient changes, in float32 and, unless the row states why not, in
  bfloat16; this library served calls; a fault of one per cent in the replacements is detected;
- different: a bit changes, `unpatch` did not restore the model, or two runs of the original differ;
- not exercised: the model ran, but did not test the replacement, for the given reason;
- not built: no small model of the class could be built or run, for the given reason.

The sizes of the models and of their inputs (diffusers.json) start from those of diffusers' own tests (Apache
License 2.0).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightrope.integrations import Entry, _graft, patch, unpatch

from ..transformers_coverage.comparing import Run, counting, difference, spoilt, tensors
from ..transformers_coverage.models import sentence
from .building import build
from .catalogue import Library, Rotary, mentions, model_classes, rotary, sizes

Leaves = dict[str, torch.Tensor]

# Inputs without gradients: masks, positions and times, from which models make angles and modulations, and
# angles.
FIXED = re.compile(r"_ids|mask|time|rotary|size|coords|indices|lens|length")


def run(model: torch.nn.Module, inputs: dict[str, Any], functions: tuple[Rotary, ...]) -> Run:
    """Run forward and backward; the loss is the sum of all outputs, times fixed random weights."""
    result = Run({}, {})
    given = copy.deepcopy(inputs)
    leaves: Leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, value in given.items():
        if leaves and not FIXED.search(name):
            leaves |= {path: x.requires_grad_() for path, x in tensors(value, f"input.{name}")}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    places = {each.place: f"{each.file.rpartition('/')[2]}.{each.name}" for each in functions}
    with counting(places, result.calls):
        # Inputs are copied first, as some models change them in place.
        out = model(**_cloned(given))
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros(())
    every = tensors(out if isinstance(out, (dict, list, tuple, torch.Tensor)) else vars(out))
    for name, value in every:
        result.outputs[name] = value.detach().clone()
        if value.requires_grad:
            weight = torch.randn(value.shape, generator=generator)
            loss = loss + (value.float() * weight).sum() / max(1.0, value.numel() ** 0.5)
    if loss.requires_grad:
        loss.backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    result.gradients = {n: grad.clone() for n, grad in found.items() if grad is not None}
    model.zero_grad(set_to_none=True)
    return result


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(each) for key, each in value.items()}
    return type(value)(map(_cloned, value)) if isinstance(value, (list, tuple)) else value


def narrowed(value: Any) -> Any:
    """The same arguments with real floating-point tensors in bfloat16."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: narrowed(each) for key, each in value.items()}
    return type(value)(map(narrowed, value)) if isinstance(value, (list, tuple)) else value


@contextmanager
def faulty() -> Iterator[None]:
    """Plant a small error in every replacement of the models that are patched inside."""
    real, classes = _graft.replacement_of, _graft._classes
    _graft.replacement_of = lambda swap: spoilt(real(swap))
    _graft._classes = {}
    try:
        yield
    finally:
        _graft.replacement_of, _graft._classes = real, classes


def row(library: Library, name: str, file: str) -> dict[str, Any]:
    """The row of one class; errors become its reason."""
    out: dict[str, Any] = {
        "model": name, "file": file, "status": "not built", "reason": "", "bfloat16": "",
        "calls": {}, "replaced": [], "left": [],
        "frozen": sizes(library).get(name, {}).get("frozen", []),
    }  # fmt: skip
    if library.base and not mentions(library, file):
        return {**out, "status": "not exercised", "reason": "its file does not rotate"}
    functions = rotary(library)
    try:
        model, inputs = build(library, name, file)
        before = run(model, inputs, functions)
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        return {**out, "reason": sentence(error)}
    out["calls"] = {name: count for name, count in before.calls.items() if name != "tightrope"}
    if not out["calls"]:
        return {**out, "status": "not exercised", "reason": "no rotary function ran"}
    try:
        out |= compared(model, inputs, before, functions)
    except Exception as error:  # noqa: BLE001 - an error of `patch` or of the patched model
        return {**out, "status": "different", "reason": sentence(error)}
    if out["status"] == "equal":
        model, inputs = model._apply(narrowed), narrowed(inputs)
        try:
            before = run(model, inputs, functions)
        except Exception as error:  # noqa: BLE001 - the model itself refuses bfloat16
            return {**out, "bfloat16": f"the model does not run in bfloat16: {error!s:.100}"}
        found = compared(model, inputs, before, functions)
        if found["status"] == "different":
            return {**out, **found, "reason": f"in bfloat16: {found['reason']}"}
        out["bfloat16"] = found["reason"] or "equal"
    return out


def compared(
    model: torch.nn.Module, inputs: dict[str, Any], before: Run, functions: tuple[Rotary, ...]
) -> dict[str, Any]:
    """Entries of a row: patching changes no bit, a fault is detected, and `unpatch` undoes it."""
    again = difference(before, run(model, inputs, functions))
    if not again.none:
        reason = f"not deterministic by itself: {again.where}"
        return {"status": "different", "reason": reason}
    with faulty():
        patch(model)
    wrong = difference(before, run(model, inputs, functions))
    unpatch(model)
    report = patch(model)
    out: dict[str, Any] = {
        "replaced": [name_of(e) for e in report.replaced],
        "left": [f"{name_of(e)}: {e.reason}" for e in report.left],
    }
    after = run(model, inputs, functions)
    change = difference(before, after)
    unpatch(model)
    undone = difference(before, run(model, inputs, functions))
    served = after.calls["tightrope"]
    # Calls that still reached an original: it was left, or its replacement called it.
    out["given_back"] = {n: c for n, c in after.calls.items() if n != "tightrope"}
    out["fault"] = [float(f"{value:.3g}") for value in (wrong.output, wrong.gradient)]
    for each, words in ((change, "at"), (undone, "after unpatch, at")):
        if not each.none:
            return {**out, "status": "different", "reason": f"{words} {each.where}"}
    if not report.replaced or not served:
        return {**out, "status": "not exercised", "reason": "nothing was replaced"}
    if sum(out["given_back"].values()) >= sum(before.calls.values()):
        return {**out, "status": "not exercised", "reason": "the originals served every call"}
    if wrong.none:
        reason = "no output depends on the rotation"
        return {**out, "status": "not exercised", "reason": reason}
    return {**out, "status": "equal", "reason": ""}


def name_of(entry: Entry) -> str:
    """`file.function`, the name under which calls are counted."""
    return f"{entry.module.rpartition('.')[2]}.{entry.name}"


def rows(
    library: Library, only: str = "", without: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the row of each model class whose name matches `only`, except those in `without`."""
    from tqdm import tqdm

    chosen = {
        name: file
        for name, file in model_classes(library).items()
        if re.search(only, name) and name not in without
    }
    for name, file in tqdm(chosen.items(), file=sys.stderr, mininterval=5, unit="model"):
        yield row(library, name, file)
