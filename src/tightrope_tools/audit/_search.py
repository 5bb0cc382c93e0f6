"""The search for a way to call an unknown rotary function."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tightrope._errors import bad_value
from tightrope.patching import FORMS, LAYOUTS, TABLE_SHAPES, WIDTHS
from tightrope.spec import RopeSpec
from tightrope_tools.forms import Argument, Way, calls_of, signature, takes

from ._call import CallFailed, Subject, fresh
from ._together import Target

# Likeliest first; another number must be stated.
_HEAD_DIMS = (64, 128, 32, 96, 80, 256, 48, 16, 8, 112, 72, 40, 24, 160, 192)
# All different, and no two of them broadcast against each other.
_ROWS, _HEADS, _TOKENS = 2, 3, 5
# The usual calls, by the number of required parameters.
_USUAL = {
    1: ("x",),
    2: ("x, positions", "x, positions -> cos, sin", "x, seq_dim"),
    3: ("q, k, positions", "x, cos, sin", "q, k, cis"),
    4: ("q, k, cos, sin",),
}


class NoCallFound(Exception):
    """No way to call the function was found; the message lists the calls that were tried, with their errors."""

    def __init__(self, tried: dict[str, str]) -> None:
        found: dict[str, str] = {}
        for call, why in tried.items():
            found.setdefault(why.rpartition(": ")[2], f"fn({call}), {why}")
        reasons = "; ".join([*found.values()][:4])
        super().__init__(reasons or "the names of its arguments do not show their roles")


def subject_of(target: Target, spec: RopeSpec | None, device: str) -> Subject:
    """Return the subject of a target, with the first call whose result has the right shape and differs by token.

    If no result does, the first call whose result has the right shape is taken, preferably one whose result
    differs by head.

    Args:
        spec: the intended rotation, if known. The tables that the audit makes have its frequencies and, unless
            the function takes only others, its number of channels.

    Raises:
        NoCallFound: no call gives a result of the right shape.
    """
    fn, make, layout = target.fn, target.make, target.layout
    _check(target)
    head_dim = target.head_dim or (None if spec is None else spec.head_dim)
    calls = _calls(fn) if target.form is None else [parse(target.form)]
    if spec is not None:
        axes = spec.axis_count
        calls = [replace(way, axes=axes) if way.takes_positions else way for way in calls]
    dims = _HEAD_DIMS if head_dim is None else (head_dim,)
    sizes = [(dim, dim if spec is None else spec.rotary_dim, calls) for dim in dims]
    if head_dim is not None:
        # If no tables of that size give a rotation, the function may rotate another slice: one whose
        # tables are as wide as those tried, in another format, or a usual one.
        with_tables = [call for call in calls if call.takes_tables and call.names_its_form]
        first = sizes[0][1]
        widths = {head_dim, 2 * first, first // 2, *range(8, head_dim, 8)} - {first}
        # Tables for one pair may have one entry, which fits any slice.
        sizes += [(head_dim, width, with_tables) for width in sorted(widths) if width > 2]
    # A function that does not rotate by token can still be audited: that is a finding.
    fitting: dict[str, Subject] = {}
    tried: dict[str, str] = {}
    for dim, width, some in sizes:
        rates = _rates(spec, width)
        for way in (each for call in some for each in _variants(call, layout, target.tables)):
            try:
                found = _fit(Subject(fresh(fn, make), way, dim, rates, make, device))
            except CallFailed as error:
                tried.setdefault(str(way), f"head_dim {dim}, {way.layout}: {error}")
                continue
            if found is not None:
                fitting.setdefault(found[1], found[0])
            if "tokens" in fitting:
                return _uncalled(fitting["tokens"], fn)
    order = ("heads", "") if layout is not None else ("", "heads")
    for along in order:
        if along in fitting:
            return _uncalled(fitting[along], fn)
    raise NoCallFound(tried)


def _check(target: Target) -> None:
    """Refuse options that no call can meet."""
    known = {"layout": LAYOUTS, "tables": tuple(WIDTHS)}
    for name, values in known.items():
        value = getattr(target, name)
        if value not in (None, *values):
            raise bad_value(f"{name} must be one of {', '.join(values)} but got {value!r}")
    if target.head_dim is not None and (target.head_dim < 2 or target.head_dim % 2):
        raise bad_value(f"head_dim must be even and positive but got {target.head_dim}")


def _uncalled(subject: Subject, fn: Callable[..., Any]) -> Subject:
    """Return the subject with a function for direct calls; those of :meth:`Subject.fresh` are never copies of it.

    Otherwise they would have the state that direct calls left.
    """
    if subject.make is not None:
        return replace(subject, fn=fn)
    copied = fresh(fn, None)
    return replace(subject, fn=copied, make=None if copied is fn else partial(fresh, fn, None))


def _rates(spec: RopeSpec | None, width: int) -> torch.Tensor:
    """The frequencies of the tables that the audit makes for so many channels."""
    if spec is not None and spec.rotary_dim == width:
        return spec.frequencies().inv_freq.double().cpu()
    base = 10000.0 if spec is None else spec.base
    return torch.tensor(base) ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _calls(fn: Callable[..., Any]) -> list[Way]:
    """Return calls to try: those that the argument names suggest, then the usual ones."""
    named = calls_of(fn)
    seen = signature(fn)
    every = [] if seen is None else list(seen.parameters.values())
    if seen is None or any(each.kind is each.VAR_POSITIONAL for each in every):
        usual = [text for texts in _USUAL.values() for text in texts]
    else:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = sum(each.default is each.empty and each.kind in kinds for each in every)
        usual = [*_USUAL.get(needed, ())]
    return [*named, *(parse(text) for text in usual if text not in {*map(str, named)})]


def _variants(call: Way, layout: str | None, width: str | None) -> Iterator[Way]:
    layouts: Sequence[str] = LAYOUTS if layout is None else (layout,)
    shapes = ["sd"] if call.takes_rows else [*TABLE_SHAPES]
    if call.packed:
        shapes = [shape for shape in TABLE_SHAPES if "b" not in shape]
        layouts = ("thd", "bshd", "bhsd", "bsd", "sd") if layout is None else layouts
    widths: Sequence[str] = call.form.widths if width not in call.form.widths else (width,)
    if call.form.gives_tables:
        yield from (replace(call, shared_positions=shared) for shared in (False, True))
        return
    for each in layouts:
        if call.takes_tables:
            for shape, held in itertools.product(shapes, widths):
                yield replace(call, layout=each, width=held, table_shape=shape)
        elif not call.takes_positions or each not in ("thd", "sd"):
            yield replace(call, layout=each)
    if call.takes_positions:
        # Tried last, because positions of shape (tokens,) may broadcast where they should not.
        yield from (replace(call, layout=each, shared_positions=True) for each in layouts)
    if "offset" in call.roles:
        rows = (each for each in layouts if "b" in each)
        yield from (replace(call, layout=each, row_offsets=True) for each in rows)


def _fit(subject: Subject) -> tuple[Subject, str] | None:
    """Try a call; return None if it does not fit.

    Else return the subject and along what equal vectors are rotated differently: "tokens", "heads" or "".
    """
    way = subject.way
    if way.form.gives_tables:
        return _gives_tables(subject)
    rows, heads = subject.most_rows or _ROWS, subject.most_heads or _HEADS
    ones = torch.linspace(0.5, 1.5, subject.head_dim).expand(rows, heads, _TOKENS, -1)
    x = subject.laid_out(ones)
    ids = torch.arange(_TOKENS)[None] + 3 * way.takes_ids * torch.arange(rows)[:, None]
    if not way.rows_differ:
        ids = ids[:1].expand(rows, -1)
    y = subject.rotate(x, ids).detach().double().cpu()
    if way.takes_tables and not _is_sound(subject, x):
        return (subject, "") if way.names_its_form else None
    ambiguous = way.takes_tables and not way.names_its_form
    if ambiguous and bool((subject.rotate(x, [0] * _TOKENS) < 0).any()):
        return None  # a quarter turn of positive numbers: sines in place of cosines
    if ambiguous and not _adds_up(subject, x):
        return subject, ""  # such as a function of angles, which turns by any table
    # x is the same for all tokens and heads: positions make tokens differ, but not heads.
    if bool((y[:, :, 1:] - y[:, :, :1]).abs().amax(-1).min() > 1e-4):
        return subject, "tokens"
    across = y.shape[1] > 1 and bool((y[:, 1:] - y[:, :1]).abs().amax(-1).min() > 1e-4)
    return subject, "heads" if across else ""


def _is_sound(subject: Subject, x: torch.Tensor) -> bool:
    """True if tables of this format give a rotation, which preserves the length of x, at other sizes too."""
    fewer = subject.laid_out(
        torch.ones(subject.most_rows or 4, subject.most_heads or 2, 3, subject.head_dim)
    )
    for each, where in ((x, [1, 2, 3, 5, 7]), (fewer, [1, 2, 5])):
        y = subject.rotate(each, where)
        before, after = each.double().norm(dim=-1), y.detach().double().norm(dim=-1)
        if not bool(((after - before).abs() <= 1e-3 * before).all()):
            return False
    return True


def _adds_up(subject: Subject, x: torch.Tensor) -> bool:
    """True if two turns by position 1 are one by position 2, up to a factor."""
    once = subject.rotate(x.clone(), [1] * _TOKENS).detach().to(x)
    both = subject.rotate(subject.laid_out(once), [1] * _TOKENS), subject.rotate(x, [2] * _TOKENS)
    one, other = (nn.functional.normalize(y.detach().double(), dim=-1) for y in both)
    return bool(((one - other).abs() <= 1e-3).all())


def _gives_tables(subject: Subject) -> tuple[Subject, str]:
    """The same for a call that returns tables, with the format of these."""
    ids = subject.ids(torch.arange(1, _TOKENS + 1), _ROWS)
    x = subject.random(_ROWS, _HEADS, _TOKENS)
    made = subject.run({"x": x, "positions": subject._positions(ids)})
    shapes = [tuple(getattr(each, "shape", ())) for each in made] if type(made) is tuple else []
    lead = (_TOKENS,) if subject.way.shared_positions else (_ROWS, _TOKENS)
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][:-1] != lead:
        wanted = ", ".join(map(str, lead))
        raise CallFailed(
            f"it must return cosines and sines of shape ({wanted}, channels) but returned {shapes}"
        )
    count = shapes[0][-1]
    narrow = {"cat": slice(count // 2), "repeat": slice(None, None, 2)}
    wide = {each: [WIDTHS[each](t[..., at]) for t in made] for each, at in narrow.items()}
    width = next((each for each, ts in wide.items() if all(map(torch.equal, ts, made))), "half")
    # The full width of the tables may exceed the guessed head_dim.
    head_dim = max(count * (1 + (width == "half")), subject.head_dim)
    fixed = replace(subject, way=replace(subject.way, width=width), head_dim=head_dim)
    y = fixed.rotate(fixed.random(_ROWS, _HEADS, _TOKENS), ids)
    return fixed, "tokens" if bool(y.isfinite().all()) else ""


def parse(text: str) -> Way:
    """Parse a call: ``"x, positions"``, ``"q, k, cos, sin"``, ``"x, positions -> cos, sin"``.

    Raises:
        ValueError: the text is not a valid list of roles.
    """
    head, arrow, result = text.partition("->")
    roles = [name.strip() for name in head.split(",")]
    if "".join(result.split()) == "cos,sin" * bool(arrow):
        for form in FORMS.values():
            if form.gives_tables == bool(arrow) and takes(form, roles):
                return Way(form, tuple(map(Argument, roles)))
    listed = ", ".join(dict.fromkeys(role for form in FORMS.values() for role in form.roles))
    raise bad_value(
        f"form must list the arguments, each one of x, q, k, seq_dim, {listed}, as in 'x, positions' or "
        f"'q, k, cos, sin', but got {text!r}"
    )
