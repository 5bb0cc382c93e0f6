"""One way to call an unknown rotary function, and the search for it."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tightrope._errors import bad_value
from tightrope.forms import (
    FORMS,
    WIDTHS,
    Argument,
    Call,
    calls_of,
    entries,
    signature,
    widen,
)
from tightrope.functional import apply_rotary_pos_emb
from tightrope.spec import RopeSpec

#: Layouts of x, likeliest first: b is batch, h heads, s sequence, d channels, t the tokens of all sequences
#: packed into one dimension. Each has functions from and to (batch, heads, sequence, channels).
_LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "bhsd": (lambda x: x, lambda y: y),
    "bshd": (lambda x: x.transpose(1, 2), lambda y: y.transpose(1, 2)),
    "bsd": (lambda x: x[:, 0], lambda y: y[:, None]),
    "sbhd": (lambda x: x.permute(2, 0, 1, 3), lambda y: y.permute(1, 2, 0, 3)),
    "thd": (lambda x: x[0].transpose(0, 1), lambda y: y.transpose(0, 1)[None]),
    "sd": (lambda x: x[0, 0], lambda y: y[None, None]),
}
LAYOUTS = tuple(_LAYOUTS)

# Shapes of tables, each with the function that makes it from (batch, sequence, channels).
_TABLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bsd": lambda table: table,
    "sd": lambda table: table[0],
    "b1sd": lambda table: table[:, None],
    "bs1d": lambda table: table[:, :, None],
}
# Roles of arguments that the audit leaves at their defaults.
_LEFT_OUT = ("more", "unsqueeze_dim")


class CallFailed(Exception):
    """The function raised an exception or returned an unusable value; the message states which."""


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def undisturbed() -> Iterator[None]:
    """Drop the output and the warnings of foreign code, and protect the random state."""
    with (
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        yield


class Hints(NamedTuple):
    """The user's options for the call, named as in :func:`tightrope_tools.audit.audit`.

    None means that the audit finds the value.
    """

    form: str | None = None
    layout: str | None = None
    tables: str | None = None
    head_dim: int | None = None

    def check(self) -> None:
        """Refuse options that no call can meet."""
        if self.form is not None:
            parse(self.form)
        for name, value, known in (
            ("layout", self.layout, LAYOUTS),
            ("tables", self.tables, WIDTHS),
        ):
            if value is not None and value not in known:
                raise bad_value(f"{name} must be one of {', '.join(known)} but got {value!r}")
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise bad_value(f"head_dim must be even and positive but got {self.head_dim}")


@dataclass(frozen=True)
class Way(Call):
    """One way to call a function, including layouts and shapes of the arguments.

    Attributes:
        layout: the layout of x, q and k.
        shared_positions: whether positions are ``(tokens,)`` and not ``(rows, tokens)``.
        width: how tables hold the entry of each pair, a key of WIDTHS.
        table_shape: the dimensions of these tables.
        row_offsets: whether offsets are ``(rows,)`` and not one number.
        axes: the number of coordinates of a position. With several, positions ``(axes, rows, tokens)`` with
            equal coordinates, as in text, are passed on.
    """

    layout: str = "bhsd"
    shared_positions: bool = False
    width: str = "cat"
    table_shape: str = "bsd"
    row_offsets: bool = False
    axes: int = 1

    @classmethod
    def of(cls, call: Call, axes: int = 1) -> Way | None:
        """Return the way of a call, or None if the call needs an argument that the audit leaves out."""
        if any(each.role in _LEFT_OUT and not each.keyword for each in call.arguments):
            return None
        passed = tuple(each for each in call.arguments if each.role not in _LEFT_OUT)
        way = cls(call.form, passed)
        return replace(way, axes=axes if way.takes_positions else 1)

    @property
    def takes_positions(self) -> bool:
        """True if the function computes angles from positions."""
        return "positions" in self.form.roles

    @property
    def takes_rows(self) -> bool:
        """True if the function takes tables and the indices of their rows."""
        return self.form.takes_tables and "positions" in self.roles

    @property
    def takes_ids(self) -> bool:
        """True if tokens may have arbitrary positions; otherwise the function numbers them itself."""
        return self.takes_positions or self.form.takes_tables

    @property
    def takes_keys(self) -> bool:
        """True if the function takes q and k in one call."""
        return "k" in self.roles

    @property
    def rows_differ(self) -> bool:
        """True if rows may have different positions in one call."""
        if "b" not in self.layout:
            return False
        if self.form.takes_tables:
            return self.takes_rows or self.table_shape != "sd"
        return not self.takes_ids or (self.takes_positions and not self.shared_positions)


@dataclass(frozen=True)
class Subject:
    """The function under audit, with the way to call it.

    Attributes:
        fn: the audited function. Calls go to a copy of it, or to a new one from ``make``, if possible.
        way: how it is called.
        head_dim: channels of one head.
        rates: the frequencies of the tables that ``fn`` takes, float64 ``[pairs]``.
        made: returns the cosines and sines of these tables at positions, if not those of ``rates``.
        make: returns a new ``fn``; None if ``fn`` is copied instead.
        renew: whether each call gets a new ``fn``, because state of earlier calls changes results.
        one_row: whether each call gets one row, because results depend on the number of rows.
        side: 0 to rotate as q, 1 to rotate as k, if the function takes both.
    """

    fn: Callable[..., Any]
    way: Way
    head_dim: int
    rates: torch.Tensor = field(compare=False)
    make: Callable[[], Callable[..., Any]] | None = None
    device: str = "cpu"
    renew: bool = False
    one_row: bool = False
    side: int = 0
    made: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    def keys(self) -> Subject:
        """Return the function of k alone, of a function of q and k."""
        return replace(self, side=1)

    @property
    def most_heads(self) -> int | None:
        """The number of heads that x can have; None for any."""
        return None if "h" in self.way.layout else 1

    @property
    def most_rows(self) -> int | None:
        """The number of rows that x can have; None for any."""
        return None if "b" in self.way.layout and not self.one_row else 1

    def fresh(self) -> Subject:
        """Return the subject with a function that has not been called yet, if possible."""
        return replace(self, fn=fresh(self.fn, self.make))

    @property
    def can_be_fresh(self) -> bool:
        """True if a fresh function is another object, with its own state."""
        return self.make is not None or fresh(self.fn, None) is not self.fn

    def random(
        self,
        rows: int,
        heads: int,
        tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> torch.Tensor:
        """Return a random x ``[rows, heads, tokens, head_dim]``, laid out by :meth:`laid_out`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, min(heads, self.most_heads or heads), tokens, self.head_dim)
        return self.laid_out(torch.randn(shape, generator=generator).to(dtype))

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return x on the device, with the strides of a contiguous tensor in the function's own layout."""
        order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (2, 0, 1, 3)}.get(
            self.way.layout, (0, 1, 2, 3)
        )
        back = [order.index(axis) for axis in range(4)]
        return x.to(self.device).permute(order).contiguous().permute(back)

    def ids(self, positions: torch.Tensor | Sequence[int], rows: int) -> torch.Tensor:
        """Return positions ``(rows, tokens)`` on the device."""
        ids = positions
        if not isinstance(ids, torch.Tensor):
            ids = torch.tensor(ids, dtype=torch.int64)  # an empty list would give float32
        if ids.ndim == 1:
            ids = ids[None].repeat(rows, 1)
        return ids.to(self.device)

    def rotate(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | Sequence[int],
        given: list[Any] | None = None,
    ) -> torch.Tensor:
        """Rotate x, as q or as k if the function takes both.

        Args:
            x: ``(rows, heads, tokens, channels)``.
            positions: ``(rows, tokens)``, ``(tokens,)``, or ``(axes, rows, tokens)``.
            given: a list to which each table that the function gets is added, with a copy made before the call.

        Raises:
            CallFailed: the function raised an exception, or its result has another shape than x.
        """
        xs = [x.detach().clone(), x.detach().clone()] if self.way.takes_keys else [x]
        xs[self.side] = x
        return self._by_rows(tuple(xs), positions, given)[self.side]

    def rotate_qk(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k in one call, for functions that take both."""
        first, second = self._by_rows((q, k), positions)
        return first, second

    def _by_rows(
        self,
        xs: tuple[torch.Tensor, ...],
        positions: torch.Tensor | Sequence[int],
        given: list[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Call row by row if one call takes only one row, or cannot take positions that differ by row."""
        ids = self.ids(positions, len(xs[0]))
        alike = ids.ndim > 2 or self.way.rows_differ or bool((ids == ids[:1]).all())
        if (self.most_rows == 1 or not alike) and len(xs[0]) > 1:
            rows = zip(*(x.split(1) for x in xs))
            parts = [self._placed(row, where, given) for row, where in zip(rows, ids.split(1))]
            return [torch.cat(each) for each in zip(*parts)]
        return self._placed(xs, ids, given)

    def _placed(
        self, xs: tuple[torch.Tensor, ...], ids: torch.Tensor, given: list[Any] | None
    ) -> list[torch.Tensor]:
        """Call a function that numbers tokens itself on an x in which each token stands at its position."""
        if self.way.takes_ids or not ids.numel():
            return self._call(xs, ids, 0, given)
        start: Any = int(ids.min()) if "offset" in self.way.roles else 0
        if self.way.row_offsets:
            start = ids.amin(-1, keepdim=True)
        size = int((ids - start).max()) + 1
        counted = torch.arange(ids.shape[-1], device=ids.device)
        if bool((ids - start == counted).all()):
            return self._call(xs, ids, start, given)
        where = [(ids - start)[:, None, :, None].expand_as(x) for x in xs]
        whole = [x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in xs]
        whole = [each.scatter(2, at, x) for each, at, x in zip(whole, where, xs)]
        ys = self._call(tuple(map(self.laid_out, whole)), ids, start, given)
        return [y.gather(2, at) for y, at in zip(ys, where)]

    def _call(
        self, xs: tuple[torch.Tensor, ...], ids: torch.Tensor, start: Any, given: list[Any] | None
    ) -> list[torch.Tensor]:
        way, (into, back) = self.way, _LAYOUTS[self.way.layout]
        values: dict[str, Any] = {"offset": start[:, 0] if way.row_offsets else start}
        values["seq_dim"] = way.layout.replace("t", "s").index("s")
        values["positions"] = self._positions(ids)
        values |= zip(("q", "k") if way.takes_keys else ("x",), map(into, xs))
        if way.takes_rows:
            count = torch.arange(ids.numel(), device=ids.device)
            values["positions"] = count.reshape(ids.shape)
        if way.form.takes_tables:
            tables = self._tables(xs[0], ids.reshape(1, -1) if way.takes_rows else ids)
            values |= zip(way.form.roles, tables)
            if given is not None:
                held = [each for each in tables if isinstance(each, torch.Tensor)]
                given += [(each, each.clone()) for each in held]
        result = self.run(values)
        if way.form.gives_tables:
            return [self._turned(x, result) for x in xs]
        if not way.takes_keys:
            result = (result,)
        elif not isinstance(result, (tuple, list)) or len(result) < 2:
            raise CallFailed(f"it returned {type(result).__name__}, not a tuple of q and k")
        ys = [like(y, into(x)) for y, x in zip(result, xs)]
        return [back(y) for y in ys]

    def run(self, values: dict[str, Any]) -> Any:
        """Call the function with arguments by role, and return its unchecked result."""
        way = self.way
        args = [values[each.role] for each in way.arguments if not each.keyword]
        named = {str(each.name): values[each.role] for each in way.arguments if each.keyword}
        try:
            fn = fresh(self.fn, self.make) if self.renew else self.fn
            return fn(*args, **named)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code may raise even SystemExit
            raise CallFailed(describe_error(error)) from error

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        if self.way.axes > 1 and ids.ndim == 2:
            ids = ids.expand(self.way.axes, -1, -1)
        return ids[..., 0, :] if self.way.shared_positions else ids

    def _tables(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
        """Cosines and sines for a function that takes them."""
        way = self.way
        angle = ids[..., None].double().cpu() * self.rates
        made = (angle.cos(), angle.sin()) if self.made is None else self.made(ids)
        dtype = x.dtype if way.form.narrow else torch.float32
        cos, sin = (_TABLES[way.table_shape](widen(t, way.width).to(x.device, dtype)) for t in made)
        return way.form.built(cos, sin)

    def _turned(self, x: torch.Tensor, tables: Any) -> torch.Tensor:
        """Rotate x by the tables that the function returned."""
        cos, sin = (t[None] if self.way.shared_positions else t for t in tables)
        width = self.way.width
        how: dict[str, Any] = {"interleaved": width == "repeat", "tables": width}
        try:
            return apply_rotary_pos_emb(x, None, cos, sin, **how, rounding="wide")[0].to(x.dtype)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CallFailed(f"its tables do not fit x: {describe_error(error)}") from error


def gradient(y: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of x for an incoming gradient; None if y does not depend on x.

    Raises:
        CallFailed: the backward pass raised an exception.
    """
    try:
        return torch.autograd.grad(y, x, out, allow_unused=True)[0] if y.requires_grad else None
    except Exception as error:  # foreign code
        raise CallFailed(describe_error(error)) from error


def fresh(
    fn: Callable[..., Any], make: Callable[[], Callable[..., Any]] | None
) -> Callable[..., Any]:
    """Return a new function or a copy; the same function if it cannot be copied."""
    if make is not None:
        try:
            return make()
        except Exception as error:  # foreign code
            raise CallFailed(f"the factory raised {describe_error(error)}") from error
    try:
        return copy.deepcopy(fn)
    except Exception:  # noqa: BLE001  # copying may raise anything
        return fn


def like(result: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the result if it is a tensor of the shape of x.

    Raises:
        CallFailed: the result is not a tensor, or has another shape.
    """
    if not isinstance(result, torch.Tensor):
        raise CallFailed(f"it returned {type(result).__name__}, not a tensor")
    if result.device.type == "meta" or result.layout != torch.strided:
        raise CallFailed("it returned a tensor without dense values")
    if result.shape != x.shape:
        got, wanted = tuple(result.shape), tuple(x.shape)
        raise CallFailed(f"it returned shape {got} for x of shape {wanted}")
    return result


# --- the search for a call ------------------------------------------------------------------------

_HEAD_DIMS = (64, 128, 32, 96, 80, 256, 48, 16, 8)
_HINTS = ("head_dim", "head_size", "dim", "rotary_dim", "rot_dim", "d_head")
# All different, and no two of them broadcast against each other.
_ROWS, _HEADS, _TOKENS = 2, 3, 5
# The usual calls, by the number of required parameters.
_USUAL = {
    1: ("x",),
    2: ("x, positions", "x, positions -> cos, sin", "x, seq_dim"),
    3: ("q, k, positions", "x, cos, sin", "q, k, cis"),
    4: ("q, k, cos, sin",),
}


_SAME_ERROR = "the same error with another size"


class NoCallFound(Exception):
    """No way to call the function was found; the message lists the calls that were tried, with their errors."""

    def __init__(self, tried: dict[str, str]) -> None:
        found: dict[str, str] = {}
        for call, why in tried.items():
            found.setdefault(why.rpartition(": ")[2], f"fn({call}), {why}")
        reasons = "; ".join([*found.values()][:4])
        super().__init__(reasons or "the names of its arguments do not show their roles")


def find_call(
    fn: Callable[..., Any],
    hints: Hints,
    *,
    spec: RopeSpec | None,
    make: Callable[[], Callable[..., Any]] | None,
    device: str,
) -> Subject:
    """Return the subject with the first call whose result has the right shape and differs by token.

    If no result does, the first call whose result has the right shape is taken, preferably one whose result
    differs by head.

    Args:
        hints: the user's options.
        spec: the intended rotation, if known. The tables that the audit makes have its frequencies and, unless
            the function takes only others, its number of channels.

    Raises:
        NoCallFound: no call gives a result of the right shape.
    """
    axes = 1 if spec is None else spec.axis_count
    calls = [
        way
        for call in (_calls(fn) if hints.form is None else [parse(hints.form)])
        if (way := Way.of(call, axes)) is not None
    ]
    dims = _dims_of(fn) if hints.head_dim is None else [hints.head_dim]
    sizes = [(dim, dim if spec is None else spec.rotary_dim, calls) for dim in dims]
    if hints.head_dim is not None:
        # If no tables of that size give a rotation, the function may rotate another slice: one whose
        # tables are as wide as those tried, in another format, or a usual one.
        with_tables = [call for call in calls if call.form.takes_tables and call.names_its_form]
        first = sizes[0][1]
        widths = {hints.head_dim, 2 * first, first // 2, *range(8, hints.head_dim, 8)} - {first}
        # Tables for one pair may have one entry, which fits any slice.
        sizes += [(hints.head_dim, width, with_tables) for width in sorted(widths) if width > 2]
    # A function that does not rotate by token can still be audited: that is a finding.
    others: dict[str, Subject] = {}
    tried: dict[str, str] = {}
    errors: dict[Way, str] = {}
    for dim, width, some in sizes:
        rates = _rates(spec, width)
        ways = (way for call in some for way in _variants(call, hints.layout, hints.tables))
        for way in ways:
            if errors.get(way) == _SAME_ERROR:
                continue
            try:
                found = _fit(Subject(fresh(fn, make), way, dim, rates, make, device))
            except CallFailed as error:
                text = str(error)
                tried.setdefault(str(way), f"head_dim {dim}, {way.layout}: {text}")
                # An error of torch that does not depend on the size will come again.
                again = text == errors.get(way) and text.startswith("RuntimeError: ")
                errors[way] = _SAME_ERROR if again else text
                continue
            if found is not None:
                subject, along = found
                if along == "tokens":
                    return _uncalled(subject, fn)
                others.setdefault(along, subject)
    if not others:
        raise NoCallFound(tried)
    order = ("heads", "") if hints.layout is not None else ("", "heads")
    return _uncalled(next(others[along] for along in order if along in others), fn)


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


def _calls(fn: Callable[..., Any]) -> list[Call]:
    """Return calls to try: those that the argument names suggest, then the usual ones."""
    found = [call for call in calls_of(fn) if not call.form.grids]
    # If argument names tell cos from sin, the swapped order is not tried: it could hide a fault.
    stated = {call.form for call in found if call.names_its_form}
    named = [call for call in found if call.names_its_form or call.form not in stated]
    known = {str(call) for call in named}
    seen = signature(fn)
    every = [] if seen is None else list(seen.parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(each.default is each.empty and each.kind in kinds for each in every)
    usual = [text for texts in _USUAL.values() for text in texts]
    if seen is not None and not any(each.kind is each.VAR_POSITIONAL for each in every):
        usual = [*_USUAL.get(needed, ())]
    return [*named, *(parse(text) for text in usual if text not in known)]


def _variants(call: Way, layout: str | None, width: str | None) -> Iterator[Way]:
    layouts: Sequence[str] = LAYOUTS if layout is None else (layout,)
    widths: Sequence[str] = call.form.widths if width not in call.form.widths else (width,)
    if call.form.gives_tables:
        yield from (replace(call, shared_positions=shared) for shared in (False, True))
        return
    for each in layouts:
        if call.form.takes_tables:
            shapes = ("sd",) if call.takes_rows else _TABLES
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
    if way.form.takes_tables and not _is_sound(subject, x):
        return (subject, "") if way.names_its_form else None
    ambiguous = way.form.takes_tables and not way.names_its_form
    if ambiguous and bool((subject.rotate(x, [0] * _TOKENS) < 0).any()):
        return None  # a quarter turn of positive numbers: sines in place of cosines
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


def _gives_tables(subject: Subject) -> tuple[Subject, str]:
    ids = subject.ids(torch.arange(1, _TOKENS + 1), _ROWS)
    x = subject.random(_ROWS, _HEADS, _TOKENS)
    result = subject.run({"x": x, "positions": subject._positions(ids)})
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not all(isinstance(table, torch.Tensor) for table in result):
        raise CallFailed("it does not return (cos, sin)")
    cos, sin = result
    wanted = (_TOKENS,) if subject.way.shared_positions else (_ROWS, _TOKENS)
    if cos.shape != sin.shape or tuple(cos.shape[:-1]) != wanted:
        lead = ", ".join(map(str, wanted))
        raise CallFailed(
            f"its tables must have shape ({lead}, channels) but have {tuple(cos.shape)}"
        )
    twice = (each for each in WIDTHS if all(torch.equal(*entries(t, each)) for t in (cos, sin)))
    width = next(twice, "half")
    # The full width of the tables may exceed the guessed head_dim.
    channels = cos.shape[-1] * (2 if width == "half" else 1)
    way = replace(subject.way, width=width)
    fixed = replace(subject, way=way, head_dim=max(channels, subject.head_dim))
    y = fixed.rotate(fixed.random(_ROWS, _HEADS, _TOKENS), ids)
    return fixed, "tokens" if bool(y.isfinite().all()) else ""


def _dims_of(fn: Callable[..., Any]) -> list[int]:
    """Return head dimensions to try, first those found in the object's attributes."""
    owner = getattr(fn, "__self__", fn)
    owner = getattr(owner, "rotary", owner)
    hints: list[Any] = []
    if isinstance(owner, nn.Module):
        values = vars(owner) | owner._buffers
        tables = [values.get(name) for name in ("inv_freq", "freqs")]
        hints = [values.get(name) for name in _HINTS]
        hints += [2 * t.numel() for t in tables if isinstance(t, torch.Tensor) and t.ndim == 1]
    usable = [n for n in hints if type(n) is int and 2 <= n <= 1024 and n % 2 == 0]
    return list(dict.fromkeys([*usable, *_HEAD_DIMS]))


def parse(text: str) -> Call:
    """Parse a call: ``"x, positions"``, ``"q, k, cos, sin"``, ``"x, positions -> cos, sin"``.

    Raises:
        ValueError: the text is not a valid list of roles.
    """
    head, arrow, result = text.partition("->")
    names = [name.strip() for name in head.split(",")]
    sound = len(set(names)) == len(names)
    if arrow:
        sound &= "x" in names and "".join(result.split()) == "cos,sin"
    usable = [form for form in FORMS.values() if not form.flat and not form.grids]
    for form in usable:
        unrotated = {"seq_dim"}
        if form.takes_tables or "positions" in form.roles:
            unrotated |= {"positions", "offset"}
        rotated = set(names) - set(form.roles) - unrotated
        fits = set(form.roles) <= set(names) and form.gives_tables == bool(arrow)
        if sound and fits and rotated in ({"x"}, {"q"}, {"q", "k"}):
            return Call(form, tuple(Argument(name) for name in names))
    listed = ", ".join(dict.fromkeys(role for form in usable for role in form.roles))
    raise bad_value(
        f"form must list the arguments, each one of x, q, k, seq_dim, {listed}, as in 'x, positions' or "
        f"'q, k, cos, sin', but got {text!r}"
    )
