"""Test every rotary function of a library by itself: of which kind is it, and does the replacement equal it?

Each function is called with all options that its kind has, in all layouts, with tensors of SHAPES, which verification
never tries. The status of a row is:

- equal: no bit of a result or gradient changes, in float32, in bfloat16, and in bfloat16 by float32 tables;
- close: it multiplies complex numbers; values agree, and a last bit differs;
- delegates: it only calls functions that are replaced;
- left: it is of no known kind, or for the given reason;
- not loaded: its file cannot be imported, or does not define it, for the given reason;
- different: more changes.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from tightrope.patching._find import Member
from tightrope.patching._kinds import FORMS
from tightrope.patching._turn import Kind, Served, replacement
from tightrope.patching._verify import (
    _CONTIGUOUS,
    _EXCHANGED,
    _GAPS,
    _alike,
    _Probe,
    _Search,
    _Trial,
    find,
)

from .catalogue import Library, Rotary, rotary
from .comparing import mapped
from .models import sentence


class Shape(NamedTuple):
    """The shape of a rotated tensor."""

    rows: int
    tokens: int
    heads: int
    channels: int


# Small ones, and one that torch divides among threads even where a pair of channels is one element.
SHAPES = (Shape(2, 11, 4, 32), Shape(3, 37, 1, 20), Shape(1, 2, 6, 24), Shape(3, 731, 3, 20))
# How each of them lies in memory.
MEMORY = (_GAPS, _CONTIGUOUS, _EXCHANGED, _GAPS)
# Dtypes of x and of the tables.
PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)
# Bounds of values that agree, by the size of an element.
CLOSE = {4: 1e-5, 2: 2e-2}
BODY = "it rotates in its body"


def run(library: Library, only: str = "") -> list[dict[str, Any]]:
    """A row for each rotary function of the files whose names match `only`; equal code is measured once."""
    from tqdm import tqdm

    chosen = [each for each in rotary(library) if re.search(only, each.file)]
    progress = tqdm(chosen, file=sys.stderr, mininterval=5, unit="function")
    measured: dict[Any, dict[str, Any]] = {}
    found = []
    for each in progress:
        key = _code_of(each)
        if key not in measured:
            measured[key] = row(each)
        found.append((each, {**measured[key], "file": each.file}))
    served = {each.code: each.last for each, row in found if row["status"] in ("equal", "close")}
    for each, row_ in found:
        if row_["status"] == "left" and row_["reason"] != BODY:
            names = ", ".join(
                dict.fromkeys(served[code] for code in each.called() if code in served)
            )
            if names:
                row_ |= {"status": "delegates", "reason": f"calls {names}, which is replaced"}
    return [row for _, row in found]


def _code_of(each: Rotary) -> Any:
    """The code of a function and of those that it calls, without places; the function itself if it has none."""
    try:
        codes = [each.code, *each.called()]
    except Exception:  # noqa: BLE001 - `row` records why
        return each
    kept = (tuple(c for c in code.co_consts if not isinstance(c, CodeType)) for code in codes)
    return each.name, repr([(code.co_code, code.co_names, c) for code, c in zip(codes, kept)])


def row(each: Rotary) -> dict[str, Any]:
    """The row of a rotary function."""
    blank: dict[str, Any] = {"file": each.file, "function": each.name}
    if (each.file, each.name) in each.library.bodies:
        return {**blank, "status": "left", "reason": BODY}
    try:
        member = each.found()
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        return {**blank, "status": "not loaded", "reason": sentence(error)}
    kind = find(member.function(), method=member.takes_self())
    if kind is None:
        return {**blank, "status": "left", "reason": "it is of no known kind"}
    blank["recognised"] = str(kind)
    if not kind.same_bits:
        return {**blank, "status": "left", "reason": "it rounds in another way"}
    try:
        return blank | compare(member, kind)
    except Exception as error:  # noqa: BLE001 - an error of the replacement alone
        return {**blank, "status": "different", "reason": sentence(error)}


def compare(member: Member, kind: Kind) -> dict[str, Any]:
    """Compare results and gradients of a function and of its replacement.

    Returns:
        The entries of a row: "status", and "reason" if that is not "equal". "calls" is the number of calls. By dtypes,
        "given_back" counts those in which the original ran, and "differ" the elements that differ; "tables" those in
        gradients of tables, sums whose last bits may differ.
    """
    original, served = member.function(), Served(member.function(), kind, lambda _: None)
    torch.manual_seed(0)
    made, far, calls = replacement(served), False, 0
    differ, back = Counter[str](), Counter[str]()
    for trial, learned in trials(original, kind):
        this = SimpleNamespace(num_heads=trial.sizes["h"], head_size=trial.sizes["d"])
        known, first, given = kind.roles, (this,) * kind.roles.method, dict[str, Any]()
        fixed = () if learned else known.tables
        probe = _Probe(functools.partial(_seen, original, first, fixed, given), known, trial)
        if not probe.ys:
            continue
        calls, before = calls + 1, served.counts[1]
        result = made(*first, **given)
        ours = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]
        weights = [torch.randn(y.shape).to(y.dtype) for y in probe.ys]
        leaves = [*probe.xs, *[probe.cos, probe.sin] * learned]
        both = [[*ys, *torch.autograd.grad(ys, leaves, weights)] for ys in (probe.ys, ours)]
        key = " by ".join(dict.fromkeys(str(dtype)[6:] for dtype in trial.dtypes))
        key += " that need gradients" * learned
        back[key] += served.counts[1] - before
        for at, (one, other) in enumerate(zip(*both, strict=True)):
            if not _alike(one.contiguous(), other.contiguous()):
                own = at < len(probe.ys) + len(probe.xs)
                differ[key if own else "tables"] += int((one != other).sum())
                bound = CLOSE[one.element_size()]
                far |= one.dtype != other.dtype or not torch.allclose(one, other, bound, bound)
    counts = {"calls": calls, "given_back": dict(+back), "differ": dict(differ)}
    found = {name: count for name, count in counts.items() if count}
    if not served.counts[0]:
        return {"status": "left", "reason": "the original serves every call", **found}
    differ.pop("tables", None)
    if far or (differ and not kind.is_complex):
        return {"status": "different", "reason": "see the numbers", **found}
    if differ:
        return {"status": "close", "reason": "the last bits of complex products differ", **found}
    return {"status": "equal", **found}


def _seen(
    original: Any, first: Any, fixed: Container[str], given: dict[str, Any], *_: Any, **call: Any
) -> Any:
    """Call a function, and keep its arguments in ``given``; those in ``fixed`` need no gradients."""
    for name, value in call.items():
        given[name] = mapped(torch.Tensor.detach, value) if name in fixed else value
    return original(*first, **given)


def trials(function: Any, kind: Kind) -> Iterator[tuple[_Trial, bool]]:
    """Yield calls of all options and layouts that a kind has, in SHAPES and PAIRS, and whether tables need gradients."""
    for options, form in kind.forms.items():
        search = _Search(function, kind, options)
        for trial in search._trials():
            probe = trial.form == form and search._probe(trial)
            if not probe or not probe.ys or search._key(probe) not in kind.places:
                continue
            part = trial.sizes["d"] // trial.width
            shapes = zip(SHAPES, MEMORY, strict=True)
            for (shape, memory), dtypes in itertools.product(shapes, PAIRS):
                rows, tokens, heads, channels = shape
                sizes = {"b": rows, "h": heads, "s": tokens, "d": channels}
                arithmetic = kind.arithmetics.get((options, *dtypes))
                if FORMS[form].narrow or dtypes[1] == torch.float32:
                    now = trial._replace(sizes=sizes, dtypes=dtypes, memory=memory)
                    now = now._replace(width=channels // part // 2 * 2)
                    yield now, False
                    if arithmetic is not None and arithmetic.tables:
                        yield now, True
