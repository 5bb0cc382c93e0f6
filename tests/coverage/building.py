"""Build small models with random weights, and inputs, from the tables in `models/`.

A table has an entry for each model: "config", the arguments of its class, and "inputs", those of its forward; for other
libraries than diffusers also its "file". "new" is the full name of a function that makes the model, if it is not the
class. Lists in the arguments of a class are tuples. A tensor is a text or an object:

- "randn 2 3": random normal numbers of this shape; "rand 2 3": random numbers from 0 to 1;
- "polar 2 3": complex numbers of absolute value 1; "turns 2 6": cosines and sines of random angles, each twice;
- "float32 1.0 2 3": one number everywhere, of this dtype;
- {"int64": [1, 2]}: these numbers;
- "ids 14": two rows of random tokens; "ids 14 9": the same with a last axis of 9. "ids 14 4:image_token_id*6,7" has six
  tokens of this setting and a 7 before the fifth token; "zeros 14 4:1*6,0" has zeros in place of random tokens;
- "steps 2 6 64": two rows of 0 to 5, each 64 times.

{"new": "package.module.Class", "size": 2} is an object of a class. "frozen" lists parameters without gradients; with
"*" the inputs have none either, for models without a backward pass.

`transformers.json` has an entry for each model type that is an exception to the rules in `small`:

- "config": settings, nested for the parts of a configuration; a part with a "model_type" replaces the whole part;
- "model": the class to build; for a configuration that no class states, the class that takes it;
- "grouped": false for families with as many key heads as query heads;
- "part": the part or method of the model to call, if the whole has no forward, is badly conditioned or not
  differentiable; "whole": the type of the model whose part it is, if no class takes its configuration alone;
- "stub": a function of its file that does nothing then, such as one that asks for packages of the loss;
- "attention": the attention implementation;
- "why": the reason, in words.
"""

from __future__ import annotations

import math
import pkgutil
from fnmatch import fnmatch
from typing import Any

import torch

from .libraries import Library
from .runs import Run, Subject

SEED = 3


def prepare(library: Library, name: str) -> tuple[Subject, Run]:
    """Build a small model of a class, in float32, with arguments for its forward, and run it once."""
    if name not in library.small:
        raise LookupError("no sizes of a small model are listed")
    entry = library.small[name]
    torch.manual_seed(0)
    new = entry.get("new") or f"{library.module_name(library.models[name])}.{name}"
    model = made({"new": new, **entry["config"]}).float().eval()
    reweigh(model)
    for pattern in entry.get("frozen", ()):
        for path, parameter in model.named_parameters():
            if fnmatch(path, pattern):
                parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
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
            continue
        kind = kinds[id(parameter)]
        inputs = parameter[0].numel() if "Conv" in kind else max(1, *parameter.shape[-2:])
        parameter.copy_(noise if "Embedding" in kind else noise / math.sqrt(inputs))
    for name, buffer in model.named_buffers():
        # The vectors of a codebook are zeros until it is trained.
        if name.endswith("embed_sum"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def made(value: Any, generator: torch.Generator | None = None, config: Any = None) -> Any:
    """The argument that an entry of a table describes.

    Args:
        generator: makes random numbers; without it, texts and objects describe no tensors.
        config: has the special tokens.
    """
    if isinstance(value, str) and " " in value and generator is not None:
        return _tensor(value, generator, config)
    if isinstance(value, dict):
        kind = getattr(torch, next(iter(value), ""), None)
        if len(value) == 1 and isinstance(kind, torch.dtype) and generator is not None:
            return torch.tensor(*value.values(), dtype=kind)
        found = {
            int(k) if k.isdigit() and generator else k: made(v, generator, config)
            for k, v in value.items()
            if k != "new"
        }
        return pkgutil.resolve_name(value["new"])(**found) if "new" in value else found
    if isinstance(value, list):
        every = [made(each, generator, config) for each in value]
        plain = all(isinstance(each, int) for each in value)
        return tuple(every) if plain or generator is None else every
    return value


def _tensor(text: str, generator: torch.Generator, config: Any) -> Any:
    kind, *numbers = text.split()
    if kind in ("randn", "rand"):
        return getattr(torch, kind)(*map(int, numbers), generator=generator)
    if kind == "polar":
        angle = torch.randn(*map(int, numbers), generator=generator)
        return torch.polar(torch.ones_like(angle), angle)
    if kind == "turns":
        *shape, width = map(int, numbers)
        angle = torch.randn(*shape, width // 2, generator=generator).repeat_interleave(2, -1)
        return angle.cos(), angle.sin()
    if kind == "steps":
        rows, steps, each = map(int, numbers)
        return torch.arange(steps).repeat_interleave(each).expand(rows, -1)
    if kind in ("ids", "zeros"):
        size, *more = numbers
        ids = torch.randint(4, 32, (2, int(size)), generator=generator) * (kind == "ids")
        if more and ":" not in more[0]:
            return ids[..., None].repeat(1, 1, int(more[0]))
        return _inserted(ids, more[0], config) if more else ids
    fill, *shape = numbers
    number = fill == "True" if kind == "bool" else float(fill)
    return torch.full([*map(int, shape)], number, dtype=getattr(torch, kind))


def _inserted(ids: torch.Tensor, text: str, config: Any) -> torch.Tensor:
    at, _, runs = text.partition(":")
    tokens: list[int] = []
    for run in runs.split(","):
        name, _, times = run.partition("*")
        token = int(name) if name.isdigit() else setting(config, name)
        tokens += [token] * int(times or 1)
    part = torch.tensor(tokens).expand(2, -1)
    return torch.cat([ids[:, : int(at)], part, ids[:, int(at) :]], 1)


def setting(config: Any, name: str) -> Any:
    """A setting of a configuration or of its parts; None if there is none."""
    found = getattr(config, name, None)
    parts = (part for part in vars(config).values() if hasattr(part, "to_dict"))
    while found is None and (part := next(parts, None)) is not None:
        found = setting(part, name)
    return found
