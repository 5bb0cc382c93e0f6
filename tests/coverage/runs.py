"""Runs of a model before and after `patch`: outputs, gradients, and the rotary functions that ran."""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

import tightrope
from tightrope import patch, unpatch
from tightrope.patching import Entry, _patch

from .libraries import Library, label

OURS = str(Path(tightrope.__file__).parent)
# Relative size of the planted fault in the results of rotary functions, and what at least must be seen of it.
FAULT, SEEN = 1e-2, 1e-5
# The largest difference of outputs and gradients if the last bits of complex products differ, by dtype.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# Inputs without gradients: masks, positions and times, from which models make angles and modulations, and angles.
FIXED = re.compile(r"_ids|mask|time|rotary|position|size|coords|indices|lens|length")
SERVED = ("equal", "close")


class Run(NamedTuple):
    """Outputs and gradients of one forward and backward pass, by their paths, and its calls."""

    values: dict[str, torch.Tensor]
    calls: Counter[str]


def tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every floating-point tensor in nested containers with its path."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from tensors(item, f"{name}.{key}")


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of nested arguments with every tensor changed."""
    if is_dataclass(value):
        return replace(value, **mapped(change, vars(value)))  # type: ignore[type-var]
    if isinstance(value, dict):
        return {key: mapped(change, each) for key, each in value.items()}
    return tree_map_only(torch.Tensor, change, value)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """The tensor in bfloat16 if it holds real floating-point numbers."""
    return x.to(torch.bfloat16) if x.is_floating_point() else x


@contextmanager
def counting(library: Library) -> Iterator[Counter[str]]:
    """Count calls of a library's rotary functions and of their copies, and of all of tightrope's as "tightrope".

    A profiler counts them; nothing is replaced.
    """
    known, calls = library.places(), Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call":
            place = code.co_filename, code.co_firstlineno, code.co_name
            if name := "tightrope" if code.co_filename.startswith(OURS) else known.get(place):
                calls[name] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@dataclass
class Subject:
    """A model under test.

    Attributes:
        inputs: the arguments of its forward.
        part: the path of the part or method that is called; empty for the model itself.
        own: the beginning of the labels of the rotary functions whose calls count.
    """

    library: Library
    model: torch.nn.Module
    inputs: dict[str, Any]
    part: str = ""
    own: str = ""

    @property
    def called(self) -> Any:
        """The model, or its part."""
        return operator.attrgetter(self.part)(self.model) if self.part else self.model

    def run(self) -> Run:
        """Run forward and backward; the loss is the sum of all outputs, times fixed random weights.

        Gradients are those of parameters and of inputs that are no positions.
        """
        # Inputs are copied, as some models change them in place; copies of leaves are no leaves.
        given = mapped(torch.clone, self.inputs)
        leaves = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, value in given.items():
            if leaves and not FIXED.search(name):
                leaves |= {path: x.requires_grad_() for path, x in tensors(value, f"input.{name}")}
        torch.manual_seed(0)
        with counting(self.library) as calls:
            out = self.called(**mapped(torch.clone, given))
        plain = isinstance(out, (dict, list, tuple, torch.Tensor))
        found = dict(tensors(out if plain else vars(out)))
        values = {name: value.detach().clone() for name, value in found.items()}
        generator = torch.Generator().manual_seed(2)
        loss = torch.zeros(())
        for value in found.values():
            if value.requires_grad and value.numel():
                weight = torch.randn(value.shape, generator=generator)
                kept = torch.where(value.isfinite(), value, 0.0).float()
                loss = loss + (kept * weight).sum() / max(1.0, value.numel() ** 0.5)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
            named = zip(leaves, gradients)
            values |= {f"gradient of {name}": g for name, g in named if g is not None}
        return Run(values, calls)

    def counted(self, run: Run) -> dict[str, int]:
        """The calls of its rotary functions in a run, by label."""
        every = run.calls.items()
        return {n: c for n, c in every if n != "tightrope" and n.startswith(self.own)}

    def row(self, before: Run) -> dict[str, Any]:
        """Entries of a row: the check in float32, and unless that fails, in bfloat16.

        "bfloat16" is the reason why the model was not equal, or not run, in bfloat16.
        """
        out = self.checked(before, torch.float32)
        if out["status"] not in SERVED:
            return out
        self.model._apply(narrowed)
        self.inputs = mapped(narrowed, self.inputs)
        try:
            before = self.run()
        except Exception as error:  # noqa: BLE001 - the model itself refuses bfloat16
            return {**out, "bfloat16": f"the model does not run in bfloat16: {error!s:.100}"}
        found = self.checked(before, torch.bfloat16)
        if found["status"] == "different":
            return {**out, **found, "reason": f"in bfloat16: {found['reason']}"}
        more = {n: c for n, c in found["given_back"].items() if n not in out["given_back"]}
        out["given_back"] |= {f"{name} in bfloat16": count for name, count in more.items()}
        return {**out, "bfloat16": "" if found["status"] == "close" else found["reason"]}

    def checked(self, before: Run, dtype: torch.dtype) -> dict[str, Any]:
        """Check that `patch` changes no bit that it may not, that a fault would, and that `unpatch` undoes it."""
        share, where = difference(before, self.run())
        if share:
            reason = f"not deterministic by itself: {where}"
            return {"status": "different", "reason": reason}
        with faulty():
            patch(self.model)
        wrong, _ = difference(before, self.run())
        unpatch(self.model)
        report = patch(self.model)
        after = self.run()
        unpatch(self.model)
        out: dict[str, Any] = {
            "replaced": [label_of(e) for e in report.replaced],
            "left": [f"{label_of(e)}: {e.reason}" for e in report.left],
            # Calls that still reached an original: it was left, or its replacement called it.
            "given_back": {n: c for n, c in after.calls.items() if n != "tightrope"},
        }
        (share, where), undone = difference(before, after), difference(before, self.run())
        may_differ = not all(entry.same_bits for entry in report.replaced)
        if share and not (may_differ and share < CLOSE[dtype]):
            return {**out, "status": "different", "reason": f"by {share:.2g} at {where}"}
        if undone[0]:
            return {**out, "status": "different", "reason": f"after unpatch, at {undone[1]}"}
        reason = self.unused(before, after, out["replaced"])
        if not reason and not wrong > SEEN:
            reason = "no output depends on the rotation"
        if not reason and share:
            return {**out, "status": "close", "reason": "the last bits of complex products differ"}
        return {**out, "status": "not exercised" if reason else "equal", "reason": reason}

    def unused(self, before: Run, after: Run, replaced: list[str]) -> str:
        """The reason why a run of the patched model shows nothing; empty if it does."""
        own = self.counted(before)
        if after.calls["tightrope"] and any(after.calls[name] < own[name] for name in own):
            return ""
        names = {name.partition("(")[0] for name in replaced}
        back = ", ".join(name for name in own if name in names)
        return f"the original served every call: {back}" if back else "nothing was replaced"


def label_of(entry: Entry) -> str:
    """The label of a function in a report."""
    return label(entry.module, entry.name)


def relative(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest difference relative to the first tensor's scale; NaN if shapes or the positions of
    infinities and NaN differ."""
    if before.shape != after.shape or not torch.equal(before.isfinite(), after.isfinite()):
        return math.nan
    finite = before.isfinite()
    if torch.equal(before[finite], after[finite]):
        return 0.0
    a, b = before[finite].double(), after[finite].double()
    scale = a.abs().max().item()
    return (a - b).abs().max().item() / scale if scale else math.inf


def difference(before: Run, after: Run) -> tuple[float, str]:
    """The largest relative difference of two runs, and its place; NaN counts as larger than any number."""
    worst = 0.0, ""
    for name in before.values.keys() | after.values.keys():
        both = name in before.values and name in after.values
        share = relative(before.values[name], after.values[name]) if both else math.nan
        if not share <= worst[0] and not math.isnan(worst[0]):
            worst = share, name
    return worst


def spoilt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an error: FAULT times the previous channel is added to each one."""

    def wrong(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(wrong, value))
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value + FAULT * value.roll(1, -1) if floating else value

    return functools.wraps(function)(lambda *args, **kwargs: wrong(function(*args, **kwargs)))


@contextmanager
def faulty() -> Iterator[None]:
    """Plant a small error in every replacement of the models that are patched inside."""
    real = _patch.replacement
    _patch.replacement = lambda *given: spoilt(real(*given))
    try:
        yield
    finally:
        _patch.replacement = real
