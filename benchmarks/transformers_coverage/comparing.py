"""One model before and after: its outputs and gradients, and which rotary functions ran."""

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

# Where this library's functions stand.
OURS = str(Path(tightrope.__file__).parent)
# The bounds of issue 7, in float32, relative to the largest magnitude of the tensor.
OUTPUT_BOUND = 2e-5
GRADIENT_BOUND = 1e-4
# A gradient that is zero but for rounding (of a bias before a softmax, say) is measured against this
# share of the model's largest gradient.
FLOOR = 1e-3
# The planted fault: what is rotated becomes wrong by this share of itself.
FAULT = 1e-2


@dataclass
class Run:
    """What one forward and backward pass gave.

    `odd` says what of the tables that a rotary function was called with no fused rotation takes.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    calls: Counter[str] = field(default_factory=Counter)
    odd: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Largest differences of two runs, relative to the tensors' own scale."""

    absolute_output: float
    output: float
    gradient: float
    where: str

    @property
    def within(self) -> bool:
        """Whether both keep the bounds. NaN does not."""
        return self.output <= OUTPUT_BOUND and self.gradient <= GRADIENT_BOUND


def tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Every floating tensor of a model's output, with a path to it."""
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
    """The modeling modules of transformers that the model's parts come from."""
    names = {k.__module__ for m in model.modules() for k in type(m).__mro__}
    return [sys.modules[n] for n in sorted(names) if n.startswith("transformers.models.")]


# Where a function stands: its file, its first line, its name. A copy of it stands there as well.
Place = tuple[str, int, str]


def place(code: CodeType) -> Place:
    """Where a code object comes from."""
    return code.co_filename, code.co_firstlineno, code.co_name


def odd_of(x: torch.Tensor, tables: list[torch.Tensor]) -> str | None:
    """Why the cosines and sines of a call are not those of a rotation that is given its angles."""
    if any(table.requires_grad for table in tables):
        return "its tables want gradients"
    with torch.no_grad():
        for table in tables:
            if 2 * table.shape[-1] <= x.shape[-1]:
                continue  # one entry for each pair
            halves = table.chunk(2, -1)
            if table.shape[-1] % 2 or not (
                torch.equal(*halves) or torch.equal(table[..., ::2], table[..., 1::2])
            ):
                return "both channels of a pair have angles of their own, so that it is no rotation"
    return None


@contextmanager
def counting(places: dict[Place, str], calls: Counter[str], odd: dict[str, str]) -> Iterator[None]:
    """Count calls of these functions, whoever holds or has copied them: nothing is replaced."""

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
    """Rotary functions of every modeling file that the model has parts of."""
    places: dict[Place, str] = {}
    for module in rotary_modules(model):
        short = module.__name__.removeprefix("transformers.models.").rpartition(".")[0]
        for code, name in rotary_codes(module).items():
            places.setdefault(place(code), f"{short}.{name}")
    return places


def run(
    model: torch.nn.Module, inputs: dict[str, Any], call: Callable[..., Any] | None = None
) -> Run:
    """Forward and backward; every output has a part in the loss, weighted at random but fixed."""
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
    """Largest difference, absolute and relative to the first tensor's scale; NaN where shapes or
    the places of infinities and NaN differ."""
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
    """Every output and every gradient of two runs, compared."""
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
            # NaN is worse than any number, and stays.
            if not share <= worst[kind][0]:
                worst[kind] = (share, name) if worst[kind][0] == worst[kind][0] else worst[kind]
    return Difference(
        absolute,
        worst["output"][0],
        worst["gradient"][0],
        ", ".join(w for _, w in worst.values() if w),
    )


def spoilt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, wrong by FAULT: each channel takes in a little of its neighbour."""

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
    """Every rotary function of the model's files is wrong by a little inside."""
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
