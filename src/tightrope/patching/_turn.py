"""Compute by the operator what a rotary function of a known kind computes, and the function that does so in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

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
        arithmetics: by the values of options that :meth:`Roles.rounding` keeps, and the dtypes of x and of the tables.
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
        fixed = map(self.roles.rounding, self.forms)
        found = [self.arithmetics.get((each, torch.float32, torch.float32)) for each in fixed]
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
    if place.leading:
        first = [max(x.shape[-2] - cos.shape[-2], 0) for x in xs]
        rest = [x[..., n:, :] if n else x for x, n in zip(xs, first)]
        ys = turned(rest, cos, sin, place._replace(leading=False), arithmetic)
        fronts = [x[..., :n, :].to(y.dtype) for x, y, n in zip(xs, ys, first)]
        both = zip(fronts, ys)
        return [torch.cat((front, y), -2) if front.shape[-2] else y for front, y in both]
    turn, own, result = place.turn, xs[0].dtype, arithmetic.result or xs[0].dtype
    wide = torch.promote_types(own, result)
    if arithmetic.cast:
        wide = torch.float64 if arithmetic.cast == "float64" else wide
        narrow = own if arithmetic.cast == "tables" else wide
        cos, sin = cos.to(narrow), sin.to(narrow)
    cos, sin = _placed(cos, sin, place, 4 if place.flat else xs[0].dim())
    width = cos.shape[-1] if turn.tables == "full" else 2 * cos.shape[-1]
    if place.flat:
        if xs[0].shape[-1] % width:
            raise ValueError("x must have whole heads")
        xs = [x.unflatten(-1, (-1, width)) for x in xs]
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    dims = xs[0].dim()
    if dims not in (3, 4) or cos.dim() > dims:
        raise ValueError("x must have 3 or 4 dimensions, and tables not more")
    behind = place.flat or _behind(cos, xs[0])
    heads, name = dims - 2 if behind else dims - 3, "sbhd" if place.tokens_first else None
    start = xs[0].shape[-1] - width if turn.last else 0
    given = Tables(cos, sin, heads, turn.interleaved, turn.tables, start, layout=name)
    given = given._replace(rounding=arithmetic.rounding)
    parts = [x.to(wide) for x in xs]
    alike = len(xs) == 2 and arithmetic.dense[0] == arithmetic.dense[1]
    pairs: list[Any] = [parts] if alike else [(x, None) for x in parts]
    ys = []
    for (q, k), dense in zip(pairs, arithmetic.dense):
        ys += rotate_by(q, k, given._replace(dense=dense))
    if turn.as_halves:
        ys = [y.unflatten(-1, (-1, 2)).mT.flatten(-2) for y in ys]
    return [(y.flatten(-2) if place.flat else y).to(result) for y in ys]


def _behind(cos: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether the heads of x come after its tokens, by the dimension that placed tables lack."""
    return cos.shape[-2] == 1 and x.shape[-2] != 1


def _placed(
    cos: torch.Tensor, sin: torch.Tensor, place: Place, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of tables that are read, with as many dimensions as x."""
    cos, sin = place.turn.read(cos, sin)
    if place.unsqueeze is not None:
        cos, sin = cos.unsqueeze(place.unsqueeze), sin.unsqueeze(place.unsqueeze)
    if cos.dim() < dims:
        missing = (None,) * (dims - cos.dim())
        cos, sin = cos[missing], sin[missing]
    return cos, sin


# --- the replacement ------------------------------------------------------------------------------


class _Way(NamedTuple):
    """The way in which calls of one kind are served.

    Attributes:
        place, arithmetic: what the operator computes.
        direct: for the commonest kinds, once :func:`turned` has served one: whether heads are behind tokens, and the
            packed options of the operator.
    """

    place: Place
    arithmetic: Arithmetic
    direct: tuple[bool, int] | None = None


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
        used = {*known.xs, *known.tables, *known.options, *known.rows}
        self.others = [name for name in known.names if name not in used]
        # Kinds of eager calls -> how they are served.
        self.ways: dict[Any, _Way] = {}

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
        options = tuple([values[name] for name in known.options])
        try:
            for name in self.others:
                value, default = values[name], known.defaults[name]
                if value is not default and (type(value) is not type(default) or value != default):
                    return None
            form = self.first.forms.get(options)
            if form is None:
                return None
            cos, sin = FORMS[form].read(*[values[name] for name in known.tables])
            for name in known.rows:
                cos, sin = cos[values[name]], sin[values[name]]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
        xs, eager, key = [values[name] for name in known.xs], how == "eager", None
        if eager:
            key = options, torch.is_grad_enabled(), *map(_key, (*xs, cos, sin))
        way = self.ways.get(key) if eager else None
        way = way or self._way(options, xs, cos, sin, rounding)
        if way is None:
            return None
        present = [x for x in xs if x is not None]
        if way.direct is not None:
            k, (behind, packed) = present[1] if len(present) > 1 else None, way.direct
            cos, sin = _placed(cos, sin, way.place, 4)
            if behind:
                cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
            ys: Any = run_packed(present[0], k, (cos, sin, None, 0, packed, 1.0))
        else:
            try:
                ys = turned(present, cos, sin, way.place, way.arithmetic)
            except (TypeError, ValueError):
                return None
            if eager:
                if len(self.ways) > _MOST:
                    self.ways.clear()
                self.ways[key] = way._replace(direct=_direct(present, cos, sin, *way[:2]))
        return ys[0] if way.place.single else (*ys, *[None] * (len(xs) - len(ys)))

    def _way(self, options: Any, xs: list[Any], cos: Any, sin: Any, rounding: Any) -> _Way | None:
        """The way in which a call is served; None if it is of a kind that was not compared."""
        present = [x for x in xs if x is not None]
        if xs[0] is None or not all(map(_is_plain, (*present, cos, sin))):
            return None
        dtype, device = xs[0].dtype, xs[0].device
        alike = all(x.dtype == dtype and x.device == device for x in present)
        kind = self.first if rounding is not None else self.kind_on(device.type)
        if kind is None or not (alike and all(_is_usual(x, kind.apart) for x in present)):
            return None
        place = kind.places.get((options, *shape_of(xs, cos)))
        arithmetic = kind.arithmetics.get((self.roles.rounding(options), dtype, cos.dtype))
        if rounding is not None:
            arithmetic = Arithmetic(rounding, result=dtype)
        if place is None or arithmetic is None:
            return None
        grad = torch.is_grad_enabled()
        learned = grad and (cos.requires_grad or sin.requires_grad)
        shared = cos.shape[0] != xs[0].shape[0]  # sums over rows have another order
        if learned and (shared or not arithmetic.tables):
            return None
        if grad and not arithmetic.gradients and any(x.requires_grad for x in present):
            return None
        return _Way(place, arithmetic)


# The most kinds of calls that a function remembers.
_MOST = 1024


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
) -> tuple[bool, int] | None:
    """The direct way of calls like one that :func:`turned` has served; None for rarer kinds."""
    q, turn, dense = xs[0], place.turn, arithmetic.dense[: len(xs)]
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if place.leading or place.tokens_first or turn.as_halves or turn.last or learned:
        return None
    if q.dim() != 4 or len(xs) > 2 or len({*dense}) > 1 or not q.numel():
        return None
    if arithmetic.cast or arithmetic.result not in (None, q.dtype):
        return None
    behind = _behind(_placed(cos, sin, place, 4)[0], q)
    layout, rounding = BY_NAME["bshd" if behind else "bhsd"], arithmetic.rounding
    return behind, pack(layout, 0, turn.interleaved, False, True, turn.tables, rounding, dense[0])


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
                result = tree_map_only(torch.Tensor, lambda y: y.to(dtype), result)
        return result

    return functools.update_wrapper(apply, original)
