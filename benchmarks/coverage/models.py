"""Run every model class of a library before and after `patch`.

The status of a row is:

- equal: no bit of any output or gradient changes, in float32 and, unless the row states why not, in
  bfloat16; this library served calls; a fault of one per cent in the replacements is detected;
- different: a bit changes, `unpatch` did not restore the model, or two runs of the original differ;
- not exercised: the model ran, but did not test the replacement, for the given reason;
- not built: no small model of the class could be built or run, for the given reason.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tightrope.integrations import Entry, patch, unpatch

from ..transformers_coverage import comparing
from ..transformers_coverage.comparing import Run, Subject, mapped, tensors
from ..transformers_coverage.models import sentence
from .building import build
from .catalogue import Library, Rotary, mentions, model_classes, rotary, sizes

# Inputs without gradients: masks, positions and times, from which models make angles and modulations, and
# angles.
FIXED = re.compile(r"_ids|mask|time|rotary|size|coords|indices|lens|length")


def run(model: torch.nn.Module, inputs: dict[str, Any], functions: tuple[Rotary, ...]) -> Run:
    """Run forward and backward, with gradients of parameters and of inputs that are no positions."""
    given = copy.deepcopy(inputs)
    leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, value in given.items():
        if leaves and not FIXED.search(name):
            leaves |= {path: x.requires_grad_() for path, x in tensors(value, f"input.{name}")}
    places = {each.place: f"{each.file.rpartition('/')[2]}.{each.name}" for each in functions}
    # Inputs are copied first, as some models change them in place.
    return comparing.run(model, mapped(torch.clone, given), places=places, leaves=leaves)


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
    own, again = list(out["calls"]), partial(run, model, inputs, functions)
    try:
        out |= Subject(model, inputs, again, own, patch, unpatch, name_of).row(before)
    except Exception as error:  # noqa: BLE001 - an error of `patch` or of the patched model
        out |= {"status": "different", "reason": sentence(error)}
    return out


def name_of(entry: Entry) -> str:
    """`file.function`, the name under which calls are counted."""
    return f"{entry.module.rpartition('.')[2]}.{entry.name}"


def rows(library: Library, only: str = "") -> Iterator[dict[str, Any]]:
    """Yield the row of each model class whose name matches `only`."""
    from tqdm import tqdm

    chosen = {n: file for n, file in model_classes(library).items() if re.search(only, n)}
    for name, file in tqdm(chosen.items(), file=sys.stderr, mininterval=5, unit="model"):
        yield row(library, name, file)
