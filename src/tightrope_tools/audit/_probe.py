"""Find out how to call a function, by trying calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tightrope._errors import bad_value
from tightrope.forms import (
    LAYOUTS,
    TABLE_SHAPES,
    WIDTHS,
    Call,
    calls_of,
    entries,
    parse,
    usual_calls,
)
from tightrope.spec import RopeSpec

from ._adapter import Adapter, rates
from ._guard import CallFailed, Guard
from ._subject import Subject, fresh

_HEAD_DIMS = (64, 128, 32, 96, 80, 256, 48, 16, 8)
_HINTS = ("head_dim", "head_size", "dim", "rotary_dim", "rot_dim", "d_head")
# All different, and no two of them broadcast against each other.
_ROWS, _HEADS, _TOKENS = 2, 3, 5


class NoCallFound(Exception):
    """No way to call the function was found; ``tried`` holds each tried call with its first error."""

    def __init__(self, tried: list[tuple[str, str]]) -> None:
        super().__init__("no way to call it was found")
        self.tried = tried

    @property
    def reasons(self) -> str:
        """The reasons why calls failed, each once with the first call that gave it; at most four."""
        found: dict[str, str] = {}
        for call, why in self.tried:
            found.setdefault(why.rpartition(": ")[2], f"fn({call}), {why}")
        tried = "; ".join([*found.values()][:4])
        return tried or "the names of its arguments do not show their roles"


class Hints(NamedTuple):
    """The user's options for the call, named as in :func:`tightrope_tools.audit.audit`.

    None means that the audit finds the value.
    """

    form: str | None
    layout: str | None
    tables: str | None
    head_dim: int | None


def find_call(
    fn: Callable[..., Any],
    guard: Guard,
    hints: Hints,
    *,
    spec: RopeSpec | None,
    header: str | None,
    make: Callable[[], Callable[..., Any]] | None,
    device: str,
    axes: int = 1,
) -> Subject:
    """Return the subject with the first call whose result has the right shape and varies by position.

    If no result varies, the first call whose result has the right shape is taken.

    Args:
        hints: the user's options.
        spec: the intended rotation, if known. The tables that the audit makes have its base and, unless
            the function takes only others, its number of channels.
        axes: the number of coordinates of a position, if the function takes positions.

    Raises:
        NoCallFound: no call gives a result of the right shape.
        Hangs: a call did not return.
    """
    form, layout, tables, head_dim = hints
    calls = [
        adapter
        for call in (_calls(fn) if form is None else [parse(form)])
        if (adapter := Adapter.of(call, axes)) is not None
    ]
    dims = _dims_of(fn) if head_dim is None else [head_dim]
    base = 10000.0 if spec is None else spec.base
    sizes = [(dim, dim if spec is None else spec.rotary_dim, calls) for dim in dims]
    if head_dim is not None:
        # If no tables of that size give a rotation, the function may rotate another slice: one whose
        # tables are as wide as those tried, in another format, or a usual one.
        with_tables = [call for call in calls if call.form.takes_tables and call.names_its_form]
        first = sizes[0][1]
        widths = {head_dim, 2 * first, first // 2, *range(8, head_dim, 8)} - {first}
        # Tables for one pair may have one entry, which fits any slice.
        sizes += [(head_dim, width, with_tables) for width in sorted(widths) if width > 2]
    # A function that rotates nothing can still be audited: that is a finding.
    second_best: Subject | None = None
    tried: dict[str, str] = {}
    for dim, width, some in sizes:
        for call in itertools.chain.from_iterable(_variants(c, layout, tables) for c in some):
            inv_freq = rates(width, base)
            subject = Subject(fresh(fn, make), call, dim, guard, inv_freq, header, make, device)
            try:
                verdict = _fits(subject)
            except CallFailed as error:
                tried.setdefault(str(call), f"head_dim {dim}, {call.layout}: {error}")
                continue
            if verdict is None:
                continue
            if verdict.moved:
                return replace(verdict.subject, fn=fn, space={})
            second_best = second_best or replace(verdict.subject, fn=fn, space={})
    if second_best is not None:
        return second_best
    raise NoCallFound(list(tried.items()))


class _Verdict(NamedTuple):
    subject: Subject
    moved: bool


def _calls(fn: Callable[..., Any]) -> list[Call]:
    """Return calls to try: those that the argument names suggest, then the usual ones."""
    found = [call for call in calls_of(fn) if not call.form.grids]
    # If argument names tell cos from sin, the swapped order is not tried: it could hide a fault.
    stated = {call.form for call in found if call.names_its_form}
    named = [call for call in found if call.names_its_form or call.form not in stated]
    known = {str(call) for call in named}
    return [*named, *(call for call in usual_calls(fn) if str(call) not in known)]


def _variants(call: Adapter, layout: str | None, width: str | None) -> Iterator[Adapter]:
    layouts: Sequence[str] = LAYOUTS if layout is None else (layout,)
    widths: Sequence[str] = call.form.widths if width not in call.form.widths else (width,)
    for each in layouts:
        if call.form.takes_tables:
            shapes = ("sd",) if call.takes_rows else TABLE_SHAPES
            for shape, held in itertools.product(shapes, widths):
                yield replace(call, layout=each, width=held, table_shape=shape)
        elif call.form.gives_tables:
            if each == layouts[0]:
                yield replace(call, layout="bhsd")
                yield replace(call, layout="bhsd", shared_positions=True)
        elif call.takes_positions:
            if each not in ("thd", "sd"):
                yield replace(call, layout=each)
        else:
            yield replace(call, layout=each)
    if call.takes_positions and not call.form.gives_tables:
        # Tried last, because positions of shape (tokens,) may broadcast where they should not.
        yield from (replace(call, layout=each, shared_positions=True) for each in layouts)


def _fits(subject: Subject) -> _Verdict | None:
    """Try a call: return the subject and whether results vary by position; None if the call does not fit."""
    call = subject.call
    if call.form.gives_tables:
        return _gives_tables(subject)
    rows = subject.most_rows or _ROWS
    ones = torch.linspace(0.5, 1.5, subject.head_dim).expand(
        rows, subject.heads(_HEADS), _TOKENS, subject.head_dim
    )
    x = subject.laid_out(ones)
    ids = torch.arange(_TOKENS)[None] + 3 * call.takes_ids * torch.arange(rows)[:, None]
    if not call.rows_differ:
        ids = ids[:1].expand(rows, -1)
    y = subject.rotate(x, ids)
    if not y.dtype.is_floating_point:
        return None
    if call.form.takes_tables and not _is_sound(subject, x):
        return _Verdict(subject, False) if call.names_its_form else None
    # x is the same for all tokens and heads: positions make tokens differ, but not heads.
    moved = bool((y[:, :, 1:] - y[:, :, :1]).abs().amax(-1).min() > 1e-4)
    across = y.shape[1] > 1 and bool((y[:, 1:] - y[:, :1]).abs().amax(-1).min() > 1e-4)
    if across and not moved:
        return None
    return _Verdict(subject, moved)


def _is_sound(subject: Subject, x: torch.Tensor) -> bool:
    """True if tables of this format give a rotation, which preserves the length of x."""
    y = subject.rotate(x, [1, 2, 3, 5, 7])
    before, after = x.double().norm(dim=-1), y.double().norm(dim=-1)
    return bool(((after - before).abs() <= 1e-3 * before).all())


def _gives_tables(subject: Subject) -> _Verdict | None:
    given = subject.ids(torch.arange(1, _TOKENS + 1), _ROWS)
    result = subject.raw("tables", subject.random(_ROWS, _HEADS, _TOKENS), given)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise CallFailed("it does not return (cos, sin)")
    cos, sin = result
    if not all(isinstance(table, torch.Tensor) for table in (cos, sin)) or cos.shape != sin.shape:
        raise CallFailed("it does not return two tables of one shape")
    wanted = (_TOKENS,) if subject.call.shared_positions else (_ROWS, _TOKENS)
    if tuple(cos.shape[:-1]) != wanted:
        lead = ", ".join(map(str, wanted))
        raise CallFailed(
            f"its tables must have shape ({lead}, channels) but have {tuple(cos.shape)}"
        )
    twice = (each for each in WIDTHS if all(torch.equal(*entries(t, each)) for t in (cos, sin)))
    width = next(twice, "half")
    # The full width of the tables may exceed the guessed head_dim.
    channels = cos.shape[-1] * (2 if width == "half" else 1)
    head_dim = max(channels, subject.head_dim)
    call = replace(subject.call, width=width)
    fixed = replace(subject, call=call, head_dim=head_dim, space={})
    y = fixed.rotate(fixed.random(_ROWS, _HEADS, _TOKENS), given)
    return _Verdict(fixed, bool(y.isfinite().all()))


def _dims_of(fn: Callable[..., Any]) -> list[int]:
    """Return head dimensions to try, first those found in the object's attributes."""
    owner = getattr(fn, "__self__", fn)
    hints = []
    owner = getattr(owner, "rotary", owner)
    if isinstance(owner, nn.Module):
        sizes = [getattr(owner, name, None) for name in _HINTS]
        hints += [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
        for name in ("inv_freq", "freqs"):
            held = getattr(owner, name, None)
            if isinstance(held, torch.Tensor) and held.ndim == 1:
                hints.append(2 * held.numel())
    hints = [value for value in hints if 2 <= value <= 1024 and value % 2 == 0]
    return list(dict.fromkeys([*hints, *_HEAD_DIMS]))


def check_hints(hints: Hints) -> None:
    """Refuse options that no call can meet."""
    if hints.form is not None:
        parse(hints.form)
    for name, value, known in (("layout", hints.layout, LAYOUTS), ("tables", hints.tables, WIDTHS)):
        if value is not None and value not in known:
            raise bad_value(f"{name} must be one of {', '.join(known)} but got {value!r}")
    if hints.head_dim is not None and (hints.head_dim < 2 or hints.head_dim % 2):
        raise bad_value(f"head_dim must be even and positive but got {hints.head_dim}")
