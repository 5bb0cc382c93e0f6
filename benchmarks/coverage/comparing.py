"""Compare two runs of a model: outputs, gradients, and the rotary functions that ran."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tightrope
from tightrope import patch, unpatch
from tightrope.patching import Entry, _patch

from .catalogue import Library, Place, label, places

CONTAINERS = (dict, list, tuple, torch.Tensor)
OURS = str(Path(tightrope.__file__).parent)
# Relative size of the planted fault in the results of rotary functions.
FAULT = 1e-2
# The largest difference of outputs and gradients if the last bits of complex products differ, by dtype.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass
class Run:
    """The results of one forward and backward pass, and its calls."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Difference:
    """The largest differences between two runs, relative to the scale of each tensor."""

    output: float
    gradient: float
    where: str

    @property
    def none(self) -> bool:
        """True if every output and gradient is equal; False for NaN."""
        return self.output == self.gradient == 0

    def within(self, bound: float) -> bool:
        """Return whether both differences are below a bound."""
        return self.output < bound and self.gradient < bound

    @property
    def numbers(self) -> list[float]:
        """Both differences, rounded to two significant digits."""
        return [float(f"{value:.2g}") for value in (self.output, self.gradient)]


def tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every floating-point tensor of a model's output with its path."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}.{i}")


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of nested arguments with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(change, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(change, each) for each in value)
    if is_dataclass(value):
        return replace(value, **mapped(change, vars(value)))  # type: ignore[type-var]
    return value


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """The tensor in bfloat16 if it holds real floating-point numbers."""
    return x.to(torch.bfloat16) if x.is_floating_point() else x


def part_of(model: Any, path: str) -> Any:
    """A part or a method of a model, by its path; the model itself if the path is empty."""
    return operator.attrgetter(path)(model) if path else model


@contextmanager
def counting(known: dict[Place, str], calls: Counter[str]) -> Iterator[None]:
    """Count calls of these functions and of their copies, and of all functions of tightrope as "tightrope".

    A profiler counts them; nothing is replaced.
    """

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call":
            place = code.co_filename, code.co_firstlineno, code.co_name
            if name := "tightrope" if code.co_filename.startswith(OURS) else known.get(place):
                calls[name] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


# Inputs without gradients: masks, positions and times, from which models make angles and modulations, and
# angles.
FIXED = re.compile(r"_ids|mask|time|rotary|position|size|coords|indices|lens|length")


@dataclass(frozen=True)
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

    def run(self) -> Run:
        """Run forward and backward; the loss is the sum of all outputs, times fixed random weights.

        Gradients are those of parameters and of inputs that are no positions.
        """
        result = Run({}, {})
        # Inputs are copied, as some models change them in place; copies of leaves are no leaves.
        given = mapped(torch.clone, self.inputs)
        leaves = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, value in given.items():
            if leaves and not FIXED.search(name):
                leaves |= {path: x.requires_grad_() for path, x in tensors(value, f"input.{name}")}
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        with counting(places(self.library), result.calls):
            out = part_of(self.model, self.part)(**mapped(torch.clone, given))
        generator = torch.Generator().manual_seed(2)
        loss = torch.zeros(())
        for name, value in tensors(out if isinstance(out, CONTAINERS) else vars(out)):
            if name in result.outputs:
                continue
            result.outputs[name] = value.detach().clone()
            if value.requires_grad and value.numel():
                weight = torch.randn(value.shape, generator=generator)
                finite = value.isfinite()
                kept = torch.where(finite, value, 0.0).float()
                loss = loss + (kept * weight).sum() / max(1.0, value.numel() ** 0.5)
        if loss.requires_grad:
            loss.backward()
        for name, x in leaves.items():
            if x.grad is not None:
                result.gradients[name] = x.grad.detach().clone()
        self.model.zero_grad(set_to_none=True)
        return result

    def counted(self, run: Run) -> dict[str, int]:
        """The calls of its rotary functions in a run, by label."""
        every = run.calls.items()
        return {n: c for n, c in every if n != "tightrope" and n.startswith(self.own)}

    def row(self, before: Run) -> dict[str, Any]:
        """Entries of a row: the check in float32, and unless that fails, in bfloat16.

        "bfloat16" is the reason why the model was not equal, or not run, in bfloat16.
        """
        out = self.checked(before, torch.float32)
        if out["status"] not in ("equal", "close"):
            return out
        self.model._apply(narrowed)
        self.inputs.update(mapped(narrowed, self.inputs))
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
        again = difference(before, self.run())
        if not again.none:
            reason = f"not deterministic by itself: {again.where}"
            return {"status": "different", "reason": reason}
        with faulty():
            patch(self.model)
        wrong = difference(before, self.run())
        unpatch(self.model)
        report = patch(self.model)
        after = self.run()
        unpatch(self.model)
        out: dict[str, Any] = {
            "fault": max(wrong.numbers),
            "replaced": [label_of(e) for e in report.replaced],
            "left": [f"{label_of(e)}: {e.reason}" for e in report.left],
            # Calls that still reached an original: it was left, or its replacement called it.
            "given_back": {n: c for n, c in after.calls.items() if n != "tightrope"},
        }
        change, undone = difference(before, after), difference(before, self.run())
        last = not all(e.same_bits for e in report.replaced) and change.within(CLOSE[dtype])
        for each, words in ((change, "at"), (undone, "after unpatch, at")):
            if not each.none and not (last and each is change):
                out["differences"] = each.numbers
                return {**out, "status": "different", "reason": f"{words} {each.where}"}
        reason = self.unused(before, after, out["replaced"])
        if not reason and wrong.none:
            reason = "no output depends on the rotation"
        if not reason and not change.none:
            reason = "the last bits of complex products differ"
            return {**out, "status": "close", "reason": reason, "differences": change.numbers}
        return {**out, "status": "not exercised" if reason else "equal", "reason": reason}

    def unused(self, before: Run, after: Run, replaced: list[str]) -> str:
        """The reason why a run of the patched model shows nothing; empty if it does."""
        fewer = any(after.calls[name] < count for name, count in self.counted(before).items())
        if fewer and after.calls["tightrope"]:
            return ""
        names = {name.partition("(")[0] for name in replaced}
        back = ", ".join(name for name in self.counted(before) if name in names)
        return f"the original served every call: {back}" if back else "nothing was replaced"


def label_of(entry: Entry) -> str:
    """The label of a function in a report."""
    return label(entry.module, entry.name)


def relative(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest difference relative to the first tensor's scale; NaN if shapes or the positions of
    infinities and NaN differ."""
    if before.shape != after.shape or not torch.equal(before.isfinite(), after.isfinite()):
        return float("nan")
    finite = before.isfinite()
    if torch.equal(before[finite], after[finite]):
        return 0.0
    a, b = before[finite].double(), after[finite].double()
    scale = a.abs().max().item()
    return (a - b).abs().max().item() / scale if scale else float("inf")


def difference(before: Run, after: Run) -> Difference:
    """Compare every output and every gradient of two runs."""
    worst = {"output": (0.0, ""), "gradient": (0.0, "")}
    for kind, left, right in (
        ("output", before.outputs, after.outputs),
        ("gradient", before.gradients, after.gradients),
    ):
        for name in left.keys() | right.keys():
            both = name in left and name in right
            share = relative(left[name], right[name]) if both else float("nan")
            # NaN counts as worse than any number.
            if not share <= worst[kind][0] and worst[kind][0] == worst[kind][0]:
                worst[kind] = share, name
    where = ", ".join(name for _, name in worst.values() if name)
    return Difference(worst["output"][0], worst["gradient"][0], where)


def spoilt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an error: FAULT times the previous channel is added to each one."""

    def wrong(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value + FAULT * value.roll(1, -1)
        if isinstance(value, tuple):
            return tuple(wrong(v) for v in value)
        return value

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return wrong(function(*args, **kwargs))

    return faulty


@contextmanager
def faulty() -> Iterator[None]:
    """Plant a small error in every replacement of the models that are patched inside."""
    real = _patch.replacement
    _patch.replacement = lambda *given: spoilt(real(*given))
    try:
        yield
    finally:
        _patch.replacement = real
