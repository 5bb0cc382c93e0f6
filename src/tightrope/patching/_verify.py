"""Find the kind of a rotary function by calls with random tensors: values, bits, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._tracing import undisturbed
from ._kinds import (
    ANGLES,
    ARITHMETICS,
    COMPLEX,
    COS_SIN,
    FORMS,
    OPTIONS,
    SHAPES,
    TURNS,
    Arithmetic,
    Roles,
    Shape,
    fits,
    roles,
)
from ._turn import FLOATING, Kind, Place, shape_of, turned

_F32, _BF16 = torch.float32, torch.bfloat16
_ONCE = Arithmetic(("once", "once"))
# Sizes by letter; no two tables of different shapes have equally many entries.
_SIZES = {"b": 2, "h": 3, "s": 19, "d": 64}
# The dtypes of x and of tables that are tried.
_DTYPES = (
    *((_F32, table) for table in (_F32, torch.float64, _BF16, torch.float16)),
    *((torch.float64, table) for table in (torch.float64, _F32)),
    *((narrow, table) for narrow in (_BF16, torch.float16) for table in (_F32, narrow)),
)
# What a kind is confirmed with: sizes, with the heads of keys as "k", dtypes, how x lies in memory, and whether it learns. One
# token, odd widths, and a long sequence with special values.
_EXCHANGED, _CONTIGUOUS, _GAPS = "heads and tokens exchanged", "contiguous", "exchanged, with gaps"
_APART = "channels apart"
_OTHERS: tuple[tuple[dict[str, int], tuple[torch.dtype, torch.dtype], str, bool], ...] = (
    ({"b": 3, "h": 5, "s": 1, "d": 32}, (_F32, _F32), _EXCHANGED, True),
    ({"b": 1, "h": 4, "k": 2, "s": 7, "d": 12}, (_F32, _F32), _CONTIGUOUS, True),
    ({"b": 3, "h": 1, "s": 5, "d": 20}, (_BF16, _BF16), _GAPS, True),
    ({"b": 2, "h": 4, "k": 1, "s": 9, "d": 96}, (_BF16, _F32), _CONTIGUOUS, True),
    ({"b": 2, "h": 3, "s": 10, "d": 40}, (_F32, _F32), _GAPS, False),
    ({"b": 2, "h": 2, "s": 260, "d": 128}, (_F32, _F32), _EXCHANGED, True),
    ({"b": 2, "h": 3, "s": 11, "d": 16}, (_F32, _F32), _APART, True),
)
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e30, -1e-30, 0.0, -0.0)
# Bounds, relative and absolute, of equal values in float32 and in results of 16 bits.
_CLOSE, _COARSE = 1e-5, 2**-6


class _Trial(NamedTuple):
    """The parts of a call with random tensors.

    Attributes:
        width: the last dimension of the tables.
        unsqueeze: the dimension at which the function is thought to unsqueeze them; None if it does not.
        tensors: the number of tensors that rotate; the others are None.
        dtypes: of x, and of the tables.
    """

    options: tuple[Any, ...]
    form: str
    shape: Shape
    width: int
    unsqueeze: int | None
    tensors: int
    dtypes: tuple[torch.dtype, torch.dtype] = (_F32, _F32)
    sizes: dict[str, int] = _SIZES
    special: bool = False
    memory: str = _EXCHANGED
    learns: bool = True


class _Object:
    """The object of a method: it has the attributes that methods of conformers read, and no others."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.num_heads, self.head_size = sizes["h"], sizes["d"]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")  # an AttributeError would become the default of getattr


class _Probe:
    """A call of a function: its tensors, and its results ``ys``, none if it raised an error or rotates nothing."""

    def __init__(self, function: Any, known: Roles, trial: _Trial, device: str = "cpu") -> None:
        self.trial, self.device, form = trial, device, FORMS[trial.form]
        both = (self._random(trial.shape.table, trial.width, trial.dtypes[1]) for _ in range(2))
        cos, sin = form.read(*form.build(*both))
        self.cos, self.sin = (t.detach().requires_grad_() for t in (cos, sin))
        tables = form.build(cos if trial.form == ANGLES else self.cos, self.sin)
        if trial.form == ANGLES:  # gradients would flow to the angle
            angle = torch.randn_like(cos)
            self.cos, self.sin, tables = angle.cos(), angle.sin(), (angle,)
        heads = (
            trial.sizes["h"] if "h" in trial.shape.table else trial.sizes.get("k", trial.sizes["h"])
        )
        self.xs = [
            self._random(
                trial.shape.x, trial.sizes["d"], trial.dtypes[0], heads if at == 1 else None
            )
            for at in range(trial.tensors)
        ]
        for x in self.xs:
            x.requires_grad_(trial.learns)
        given = dict(zip(known.options, trial.options))
        given |= dict(zip(known.xs, [*self.xs, None, None]))
        given |= dict(zip(known.tables, tables))
        if known.rows:
            rows = torch.arange(self.cos.shape[0], device=device).flip(0)
            given[known.rows] = rows
            self.cos, self.sin = self.cos[rows], self.sin[rows]
        self.ys: list[torch.Tensor] = []
        self.single = False
        first = [_Object(trial.sizes)] if known.method else []
        try:
            found = function(*first, **given)
        except Exception:  # noqa: BLE001  # functions raise anything for shapes that they do not take
            return
        several = found if type(found) is tuple else (found,)
        ys, rest = several[: len(self.xs)], several[len(self.xs) :]
        same = [getattr(y, "shape", None) for y in ys] == [x.shape for x in self.xs]
        same = same and all(
            y.is_floating_point() and (y.requires_grad or not trial.learns) for y in ys
        )
        whole = len(several) in (1, len(known.xs)) and all(y is None for y in rest)
        if same and whole and not any(x._version for x in self.xs):
            self.ys, self.single = list(ys), type(found) is not tuple

    def _random(
        self, letters: str, width: int, dtype: torch.dtype, heads: int | None = None
    ) -> torch.Tensor:
        """A tensor of a shape in letters; by default as a projection leaves it, with tokens and heads exchanged."""
        own = self.trial.sizes
        sizes = {
            **own,
            "h": heads or own["h"],
            "d": width,
            "1": 1,
            "S": own["s"] + 2,
            "f": (heads or own["h"]) * width,
        }
        # Of float64, so that float64 tensors are no numbers of float32.
        shape = [sizes[letter] for letter in letters]
        x = torch.randn(shape, dtype=torch.float64, device=self.device)
        if self.trial.special:
            some = x.view(-1)[:: x.numel() // 30]
            some.copy_(torch.tensor(_SPECIAL, dtype=x.dtype).repeat(9)[: len(some)])
        x = x.to(dtype)
        if len(letters) < 3 or self.trial.memory == _CONTIGUOUS:
            return x
        if self.trial.memory == _APART:
            return x.mT.contiguous().mT
        x = x.transpose(-3, -2).contiguous()
        if self.trial.memory == _GAPS:
            x = torch.cat((x, x), -1)[..., : x.shape[-1]]
        return x.transpose(-3, -2)

    def turned(self, place: Place, arithmetic: Arithmetic) -> list[torch.Tensor] | None:
        """The operator's results; None if it does not take the call."""
        try:
            return turned(self.xs, self.cos, self.sin, place, arithmetic)
        except (TypeError, ValueError):
            return None

    def agrees(self, place: Place) -> bool | None:
        """Return whether the operator has the function's values; None if it does not take the call."""
        mine = self.turned(place, _ONCE)
        if mine is None:
            return None
        bound = _CLOSE if self.ys[0].dtype.itemsize > 2 else _COARSE
        return all(torch.allclose(a, b.to(a.dtype), bound, bound) for a, b in zip(mine, self.ys))

    def arithmetic(self, place: Place, rows: tuple[Arithmetic, ...]) -> Arithmetic | None:
        """The row with the function's bits, or one whose gradients alone differ; None if there is none."""
        count = len(self.xs)
        if not self.trial.learns:
            for row in rows:
                mine = self.turned(place, row)
                if mine is not None and all(map(_alike, mine, self.ys)):
                    return row
            return None
        grads = [torch.randn_like(y) for y in self.ys]
        leaves = [*self.xs, *(t for t in (self.cos, self.sin) if t.requires_grad)]
        wanted = torch.autograd.grad(self.ys, leaves, grads, allow_unused=True)
        dense = tuple(
            (y.is_contiguous(), g is not None and g.is_contiguous())
            for y, g in zip(self.ys, wanted)
        )
        nearest = None
        for row in rows:
            tried = row._replace(
                result=self.ys[0].dtype, dense=(*dense, *[(False, False)] * (3 - count))
            )
            mine = self.turned(place, tried)
            if mine is None or not all(map(_alike, mine, self.ys)):
                continue
            found = torch.autograd.grad(mine, leaves, grads, allow_unused=True)
            same = [a is not None and b is not None and _alike(a, b) for a, b in zip(found, wanted)]
            if all(same[:count]):
                return tried._replace(tables=len(same) > count and all(same))
            nearest = tried._replace(gradients=False, tables=False)
        return nearest


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits and strides; every NaN counts as one number."""
    steps = ([n for n, size in zip(x.stride(), x.shape) if size > 1] for x in (one, other))
    if one.dtype != other.dtype or next(steps) != next(steps):
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def find(function: Any, device: str = "cpu", method: bool = False, given: str = "") -> Kind | None:
    """The kind of a function; None if it is of no kind.

    Args:
        device: the type of device on which it is tried.
        method: whether it takes self first.
        given: the roles of its parameters; see :func:`roles`.
    """
    known = roles(function, method, given)
    if known is None:
        return None
    kind = Kind(known, device)
    # Without functions of tensor subclasses and of modes, such as `with torch.device("meta")`, which take time.
    with undisturbed(device), torch.enable_grad(), torch._C.DisableTorchFunction():
        torch.manual_seed(0)
        tried = []
        for name in known.options:
            default = known.defaults.get(name)
            values = (default, not default) if isinstance(default, bool) else OPTIONS[name]
            tried.append(dict.fromkeys(values if default is None else (default, *values)))
        for options in itertools.product(*tried):
            _Search(function, kind, options).run()
    return kind if kind.forms else None


class _Search:
    """The search for what a function computes with some values of its options."""

    def __init__(self, function: Any, kind: Kind, options: tuple[Any, ...]) -> None:
        self.function, self.kind, self.options = function, kind, options
        self.turns = list(TURNS)
        self.first: _Trial | None = None

    def run(self) -> None:
        """Find shapes, then where results round, and confirm both at other sizes."""
        unlike = []
        for trial in self._trials():
            if self.first is not None and trial.form != self.first.form:
                continue
            probe = self._probe(trial)
            if probe.ys:
                key = self._key(probe)
                place = self._place(probe)
                if place is None:
                    unlike.append((key, probe))
                    continue
                few = self._probe(trial._replace(sizes={**_SIZES, "b": 3, "h": 1}))
                if few.ys and few.agrees(place) is False:
                    continue  # it takes one head for another dimension
                self.first = self.first or trial
                held = self.kind.places.setdefault(key, place)
                if held._replace(leading=True) == place:
                    self.kind.places[key] = place
        # Another layout of the same ranks, in which the function does something else.
        for key, probe in unlike:
            if self.first is None or probe.trial.form != self.first.form:
                continue
            if key in self.kind.places and probe.agrees(self.kind.places[key]) is not True:
                del self.kind.places[key]
        if self.first is not None and any(key[0] == self.options for key in self.kind.places):
            self.kind.forms[self.options] = self.first.form
            if not self._known():
                self._round(self.first)
                self._confirm(self.first)

    def _known(self) -> bool:
        """Take where results round from options that differ only in where tables are unsqueezed, if there are some."""
        names = self.kind.roles.options
        if "unsqueeze_dim" not in names:
            return False
        at = names.index("unsqueeze_dim")
        found = [
            (options, *dtypes)
            for options, *dtypes in self.kind.arithmetics
            if options[:at] + options[at + 1 :] == self.options[:at] + self.options[at + 1 :]
        ]
        for key in found:
            self.kind.arithmetics[(self.options, key[1], key[2])] = self.kind.arithmetics[key]
        return bool(found)

    def _probe(self, trial: _Trial) -> _Probe:
        return _Probe(self.function, self.kind.roles, trial, self.kind.device)

    def _key(self, probe: _Probe) -> tuple[Any, ...]:
        missing = [None] * (len(self.kind.roles.xs) - len(probe.xs))
        return self.options, *shape_of([*probe.xs, *missing], probe.cos)

    def _trials(self) -> Iterator[_Trial]:
        known = self.kind.roles
        asked = dict(zip(known.options, self.options)).get("unsqueeze_dim")
        forms = [name for name in FORMS if (name == COS_SIN) == (len(known.tables) == 2)]
        for form, shape, part in itertools.product(forms, SHAPES, (1, 2, 4)):
            places = [None, -2, -3]
            if asked is not None:
                places = [asked - len(shape.table) - 1 if asked >= 0 else asked]
            place = next((p for p in places if fits(shape, p)), "none")
            if place == "none":
                continue
            for count in {len(known.xs), 1}:
                trial = _Trial(self.options, form, shape, _SIZES["d"] // part, place, count)  # type: ignore[arg-type]
                yield trial

    def _place(self, probe: _Probe) -> Place | None:
        """The way to serve a call; None if no row of TURNS has its values."""
        shape = probe.trial.shape
        flat, first = shape.x.endswith("f"), shape.x.startswith("sb")
        for turn in self.turns:
            place = Place(turn, probe.trial.unsqueeze, probe.single, "S" in shape.x, first, flat)
            if probe.agrees(place):
                self.turns = [turn, *(t for t in self.turns if t is not turn)]
                return place
        return None

    def _round(self, first: _Trial) -> None:
        """Find where results round, for all dtypes."""
        narrow = FORMS[first.form].narrow
        for dtypes in _DTYPES:
            if not narrow and dtypes[1] not in FLOATING[:2]:
                continue
            shown = self.kind.arithmetics.get((self.options, _F32, dtypes[1]))
            if dtypes[0] != _F32 and shown is None:
                continue  # results of 16 bits do not show every rounding
            rows: tuple[Arithmetic, ...] = ARITHMETICS
            if dtypes[0] in FLOATING[2:] and shown is not None and shown.cast == "float64":
                rows = tuple(row for row in rows if row.cast == "float64")
            probe = self._probe(first._replace(dtypes=dtypes))
            place = probe.ys and self.kind.places.get(self._key(probe))
            if place and (found := probe.arithmetic(place, rows)) is not None:
                key = self.options, *dtypes
                self.kind.arithmetics[key] = found

    def _confirm(self, first: _Trial) -> None:
        """Compare bits at sizes, strides and values that were not tried; drop what differs."""
        for sizes, dtypes, memory, learns in _OTHERS:
            key = self.options, *dtypes
            arithmetic = self.kind.arithmetics.get(key)
            if arithmetic is None:
                continue
            trial = first._replace(
                sizes=sizes,
                dtypes=dtypes,
                width=first.width * sizes["d"] // _SIZES["d"],
                special=sizes["s"] > 100 and first.form != COMPLEX,
                memory=memory,
                learns=learns,
            )
            probe = self._probe(trial)
            place = self.kind.places.get(self._key(probe))
            if place is None:
                continue
            if not probe.ys:
                same: bool | None = False
            elif first.form == COMPLEX:  # its last bit depends on the size
                same = probe.agrees(place)
            else:
                found = probe.arithmetic(place, (arithmetic,))
                same = found is not None and found.gradients >= arithmetic.gradients
            if memory == _APART:
                self.kind.apart = self.kind.apart and bool(same)
            elif not same:
                del self.kind.arithmetics[key]
