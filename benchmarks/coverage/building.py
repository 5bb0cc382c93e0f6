"""Build small models with random weights and inputs from a table of sizes.

`diffusers.json` has an entry for each model class: "config", the arguments of the class, and "inputs", those
of its forward. `others.json` has a table like it for each library, with the "file" of each class in addition;
"new" is the full name of a function that makes the model, if it is not the class. Lists in the arguments of a
class are tuples. A tensor is a text or an object:

- "randn 2 3": random normal numbers of this shape;
- "polar 2 3": complex numbers of absolute value 1;
- "float32 1.0 2 3": one number everywhere, of this dtype;
- {"int64": [1, 2]}: these numbers.

{"new": "package.module.Class", "size": 2} is an object of a class. "frozen" lists
parameters without gradients; with "*" the inputs have none either, for models without a backward pass.
"""

from __future__ import annotations

import pkgutil
from fnmatch import fnmatch
from typing import Any

import torch

from ..transformers_coverage.building import reweigh
from .catalogue import Library, module, sizes


def build(library: Library, name: str, file: str) -> tuple[Any, dict[str, Any]]:
    """A small model of a class, in float32, with arguments for its forward."""
    if name not in sizes(library):
        raise LookupError("no sizes of a small model are listed")
    entry = sizes(library)[name]
    torch.manual_seed(0)
    new = entry.get("new") or f"{module(library, file).__name__}.{name}"
    model = _made({"new": new, **entry["config"]}).float().eval()
    reweigh(model, 1.0)
    for pattern in entry.get("frozen", ()):
        for path, parameter in model.named_parameters():
            if fnmatch(path, pattern):
                parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    return model, {key: _made(value, generator) for key, value in entry["inputs"].items()}


def _made(value: Any, generator: torch.Generator | None = None) -> Any:
    """The argument that an entry of the table describes; tensors only with a generator."""
    if isinstance(value, str) and generator is not None:
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
    if isinstance(value, dict):
        if len(value) == 1 and generator is not None:
            ((kind, numbers),) = value.items()
            if isinstance(getattr(torch, kind, None), torch.dtype):
                return torch.tensor(numbers, dtype=getattr(torch, kind))
        made = {
            int(k) if k.isdigit() and generator else k: _made(v, generator)
            for k, v in value.items()
        }
        if "new" not in made:
            return made
        return pkgutil.resolve_name(made.pop("new"))(**made)
    if isinstance(value, list):
        made = [_made(each, generator) for each in value]
        plain = all(isinstance(each, int) for each in value)
        return tuple(made) if plain or generator is None else made
    return value
