"""Build small models with random weights, and inputs, from the tables of sizes.

`diffusers.json` has an entry for each model class: "config", the arguments of the class, and "inputs", those
of its forward. `others.json` has a table like it for each library, with the "file" of each class in addition;
"new" is the full name of a function that makes the model, if it is not the class. Lists in the arguments of a
class are tuples. A tensor is a text or an object:

- "randn 2 3": random normal numbers of this shape; "rand 2 3": random numbers from 0 to 1;
- "polar 2 3": complex numbers of absolute value 1;
- "float32 1.0 2 3": one number everywhere, of this dtype;
- {"int64": [1, 2]}: these numbers.

{"new": "package.module.Class", "size": 2} is an object of a class. "frozen" lists
parameters without gradients; with "*" the inputs have none either, for models without a backward pass.

`transformers.json` has an entry for each model type that is an exception to the rules in `transformers` and
`inputs`:

- "config": settings, nested for the parts of a configuration; a part with a "model_type" replaces the whole part;
- "inputs": some of the inputs, where "ids 14" are random tokens, and "ids 14 9" the same with a last axis of 9, or
  the name of a function in `inputs`; "without": inputs to leave out;
- "model": the class to build; for a configuration that no class states, the class that takes it;
- "part": the part or method of the model to call, if the whole has no forward, is badly conditioned or not
  differentiable; "whole": the type of the model whose part it is, if no class takes its configuration alone;
- "stub": a function of its file that does nothing then, such as one that asks for packages of the loss;
- "attention": the attention implementation; "patches", "grids": see `inputs.Maker.images`;
- "why": the reason, in words.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch

from .catalogue import Library, table
from .comparing import Run, Subject


def prepare(library: Library, name: str, file: str) -> tuple[Subject, Run]:
    """Build a small model of a class, in float32, with arguments for its forward, and run it once."""
    if name not in table(library):
        raise LookupError("no sizes of a small model are listed")
    entry = table(library)[name]
    torch.manual_seed(0)
    new = entry.get("new") or f"{library.module_name(file)}.{name}"
    model = made({"new": new, **entry["config"]}).float().eval()
    reweigh(model)
    for pattern in entry.get("frozen", ()):
        for path, parameter in model.named_parameters():
            if fnmatch(path, pattern):
                parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    subject = Subject(library, model, made(entry["inputs"], generator))
    return subject, subject.run()


@torch.no_grad()
def reweigh(model: torch.nn.Module) -> None:
    """Set random weights that preserve the variance of activations.

    No weight stays zero or tiny, so that scores depend on angles.
    """
    generator = torch.Generator().manual_seed(1)
    kinds = {id(p): type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=0.1)
        elif "Embedding" in kinds[id(parameter)]:
            parameter.copy_(noise)
        elif "Conv" in kinds[id(parameter)]:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(noise / math.sqrt(max(1, *parameter.shape[-2:])))
    for name, buffer in model.named_buffers():
        # The vectors of a codebook are zeros until it is trained.
        if name.endswith("embed_sum"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def made(
    value: Any,
    generator: torch.Generator | None = None,
    ids: Callable[[int], torch.Tensor] | None = None,
) -> Any:
    """The argument that an entry of a table describes.

    Args:
        generator: makes random numbers; without it, texts and objects describe no tensors.
        ids: makes random tokens of this number.
    """
    if isinstance(value, str) and generator is not None:
        kind, *numbers = value.split()
        if kind in ("randn", "rand"):
            return getattr(torch, kind)(*map(int, numbers), generator=generator)
        if kind == "polar":
            angle = torch.randn(*map(int, numbers), generator=generator)
            return torch.polar(torch.ones_like(angle), angle)
        if kind == "ids" and ids is not None:
            tokens = ids(int(numbers[0]))
            return tokens[..., None].repeat(1, 1, int(numbers[1])) if numbers[1:] else tokens
        if len(numbers) > 1 and isinstance(getattr(torch, kind, None), torch.dtype):
            dtype = getattr(torch, kind)
            fill = numbers[0] == "True" if dtype is torch.bool else float(numbers[0])
            return torch.full([int(n) for n in numbers[1:]], fill, dtype=dtype)
    if isinstance(value, dict):
        if len(value) == 1 and generator is not None:
            ((kind, numbers),) = value.items()
            if isinstance(getattr(torch, kind, None), torch.dtype):
                return torch.tensor(numbers, dtype=getattr(torch, kind))
        found = {
            int(k) if k.isdigit() and generator else k: made(v, generator, ids)
            for k, v in value.items()
        }
        if "new" not in found:
            return found
        return pkgutil.resolve_name(found.pop("new"))(**found)
    if isinstance(value, list):
        every = [made(each, generator, ids) for each in value]
        plain = all(isinstance(each, int) for each in value)
        return tuple(every) if plain or generator is None else every
    return value
