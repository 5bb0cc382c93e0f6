"""Build small models with random weights and inputs from a table of sizes.

`LIBRARY.json` has an entry for each model class: the arguments of the class and those of its forward.
Lists in the arguments of a class are tuples. A tensor is a text or an object:

- "randn 2 3": random normal numbers of this shape;
- "polar 2 3": complex numbers of absolute value 1;
- "float32 1.0 2 3": one number everywhere, of this dtype;
- {"int64": [1, 2]}: these numbers.

{"new": "Cache", "arguments": [2]} is an object of a class next to the model's. "frozen" lists
parameters without gradients; with "*" the inputs have none either, for models without a backward pass.
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..transformers_coverage.building import reweigh
from .catalogue import Library, model_class


@cache
def sizes(library: str) -> dict[str, dict[str, Any]]:
    """The table of sizes of a library."""
    path = Path(__file__).with_name(f"{library}.json")
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def build(library: Library, name: str, file: str) -> tuple[Any, dict[str, Any]]:
    """A small model of a class, in float32, with arguments for its forward."""
    if name not in sizes(library.name):
        raise LookupError("no sizes of a small model are listed")
    entry = sizes(library.name)[name]
    torch.manual_seed(0)
    model = model_class(library, name, file)(**_tupled(entry["config"])).float().eval()
    reweigh(model, 1.0)
    for pattern in entry.get("frozen", ()):
        for path, parameter in model.named_parameters():
            if fnmatch(path, pattern):
                parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    return model, {
        key: _new(model, value)
        if isinstance(value, dict) and "new" in value
        else _made(value, generator)
        for key, value in entry["inputs"].items()
    }


def _new(model: Any, value: dict[str, Any]) -> Any:
    """An object of a class in the module of the model's class."""
    return vars(sys.modules[type(model).__module__])[value["new"]](*value["arguments"])


def _tupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tupled(each) for key, each in value.items()}
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _made(value: Any, generator: torch.Generator) -> Any:
    """The argument that an entry of the table describes."""
    if isinstance(value, str):
        kind, *numbers = value.split()
        if kind == "randn":
            return torch.randn(*map(int, numbers), generator=generator)
        if kind == "polar":
            angle = torch.randn(*map(int, numbers), generator=generator)
            return torch.polar(torch.ones_like(angle), angle)
        if len(numbers) > 1 and isinstance(getattr(torch, kind, None), torch.dtype):
            dtype = getattr(torch, kind)
            fill = numbers[0] == "True" if dtype is torch.bool else float(numbers[0])
            return torch.full([int(n) for n in numbers[1:]], fill, dtype=dtype)
        return value
    if isinstance(value, dict):
        if len(value) == 1:
            ((kind, numbers),) = value.items()
            if isinstance(getattr(torch, kind, None), torch.dtype):
                return torch.tensor(numbers, dtype=getattr(torch, kind))
        return {int(k) if k.isdigit() else k: _made(v, generator) for k, v in value.items()}
    if isinstance(value, list):
        plain = all(isinstance(each, int) for each in value)
        return tuple(value) if plain else [_made(each, generator) for each in value]
    return value
