"""Test every rotary function of transformers by itself: is it recognised, and does the replacement
equal it in values and gradients?"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightrope.forms import unwrapped, widen
from tightrope.integrations._candidate import Candidate
from tightrope.integrations._code import global_names
from tightrope.integrations._find import looks_rotary
from tightrope.integrations._graft import Recipe, Swap, calling
from tightrope.integrations._recognise import recognise_member, to_the_bit
from tightrope.integrations._replace import replacement
from tightrope.integrations.transformers import recognise

from .catalogue import models_folder, rotary_names


class Shape(NamedTuple):
    """The shape of a rotated tensor."""

    rows: int
    tokens: int
    heads: int
    channels: int


# A small one, and three that torch divides among threads even where a pair of channels is one element. In the third,
# halves of the pairs are no multiple of eight; in the last, halves of the elements neither.
SHAPES = (Shape(2, 11, 4, 16), Shape(2, 600, 4, 32), Shape(3, 911, 3, 16), Shape(3, 731, 3, 20))
Make = Callable[[torch.dtype, torch.dtype, Shape], dict[str, Any]]
# Dtypes of x and of the tables.
Pair = tuple[torch.dtype, torch.dtype]
PAIRS: tuple[Pair, ...] = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))


def files() -> list[Path]:
    """The modeling files that define a rotary function."""
    found = sorted(models_folder().rglob("modeling_*.py"))
    return [path for path in found if rotary_names(path)]


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each rotary function of a file; an error becomes a row too."""
    name = path.relative_to(models_folder()).with_suffix("").as_posix()
    try:
        module = importlib.import_module("transformers.models." + name.replace("/", "."))
    except Exception as error:  # noqa: BLE001
        yield _row(name, "*", "left", reason=f"cannot be imported: {error!s:.200}")
        return
    swaps: dict[str, Swap] = {}
    for function in names(module, path):
        try:
            yield _one(module, name, function, swaps)
        except Exception as error:  # noqa: BLE001
            yield _row(
                name, function, "different", reason=f"{type(error).__name__}: {error!s:.200}"
            )


def names(module: ModuleType, path: Path) -> list[str]:
    """Return names of rotary functions and methods in a file, found by name or by parameters."""
    known = list(rotary_names(path))
    for name, value in vars(module).items():
        here = getattr(unwrapped(value), "__module__", None) == module.__name__
        if here and name not in known and looks_rotary(name, value):
            known.append(name)
    return known


class _Spy(TorchDispatchMode):
    """Count calls of the operator.

    A replacement that only calls the original gives equal results without calling the operator.
    """

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket is torch.ops.tightrope.rotate
        return func(*args, **(kwargs or {}))


def _row(name: str, function: str, status: str, **more: Any) -> dict[str, Any]:
    return {"file": name, "function": function, "status": status, "recognised": None, **more}


def measured(
    candidate: Candidate, original: Any, method: bool, pairs: Sequence[Pair] = PAIRS
) -> dict[str, Any]:
    """Entries of a row: a function or method compared with its replacement; `pairs`: see :func:`compare`."""
    make, rotated = arguments(candidate, method), candidate.call.rotated
    found = compare(original, replacement(original, [candidate]), make, rotated, pairs)
    return found | {"recognised": str(candidate)}


def _one(module: ModuleType, name: str, function: str, swaps: dict[str, Swap]) -> dict[str, Any]:
    value, owner = Swap(module.__name__, function).found()
    target = unwrapped(value) if "." in function else value
    recognition = to_the_bit(recognise_member(target, owner))
    if recognition.candidate is not None:
        swaps[function] = Swap(module.__name__, function)
        return _row(name, function, **measured(recognition.candidate, target, owner is not None))
    # A function that only delegates: the functions it calls are replaced.
    for each in (n for n in names(module, Path(module.__file__ or "")) if n not in swaps):
        inner = getattr(module, each, None)
        if isinstance(inner, FunctionType) and each != function:
            found = to_the_bit(recognise(inner))
            if found.candidate is not None:
                swaps[each] = Swap(module.__name__, each)
    recipe = Recipe(tuple(swaps.values()))
    made = calling(target, recipe) if isinstance(target, FunctionType) else None
    if made is not None and function in COMPOSED:
        compared = compare(target, made, COMPOSED[function], ("x",))
        reached = ", ".join(each for each in swaps if each in global_names(target.__code__))
        return _row(name, function, **compared | {"reason": f"calls {reached}, which is replaced"})
    return _row(name, function, "left", reason=recognition.reason)


def arguments(candidate: Candidate, method: bool = False) -> Make:
    """Return a function that makes arguments for a candidate: random x, and cos/sin of angles as in a model."""
    call, rotation = candidate.call, candidate.rotation
    unsqueeze_dim, positions = call.parameter("unsqueeze_dim"), call.parameter("positions")
    # Prefer x of rank four, tables that are unsqueezed, which tell the layout of x, and tables of rank three.
    dims, table, given, place = max(
        candidate.shapes,
        key=lambda s: (s[0], s[3] is not None, s[1] == 3, -(s[2] or 0), s[1]),
        default=(4, 4, None, None),
    )
    tokens_first = place == -2 or call.form.flat or call.form.grids or "1s1d" in candidate.ones

    def make(dtype: torch.dtype, table_dtype: torch.dtype, shape: Shape) -> dict[str, Any]:
        torch.manual_seed(0)
        rows, tokens, heads, channels = shape
        middle = (tokens, heads) if tokens_first else (heads, tokens)
        lead = (rows, *middle) if dims == 4 else middle if place == -2 else (rows, tokens)
        xs = {name: torch.randn(*lead, channels, dtype=dtype) for name in call.rotated}
        pairs = channels // 2
        angle = torch.arange(1, tokens + 1)[:, None] * 10.0 ** -torch.linspace(0, 3, pairs)
        full = widen(angle, rotation.width)
        cos, sin = full.cos().to(table_dtype), full.sin().to(table_dtype)
        ones = {2: (), 3: (1,), 4: (1, 1)}[table]
        if positions is None:
            cos, sin = cos.expand(*ones, *cos.shape), sin.expand(*ones, *sin.shape)
        if not call.form.narrow:
            cos, sin = cos.float(), sin.float()
        if call.form.grids:
            cos, sin = (t[0, 0, :, None].expand(rows, -1, -1, -1) for t in (cos, sin))
        values: dict[str, Any] = {**xs, **({} if call.makes_its_tables else call.build(cos, sin))}
        if candidate.channels_first:
            values |= {name: x.mT for name, x in xs.items()}
        if call.form.flat:
            values |= {name: x.flatten(2) for name, x in xs.items()}
            table_name = call.tables[0]
            values[table_name] = torch.stack((cos[0, 0], sin[0, 0]))[:, :, None, None]
        if unsqueeze_dim:
            values[unsqueeze_dim] = given
        if positions:
            ids = torch.arange(tokens).flip(0)
            values[positions] = ids if call.makes_its_tables else ids[None]
        if method:
            values["self"] = SimpleNamespace(num_heads=heads, head_size=channels)
        return values | dict(candidate.constants)

    return make


def _multidimensional(dtype: torch.dtype, table_dtype: torch.dtype, shape: Shape) -> dict[str, Any]:
    torch.manual_seed(0)
    rows, tokens, _, channels = shape
    angle = torch.rand(rows, tokens, channels // 4)
    table = torch.cat((angle, angle, 2 * angle, 2 * angle), -1)
    return {
        "x": torch.randn(*shape, dtype=dtype),
        "cos": table.cos().to(table_dtype),
        "sin": table.sin().to(table_dtype),
        "position_ids": torch.zeros(rows, tokens, 2, dtype=torch.int64),
    }


#: Arguments of functions that delegate to others.
COMPOSED: dict[str, Make] = {"apply_multidimensional_rope": _multidimensional}


def compare(
    original: Any, replaced: Any, make: Make, rotated: Sequence[str], pairs: Sequence[Pair] = PAIRS
) -> dict[str, Any]:
    """Count the elements of results and gradients whose values differ, in all shapes, for each pair of dtypes.

    Args:
        make: makes the arguments for a dtype of x and one of the tables.
        rotated: the names of the arguments that need gradients.
        pairs: dtypes of x and of the tables. In the first two, the operator must serve calls with the first two
            shapes.
    """
    found: dict[str, Any] = {"served": []}
    for shape in SHAPES:
        served = []
        for pair in pairs:
            with _Spy() as spy:
                theirs, ours = (_run(f, make(*pair, shape), rotated) for f in (original, replaced))
            served.append(spy.calls > 1)
            key = " by ".join(dict.fromkeys(str(dtype)[6:] for dtype in pair))
            before = found.get(key, (0, 0))
            found[key] = [n + _differing(*both) for n, both in zip(before, zip(theirs, ours))]
        found["served"].append(sum(served[:2]))
    small, large, *_ = found["served"]
    if small < 2 or any(any(found[key]) for key in found if key != "served"):
        status, reason = "different", "differs, or bypasses the operator: see the numbers"
    elif large < 2:
        status, reason = "left", "the original serves calls with large tensors"
    else:
        status, reason = "equal", "equal to the bit"
    return {"status": status, "reason": reason, **found}


def _run(
    function: Any, values: dict[str, Any], rotated: Sequence[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    owner = () if (this := values.pop("self", None)) is None else (this,)
    leaves = [values[name].requires_grad_() for name in rotated]
    result = function(*owner, **values)
    ys = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in ys]
    return [y.detach() for y in ys], list(torch.autograd.grad(ys, leaves, weights))


def _differing(one: list[torch.Tensor], other: list[torch.Tensor]) -> int:
    """The number of elements that differ; all if dtypes, shapes or numbers of tensors differ."""
    alike = len(one) == len(other) and all(a.dtype == b.dtype for a, b in zip(one, other))
    if not alike or any(a.shape != b.shape for a, b in zip(one, other)):
        return sum(a.numel() for a in one)
    return sum(int((a != b).sum()) for a, b in zip(one, other))


def run(only: str = "") -> list[dict[str, Any]]:
    """The rows of all files whose folder matches `only`, with a progress bar."""
    from tqdm import tqdm

    chosen = [path for path in files() if re.search(only, path.parent.name)]
    found: list[dict[str, Any]] = []
    for path in tqdm(chosen, file=sys.stderr, mininterval=5, unit="file"):
        found += rows(path)
    return found
