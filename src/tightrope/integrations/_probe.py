"""Calls of an unknown rotary function with random tensors, and the comparison of their results."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch

from ..forms import HALF, Arrangement, Call, Rotation, candidates, plain
from ._candidate import Bits
from ._replace import fused, tables_inside

# No two tables of different shapes have equally many entries, so a view cannot take one for the other.
BATCH, HEADS, TOKENS, CHANNELS = 3, 2, 5, 16
# The number of heads of all tensors but the first.
KEY_HEADS = 4
_SIZES = {"rows": BATCH, "heads": HEADS, "tokens": TOKENS, "channels": CHANNELS}

# Bound for float32 inputs; a wrong candidate is off by as much as the values themselves.
CLOSE = 2e-5
# Bounds for several roundings, to 8 and to 11 significant bits, of values near 10.
COARSE = {torch.bfloat16: 0.2, torch.float16: 0.03}


# --- why a function is not recognised ---


class Unlike(Exception):
    """The function matches no candidate; the message is the reason."""


NO_CALL = "it does not run on tensors of any usual shape"
READS = "it reads attributes of its object, which may differ between objects"
KEEPS = "it keeps state between calls"
COMPILED = (
    "torch.compile made it or a function that it calls, so its bits are not those of eager code"
)
NO_MATCH = "it matches no known rotation"
UNEVEN = "it matches a known rotation at some shapes or widths and none at others"
AMBIGUOUS = "the axis at which it unsqueezes cos/sin is ambiguous"
WRITES = "it writes to its arguments"
RANDOM = "two equal calls give different results"
RAISES = "it raises an error for some strides of x, or where gradients are needed"
CLASS = "it is a method of the class itself, which patch does not replace"
REFUSES = "it raises an error for some dtypes of x and cos/sin"
DTYPES = (
    "the dtype of its results is neither that of x, nor the one that x and cos/sin promote to, nor always "
    "the same"
)
VALUES = (
    "it matches a known rotation on some inputs but not on all that were tried, such as 300 tokens, 128 "
    "channels, large values, NaN and infinity"
)
CONTAINER = "it returns neither one tensor for one tensor nor a tuple for several"
GRADIENTS = "its gradients are not those of the rotation it computes"
RANK = (
    NO_CALL,
    READS,
    NO_MATCH,
    UNEVEN,
    AMBIGUOUS,
    WRITES,
    RANDOM,
    RAISES,
    REFUSES,
    DTYPES,
    VALUES,
    CONTAINER,
    GRADIENTS,
)


class Unknown:
    """An object of which only some methods are known, as the self of a method; it notes that the method reads more.

    Attributes:
        is_read: whether it read anything else.
    """

    __slots__ = ("_known_methods", "is_read")

    def __init__(self, methods: Mapping[str, Any]) -> None:
        self._known_methods, self.is_read = methods, False

    def __getattr__(self, name: str) -> Any:
        known = self._known_methods.get(name)
        if known is None:
            self.is_read = True
            raise AttributeError(name)
        return known.__func__ if isinstance(known, staticmethod) else MethodType(known, self)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() reads it
        self.is_read = True
        return Unknown

    def __hash__(self) -> int:  # so does a set or a dict of objects
        self.is_read = True
        return 0

    def __eq__(self, other: object) -> bool:
        self.is_read = True
        return False


class Caller:
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
            return fitting(width)
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


@functools.lru_cache
def fitting(width: int) -> tuple[Rotation, ...]:
    """Every rotation of CHANNELS channels by tables of a width."""
    return tuple(each for each in candidates() if each.fits(CHANNELS, width))


class _StandIn:
    """The owner of a method, with the head count and head size of a probe."""

    __slots__ = ("_channels", "_heads", "_owner")

    def __init__(self, owner: object, heads: int, channels: int) -> None:
        self._owner, self._heads, self._channels = owner, heads, channels

    def __getattr__(self, name: str) -> Any:
        if re.fullmatch(r"n(um)?_(attention_)?heads", name):
            return self._heads
        return self._channels if name in ("head_size", "head_dim") else getattr(self._owner, name)


class Probe:
    """Random tensors for a call, with a different size for each dimension."""

    def __init__(
        self,
        caller: Caller,
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
                raise Unlike(NO_CALL) from error
            if tables is None:
                raise Unlike(NO_MATCH)
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

    def copied(self) -> Probe:
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
        bound: float = CLOSE,
        count: int | None = None,
    ) -> bool:
        """Return True if ``ys`` are the rotated xs, or the first ``count`` of them."""
        xs = list(self.xs.values())[:count]
        try:
            return len(ys) == len(xs) and all(
                agrees(y, self.expected(x, rotation), bound) for y, x in zip(ys, xs)
            )
        except RuntimeError:  # these tables do not broadcast
            return False


Make = Callable[..., Probe]


def _could_be(y: object, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(y, torch.Tensor) and y.shape == x.shape and y.is_floating_point()


def agrees(y: object, expected: torch.Tensor, bound: float = CLOSE) -> bool:
    if not _could_be(y, expected):
        return False
    bound = max(bound, 2 * torch.finfo(y.dtype).eps)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((y.double() - expected).abs() <= bound * scale).all())


def equal(ys: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    pairs = zip(ys, others, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def key_of(shape: Arrangement) -> tuple[int, int, int | None, int | None]:
    return len(shape.x), len(shape.table), shape.unsqueeze_dim, shape.place


def permuted(x: torch.Tensor, outer: int = 0) -> torch.Tensor:
    """The same values in a memory in which tokens or heads lie further out than another dimension.

    By default that dimension is the batch. With -3, it is that of heads or tokens, as in a projection
    that was split into heads and transposed.
    """
    return x.detach().transpose(outer, -2).contiguous().transpose(outer, -2)
