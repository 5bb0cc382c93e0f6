"""Compute by the operator what a rotary function of a known kind computes, and the function that does so in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..functional.tables import Tables, pack, rotate_by
from ..ops import route
from ..ops.layouts import BY_NAME
from ..ops.run import run_packed
from ._kinds import COMPLEX, FORMS, Arithmetic, Roles, Turn

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Place(NamedTuple):
    """The way in which the operator serves calls of one shape.

    Attributes:
        turn: what happens to pairs.
        unsqueeze: the dimension at which tables are unsqueezed, from the end; None if they are not.
        single: whether the result is one tensor.
        leading: whether x may have leading tokens that its tables lack, which pass through.
        tokens_first: whether x and tables have four dimensions, tokens in the first.
        flat: whether the last dimension of x has the channels of all heads; tables have tokens in the first of four.
    """

    turn: Turn
    unsqueeze: int | None
    single: bool = False
    leading: bool = False
    tokens_first: bool = False
    flat: bool = False


@dataclass
class Kind:
    """The result of verification: what a function computes on one type of device.

    Attributes:
        forms: the form of its tables by the values of the options.
        places: by the values of the options and the shape of a call; see :func:`shape_of`.
        arithmetics: by the values of the options, and the dtypes of x and of the tables.
        apart: whether channels of x may lie apart in memory.
    """

    roles: Roles
    device: str = "cpu"
    forms: dict[Any, str] = field(default_factory=dict)
    places: dict[Any, Place] = field(default_factory=dict)
    arithmetics: dict[Any, Arithmetic] = field(default_factory=dict)
    apart: bool = True

    @property
    def is_complex(self) -> bool:
        """True if it multiplies complex numbers, which torch rounds otherwise at the end of a vector."""
        return COMPLEX in self.forms.values()

    @property
    def same_bits(self) -> bool:
        """True if results and gradients in float32 have the function's bits."""
        wide = torch.float32, torch.float32
        found = [self.arithmetics.get((options, *wide)) for options in self.forms]
        return all(each is not None and each.gradients for each in found)

    def __str__(self) -> str:
        # Tables of full width do not show which channels turn by narrow ones.
        places = sorted(self.places.items(), key=lambda item: item[1].turn.last)
        turns = {key[0]: place.turn.words for key, place in places}
        return " or ".join(dict.fromkeys(f"{turns[o]}, {form}" for o, form in self.forms.items()))


def shape_of(xs: list[Any], cos: torch.Tensor) -> tuple[int, int, int, int]:
    """The shape of a call, which decides how it is served: ranks, the number of tensors, the width of tables."""
    rank, width, channels = xs[0].dim(), cos.shape[-1], xs[0].shape[-1]
    kind = 3 if cos.dim() > rank else 0 if width == channels else 1 if 2 * width == channels else 2
    return rank, cos.dim(), sum(x is not None for x in xs), kind


def turned(
    xs: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    place: Place,
    arithmetic: Arithmetic,
) -> list[torch.Tensor]:
    """Turn one to three tensors by the cosines and sines of their call.

    Raises:
        TypeError, ValueError: the operator does not take them.
    """
    turn, dtype, result = place.turn, xs[0].dtype, arithmetic.result or xs[0].dtype
    wide = torch.promote_types(dtype, result)
    if arithmetic.cast:
        wide = torch.float64 if arithmetic.cast == "float64" else wide
        narrow = dtype if arithmetic.cast == "tables" else wide
        cos, sin = cos.to(narrow), sin.to(narrow)
    cos, sin = turn.read(cos, sin)
    width = cos.shape[-1] if turn.tables == "full" else 2 * cos.shape[-1]
    if place.unsqueeze is not None:
        cos, sin = cos.unsqueeze(place.unsqueeze), sin.unsqueeze(place.unsqueeze)
    if place.flat:
        if xs[0].shape[-1] % width:
            raise ValueError("x must have whole heads")
        xs = [x.unflatten(-1, (-1, width)) for x in xs]
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    dims = xs[0].dim()
    if dims not in (3, 4) or cos.dim() > dims:
        raise ValueError("x must have 3 or 4 dimensions, and tables not more")
    missing = (None,) * (dims - cos.dim())
    cos, sin = cos[missing], sin[missing]
    behind = cos.shape[-2] == 1 and xs[0].shape[-2] != 1 and not place.leading
    heads, axis = (dims - 2, dims - 3) if behind or place.flat else (dims - 3, dims - 2)
    name = None
    if place.tokens_first:
        name, axis = "sbhd", 0
    start = xs[0].shape[-1] - width if turn.last else 0

    def given(at: int) -> Tables:
        dense = arithmetic.dense[at]
        options = heads, turn.interleaved, turn.tables, start
        return Tables(cos, sin, *options, rounding=arithmetic.rounding, dense=dense, layout=name)

    rows = cos.shape[axis]
    passed = [max(x.shape[axis] - rows, 0) if place.leading else 0 for x in xs]
    parts = [x.narrow(axis, n, rows).to(wide) if n else x.to(wide) for x, n in zip(xs, passed)]
    if len(xs) == 2 and arithmetic.dense[0] == arithmetic.dense[1]:
        ys = [*rotate_by(parts[0], parts[1], given(0))]
    else:
        ys = [rotate_by(x, None, given(at))[0] for at, x in enumerate(parts)]
    if turn.as_halves:
        ys = [y.unflatten(-1, (-1, 2)).mT.flatten(-2) for y in ys]
    for at, n in enumerate(passed):
        y = ys[at].to(result)
        ys[at] = torch.cat((xs[at].narrow(axis, 0, n).to(result), y), axis) if n else y
    return [y.flatten(-2) for y in ys] if place.flat else ys


# --- the replacement ------------------------------------------------------------------------------


class _Way(NamedTuple):
    """The way in which calls of one kind are served.

    Attributes:
        place, arithmetic: what the operator computes.
        direct: for the commonest kinds, what :func:`_launch` needs; None if :func:`turned` must run.
    """

    place: Place
    arithmetic: Arithmetic
    direct: tuple[Any, ...] | None


class Served:
    """The calls of one function: which the operator serves, and how many.

    Attributes:
        kinds: the kind that was found, by type of device; None if there is none.
        counts: the eager calls that the operator and the original served.
        compared: the types of devices on which bits were compared.
        active: false once the replacement is undone; others may have kept it.
    """

    active = True

    def __init__(self, original: Any, kind: Kind, verify: Callable[[str], Kind | None]) -> None:
        self.original, self.first, self.verify = original, kind, verify
        self.kinds: dict[str, Kind | None] = {kind.device: kind}
        self.counts = [0, 0]
        self.compared = [kind.device]
        self.roles = known = kind.roles
        used = {*known.xs, *known.tables, *known.options, known.rows}
        self.others = [name for name in known.names if name not in used]
        # Kinds of eager calls -> how they are served, None if the original runs.
        self.ways: dict[Any, _Way | None] = {}

    def kind_on(self, device: str) -> Kind | None:
        """The kind on a type of device; it is verified in the first eager call there."""
        if device not in self.kinds and not torch.compiler.is_compiling():
            found = self.kinds[device] = self.verify(device)
            self.compared += [device] * (found is not None and found.same_bits)
        return self.kinds.get(device, self.first)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rounding: Any) -> Any:
        """The results of a call; None if the original must run.

        Args:
            rounding: where results round; None for the bits of the original.
        """
        known, how = self.roles, route.mode()
        values = {**known.defaults, **dict(zip(known.names, args)), **kwargs}
        unusual = len(args) > len(known.names) or len(values) != len(known.names)
        if unusual or not self.active or how not in ("eager", "compiled"):
            return None
        for name in self.others:
            if not _is_same(values[name], known.defaults[name]):
                return None
        options = tuple([values[name] for name in known.options])
        for each in options:
            if type(each) is not bool and type(each) is not int:
                return None
        form = self.first.forms.get(options)
        if form is None:
            return None
        try:
            cos, sin = FORMS[form].read(*[values[name] for name in known.tables])
            if known.rows:
                cos, sin = cos[values[known.rows]], sin[values[known.rows]]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
        xs = [values[name] for name in known.xs]
        if how == "compiled":
            way = self._way(options, xs, cos, sin, rounding)
        else:
            key = options, torch.is_grad_enabled(), *map(_key, (*xs, cos, sin))
            if key not in self.ways:
                if len(self.ways) > _MOST:
                    self.ways.clear()
                self.ways[key] = self._way(options, xs, cos, sin, rounding)
            way = self.ways[key]
        if way is None:
            return None
        if how == "eager" and way.direct is not None:
            ys: Any = _launch(xs, cos, sin, way.direct)
        else:
            present = [x for x in xs if x is not None]
            try:
                ys = turned(present, cos, sin, way.place, way.arithmetic)
            except (TypeError, ValueError):
                return None
        return ys[0] if way.place.single else (*ys, *[None] * (len(xs) - len(ys)))

    def _way(self, options: Any, xs: list[Any], cos: Any, sin: Any, rounding: Any) -> _Way | None:
        """The way in which a call is served; None if it is of a kind that was not compared."""
        present = [x for x in xs if x is not None]
        if xs[0] is None or not all(map(_is_plain, (*present, cos, sin))):
            return None
        alike = all(x.dtype == xs[0].dtype and x.device == xs[0].device for x in present)
        kind = self.first if rounding is not None else self.kind_on(xs[0].device.type)
        if kind is None or not (alike and all(_is_usual(x, kind.apart) for x in present)):
            return None
        place = kind.places.get((options, *shape_of(xs, cos)))
        arithmetic = kind.arithmetics.get((options, xs[0].dtype, cos.dtype))
        if rounding is not None:
            arithmetic = Arithmetic(rounding, result=xs[0].dtype)
        if place is None or arithmetic is None:
            return None
        grad = torch.is_grad_enabled()
        learned = grad and (cos.requires_grad or sin.requires_grad)
        shared = cos.shape[0] != xs[0].shape[0]  # sums over rows have another order
        if learned and (shared or not arithmetic.tables):
            return None
        if grad and not arithmetic.gradients and any(x.requires_grad for x in present):
            return None
        direct = None
        if not (learned or torch.compiler.is_compiling()):
            direct = _direct(present, cos, sin, place, arithmetic)
        return _Way(place, arithmetic, direct)


# The most kinds of calls that a function remembers.
_MOST = 1024


def _is_same(value: Any, default: Any) -> bool:
    number = type(default) in (int, float, bool, str)
    return value is default or (number and type(value) is type(default) and bool(value == default))


def _key(x: Any) -> Any:
    """The properties of a tensor that decide how a call is served."""
    if type(x) is torch.Tensor or type(x) is torch.nn.Parameter:
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return None if x is None else type(x)


def _is_plain(x: Any) -> bool:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_exporting()
    return plain and x.dtype in FLOATING and x.device.type != "meta"


def _is_usual(x: torch.Tensor, apart: bool) -> bool:
    """Return whether x lies in memory as in the calls that were compared: rows, and unless they may lie apart, channels."""
    steps = x.stride()
    near = apart or steps[-1:] == (1,)
    return near and len(steps) > 1 and (x.shape[0] == 1 or steps[0] >= max(steps[1:]))


def _direct(
    xs: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    place: Place,
    arithmetic: Arithmetic,
) -> tuple[Any, ...] | None:
    """The arguments of :func:`_launch` for a call; None for calls of rarer kinds, for which :func:`turned` runs."""
    q, turn, dense = xs[0], place.turn, arithmetic.dense[0]
    simple = q.dim() == 4 and len(xs) < 3 and not place.leading
    simple = simple and not (place.tokens_first or turn.as_halves or turn.last)
    plain = not arithmetic.cast and arithmetic.result in (None, q.dtype)
    if not (simple and plain and arithmetic.dense[: len(xs)] == (dense,) * len(xs)):
        return None
    c, s = _placed(cos, sin, turn.read, place.unsqueeze, 4, False)
    behind = c.shape[2] == 1 and q.shape[2] != 1
    rows, heads, tokens, width = c.transpose(1, 2).shape if behind else c.shape
    axis = 1 if behind else 2
    turning = width if turn.tables == "full" else 2 * width
    shapes = {(x.shape[0], x.shape[axis], x.shape[3]) for x in xs}
    fits = turning % 2 == 0 and turning <= q.shape[3] and heads == 1 and rows in (1, q.shape[0])
    fits = fits and shapes == {(q.shape[0], tokens, q.shape[3])} and all(x.numel() for x in xs)
    if not fits or (c.shape, c.dtype, c.device) != (s.shape, s.dtype, q.device):
        return None
    layout = BY_NAME["bshd" if behind else "bhsd"]
    options = pack(
        layout, 0, turn.interleaved, False, True, turn.tables, arithmetic.rounding, dense
    )
    return turn.read, place.unsqueeze, 4, behind, options


def _placed(
    cos: torch.Tensor, sin: torch.Tensor, read: Any, unsqueeze: int | None, dims: int, behind: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of tables that are read, with as many dimensions as x: rows, heads, tokens, width."""
    cos, sin = read(cos, sin)
    if unsqueeze is not None:
        cos, sin = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
    if cos.dim() < dims:
        missing = (None,) * (dims - cos.dim())
        cos, sin = cos[missing], sin[missing]
    return (cos.transpose(1, 2), sin.transpose(1, 2)) if behind else (cos, sin)


def _launch(xs: list[Any], cos: torch.Tensor, sin: torch.Tensor, direct: tuple[Any, ...]) -> Any:
    """Turn q and k by arguments that need no more checks."""
    *how, options = direct
    cos, sin = _placed(cos, sin, *how)
    k = xs[1] if len(xs) > 1 else None
    return run_packed(xs[0], k, (cos, sin, None, 0, options, 1.0))


def replacement(served: Served, rounding: Any = None) -> Callable[..., Any]:
    """A function that has the operator serve the calls that were verified, and the original all others.

    Args:
        rounding: where results round; None for the bits of the original.
    """
    known, original = served.first.roles, served.original
    skipped = int(known.method)

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = served.run(args[skipped:], kwargs, rounding)
        if not torch.compiler.is_compiling():
            served.counts[result is None] += 1
        if result is None:
            result = original(*args, **kwargs)
            if rounding is not None:  # exchanged tables may be wider than the model's
                dtype = {**dict(zip(known.names, args[skipped:])), **kwargs}[known.xs[0]].dtype
                several = result if isinstance(result, tuple) else (result,)
                alike = tuple(y if y is None else y.to(dtype) for y in several)
                result = alike if isinstance(result, tuple) else alike[0]
        return result

    return functools.update_wrapper(apply, original)
