"""Find the kind of a rotary function by calls with random tensors: values, bits, gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._tracing import undisturbed
from . import _kinds
from ._kinds import ANGLES, COMPLEX, COS_SIN, FORMS, Arithmetic, Roles, Shape, Turn
from ._turn import FLOATING, Kind, Place, shape_of, turned

_F32, _BF16 = torch.float32, torch.bfloat16
_ONCE = Arithmetic(("once", "once"))
# Sizes by letter; no two tables of different shapes have equally many entries. And those in which heads could be taken for
# another dimension.
_SIZES = {"b": 2, "h": 3, "s": 19, "d": 64}
_ALIKE = ({**_SIZES, "b": 3, "h": 1}, {**_SIZES, "b": 3, "h": 3})
# How tensors lie in memory.
_EXCHANGED, _CONTIGUOUS, _GAPS = "heads and tokens exchanged", "contiguous", "exchanged, with gaps"
_APART = "channels apart"
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e30, -1e-30, 0.0, -0.0)
# Bounds, relative and absolute, of equal values in float32 and in results of 16 bits.
_CLOSE, _COARSE = 1e-5, 2**-6


class _Bits(NamedTuple):
    """A comparison of bits.

    Attributes:
        dtypes: of x, and of the tables.
        sizes: by letter, with the heads of keys as "k". A sequence of more than 100 tokens has special values.
        memory: how tensors lie in memory.
        learns: whether x needs gradients.
    """

    dtypes: tuple[torch.dtype, torch.dtype] = (_F32, _F32)
    sizes: dict[str, int] = _SIZES
    memory: str = _EXCHANGED
    learns: bool = True


# The first of each pair of dtypes finds where results round, the others confirm it: one token, odd widths, a long sequence.
_COMPARED = (
    *(_Bits((_F32, table)) for table in (_F32, torch.float64, _BF16, torch.float16)),
    *(_Bits((torch.float64, table)) for table in (torch.float64, _F32)),
    *(_Bits((x, table)) for x in (_BF16, torch.float16) for table in (_F32, x)),
    _Bits(sizes={"b": 3, "h": 5, "s": 1, "d": 32}),
    _Bits(sizes={"b": 1, "h": 4, "k": 2, "s": 7, "d": 12}, memory=_CONTIGUOUS),
    _Bits((_BF16, _BF16), {"b": 3, "h": 1, "s": 5, "d": 20}, _GAPS),
    _Bits((_BF16, _F32), {"b": 2, "h": 4, "k": 1, "s": 9, "d": 96}, _CONTIGUOUS),
    _Bits(sizes={"b": 2, "h": 3, "s": 10, "d": 40}, memory=_GAPS, learns=False),
    _Bits(sizes={"b": 2, "h": 2, "s": 260, "d": 128}),
    _Bits(sizes={"b": 2, "h": 3, "s": 11, "d": 16}, memory=_APART),
)


class _Trial(NamedTuple):
    """A kind of calls.

    Attributes:
        part: the channels of x for each entry in the last dimension of tables.
        unsqueeze: the dimension at which the function is thought to unsqueeze them; None if it does not.
        tensors: the number of tensors that rotate; the others are None.
    """

    form: str
    shape: Shape
    part: int
    unsqueeze: int | None
    tensors: int


class _Object:
    """The object of a method: it has the attributes that methods of conformers read, and no others."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.num_heads, self.head_size = sizes["h"], sizes["d"]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")  # an AttributeError would become the default of getattr


class _Probe:
    """A call of a function: its tensors, and its results ``ys``, none if it raised an error or rotates nothing."""

    def __init__(
        self, function: Any, kind: Kind, options: tuple[Any, ...], trial: _Trial, bits: _Bits
    ) -> None:
        self.trial, self.bits, self.device = trial, bits, kind.device
        known, form, (of_x, of_table) = kind.roles, FORMS[trial.form], trial.shape
        width = bits.sizes["d"] // trial.part
        both = (self._random(of_table, width, bits.dtypes[1]) for _ in range(2))
        tables = form.build(*both)
        self.cos, self.sin = (t.detach() for t in form.read(*tables))
        if trial.form != ANGLES:  # gradients would flow to the angle
            tables = form.build(self.cos.requires_grad_(), self.sin.requires_grad_())
        of_keys = of_x if "h" in of_table else of_x.replace("h", "k")
        self.xs = [
            self._random(letters, bits.sizes["d"], bits.dtypes[0]).requires_grad_(bits.learns)
            for letters in (of_x, of_keys, of_x)[: trial.tensors]
        ]
        given = dict(zip(known.xs, [*self.xs, None, None]))
        given |= dict(zip((*known.tables, *known.options), (*tables, *options)))
        for name in known.rows:
            given[name] = rows = torch.arange(len(self.cos), device=self.device).flip(0)
            self.cos, self.sin = self.cos[rows], self.sin[rows]
        self.ys: list[torch.Tensor] = []
        self.single = False
        first = [_Object(bits.sizes)] if known.method else []
        try:
            found = function(*first, **given)
        except Exception:  # noqa: BLE001  # functions raise anything for shapes that they do not take
            return
        several = found if type(found) is tuple else (found,)
        ys, rest = several[: len(self.xs)], several[len(self.xs) :]
        same = [getattr(y, "shape", None) for y in ys] == [x.shape for x in self.xs]
        same = same and all(y.is_floating_point() and y.requires_grad >= bits.learns for y in ys)
        whole = len(several) in (1, len(known.xs)) and all(y is None for y in rest)
        if same and whole and not any(x._version for x in self.xs):
            self.ys, self.single = list(ys), type(found) is not tuple

    def _random(self, letters: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a shape in letters."""
        own = self.bits.sizes
        sizes = {"k": own["h"], **own, "d": width, "1": 1, "S": own["s"] + 2, "f": own["h"] * width}
        # Of float64, so that float64 tensors are no numbers of float32.
        shape = [sizes[letter] for letter in letters]
        x = torch.randn(shape, dtype=torch.float64, device=self.device)
        if own["s"] > 100 and self.trial.form != COMPLEX:
            some = x.view(-1)[:: x.numel() // 30]
            some.copy_(torch.tensor(_SPECIAL, dtype=x.dtype).repeat(9)[: len(some)])
        x, memory = x.to(dtype), self.bits.memory
        if len(letters) < 3 or memory == _CONTIGUOUS:
            return x
        if memory == _APART:
            return x.mT.contiguous().mT
        wide = torch.cat((x, x), -1) if memory == _GAPS else x
        return wide.transpose(-3, -2).contiguous().transpose(-3, -2)[..., : x.shape[-1]]

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

    @functools.cached_property
    def wanted(self) -> tuple[Any, Any, Any]:
        """The tensors that get gradients, the gradients of results, and those that the function then has."""
        leaves = [t for t in (*self.xs, self.cos, self.sin) if t.requires_grad]
        grads = [torch.randn_like(y) for y in self.ys]
        return leaves, grads, torch.autograd.grad(self.ys, leaves, grads, allow_unused=True)

    def arithmetic(self, place: Place, rows: list[Arithmetic]) -> Arithmetic | None:
        """The first row with the function's bits, or one whose gradients alone differ; None if there is none."""
        nearest = None
        if not self.ys:
            return None
        both = zip(self.ys, self.wanted[2] if self.bits.learns else self.ys)
        dense = [(y.is_contiguous(), g is not None and g.is_contiguous()) for y, g in both]
        dense += [(False, False)] * (3 - len(dense))
        for row in rows:
            tried = row._replace(result=self.ys[0].dtype, dense=tuple(dense))
            if (seen := self._compared(place, tried)) is not None:
                nearest = seen
                if seen.gradients:
                    break
        return nearest

    def _compared(self, place: Place, row: Arithmetic) -> Arithmetic | None:
        """A row, and which gradients have the function's bits too; None if results have not."""
        mine = self.turned(place, row)
        if mine is None or not all(map(_alike, mine, self.ys)):
            return None
        if not self.bits.learns:
            return row
        leaves, grads, wanted = self.wanted
        found = torch.autograd.grad(mine, leaves, grads, allow_unused=True)
        same = [a is not None and b is not None and _alike(a, b) for a, b in zip(found, wanted)]
        count = len(self.xs)
        return row._replace(gradients=all(same[:count]), tables=len(same) > count and all(same))


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
    known = _kinds.roles(function, method, given)
    if known is None:
        return None
    kind = Kind(known, device)
    # Without functions of tensor subclasses and of modes, such as `with torch.device("meta")`, which take time.
    with undisturbed(device), torch.enable_grad(), torch._C.DisableTorchFunction():
        torch.manual_seed(0)
        tried = []
        for name in known.options:
            default = known.defaults.get(name)
            values = (default, not default) if isinstance(default, bool) else _kinds.OPTIONS[name]
            tried.append(dict.fromkeys(values if default is None else (default, *values)))
        for options in itertools.product(*tried):
            _search(kind, options, functools.partial(_Probe, function, kind, options))
    return kind if kind.forms else None


def _search(kind: Kind, options: tuple[Any, ...], probe_of: Any) -> None:
    """Find what a function computes with some values of its options.

    Args:
        probe_of: makes a probe of it from a trial and a comparison.
    """
    for form, row in FORMS.items():
        if row.read is None or (form == COS_SIN) != (len(kind.roles.tables) == 2):
            continue
        tried: dict[Any, list[_Probe]] = {}
        for trial in _trials(kind.roles, options, form):
            for sizes in (_SIZES, *_ALIKE):
                probe = probe_of(trial, _Bits(sizes=sizes))
                if not probe.ys:
                    break
                tried.setdefault((options, *shape_of(probe.xs, probe.cos)), []).append(probe)
        turns = [*_kinds.TURNS]  # those that were found come first
        found = {key: place for key, each in tried.items() if (place := _place(each, turns))}
        if found:
            kind.forms[options] = form
            kind.places |= found
            # A function that takes one head for another dimension shows its roundings in other shapes.
            for key in found:
                _round(kind, options, functools.partial(probe_of, tried[key][0].trial))
                if kind.arithmetics:
                    return
            return


def _trials(known: Roles, options: tuple[Any, ...], form: str) -> Iterator[_Trial]:
    asked = dict(zip(known.options, options)).get("unsqueeze_dim")
    for shape, part in itertools.product(_kinds.SHAPES, (1, 2, 4)):
        places = [None, -2, -3]
        if asked is not None:
            places = [asked - len(shape.table) - 1 if asked >= 0 else asked]
        for place in [each for each in places if _kinds.fits(shape, each)][:1]:
            yield from (_Trial(form, shape, part, place, n) for n in {len(known.xs), 1})


def _place(probes: list[_Probe], turns: list[Turn]) -> Place | None:
    """The way to serve calls of one shape; None if no row of TURNS has the values of all that were tried."""
    leading_first = sorted(probes, key=lambda probe: "S" not in probe.trial.shape.x)
    for probe, turn in itertools.product(leading_first, turns):
        x, at = probe.trial.shape.x, probe.trial.unsqueeze
        place = Place(turn, at, probe.single, "S" in x, x.startswith("sb"), x.endswith("f"))
        if probe.agrees(place) and all(each.agrees(place) is not False for each in probes):
            turns.insert(0, turn)
            return place
    return None


def _round(kind: Kind, options: tuple[Any, ...], probe_of: Any) -> None:
    """Find where results round for all dtypes, and confirm it at sizes, strides and values that were not tried."""
    found, fixed = kind.arithmetics, kind.roles.rounding(options)
    if any(key[0] == fixed for key in found):
        return
    narrow = FORMS[kind.forms[options]].narrow
    for bits in _COMPARED:
        own, table = bits.dtypes
        known, shown = found.get((fixed, own, table)), found.get((fixed, _F32, table))
        if bits.sizes is not _SIZES:
            if known is None:
                continue
        elif (own != _F32 and shown is None) or not (narrow or table in FLOATING[:2]):
            continue  # results of 16 bits do not show every rounding
        probe = probe_of(bits)
        place = kind.places.get((options, *shape_of(probe.xs, probe.cos)))
        if place is None:
            continue
        rows = [row for row in _kinds.ARITHMETICS if known is None or row[:2] == known[:2]]
        if shown is not None and shown.cast == "float64" and own.itemsize == 2:
            rows = [row for row in rows if row.cast == "float64"]
        seen = probe.arithmetic(place, rows)
        if known is not None and kind.is_complex:  # its last bit depends on the size
            seen = known if probe.ys and probe.agrees(place) else None
        if bits.memory == _APART:
            kind.apart = kind.apart and seen is not None and seen.gradients
            continue
        if known is not None and seen is not None:
            both = known.gradients and seen.gradients, known.tables and seen.tables
            seen = known._replace(gradients=both[0], tables=both[1])
        found.pop((fixed, own, table), None)
        if seen is not None:
            found[fixed, own, table] = seen
