"""Compare two runs of a model: outputs, gradients, and the rotary functions that ran."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tightrope.integrations._replace import tables_inside

import tightrope
from tightrope.integrations import Entry, _graft, patch, unpatch

from .catalogue import Library, Place, label, places

CONTAINERS = (dict, list, tuple, torch.Tensor)
OURS = str(Path(tightrope.__file__).parent)
# Relative size of the planted fault in the results of rotary functions.
FAULT = 1e-2
# torch divides an elementwise operation on a CPU among threads above this number of elements.
GRAIN = 32_768


@dataclass
class Run:
    """The results of one forward and backward pass.

    `elements` is the number of elements in the largest tensor that each rotary function rotated. Channels that
    pass through do not count, and a pair of channels counts as one where numbers are complex.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    calls: Counter[str] = field(default_factory=Counter)
    elements: dict[str, int] = field(default_factory=dict)


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


def repeated(times: int, lengths: Container[int], x: torch.Tensor) -> torch.Tensor:
    """The tensor with its rows several times, if there are as many rows as one of these numbers."""
    return torch.cat([x] * times) if x.ndim and len(x) in lengths else x


def part_of(model: Any, path: str) -> Any:
    """A part or a method of a model, by its path; the model itself if the path is empty."""
    return operator.attrgetter(path)(model) if path else model


@contextmanager
def counting(known: dict[Place, str], result: Run) -> Iterator[None]:
    """Count calls of these functions and of their copies, and of all functions of tightrope as "tightrope".

    A profiler counts them; nothing is replaced.
    """

    calls, elements = result.calls, result.elements

    def note(frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        if event == "return":
            name = known.get((code.co_filename, code.co_firstlineno, code.co_name))
            if name is not None:
                held = {k: x for k, x in frame.f_locals.items() if isinstance(x, torch.Tensor)}
                size = max((x.numel() for _, x in tensors(value)), default=0)
                size -= max((x.numel() for k, x in held.items() if k.endswith("_pass")), default=0)
                size //= 1 + any(x.is_complex() for x in held.values())
                elements[name] = max(size, elements.get(name, 0))
        elif event == "call":
            name = known.get((code.co_filename, code.co_firstlineno, code.co_name))
            if name is not None:
                # Calls that only read tables off a function do not count.
                caller = frame.f_back and frame.f_back.f_code
                calls[name] += caller is not tables_inside.__code__
            elif code.co_filename.startswith(OURS):
                calls["tightrope"] += 1

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
        with counting(places(self.library), result):
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
        """Entries of a row: the check in float32, and if that is equal, in bfloat16.

        "bfloat16" is the reason why the model was not equal, or not run, in bfloat16; "elements" the size of the
        largest rotated tensor, if torch does not divide it among threads.
        """
        before = self.enlarged(before)
        out = self.checked(before)
        if (size := self.largest(before)) <= GRAIN:
            out["elements"] = size
        if out["status"] != "equal":
            return out
        self.model._apply(narrowed)
        self.inputs.update(mapped(narrowed, self.inputs))
        try:
            before = self.run()
        except Exception as error:  # noqa: BLE001 - the model itself refuses bfloat16
            return {**out, "bfloat16": f"the model does not run in bfloat16: {error!s:.100}"}
        found = self.checked(before)
        if found["status"] == "different":
            return {**out, **found, "reason": f"in bfloat16: {found['reason']}"}
        return {**out, "bfloat16": found["reason"]}

    def largest(self, run: Run) -> int:
        """The size of the largest tensor that the functions returned."""
        return max((run.elements.get(name, 0) for name in self.counted(run)), default=0)

    def enlarged(self, before: Run) -> Run:
        """Repeat the rows of the inputs until torch divides the rotated tensors among threads.

        If the model does not take more rows, or differs from itself then, the inputs stay, and the old run is
        returned.
        """
        if self.largest(before) > GRAIN:
            return before
        small, lengths = dict(self.inputs), set[int]()
        mapped(lambda x: lengths.update(x.shape[:1]), small)
        # Odd, so that two threads get different rows of two.
        times = (GRAIN // max(1, self.largest(before)) + 1) | 1
        # The rows are those of all tensors, or of the tensors of one length.
        for alike in (lengths, *({n} for n in lengths)):
            self.inputs.update(mapped(functools.partial(repeated, times, alike), small))
            try:
                found = self.run()
                # Some sums of a model are not deterministic with more rows.
                if self.largest(found) > GRAIN and difference(found, self.run()).none:
                    return found
            except Exception:  # noqa: BLE001 - the inputs do not fit together
                continue
        self.inputs.update(small)
        return before

    def checked(self, before: Run) -> dict[str, Any]:
        """Check that `patch` changes no bit, that a fault would, and that `unpatch` undoes it."""
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
        for each, words in ((change, "at"), (undone, "after unpatch, at")):
            if not each.none:
                out["differences"] = each.numbers
                return {**out, "status": "different", "reason": f"{words} {each.where}"}
        reason = self.unused(before, after, out["replaced"])
        if not reason and wrong.none:
            reason = "no output depends on the rotation"
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
    real, classes = _graft.replacement_of, _graft._classes
    _graft.replacement_of = lambda *given: spoilt(real(*given))
    _graft._classes = {}
    try:
        yield
    finally:
        _graft.replacement_of, _graft._classes = real, classes
