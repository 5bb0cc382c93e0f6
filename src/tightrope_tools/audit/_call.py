"""One way to call an unknown rotary function."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tightrope.functional import apply_rotary_pos_emb
from tightrope.patching import WIDTHS
from tightrope_tools.forms import Argument, Way

_ALL: Any = slice(None)


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


Xs = list[torch.Tensor]
Positions = torch.Tensor | Sequence[Any]


def _order(layout: str) -> tuple[list[int], list[int], tuple[int, ...]]:
    """How a layout orders (batch, heads, sequence, channels), first those that it lacks; the inverse; an index of these."""
    held = ["bhsd".index(each) for each in layout.replace("t", "s")]
    order = [*(n for n in range(4) if n not in held), *held]
    return order, [order.index(n) for n in range(4)], (0,) * (4 - len(held))


def _into(x: torch.Tensor, layout: str) -> torch.Tensor:
    order, _, lacks = _order(layout)
    return x.permute(order)[lacks]


def _back(y: torch.Tensor, layout: str) -> torch.Tensor:
    _, inverse, lacks = _order(layout)
    return y[(None,) * len(lacks)].permute(inverse)


def index_of(shape: str) -> tuple[Any, ...]:
    """The index that makes a table of a shape, in letters, from one of (batch, sequence, channels)."""
    index = [0] * ("b" not in shape) + [_ALL if letter in "bs" else None for letter in shape[:-1]]
    while index and index[-1] is _ALL:
        index.pop()
    return tuple(index)


#: The role of an argument that is None in each call, such as k where q rotates alone.
NOTHING = "nothing"


@dataclass(frozen=True)
class Subject:
    """The function under audit, with the way to call it.

    Attributes:
        fn: the audited function. Calls go to a copy of it, or to a new one from ``make``, if possible.
        way: how it is called.
        head_dim: channels of one head.
        rates: the frequencies of the tables that ``fn`` takes, float64 ``[pairs]``.
        made: returns the cosines and sines of these tables at positions, if not those of ``rates``.
        make: returns a new ``fn``, with its own state; None if there is no way to.
        renew: whether each call gets a new ``fn``, because state of earlier calls changes results.
        one_row, one_head: whether each call gets one row, or one head, because others depend on their number or place.
        side: 0 to rotate as q, 1 to rotate as k, if the function takes both.
        given: the tables that ``fn`` got, each with a copy made before the call.
        last: the arguments of the last call by their roles, and as "ids" the positions of its tables.
    """

    fn: Callable[..., Any]
    way: Way
    head_dim: int
    rates: torch.Tensor = field(compare=False)
    make: Callable[[], Callable[..., Any]] | None = None
    device: str = "cpu"
    renew: bool = False
    one_row: bool = False
    one_head: bool = False
    side: int = 0
    made: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    given: list[Any] = field(default_factory=list, compare=False)
    last: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def most_heads(self) -> int | None:
        """The number of heads that x can have; None for any."""
        return None if "h" in self.way.layout and not self.one_head else 1

    @property
    def most_rows(self) -> int | None:
        """The number of rows that x can have; None for any."""
        return None if ("b" in self.way.layout or self.way.packed) and not self.one_row else 1

    def fresh(self) -> Subject:
        """Return the subject with a function that has not been called yet, if possible."""
        return replace(self, fn=fresh(self.fn, self.make), given=[], last={})

    def random(
        self, rows: int, heads: int, tokens: int, *, dtype: Any = torch.float32, seed: int = 0
    ) -> torch.Tensor:
        """Return a random x ``[rows, heads, tokens, head_dim]``, laid out by :meth:`laid_out`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, min(heads, self.most_heads or heads), tokens, self.head_dim)
        return self.laid_out(torch.randn(shape, generator=generator).to(dtype))

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return x on the device, with the strides of a contiguous tensor in the function's own layout."""
        order, inverse, _ = _order(self.way.layout)
        return x.to(self.device).permute(order).contiguous().permute(inverse)

    def ids(self, positions: Positions, rows: int) -> torch.Tensor:
        """Return positions ``(rows, tokens)`` on the device."""
        ids = positions
        if not isinstance(ids, torch.Tensor):
            ids = torch.tensor(ids, dtype=torch.int64)  # an empty list would give float32
        if ids.ndim == 1:
            ids = ids[None].repeat(rows, 1)
        return ids.to(self.device)

    def rotate(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Rotate x, as q or as k if the function takes both.

        Args:
            x: ``(rows, heads, tokens, channels)``.
            positions: ``(rows, tokens)``, ``(tokens,)``, or ``(axes, rows, tokens)``.

        Raises:
            CallFailed: the function raised an exception, or its result has another shape than x.
        """
        xs = [x.detach().clone(), x.detach().clone()] if self.way.takes_keys else [x]
        xs[self.side] = x
        return self.rotate_all(xs, positions)[self.side]

    def rotate_all(self, xs: Xs, positions: Positions) -> Xs:
        """Rotate x, or q and k, in one call.

        Call row by row if one call takes only one row, or cannot take positions that differ by row.
        """
        ids = self.ids(positions, len(xs[0]))
        alike = ids.ndim > 2 or self.way.rows_differ or bool((ids == ids[:1]).all())
        if (self.most_rows == 1 or not alike) and len(xs[0]) > 1:
            rows = zip(*(x.split(1) for x in xs))
            parts = [self._placed([*row], where) for row, where in zip(rows, ids.split(1))]
            return [torch.cat(each) for each in zip(*parts)]
        return self._placed(xs, ids)

    def _placed(self, xs: Xs, ids: torch.Tensor) -> Xs:
        """Call a function that numbers tokens itself on an x in which each token stands at its position."""
        way = self.way
        start: Any = 0
        if way.counts == "rising" and bool((ids.diff() < 0).any()):
            every, order = ids.sort(dim=-1, stable=True)
            where = order.argsort(dim=-1)
        elif way.takes_ids or not ids.numel():
            return self._call(xs, ids, 0)
        else:
            if way.row_offsets:
                start = ids.amin(-1, keepdim=True) * way.takes_offset
            elif way.takes_offset:
                start = int(ids.min())
            where = ids - start
            counted = torch.arange(ids.shape[-1], device=ids.device)
            if bool((where == counted).all()) or (way.packed and counted_rows(ids)):
                return self._call(xs, ids, start)
            every = torch.arange(int(where.max()) + 1, dtype=ids.dtype, device=ids.device)
            every = every.repeat(len(ids), 1) + start
        at = [where.long()[:, None, :, None].expand_as(x) for x in xs]
        whole = [x.new_zeros(*x.shape[:2], every.shape[-1], x.shape[3]) for x in xs]
        placed = [self.laid_out(each.scatter(2, to, x)) for each, to, x in zip(whole, at, xs)]
        return [y.gather(2, to) for y, to in zip(self._call(placed, every, start), at)]

    def _call(self, xs: Xs, ids: torch.Tensor, start: Any) -> Xs:
        way, rows = self.way, len(xs[0])
        if way.counts == "in tables":
            start, ids = int(ids.min()), torch.arange(int(ids.max()) + 1).expand(rows, -1)
        values: dict[str, Any] = {"offset": start, NOTHING: None}
        if isinstance(start, torch.Tensor):
            values["offset"] = start[:, 0]
        if way.packed:
            lengths = counted_rows(ids) or [ids.shape[-1]] * rows
            ids = torch.arange(sum(lengths))[None] if counted_rows(ids) else ids.reshape(1, -1)
            ends = torch.tensor([0, *lengths], device=xs[0].device).cumsum(0)
            values |= {"cu_seqlens": ends.int(), "max_seqlen": max(lengths)}
            xs = [x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for x in xs]
        values["seq_dim"] = way.layout.replace("t", "s").index("s")
        values["positions"] = self._positions(ids)
        given = [_into(x, way.layout) for x in xs]
        values |= zip(("q", "k") if way.takes_keys else ("x",), given)
        if way.takes_rows:
            count = torch.arange(ids.numel(), device=ids.device)
            values["positions"] = count.reshape(ids.shape)
        if (build := way.form.build) is not None:
            values["ids"] = ids.reshape(1, -1) if way.takes_rows else ids
            tables = build(*self._tables(xs[0], values["ids"]))
            values |= zip(way.form.roles, tables)
            held = [each for each in tables if isinstance(each, torch.Tensor)]
            self.given.extend((each, each.clone()) for each in held)
        result = self.run(values)
        if way.form.gives_tables:
            return [self._turned(x, result) for x in xs]
        if not way.takes_keys:
            first = NOTHING in way.roles and isinstance(result, (tuple, list))
            result = (result[0] if first else result,)
        elif not isinstance(result, (tuple, list)) or len(result) < 2:
            raise CallFailed(f"it returned {type(result).__name__}, not a tuple of q and k")
        ys = [_back(like(y, x), way.layout) for y, x in zip(result, given)]
        if way.packed:
            ys = [y.transpose(1, 2)[0].unflatten(0, (rows, -1)).transpose(1, 2) for y in ys]
        return ys

    def run(self, values: dict[str, Any]) -> Any:
        """Call the function with arguments by role, and return its unchecked result."""
        self.last.update(values)
        positional, named = passed(self.way.arguments, values)
        try:
            fn = fresh(self.fn, self.make) if self.renew else self.fn
            return fn(*positional, **named)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code may raise even SystemExit
            raise CallFailed(describe_error(error)) from error

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        if self.way.axes > 1 and ids.ndim == 2:
            ids = ids.expand(self.way.axes, -1, -1)
        return ids[..., 0, :] if self.way.shared_positions else ids

    def _tables(self, x: torch.Tensor, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Cosines and sines for a function that takes them."""
        way = self.way
        angle = ids[..., None].double().cpu() * self.rates
        made = (angle.cos(), angle.sin()) if self.made is None else self.made(ids)
        dtype = x.dtype if way.form.narrow else torch.float32
        wide = (WIDTHS[way.width](table).to(x.device, dtype) for table in made)
        return (table[index_of(way.table_shape)] for table in wide)

    def _turned(self, x: torch.Tensor, tables: Any) -> torch.Tensor:
        """Rotate x by the tables that the function returned."""
        cos, sin = (t[None] if self.way.shared_positions else t for t in tables)
        width = self.way.width
        how: dict[str, Any] = {"interleaved": width == "repeat", "tables": width}
        try:
            return apply_rotary_pos_emb(x, None, cos, sin, **how, rounding="wide")[0].to(x.dtype)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CallFailed(f"its tables do not fit x: {describe_error(error)}") from error


def passed(
    arguments: Sequence[Argument], values: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return what to pass for arguments, by position and by name, from values by role."""
    positional = [values[each.role] for each in arguments if not each.keyword]
    return positional, {str(each.name): values[each.role] for each in arguments if each.keyword}


def counted_rows(ids: torch.Tensor) -> list[int]:
    """Return the lengths of the packed rows that begin where positions are 0; none if they do not count up from there."""
    flat = ids.flatten()
    starts = (flat == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], len(flat)]
    counted = [p for start, end in zip(starts, ends) for p in range(end - start)]
    return [end - start for start, end in zip(starts, ends)] if counted == flat.tolist() else []


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
