"""Recognise what a rotary function computes, by calling it on random tensors."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..forms import (
    HALF,
    INTERLEAVED,
    Arrangement,
    Call,
    Rotation,
    calls_of,
    candidates,
    plain,
    signature,
    unwrapped,
)
from ._candidate import Bits, Candidate
from ._find import global_names, passes_on
from ._run import fused, tables_inside
from ._state import State

# No two tables of different shapes have equally many entries, so a view cannot take one for the other.
BATCH, HEADS, TOKENS, CHANNELS = 3, 2, 5, 16
# The number of heads of all tensors but the first.
KEY_HEADS = 4
_SIZES = {"rows": BATCH, "heads": HEADS, "tokens": TOKENS, "channels": CHANNELS}

# Bound for float32 inputs; a wrong candidate is off by as much as the values themselves.
_CLOSE = 2e-5
# Torch's own operations never fuse multiply-adds, so no function made of them rounds "once".
_ROUNDINGS = ("each", "wide")
# Bounds for several roundings, to 8 and to 11 significant bits, of values near 10.
_COARSE = {torch.bfloat16: 0.2, torch.float16: 0.03}


@dataclass(frozen=True)
class Recognition:
    """The result of :func:`recognise`: a candidate, or None and the reason."""

    candidate: Candidate | None
    reason: str

    def __bool__(self) -> bool:
        return self.candidate is not None


class _Unlike(Exception):
    """The function matches no candidate; the message is the reason."""


def recognise(
    function: Any, owner: object = None, constants: Sequence[tuple[str, Any]] = ()
) -> Recognition:
    """Recognise which rotation a function computes, by calling it on random tensors.

    The function is compared with every pairing, output order, slice, sign and reading of cos/sin, at
    several shapes, widths and dtypes, in values and gradients. The two halves of the random cos/sin
    are unrelated. Parameter names only decide which argument is tried in which role.

    Args:
        function: a rotary function or method, or a module whose forward is one.
        owner: the object to pass as self to a method.
        constants: keyword arguments that every call passes, as (name, value), if the function computes
            several rotations: it is then recognised only with these.

    Returns:
        The one candidate that matches everywhere, or None and the reason.

    >>> def turn(x, cos, sin):
    ...     u, v = x.chunk(2, -1)
    ...     return x * cos + torch.cat((-v, u), -1) * sin
    >>> print(recognise(turn).candidate.rotation)
    rotate_half on all channels, cos/sin of full width
    >>> recognise(lambda x, cos, sin: x * cos + x * sin).reason
    'it matches no known rotation'
    """
    seen = signature(function)
    if seen is None:
        return Recognition(None, "its signature cannot be read")
    given = dict(constants)
    ways: list[dict[str, Any]] = []
    for call in calls_of(function, method=owner is not None):
        if given.keys() & {each.name for each in call.arguments}:
            continue
        if call.form.takes_tables:
            ways += [{"call": call, "channels_first": first} for first in (False, True)]
        elif call.makes_its_tables:
            ways += [{"call": call, "inside": pairs} for pairs in (HALF, INTERLEAVED)]
    if not ways:
        names = ", ".join(seen.parameters)
        return Recognition(
            None, f"its arguments ({names}) are not those of a rotation by given cos/sin"
        )
    found: list[Candidate] = []
    reasons: list[str] = []
    state = State(function)
    if state.compiled:
        return Recognition(None, _COMPILED)
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),  # as while a model is loaded under FakeTensorMode
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for way in ways:
            mine = _Unknown() if owner is _Unknown else owner
            try:
                explained = _explain(_Caller(function, owner=mine, constants=given, **way))
            except _Unlike as unlike:
                explained = []
                reasons.append(str(unlike))
            if type(mine) is _Unknown and mine.is_read:
                explained = []
                reasons.append(_READS)
            found += explained
    if state.restore() and found:
        return Recognition(None, _KEEPS)
    if len(found) == 1:
        return Recognition(found[0], "matches exactly one known rotation")
    if found:
        return Recognition(
            None, f"matches {len(found)} known rotations: {'; '.join(map(str, found))}"
        )
    # Report the reason of the call that passed the most checks.
    return Recognition(None, max(reasons, key=_RANK.index) if reasons else _RANK[0])


def to_the_bit(recognition: Recognition) -> Recognition:
    """Refuse a function whose bits the operator cannot equal for any dtype."""
    candidate = recognition.candidate
    if candidate is None or candidate.bits:
        return recognition
    return Recognition(
        None, f"it computes {candidate}, but not to the bit; rounding='once' replaces it"
    )


def recognise_member(
    value: Any, method: bool, constants: Sequence[tuple[str, Any]] = ()
) -> Recognition:
    """Recognise what `patch` finds in a module or a class: a function, a static method or a method.

    All objects of a class and of its subclasses share one replacement, so a method that reads attributes
    of its object, other methods included, is not recognised. Only the number and the size of heads may be
    read, if x is (batch, seq, heads * dim).
    """
    if not method:
        plain = value.__func__ if isinstance(value, staticmethod) else value
        return recognise(plain, constants=constants)
    function: Any = unwrapped(value)
    tried = recognise(function, _Unknown, constants)
    readers = State(function).functions if passes_on(function) else [function]
    if tried and any(_READERS & global_names(each.__code__) for each in readers):
        return Recognition(None, _READS)
    return tried


# Builtins by which a function can read its object without asking it for an attribute.
_READERS = {"type", "super", "vars"}


class _Unknown:
    """An object of which nothing is known, as the self of a method; it notes that the method reads it."""

    __slots__ = ("is_read",)

    def __init__(self) -> None:
        self.is_read = False

    def __getattr__(self, name: str) -> Any:
        self.is_read = True
        raise AttributeError(name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() reads it
        self.is_read = True
        return _Unknown


_NO_CALL = "it does not run on tensors of any usual shape"
_READS = "it reads attributes of its object, which may differ between objects"
_KEEPS = "it keeps state between calls"
_COMPILED = (
    "torch.compile made it or a function that it calls, so its bits are not those of eager code"
)
_NO_MATCH = "it matches no known rotation"
_UNEVEN = "it matches a known rotation at some shapes or widths and none at others"
_AMBIGUOUS = "the axis at which it unsqueezes cos/sin is ambiguous"
_WRITES = "it writes to its arguments"
_RANDOM = "two equal calls give different results"
_REFUSES = "it raises an error for some dtypes of x and cos/sin"
_DTYPES = (
    "the dtype of its results is neither that of x, nor the one that x and cos/sin promote to, nor always "
    "the same"
)
_VALUES = (
    "it matches a known rotation on some inputs but not on all that were tried, such as 300 tokens, 128 "
    "channels, large values, NaN and infinity"
)
_CONTAINER = "it returns neither one tensor for one tensor nor a tuple for several"
_GRADIENTS = "its gradients are not those of the rotation it computes"
_RANK = (
    _NO_CALL, _READS, _NO_MATCH, _UNEVEN, _AMBIGUOUS, _WRITES, _RANDOM, _REFUSES, _DTYPES, _VALUES,
    _CONTAINER, _GRADIENTS,
)  # fmt: skip


class _Caller:
    """A function and one way to call it.

    Attributes:
        channels_first: whether to exchange the last two dimensions of x before a call, and those of the
            results after it.
        inside: the pairing by which to read tables off the results, if the function makes them itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: Call,
        owner: object,
        constants: Mapping[str, Any],
        channels_first: bool = False,
        inside: str | None = None,
    ) -> None:
        self.function, self.call, self.owner, self.constants = function, call, owner, constants
        self.channels_first, self.inside = channels_first, inside
        self.unsqueeze_dim = call.parameter("unsqueeze_dim")
        self.positions = None if inside else call.parameter("positions")

    def fitting(self, width: int) -> tuple[Rotation, ...]:
        """The rotations to compare with, for tables of a width."""
        if self.inside is None:
            return _fitting(width)
        reading = "cat" if self.inside == HALF else "repeat"
        return (Rotation(self.inside, self.inside, reading, "first", 1),)

    def arrangements(self) -> list[Arrangement]:
        """The layouts of x and tables to try; those with ``broadcasts`` come last."""
        if self.inside:
            return [Arrangement(x, t, None, True) for x, t in (("bhsd", "11sd"), ("bshd", "1s1d"))]
        by_parameter = self.unsqueeze_dim is not None
        every = self.call.form.arrangements
        if self.channels_first:
            every = tuple(e for e in every if e.x == "bhsd" and not (e.place or e.broadcasts))
        fitting = [each for each in every if (each.unsqueeze_dim is not None) == by_parameter]
        if self.positions:
            # The function indexes tables (rows, width) by position, so no axis of size 1 is needed.
            return [each for each in fitting if "1" not in each.table]
        return fitting


class _StandIn:
    """The owner of a method, with the head count and head size of a probe."""

    __slots__ = ("_channels", "_heads", "_owner")

    def __init__(self, owner: object, heads: int, channels: int) -> None:
        self._owner, self._heads, self._channels = owner, heads, channels

    def __getattr__(self, name: str) -> Any:
        if re.fullmatch(r"n(um)?_(attention_)?heads", name):
            return self._heads
        return self._channels if name in ("head_size", "head_dim") else getattr(self._owner, name)


class _Probe:
    """Random tensors for a call, with a different size for each dimension."""

    def __init__(
        self,
        caller: _Caller,
        shape: Arrangement,
        width: int,
        *,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype = torch.float32,
        **sizes: int,
    ) -> None:
        """Draw the tensors; ``sizes`` replace those of rows, heads, tokens and channels."""
        rows, heads, tokens, channels = ({**_SIZES, **sizes}[name] for name in _SIZES)
        size = {"b": rows, "h": heads, "s": tokens, "1": 1, "d": channels}
        self.caller, self.shape = caller, shape
        self.xs: dict[str, torch.Tensor] = {}
        for name in caller.call.rotated:
            x = torch.randn([size[letter] for letter in shape.x], device="cpu")
            self.xs[name] = (x * scale).to(dtype)
            if "h" not in shape.table:
                size["h"] = KEY_HEADS
        size |= {"h": heads, "d": width}
        table = [size[letter] for letter in shape.table][-2 if caller.positions else 0 :]
        cos, sin = (torch.randn(table, device="cpu") for _ in range(2))
        if caller.call.form.unit:
            cos, sin = cos.cos(), cos.sin()
        if (form := caller.call.form).grids and form.read is not None:
            cos, sin = form.read(*form.built(cos, sin))
        self.cos, self.sin = cos.to(table_dtype), sin.to(table_dtype)
        self.ids = torch.randint(0, 50, (tokens,), device="cpu")
        if caller.inside:
            try:
                tables = self.tables()
            except Exception as error:  # third-party code can raise anything
                raise _Unlike(_NO_CALL) from error
            if tables is None:
                raise _Unlike(_NO_MATCH)
            self.cos, self.sin = tables
        self.container: type | None = None  # of the result of the last run

    def angles(self) -> dict[str, Any]:
        """The arguments from which the tables follow."""
        call = self.caller.call
        if self.caller.inside:
            return {str(call.parameter("positions")): self.ids}
        return call.build(self.cos, self.sin)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines, read as in a replacement: angles do not keep their bits."""
        caller, given = self.caller, self.angles()
        if not caller.inside:
            return caller.call.read(given)
        (name,) = self.xs
        selves = () if caller.owner is None else (caller.owner,)
        made = functools.partial(caller.function, *selves)
        given |= {**self.xs, **caller.constants}
        return tables_inside(made, given, name, caller.inside, self.shape.x == "bshd")

    def copied(self) -> _Probe:
        """The same probe for a function that may write to its arguments."""
        made = copy.copy(self)
        made.xs = {name: x.clone() for name, x in self.xs.items()}
        made.cos, made.sin = self.cos.clone(), self.sin.clone()
        return made

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that the function is called with."""
        return [*self.xs.values(), self.cos, self.sin]

    def run(self, other: Mapping[str, Any] | None = None) -> list[torch.Tensor | None]:
        """Call the function and return its results in order; its errors are not caught.

        ``other`` arguments are added, or replace those of the probe.
        """
        caller, owner = self.caller, self.caller.owner
        arguments: dict[str, Any] = {**self.xs, **(other or {})}
        flat = caller.call.form.flat
        if flat:
            shape = next(iter(arguments.values())).shape
            arguments = {name: x.flatten(2) for name, x in arguments.items()}
            owner = _StandIn(owner, *shape[-2:])
        arguments |= self.angles() | dict(caller.constants)
        if caller.channels_first:
            turned = {n: arguments[n].mT for n in caller.call.rotated if arguments[n] is not None}
            arguments |= turned
        if caller.unsqueeze_dim:
            arguments[caller.unsqueeze_dim] = self.shape.unsqueeze_dim
        if caller.positions:
            arguments[caller.positions] = torch.arange(self.cos.shape[-2], device="cpu")[None]
        selves = () if owner is None else (owner,)
        with torch.device("cpu"):  # for tensors that the function makes
            result = caller.function(*selves, **arguments)
        self.container = type(result)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if caller.channels_first:
            return [None if y is None else y.mT for y in results]
        return [y.unflatten(-1, shape[-2:]) for y in results] if flat else results

    def tried(self, other: Mapping[str, Any] | None = None) -> list[torch.Tensor | None] | None:
        """Call the function like :meth:`run`; None if it raises."""
        try:
            return self.run(other)
        except Exception:  # noqa: BLE001  # third-party code can raise anything
            return None

    def expected(
        self, x: torch.Tensor, rotation: Rotation, rows: int | None = None
    ) -> torch.Tensor:
        """Rotate one x, by the last ``rows`` rows of the tables if given."""
        cos, sin = (t if rows is None else t[..., -rows:, :] for t in (self.cos, self.sin))
        if (place := self.shape.place) is not None:
            cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
        return plain(x.double(), cos.double(), sin.double(), rotation)

    def fused(
        self, which: int, rotation: Rotation, dtype: torch.dtype, bits: Bits
    ) -> torch.Tensor | None:
        """Rotate one of the xs by the operator; None if the operator refuses these tensors."""
        x, tables = list(self.xs.values())[which], self.tables()
        if tables is None:
            return None
        cos, sin = tables
        if (place := self.shape.place) is not None:
            cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
        return fused(x, cos, sin, rotation, dtype, bits, which)

    def could_be(self, ys: Sequence[object]) -> bool:
        """Return True if ``ys`` have the kinds and shapes of rotated xs."""
        return len(ys) == len(self.xs) and all(map(_could_be, ys, self.xs.values()))

    def agrees(
        self,
        ys: list[torch.Tensor | None],
        rotation: Rotation,
        bound: float = _CLOSE,
        count: int | None = None,
    ) -> bool:
        """Return True if ``ys`` are the rotated xs, or the first ``count`` of them."""
        xs = list(self.xs.values())[:count]
        try:
            return len(ys) == len(xs) and all(
                _agrees(y, self.expected(x, rotation), bound) for y, x in zip(ys, xs)
            )
        except RuntimeError:  # these tables do not broadcast
            return False


_Make = Callable[..., _Probe]


def _could_be(y: object, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(y, torch.Tensor) and y.shape == x.shape and y.is_floating_point()


def _agrees(y: object, expected: torch.Tensor, bound: float = _CLOSE) -> bool:
    if not _could_be(y, expected):
        return False
    bound = max(bound, 2 * torch.finfo(y.dtype).eps)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((y.double() - expected).abs() <= bound * scale).all())


def _equal(ys: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    pairs = zip(ys, others, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def _key(shape: Arrangement) -> tuple[int, int, int | None, int | None]:
    return len(shape.x), len(shape.table), shape.unsqueeze_dim, shape.place


def _explain(caller: _Caller) -> list[Candidate]:
    """The candidates that match a function, called in one way."""
    alive: list[Rotation] | None = None
    verified: list[Arrangement] = []
    # Layouts at which the function runs but matches nothing, except those with ``broadcasts``: their
    # tables have one row and do not show how rows are used.
    refused: set[tuple[int, int, int | None, int | None]] = set()
    partial = ran = False
    for shape in caller.arrangements():
        known = {_key(each)[:3] for each in verified if not each.broadcasts}
        if shape.broadcasts and len(shape.table) == 3 and _key(shape)[:3] in known:
            continue
        matches = _at(caller, shape, alive)
        ran |= bool(matches)
        if not any(matches.values()):
            if matches and not shape.broadcasts:
                refused.add(_key(shape))
            continue
        if not all(matches.values()):
            raise _Unlike(_UNEVEN)
        for width, rotations in matches.items():
            alive = rotations if alive is None else [r for r in alive if r in rotations]
            partial |= any(not replace(r, slice="whole").fits(CHANNELS, width) for r in rotations)
        verified.append(shape)
    if alive is None:
        raise _Unlike(_NO_MATCH if ran else _NO_CALL)
    if not partial:
        alive = list(dict.fromkeys(replace(r, slice="whole") for r in alive))
    keys = frozenset(_key(shape) for shape in verified if not shape.broadcasts)
    if not alive or (keys and keys <= refused):
        raise _Unlike(_UNEVEN)
    # Calls with ranks of which some layouts match nothing run the original.
    keys -= refused
    verified = [shape for shape in verified if shape.broadcasts or _key(shape) in keys]
    if len({key[:3] for key in keys}) != len(keys):
        raise _Unlike(_AMBIGUOUS)
    seen = frozenset(shape.table for shape in verified if shape.broadcasts)
    made = [Candidate(caller.call, rotation, keys, seen) for rotation in alive]
    return [_confirm(caller, candidate, verified) for candidate in made]


@functools.lru_cache
def _fitting(width: int) -> tuple[Rotation, ...]:
    """Every rotation of CHANNELS channels by tables of a width."""
    return tuple(each for each in candidates() if each.fits(CHANNELS, width))


def _at(
    caller: _Caller, shape: Arrangement, alive: list[Rotation] | None
) -> dict[int, list[Rotation]]:
    """For each width of tables that the function accepts: the rotations that match it."""
    matches: dict[int, list[Rotation]] = {}
    for width in (CHANNELS,) if caller.inside else (CHANNELS, CHANNELS // 2, CHANNELS // 4):
        try:
            probe = _Probe(caller, shape, width)
        except _Unlike:  # a function that makes its tables gives none
            continue
        if (ys := probe.copied().tried()) is not None:
            fitting = caller.fitting(width) if alive is None else alive
            matches[width] = [
                rotation
                for rotation in (fitting if probe.could_be(ys) else ())
                if rotation.fits(CHANNELS, width) and probe.agrees(ys, rotation)
            ]
        if matches.get(width):
            # A function can take a layout for another one, and slice the heads as if they were tokens.
            single = _Probe(caller, shape, width, tokens=1)
            ys = single.copied().tried() or []
            matches[width] = [each for each in matches[width] if single.agrees(ys, each)]
    return matches


def _confirm(caller: _Caller, candidate: Candidate, shapes: list[Arrangement]) -> Candidate:
    """Check a candidate at further sizes, dtypes, strides and gradients; fill in its options."""
    rotation = candidate.rotation
    width = CHANNELS // 2 if rotation.reading == "half" else CHANNELS
    several: tuple[dict[str, Any], ...] = (
        {"tokens": 1, "channels": 16},
        {"tokens": 5, "channels": 8, "scale": 100.0},
        {"tokens": 67, "channels": 64},
        {"tokens": 12, "channels": 16, "rows": 1, "scale": 5000.0},
        {"tokens": 300, "channels": 128, "rows": 1, "heads": 24},
        {"tokens": 0, "channels": 16},
    )
    for sizes in several:
        tokens, channels = sizes["tokens"], sizes["channels"]
        for shape in shapes if tokens == 1 else shapes[:1]:
            try:
                probe = _Probe(caller, shape, channels * width // CHANNELS, **sizes)
            except _Unlike:
                if tokens == 0:
                    continue
                raise
            before = [t.clone() for t in probe.tensors()]
            ys, again = probe.tried(), probe.tried()
            if tokens == 0 and (ys is None or again is None):
                continue
            if ys is not None and not all(map(torch.equal, probe.tensors(), before)):
                raise _Unlike(_WRITES)
            if ys is None or again is None or not probe.agrees(ys, rotation):
                raise _Unlike(_VALUES)
            if not _equal(ys, again):
                raise _Unlike(_RANDOM)
    make = functools.partial(_Probe, caller, shapes[0], width)
    _check_strides(make(), rotation)
    _check_container(make())
    _check_gradients(make(), rotation)
    _check_nan(make(), rotation)
    dtype = _dtype(make, rotation)
    bits = _all_bits(caller, shapes[0], rotation, dtype)
    ones = set(candidate.ones)
    for shape in shapes:
        # Gradients of tables sum in another order, so calls that need them run the original.
        if shape.table == "s11d" and not _alike_bits(
            _all_bits(caller, shape, rotation, dtype), bits
        ):
            ones.discard(shape.table)
    return replace(
        candidate,
        ones=frozenset(ones),
        ignored=_ignored(make),
        dtype=dtype,
        tokens=_uneven_tokens(make, rotation),
        excluded=_excluded(make, rotation),
        repeats=_repeats(make, rotation),
        alone=_alone(make(), rotation),
        trailing=_trailing(make(), rotation),
        bits=bits,
        channels_first=caller.channels_first,
        constants=tuple(caller.constants.items()),
        folds=_folds(make(), candidate, rotation, dtype, bits),
    )


def _folds(
    probe: _Probe,
    candidate: Candidate,
    rotation: Rotation,
    result: str | torch.dtype,
    bits: tuple[tuple[torch.dtype, torch.dtype, Bits], ...],
) -> bool:
    """Return whether x may have six dimensions, with tables of six that vary along one of them."""
    call = candidate.call
    usual = (4, 4, None, None) in candidate.shapes and not (probe.caller.inside or call.form.flat)
    if not bits or not usual or len(call.rotated) != 1 or probe.caller.channels_first:
        return False
    made, sizes = replace(candidate, dtype=result), (2, 3, 4, 5, 2)
    width = probe.cos.shape[-1]
    for (dtype, table_dtype, choices), along in itertools.product(bits, (1, 2, 3)):
        probe = copy.copy(probe)
        x = torch.randn((*sizes, CHANNELS), device="cpu").to(dtype)
        shape = [size if dim == along else 1 for dim, size in enumerate(sizes)]
        probe.cos, probe.sin = torch.randn((2, *shape, width), device="cpu").to(table_dtype)
        probe.xs = dict.fromkeys(probe.xs, x)
        dtype = made.result_dtype(dtype, table_dtype)
        mine = fused(x, probe.cos, probe.sin, rotation, dtype, choices, 0)
        ys = probe.tried() or []
        if mine is None or len(ys) != 1 or not isinstance(y := ys[0], torch.Tensor):
            return False
        if not torch.equal(y, mine) or y.stride() != mine.stride():
            return False
    return True


def _all_bits(
    caller: _Caller, shape: Arrangement, rotation: Rotation, result: str | torch.dtype
) -> tuple[tuple[torch.dtype, torch.dtype, Bits], ...]:
    """``Candidate.bits``: where the function rounds for each pair of dtypes, and its strides."""
    f32, f64, narrow = torch.float32, torch.float64, (torch.bfloat16, torch.float16)
    dtypes = ((f32, f32), *itertools.product((f32, *narrow), narrow), *((x, f32) for x in narrow))
    found = []
    if not caller.call.form.narrow:
        dtypes = tuple((x, table) for x in (f32, *narrow) for table in (f32, f64))
    # Results of 16 bits cannot show whether arithmetic is in float64, but those of a float32 x can: the
    # dtypes of the tables for which they are, and for which they are not.
    shown: dict[torch.dtype, bool] = {}
    # The operator reads float64 tables in full only for a float64 x. Results that are always of 16 bits
    # show the roundings of float32 only in one of many thousand entries, and those of float64 never.
    hidden = result in narrow
    for dtype, table_dtype in (*dtypes, *(() if hidden else ((f64, f64), (f64, f32)))):
        if dtype in narrow and table_dtype == f64 and f64 not in shown:
            continue
        casts = ["", "tables"] if dtype != table_dtype else [""]
        if dtype == f32:
            casts.append("float64")
        elif dtype in narrow and shown.get(table_dtype):
            casts = ["float64"]
        width = 32 if rotation.reading == "half" else 64
        # Results may have other strides if channels pass through.
        widths = (width,) if rotation.slice == "whole" else (width, width // 2)
        sizes: dict[str, Any] = {
            "tokens": 4001 if hidden and dtype == f32 else 67,
            "channels": 64,
            "dtype": dtype,
            "table_dtype": table_dtype,
        }
        probes = [_Probe(caller, shape, each, **sizes) for each in widths]
        if caller.inside and probes[0].cos.dtype != table_dtype:
            continue
        for cast, by_batch in itertools.product(casts, (False, True)):
            tried = [_bits(probe, rotation, cast, by_batch) for probe in probes]
            every = [bits for bits in tried if bits is not None]
            learns = all(bits.tables for bits in every)
            alike = {bits._replace(tables=learns) for bits in every}
            if len(every) == len(tried) and len(alike) == 1:
                found.append((dtype, table_dtype, alike.pop()))
                if dtype == f32:
                    shown[table_dtype] = cast == "float64"
                break
        if not found:
            # If float32 differs, equal bits in 16-bit dtypes prove nothing: the more precise
            # arithmetic of the operator changes too few 16-bit results for a probe to notice.
            return ()
    return tuple(found)


_AllBits = tuple[tuple[torch.dtype, torch.dtype, Bits], ...]


def _alike_bits(one: _AllBits, other: _AllBits) -> bool:
    """Return whether two results of :func:`_all_bits` agree, except about the tables."""
    kept = [
        [(x, table, bits._replace(tables=True, cast="")) for x, table, bits in each]
        for each in (one, other)
    ]
    return kept[0] == kept[1]


def _bits(probe: _Probe, rotation: Rotation, cast: str, by_batch: bool) -> Bits | None:
    """The choices with which the operator equals a function on one probe; None if none does."""
    probe = probe.copied()
    outer = -3 if by_batch else 0
    xs = [_permuted(x, outer).requires_grad_() for x in probe.xs.values()]
    probe.xs = dict(zip(probe.xs, xs))
    tables = [probe.cos.requires_grad_(), probe.sin.requires_grad_()]
    count, nearest = len(xs), None
    with torch.enable_grad():
        ys = [y for y in probe.tried() or [] if y is not None]
        if len(ys) != count:
            return None
        grads = [_permuted(torch.randn(y.shape, device="cpu").to(y.dtype), outer) for y in ys]
        wanted = torch.autograd.grad(ys, [*xs, *tables], grads, allow_unused=True)
        dense = tuple(
            (y.is_contiguous(), g is not None and g.is_contiguous()) for y, g in zip(ys, wanted)
        )
        for pair in itertools.product(_ROUNDINGS, _ROUNDINGS):
            bits = Bits(pair, dense, cast=cast, by_batch=by_batch)
            mine = [probe.fused(i, rotation, ys[0].dtype, bits) for i in range(count)]
            if not _equal(mine, ys) or not all(map(_alike, mine, ys)):
                continue
            found = torch.autograd.grad(
                [y for y in mine if y is not None], [*xs, *tables], grads, allow_unused=True
            )
            bits = bits._replace(tables=_equal(found[count:], wanted[count:]))
            both = found[:count], wanted[:count]
            if _equal(*both) and all(map(_alike, *both)):
                return bits
            nearest = bits._replace(gradients=False)
        return nearest


def _alike(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same strides, except in dimensions of size 1."""
    if x is None or y is None:
        return x is y
    kept = [dim for dim, size in enumerate(x.shape) if size > 1]
    return [x.stride(dim) for dim in kept] == [y.stride(dim) for dim in kept]


def _permuted(x: torch.Tensor, outer: int = 0) -> torch.Tensor:
    """The same values in a memory in which tokens or heads lie further out than another dimension.

    By default that dimension is the batch. With -3, it is that of heads or tokens, as in a projection
    that was split into heads and transposed.
    """
    return x.detach().transpose(outer, -2).contiguous().transpose(outer, -2)


def _check_strides(probe: _Probe, rotation: Rotation) -> None:
    strided = {name: _permuted(x) for name, x in probe.xs.items()}
    if not probe.agrees(probe.run(strided), rotation):
        raise _Unlike(_VALUES)


def _check_nan(probe: _Probe, rotation: Rotation) -> None:
    """Refuse a function that replaces numbers that are not finite, which hides faults of a model."""
    for x in probe.xs.values():
        x[..., 0], x[..., 1] = torch.nan, torch.inf
    ys = probe.tried() or [None] * len(probe.xs)
    for y, x in zip(ys, probe.xs.values()):
        if y is None or not torch.equal(y.isnan(), probe.expected(x, rotation).isnan()):
            raise _Unlike(_VALUES)


def _check_container(probe: _Probe) -> None:
    """Refuse other containers than those that the replacement returns."""
    probe.run()
    if probe.container is not (tuple if len(probe.xs) > 1 else torch.Tensor):
        raise _Unlike(_CONTAINER)


def _check_gradients(probe: _Probe, rotation: Rotation) -> None:
    leaves = [x.requires_grad_() for x in probe.xs.values()]
    with torch.enable_grad():
        ys = [y for y in probe.run() if y is not None]
        wanted = [probe.expected(x, rotation) for x in leaves]
        weights = [torch.randn(y.shape, device="cpu").to(y.dtype) for y in ys]
        try:
            got = torch.autograd.grad(ys, leaves, weights, allow_unused=True)
        except RuntimeError as error:
            raise _Unlike(_GRADIENTS) from error
        right = torch.autograd.grad(wanted, leaves, [w.double() for w in weights])
    if not all(_agrees(g, r.double()) for g, r in zip(got, right)):
        raise _Unlike(_GRADIENTS)


def _dtype(make: _Make, rotation: Rotation) -> str | torch.dtype:
    """``Candidate.dtype``: how the dtype of results follows from those of the arguments."""
    f32, f64, b16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    found: list[dict[str | torch.dtype, torch.dtype]] = []
    for dtype, table_dtype in (
        *((b16, b16), (b16, f32), (f32, b16), (f16, f32), (f16, f16), (f64, f32), (f32, f64)),
        (f32, f32),
    ):
        probe = make(dtype=dtype, table_dtype=table_dtype)
        if not probe.caller.call.form.narrow and table_dtype not in (f32, f64):
            continue
        ys = probe.tried()
        if ys is None:
            raise _Unlike(_REFUSES)
        kinds = {y.dtype for y in ys if y is not None}
        promoted = torch.promote_types(dtype, table_dtype)
        rules: dict[str | torch.dtype, torch.dtype] = {"x": dtype, "promoted": promoted}
        rules |= {each: each for each in (b16, f16, f32)}
        found.append({rule: kind for rule, kind in rules.items() if kinds == {kind}})
        bound = max(_COARSE.get(each, _CLOSE) for each in (dtype, table_dtype))
        if not probe.agrees(ys, rotation, bound):
            raise _Unlike(_VALUES)
    rules_left = [rule for rule in found[0] if all(rule in each for each in found)]
    if len(rules_left) != 1:
        raise _Unlike(_DTYPES)
    return rules_left[0]


def _ignored(make: _Make) -> frozenset[str]:
    """Parameters with "position" in their names that change no result, such as unused position_ids."""
    caller = make().caller
    seen = signature(caller.function)
    known = {each.name for each in caller.call.arguments}
    ignored = set()
    for name in () if seen is None else seen.parameters:
        if name in known or "position" not in name:
            continue
        probe, ids = make(), torch.randint(0, TOKENS, (BATCH, TOKENS), device="cpu")
        with_ids = probe.tried({name: ids})
        if with_ids is not None and _equal(probe.run(), with_ids):
            ignored.add(name)
    return frozenset(ignored)


def _uneven_tokens(make: _Make, rotation: Rotation) -> str:
    """``Candidate.tokens``: how x with more or fewer tokens than the tables is handled."""
    probe = make()
    if probe.shape.x[-2] != "s":
        return "same"
    for kind, tokens in (("prefix", TOKENS + 2), ("suffix", TOKENS - 2)):
        xs = make(tokens=tokens).xs
        if kind == "suffix":
            xs |= {name: x for i, (name, x) in enumerate(probe.xs.items()) if i}
        ys = probe.tried(xs) or []
        if len(ys) == len(xs) and all(
            _agrees(y, _unevenly(probe, x, rotation)) for y, x in zip(ys, xs.values())
        ):
            return kind
    return "same"


def _excluded(make: _Make, rotation: Rotation) -> str | None:
    """``Candidate.excluded``: the parameter that is the number of keys at the end that pass through."""
    seen = signature(make().caller.function)
    for name, parameter in ({} if seen is None else seen.parameters).items():
        if "exclude" not in name or type(parameter.default) is not int:
            continue
        for probe, key, y in _longer_key(make, TOKENS + 2, {name: 2}):
            turned = probe.expected(key[..., :TOKENS, :], rotation)
            if _agrees(y, torch.cat((turned, key[..., TOKENS:, :].double()), dim=-2)):
                return name
    return None


def _repeats(make: _Make, rotation: Rotation) -> bool:
    """``Candidate.repeats``: whether a longer k takes the tables several times."""
    for probe, key, y in _longer_key(make, 3 * TOKENS):
        turned = [probe.expected(each, rotation) for each in key.split(TOKENS, dim=-2)]
        return _agrees(y, torch.cat(turned, dim=-2))
    return False


def _longer_key(
    make: _Make, tokens: int, given: Mapping[str, Any] | None = None
) -> Iterator[tuple[_Probe, torch.Tensor, torch.Tensor | None]]:
    """Yield a probe, k with another number of tokens and what becomes of it, if the call succeeds."""
    probe = make()
    if len(probe.xs) == 2 and probe.shape.x[-2] == "s":
        name = list(probe.xs)[1]
        key = make(tokens=tokens).xs[name]
        ys = probe.tried({name: key, **(given or {})}) or []
        if len(ys) == 2:
            yield probe, key, ys[1]


def _unevenly(probe: _Probe, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    more = x.shape[-2] - TOKENS
    if more <= 0:
        return probe.expected(x, rotation, x.shape[-2])
    front, back = x[..., :more, :], x[..., more:, :]
    return torch.cat((front.double(), probe.expected(back, rotation)), dim=-2)


def _alone(probe: _Probe, rotation: Rotation) -> str | None:
    """``Candidate.alone``: the result if the second tensor is None."""
    if len(probe.xs) != 2:
        return None
    second = list(probe.xs)[1]
    ys = probe.tried({second: None}) or []
    if not probe.agrees(ys[:1], rotation, count=1):
        return None
    if len(ys) == 1:
        return "one"
    return "pair" if len(ys) == 2 and ys[1] is None else None


def _trailing(probe: _Probe, rotation: Rotation) -> bool:
    """Return True if the function takes None for the tensors after the second."""
    if len(probe.xs) < 3:
        return False
    ys = probe.tried(dict.fromkeys(list(probe.xs)[2:])) or []
    return probe.agrees(ys, rotation, count=2)
