"""The replacement of a recognised function: the fused operator under the same signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import functional
from ._form import Candidate, signature
from ._rotation import HALF, Rotation, entries, plain

# What :func:`_twice` found out: table -> (its version, reading, verdict).
_verdicts: WeakIdKeyDictionary = WeakIdKeyDictionary()

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def replacement(original: Any, candidate: Candidate, narrow: bool = False) -> Callable[..., Any]:
    """A function with the signature of the original.

    Args:
        original: what it does wherever a call is not one of those that were tried.
        candidate: what the original was recognised as.
        narrow: give results in the dtype of x even where the original would widen them: for tables
            that are float32 now and were of the dtype of x.
    """
    seen = signature(original)
    assert seen is not None, "a candidate was made from the signature"
    form, rotation = candidate.form, candidate.rotation
    names = [p.name for p in seen.parameters.values() if p.kind is not p.VAR_KEYWORD]
    defaults = {
        p.name: p.default for p in seen.parameters.values() if p.default is not inspect.Parameter.empty
    }
    takes = set(form.rotated) | set(form.tables) | {form.unsqueeze, form.rows} | form.ignored
    others = [name for name in names if name not in takes and not (form.method and name == names[0])]
    required = {name for name in names if name not in defaults}
    keeps = candidate.keeps_dtype or narrow
    places = {(x, table, given): place for x, table, given, place in candidate.shapes}

    def attempt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives, or NotImplemented where the original must be asked."""
        values = dict(defaults)
        values.update(zip(names, args))
        values.update(kwargs)
        if len(args) > len(names) or len(values) != len(names):
            return NotImplemented
        for name in others:
            if values[name] is not defaults.get(name, NotImplemented):
                return NotImplemented
        xs = [values[name] for name in form.rotated]
        if len(xs) > 1 and xs[1] is None and candidate.alone is None:
            return NotImplemented
        given = values[form.unsqueeze] if form.unsqueeze else None
        cos, sin = form.split(values)
        if form.rows:
            rows = values[form.rows]
            cos, sin = cos[rows], sin[rows]
        place = places.get((xs[0].dim(), cos.dim(), given), 0)
        if place == 0 or cos.shape != sin.shape:
            return NotImplemented
        first = xs[0]
        present = [x for x in xs if x is not None]
        for x in present:
            if x.dim() != first.dim() or x.dtype != first.dtype:
                return NotImplemented
        if not rotation.fits(first.shape[-1], cos.shape[-1]):
            return NotImplemented
        if form.carrier == "stack":
            return NotImplemented
        if place is not None:
            cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
        dtype = first.dtype if keeps else torch.promote_types(first.dtype, cos.dtype)
        ys = _turn(present, cos, sin, candidate, dtype)
        if ys is None:
            return NotImplemented
        if len(xs) == 1:
            return ys[0]
        if xs[1] is None:
            return ys[0] if candidate.alone == "one" else (ys[0], None)
        if len(present) < len(xs):
            return tuple(ys) if None in defaults.values() else NotImplemented
        return tuple(ys)

    del required

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = attempt(args, kwargs)
        return original(*args, **kwargs) if result is NotImplemented else result

    functools.update_wrapper(apply, original if callable(original) else original.__func__)
    apply.__signature__ = seen  # type: ignore[attr-defined]
    return apply


def _turn(
    xs: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    candidate: Candidate,
    dtype: torch.dtype,
) -> list[torch.Tensor] | None:
    """All of xs by tables that broadcast against each; None where the original must be asked."""
    rotation = candidate.rotation
    if candidate.tokens != "same":
        return _uneven(xs, cos, sin, candidate, dtype)
    if torch.compiler.is_compiling():
        return [plain(x, cos, sin, rotation, dtype) for x in xs]
    return _fused(xs, cos, sin, rotation, dtype)


def _uneven(
    xs: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    candidate: Candidate,
    dtype: torch.dtype,
) -> list[torch.Tensor] | None:
    even = Candidate(candidate.form, candidate.rotation, candidate.shapes)
    results = []
    for x in xs:
        tokens, rows = x.shape[-2], cos.shape[-2]
        c, s, passed = cos, sin, None
        if candidate.tokens == "prefix" and tokens > rows:
            passed, x = x[..., : tokens - rows, :], x[..., tokens - rows :, :]
        elif candidate.tokens == "suffix" and tokens < rows:
            c, s = cos[..., rows - tokens :, :], sin[..., rows - tokens :, :]
        ys = _turn([x], c, s, even, dtype)
        if ys is None:
            return None
        y = ys[0] if passed is None else torch.cat((passed.to(dtype), ys[0]), dim=-2)
        results.append(y)
    return results


def _fused(
    xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, dtype: torch.dtype
) -> list[torch.Tensor] | None:
    """The operator, where it takes these tensors."""
    first = xs[0]
    if (
        first.dtype not in _FLOATING
        or cos.dtype not in _FLOATING
        or first.device.type == "meta"
        or cos.device != first.device
        or cos.requires_grad
        or sin.requires_grad
    ):
        return None
    dims = first.dim()
    while cos.dim() < dims:
        cos, sin = cos[None], sin[None]
    if cos.dim() != dims:
        return None
    if dims == 4:
        heads = 2 if cos.shape[2] == 1 and first.shape[2] != 1 else 1
    elif dims == 3:
        heads = 1 if cos.shape[1] == 1 and first.shape[1] != 1 else 0
    else:
        return None
    assumed = rotation.assumes
    if assumed and not (_twice(cos, assumed) and _twice(sin, assumed)):
        return None
    if first.dtype != dtype:
        xs = [x.to(dtype) for x in xs]
    count, channels = rotation.pairs_of(cos.shape[-1]), first.shape[-1]
    start = rotation.start(channels, cos.shape[-1])
    kind = {"cat": "cat", "first": "cat", "repeat": "repeat", "even": "repeat"}.get(
        rotation.reading, "half"
    )
    if rotation.reading in ("second", "odd"):
        cos, sin = entries(cos, rotation.reading)[0], entries(sin, rotation.reading)[0]
    try:
        ys: list[torch.Tensor] = []
        for i in range(0, len(xs), 2):
            q, k = xs[i], (xs[i + 1] if i + 1 < len(xs) else None)
            turned = functional.apply_rotary_pos_emb(
                *(q, k, cos, sin, heads),
                interleaved=rotation.pairs != HALF,
                tables=kind,
                start=start,
                inverse=rotation.sign < 0,
            )
            ys.extend(y for y in turned if y is not None)
    except (TypeError, ValueError):
        return None
    if rotation.out != rotation.pairs:
        ys = [_reorder(y, start, count, rotation) for y in ys]
    return ys


def _reorder(y: torch.Tensor, start: int, count: int, rotation: Rotation) -> torch.Tensor:
    """Pairs that the operator left where they were, to where the function leaves them."""
    part = y[..., start : start + 2 * count]
    shape = (2, count) if rotation.pairs == HALF else (count, 2)
    moved = part.unflatten(-1, shape).transpose(-1, -2).flatten(-2)
    if 2 * count == y.shape[-1]:
        return moved
    return torch.cat((y[..., :start], moved, y[..., start + 2 * count :]), dim=-1)


def _twice(table: torch.Tensor, reading: str) -> bool:
    """Whether a table holds its entries twice, as the operator takes for granted.

    Layers share their tables, so each is looked at once.
    """
    owner = table
    while owner._base is not None:
        owner = owner._base
    try:
        version = owner._version
    except RuntimeError:
        return _looks_twice(table, reading)
    found = _verdicts.get(owner)
    key = (version, reading, table.shape, table.stride(), table.storage_offset())
    if found is not None and found[0] == key:
        return bool(found[1])
    verdict = _looks_twice(table, reading)
    _verdicts[owner] = (key, verdict)
    return verdict


def _looks_twice(table: torch.Tensor, reading: str) -> bool:
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return torch.equal(*entries(table, reading))
