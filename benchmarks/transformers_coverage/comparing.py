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
from tightrope.integrations._run import tables_inside

from .catalogue import rotary_codes

OURS = str(Path(tightrope.__file__).parent)
# Relative size of the planted fault in the results of rotary functions.
FAULT = 1e-2


@dataclass
class Run:
    """The results of one forward and backward pass."""

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


@contextmanager
def counting(places: dict[Place, str], calls: Counter[str]) -> Iterator[None]:
    """Count calls of these functions and of their copies, and of all functions of tightrope as "tightrope".

    A profiler counts them; nothing is replaced.
    """

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            name = places.get(place(code))
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


def places_of(model: torch.nn.Module) -> dict[Place, str]:
    """Place -> name of the rotary functions in every modeling file that defines parts of the model."""
    places: dict[Place, str] = {}
    for module in rotary_modules(model):
        short = module.__name__.removeprefix("transformers.models.").rpartition(".")[0]
        for code, name in rotary_codes(module).items():
            places.setdefault(place(code), f"{short}.{name}")
    return places


def run(
    model: torch.nn.Module, inputs: dict[str, Any], call: Callable[..., Any] | None = None
) -> Run:
    """Run forward and backward; the loss is the sum of all outputs, times fixed random weights."""
    result = Run({}, {})
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with counting(places_of(model), result.calls):
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
