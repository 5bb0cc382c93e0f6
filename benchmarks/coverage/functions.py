"""Test every rotary function of a library by itself: is it recognised, and does the replacement
equal it in values and gradients?

The status of a row is:

- equal: recognised, and no bit of a result or gradient changes, in float32, in bfloat16, and in bfloat16 by
  float32 tables;
- delegates: it only calls functions that are equal;
- left: not recognised, for the given reason, or not replaced for large tensors;
- not loaded: its file cannot be imported, or does not define it, for the given reason;
- different: a bit changes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tightrope.forms import unwrapped, widen
from tightrope.integrations._candidate import Candidate
from tightrope.integrations._find import BODY, Constants
from tightrope.integrations._recognise import recognise_member, to_the_bit
from tightrope.integrations._replace import replacement
from torch.utils._python_dispatch import TorchDispatchMode

from tightrope.integrations import Recognition

from .catalogue import Library, Rotary, rotary
from .models import sentence


class Shape(NamedTuple):
    """The shape of a rotated tensor."""

    rows: int
    tokens: int
    heads: int
    channels: int


# A small one, and three that torch divides among threads even where a pair of channels is one element. In the third,
# halves of the pairs are no multiple of eight; in the last, halves of the elements neither.
SHAPES = (Shape(2, 11, 4, 32), Shape(2, 600, 4, 32), Shape(3, 911, 3, 16), Shape(3, 731, 3, 20))
Make = Callable[[torch.dtype, torch.dtype, Shape], dict[str, Any]]
# Dtypes of x and of the tables.
Pair = tuple[torch.dtype, torch.dtype]
PAIRS: tuple[Pair, ...] = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


class _Spy(TorchDispatchMode):
    """Count calls of the operator.

    A replacement that only calls the original gives equal results without calling the operator.
    """

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket is torch.ops.tightrope.rotate
        return func(*args, **(kwargs or {}))


def run(library: Library, only: str = "") -> list[dict[str, Any]]:
    """A row for each rotary function and combination of constants, of the files whose names match `only`."""
    from tqdm import tqdm

    chosen = [each for each in rotary(library) if re.search(only, each.file)]
    progress = tqdm(chosen, file=sys.stderr, mininterval=5, unit="function")
    found = [(each, row) for each in progress for row in rows(each)]
    equal = {each.code: each.last for each, row in found if row["status"] == "equal"}
    for each, row in found:
        if row["status"] == "left" and row["reason"] != BODY:
            names = ", ".join(dict.fromkeys(equal[code] for code in each.called() if code in equal))
            if names:
                row |= {"status": "delegates", "reason": f"calls {names}, which is replaced"}
    return [row for _, row in found]


def rows(each: Rotary) -> Iterator[dict[str, Any]]:
    """Yield the row of a rotary function with each combination of constants."""
    blank: dict[str, Any] = {"file": each.file, "function": each.name}
    if (each.file, each.name) in each.library.bodies:
        yield {**blank, "status": "left", "reason": BODY}
        return
    try:
        value, owner = each.found()
        several = each.constants(value)
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        yield {**blank, "status": "not loaded", "reason": sentence(error)}
        return
    for constants in several:
        given = {"constants": dict(constants)} if constants else {}
        yield blank | given | _one(value, owner, constants)


def _one(value: Any, owner: type | None, constants: Constants) -> dict[str, Any]:
    plain = unwrapped(value)
    found: Recognition = to_the_bit(recognise_member(plain, owner, constants))
    candidate = found.candidate
    if candidate is None:
        return {"status": "left", "reason": found.reason}
    text = {"recognised": str(candidate)}
    try:
        make, made = arguments(candidate, owner is not None), replacement(plain, [candidate])
        return text | compare(plain, made, make, candidate.call.rotated)
    except Exception as error:  # noqa: BLE001 - third-party code can raise anything
        return text | {"status": "different", "reason": sentence(error)}


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


def compare(original: Any, replaced: Any, make: Make, rotated: Sequence[str]) -> dict[str, Any]:
    """Compare the bits of results and gradients, in all shapes and for each pair of dtypes.

    Args:
        make: makes the arguments for a dtype of x, one of the tables, and a shape.
        rotated: the names of the arguments that need gradients.

    Returns:
        The entries of a row: "status", and "reason" if that is not "equal". "differ" counts the elements of
        results and of gradients that differ, by dtypes. "given_back" is the number of shapes, beside the first
        two, that the original rotates in some dtype.
    """
    differ: dict[str, list[int]] = {}
    served = []
    for shape in SHAPES:
        count = 0
        for pair in PAIRS:
            with _Spy() as spy:
                theirs, ours = (_run(f, make(*pair, shape), rotated) for f in (original, replaced))
            # Tables of another dtype than x may be left to the original.
            count += spy.calls > 1 and pair[0] == pair[1]
            key = " by ".join(dict.fromkeys(str(dtype)[6:] for dtype in pair))
            found = [_differing(*both) for both in zip(theirs, ours)]
            if any(found):
                before = differ.get(key, (0, 0))
                differ[key] = [a + b for a, b in zip(before, found)]
        served.append(count)
    small, large, *rest = served
    if small < 2 or differ:
        reason = "differs, or bypasses the operator: see the numbers"
        return {"status": "different", "reason": reason, "differ": differ}
    if large < 2:
        return {"status": "left", "reason": "the original serves calls with large tensors"}
    back = sum(count < 2 for count in rest)
    return {"status": "equal", **({"given_back": back} if back else {})}


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
