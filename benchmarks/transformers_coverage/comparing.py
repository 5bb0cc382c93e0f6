"""Compare two runs of a model: outputs, gradients, and the rotary functions that ran."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

import tightrope

from .catalogue import rotary_codes

OURS = str(Path(tightrope.__file__).parent)
# Bounds in float32, relative to the largest magnitude of the tensor.
OUTPUT_BOUND = 2e-5
GRADIENT_BOUND = 1e-4
# A gradient that is zero up to rounding (for example of a bias before a softmax) is compared relative
# to this fraction of the model's largest gradient.
FLOOR = 1e-3
# Relative size of the planted fault in the results of rotary functions.
FAULT = 1e-2


@dataclass
class Run:
    """The results of one forward and backward pass.

    `odd`: rotary function -> why the operator does not take the cos/sin of its calls.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    calls: Counter[str] = field(default_factory=Counter)
    odd: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The largest differences between two runs, relative to the scale of each tensor."""

    absolute_output: float
    output: float
    gradient: float
    where: str

    @property
    def within(self) -> bool:
        """True if both are within the bounds; False for NaN."""
        return self.output <= OUTPUT_BOUND and self.gradient <= GRADIENT_BOUND


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


def rotary_modules(model: torch.nn.Module) -> list[ModuleType]:
    """The modeling modules of transformers that define the model's parts."""
    names = {k.__module__ for m in model.modules() for k in type(m).__mro__}
    return [sys.modules[n] for n in sorted(names) if n.startswith("transformers.models.")]


# The place of a function: file, first line, name. Copies of the function have the same place.
Place = tuple[str, int, str]


def place(code: CodeType) -> Place:
    """The file, first line and name of a code object."""
    return code.co_filename, code.co_firstlineno, code.co_name


def odd_of(x: torch.Tensor, tables: list[torch.Tensor]) -> str | None:
    """The reason why the operator does not take the cos/sin of a call, or None."""
    if any(table.requires_grad for table in tables):
        return "its cos/sin require gradients"
    with torch.no_grad():
        for table in tables:
            if 2 * table.shape[-1] <= x.shape[-1]:
                continue  # one entry for each pair
            halves = table.chunk(2, -1)
            if table.shape[-1] % 2 or not (
                torch.equal(*halves) or torch.equal(table[..., ::2], table[..., 1::2])
            ):
                return "the two channels of a pair have different angles, so it is no rotation"
    return None


@contextmanager
def counting(places: dict[Place, str], calls: Counter[str], odd: dict[str, str]) -> Iterator[None]:
    """Count calls of these functions and of copies of them, with a profiler; nothing is replaced."""

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            name = places.get((code.co_filename, code.co_firstlineno, code.co_name))
            if name is not None:
                calls[name] += 1
                held = [frame.f_locals.get(each) for each in ("q", "cos", "sin")]
                known = all(isinstance(each, torch.Tensor) for each in held)
                found = odd_of(held[0], held[1:]) if known else None
                if found is not None:
                    odd[name] = found
            elif code.co_filename.startswith(OURS):
                calls["tightrope"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def places_of(model: torch.nn.Module) -> dict[Place, str]:
    """The rotary functions of every modeling file that defines parts of the model."""
    places: dict[Place, str] = {}
    for module in rotary_modules(model):
        short = module.__name__.removeprefix("transformers.models.").rpartition(".")[0]
        for code, name in rotary_codes(module).items():
            places.setdefault(place(code), f"{short}.{name}")
    return places


def run(
    model: torch.nn.Module, inputs: dict[str, Any], call: Callable[..., Any] | None = None
) -> Run:
    """Run forward and backward; the loss is a fixed random weighting of every output."""
    result = Run({}, {})
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with counting(places_of(model), result.calls, result.odd):
        out = (call or model)(**inputs)
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros(())
    for name, value in tensors(out):
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
    result.gradients = {
        n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return result


def relative(before: torch.Tensor, after: torch.Tensor, floor: float) -> tuple[float, float]:
    """The largest difference, absolute and relative to the first tensor's scale; NaN if shapes or
    the positions of infinities and NaN differ."""
    if before.shape != after.shape:
        return float("nan"), float("nan")
    finite = before.isfinite()
    if not torch.equal(finite, after.isfinite()):
        return float("nan"), float("nan")
    if not finite.any():
        return 0.0, 0.0
    a, b = before[finite].double(), after[finite].double()
    largest = (a - b).abs().max().item()
    scale = max(a.abs().max().item(), floor)
    return largest, largest / scale if scale else (0.0 if largest == 0 else float("inf"))


def difference(before: Run, after: Run) -> Difference:
    """Compare every output and every gradient of two runs."""
    worst = {"output": (0.0, ""), "gradient": (0.0, "")}
    absolute = 0.0
    top = max((g.abs().max().item() for g in before.gradients.values() if g.numel()), default=0.0)
    for kind, left, right, floor in (
        ("output", before.outputs, after.outputs, 0.0),
        ("gradient", before.gradients, after.gradients, FLOOR * top),
    ):
        for name in left.keys() | right.keys():
            if name in left and name in right:
                largest, share = relative(left[name], right[name], floor)
            else:
                largest, share = float("nan"), float("nan")
            if kind == "output":
                absolute = largest if not largest <= absolute else absolute
            # NaN counts as worse than any number.
            if not share <= worst[kind][0]:
                worst[kind] = (share, name) if worst[kind][0] == worst[kind][0] else worst[kind]
    return Difference(
        absolute,
        worst["output"][0],
        worst["gradient"][0],
        ", ".join(w for _, w in worst.values() if w),
    )


def spoilt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an error: to each channel of its results, FAULT times the adjacent one is added."""

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
def fault(model: torch.nn.Module) -> Iterator[None]:
    """Plant a small error in every rotary function of the model's files."""
    undo: list[tuple[Any, str, Any]] = []
    for module in rotary_modules(model):
        for name in rotary_codes(module).values():
            owner: Any = module
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            held = inspect.getattr_static(owner, last)
            undo.append((owner, last, held))
            if isinstance(held, staticmethod):
                setattr(owner, last, staticmethod(spoilt(held.__func__)))
            else:
                setattr(owner, last, spoilt(held))
    try:
        yield
    finally:
        for owner, last, held in reversed(undo):
            setattr(owner, last, held)
