"""The arithmetic of PTX: what each instruction computes from its operands, as the manual defines it.

Operands are arrays; see values.py. An instruction that is not here is an error: so are approximations, whose results
the manual does not define.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.emulator.parse import Fault
from tests.emulator.values import BITS, VIEWS, Array, flushed, fma_narrow, fma_wide


class Meaning(NamedTuple):
    """The meaning of an instruction: what it computes.

    Attributes:
        results, sources: types of the results and of the sources.
        function: returns the result, or a tuple of results, given the sources.
        whole: whether it needs whole warps; then arrays have a row for each warp.
        takes_carry, sets_carry: whether the carry is the last source, and the last result.
        repeats: whether there may be another source, to which the function is applied again.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable[..., Any]
    whole: bool = False
    takes_carry: bool = False
    sets_carry: bool = False
    repeats: bool = False


# --- the table ------------------------------------------------------------------------------------

_TABLE: list[tuple[re.Pattern[str], Callable[..., Meaning]]] = []
Maker = Callable[..., Meaning]


def defines(pattern: str) -> Callable[[Maker], Maker]:
    """Enter a function that returns the meaning of all opcodes that match, given the groups."""

    def enter(make: Maker) -> Maker:
        _TABLE.append((re.compile(pattern), make))
        return make

    return enter


@functools.cache
def meaning_of(opcode: str, count: int) -> Meaning:
    """Return the meaning of an opcode with a number of sources; raise Fault if it is not known."""
    for pattern, make in _TABLE:
        if found := pattern.fullmatch(opcode):
            meaning = make(*found.groups())
            if meaning.repeats and count == 3:
                return same(meaning.results[0], count, twice(meaning.function))
            if len(meaning.sources) != count:
                raise Fault(f"the instruction {opcode} with {count} sources is unknown")
            return meaning
    raise Fault(f"the instruction {opcode} is unknown")


def twice(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b, c: function(function(a, b), c)


def same(kind: str, count: int, function: Callable[..., Any]) -> Meaning:
    return Meaning((kind,), (kind,) * count, function)


def either(ftz: str | None, function: Callable[..., Array]) -> Callable[..., Array]:
    """Return the function; with ".ftz" it takes and gives no subnormal numbers."""
    return (lambda *xs: flushed(function(*map(flushed, xs)))) if ftz else function


# --- integers and bits ----------------------------------------------------------------------------


@defines(r"(add|sub)\.([su](?:16|32|64|16x2))")
def _sum(name: str, kind: str) -> Meaning:
    return same(kind, 2, np.add if name == "add" else np.subtract)


@defines(r"(mul|mad)\.(?:lo\.([su](?:16|32|64))|wide\.([su])(16|32))")
def _product(name: str, kind: str | None, sign: str, bits: str) -> Meaning:
    of, to = (kind, kind) if kind else (f"{sign}{bits}", f"{sign}{2 * int(bits)}")
    wide = np.dtype(VIEWS.get(to, BITS[to]))

    def product(a: Array, b: Array) -> Array:
        return a.astype(wide) * b.astype(wide)

    if name == "mul":
        return Meaning((to,), (of, of), product)
    return Meaning((to,), (of, of, to), lambda a, b, c: product(a, b) + c)


@defines(r"(mad\.lo\.cc|madc\.hi)\.u32")
def _carries(name: str) -> Meaning:
    """The halves of a longer product: the lower one sets the carry, the upper one takes it."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)

    def carried(a: Array, b: Array, c: Array, carry: Array | None = None) -> Any:
        product = a.astype("u8") * b.astype("u8")
        if carry is not None:
            return ((product >> half) + c + carry).astype("u4")
        total = (product & mask) + c
        return total.astype("u4"), total > mask

    takes = name == "madc.hi"
    return Meaning(("u32",), ("u32",) * 3, carried, takes_carry=takes, sets_carry=not takes)


@defines(r"(div|rem)\.([su](?:16|32|64))")
def _divide(name: str, kind: str) -> Meaning:
    def divide(a: Array, b: Array) -> Array:
        if (b == 0).any():
            raise Fault(f"{name}.{kind} by zero")
        rest = np.fmod(a, b)
        return rest if name == "rem" else (a - rest) // b

    return same(kind, 2, divide)


@defines(r"(min|max)\.([su](?:16|32|64))")
def _least(name: str, kind: str) -> Meaning:
    return same(kind, 2, np.minimum if name == "min" else np.maximum)


@defines(r"(neg|abs)\.(s(?:16|32|64))")
def _sign(name: str, kind: str) -> Meaning:
    return same(kind, 1, np.negative if name == "neg" else np.abs)


@defines(r"(and|or|xor)\.(pred|b(?:16|32|64))")
def _logic(name: str, kind: str) -> Meaning:
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return same(kind, 2, functions[name])


@defines(r"not\.(pred|b(?:16|32|64))")
def _not(kind: str) -> Meaning:
    return same(kind, 1, np.invert)


@defines(r"(shl|shr)\.([sub](?:16|32|64))")
def _shift(name: str, kind: str) -> Meaning:
    """Shifts by the number of bits or more give 0, or for signed numbers the sign."""

    def shift(a: Array, by: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        most = np.minimum(by, bits - 1).astype(a.dtype)
        over = a.dtype.type(0) if kind[0] != "s" else a >> a.dtype.type(bits - 1)
        return np.where(by >= bits, over, a << most if name == "shl" else a >> most)

    return Meaning((kind,), (kind, "u32"), shift)


@defines(r"shf\.l\.wrap\.b32")
def _funnel() -> Meaning:
    def shift(low: Array, high: Array, by: Array) -> Array:
        both = low.astype("u8") | high.astype("u8") << np.uint64(32)
        return (both << (by & 31).astype("u8") >> np.uint64(32)).astype("u4")

    return same("u32", 3, shift)


@defines(r"bfe\.([su])32")
def _extract(sign: str) -> Meaning:
    kind, wide = f"{sign}32", np.dtype("i8" if sign == "s" else "u8")

    def extract(a: Array, at: Array, count: Array) -> Array:
        at, count = (x.astype(wide) & 255 for x in (at, count))
        above = (64 - np.clip(count, 1, 32)).astype(wide)
        found = a.astype(wide) >> np.minimum(at, 63) << above >> above
        return np.where(count > 0, found, 0).astype(a.dtype)

    return Meaning((kind,), (kind, "u32", "u32"), extract)


@defines(r"prmt\.b32")
def _permute() -> Meaning:
    def permute(a: Array, b: Array, selectors: Array) -> Array:
        both = a.astype("u8") | b.astype("u8") << np.uint64(32)
        result = np.zeros(1, "u8")
        for i in range(4):
            selector = selectors.astype("u8") >> np.uint64(4 * i)
            byte = both >> (selector & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), 255, 0).astype("u8")
            byte = np.where(selector & np.uint64(8), sign, byte)
            result = result | byte << np.uint64(8 * i)
        return result.astype("u4")

    return same("b32", 3, permute)


# --- floating point -------------------------------------------------------------------------------

_HALVES = r"bf16|f16|bf16x2|f16x2"


@defines(rf"(add|sub|mul)(?:\.rn)?(\.ftz)?\.(f32|f64|f32x2|{_HALVES})")
def _float(name: str, ftz: str | None, kind: str) -> Meaning:
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    return same(kind, 2, either(_of_float32(ftz, kind), functions[name]))


@defines(r"(add|sub|fma)\.rn\.f32\.(f16|bf16)")
def _mixed(name: str, kind: str) -> Meaning:
    """The last operand is of float32, and the result."""
    sources = (kind,) * (2 if name == "fma" else 1)
    functions: dict[str, Any] = {"add": np.add, "sub": np.subtract, "fma": fma_narrow}

    def mixed(*xs: Array) -> Array:
        # numpy would round the sum of float32 and float64 twice.
        return functions[name](*[x.astype("f4") for x in xs]).astype("f4")

    return Meaning(("f32",), (*sources, "f32"), mixed)


def _of_float32(ftz: str | None, kind: str) -> str | None:
    if ftz and kind not in ("f32", "f32x2"):
        raise Fault(f"the modifier .ftz of {kind} is unknown")
    return ftz


@defines(rf"fma\.rn(\.ftz)?\.(f32|f64|f32x2|{_HALVES})")
def _fused(ftz: str | None, kind: str) -> Meaning:
    if kind == "f64":
        return same(kind, 3, fma_wide)
    narrow: Callable[..., Array] = fma_narrow
    if kind[:3] == "f32":
        narrow = lambda a, b, c: fma_narrow(a, b, c).astype("f4")  # noqa: E731
    return same(kind, 3, either(_of_float32(ftz, kind), narrow))


@defines(r"(div|sqrt)\.rn(\.ftz)?\.(f32|f64)")
def _quotient(name: str, ftz: str | None, kind: str) -> Meaning:
    function: Callable[..., Array] = np.divide if name == "div" else np.sqrt
    return same(kind, 2 if name == "div" else 1, either(_of_float32(ftz, kind), function))


@defines(r"(min|max)(\.ftz)?(\.NaN)?\.(f32|f64)")
def _least_float(name: str, ftz: str | None, nan: str | None, kind: str) -> Meaning:
    """A NaN gives the other operand, or with ".NaN" NaN; -0 is less than 0."""

    def least(a: Array, b: Array) -> Array:
        most = name == "max"
        if nan:
            result = np.maximum(a, b) if most else np.minimum(a, b)
        else:
            result = np.fmax(a, b) if most else np.fmin(a, b)
        first = np.signbit(a) != most
        return np.where(a == b, np.where(first, a, b), result)

    function = either(_of_float32(ftz, kind), least)
    return Meaning((kind,), (kind, kind), function, repeats=kind == "f32")


@defines(rf"(neg|abs)(\.ftz)?\.(f32|f64|{_HALVES})")
def _sign_float(name: str, ftz: str | None, kind: str) -> Meaning:
    function = either(_of_float32(ftz, kind), np.negative if name == "neg" else np.abs)
    return same(kind, 1, function)


_ORDERS: dict[str, Callable[..., Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


@defines(r"setp\.([a-z]+)(\.ftz)?\.([a-z]+\d+(?:x2)?)")
def _compare(order: str, ftz: str | None, kind: str) -> Meaning:
    """Return whether a comparison holds, and for two results also whether it does not.

    Comparisons with NaN do not hold, except those that end with "u". Of a packed type the two
    results are those of its two elements.
    """
    floating = "f" in kind
    plain = order.removesuffix("u") if floating else order
    if kind not in BITS or not (plain in _ORDERS or (floating and order == "nan")):
        raise Fault(f"the comparison {order} of {kind} is unknown")

    def compare(a: Array, b: Array) -> Any:
        if ftz:
            a, b = flushed(a), flushed(b)
        unordered = np.isnan(a) | np.isnan(b) if floating else np.False_
        if order == "nan":
            holds = unordered
        else:
            found = _ORDERS[plain](a, b)
            holds = found | unordered if plain != order else found & ~unordered
        return (holds[:, 0], holds[:, 1]) if kind.endswith("x2") else (holds, ~holds)

    _of_float32(ftz, kind)
    return Meaning(("pred", "pred"), (kind, kind), compare)


@defines(r"selp\.([sub](?:16|32|64)|f32|f64)")
def _select(kind: str) -> Meaning:
    return Meaning((kind,), (kind, kind, "pred"), lambda a, b, which: np.where(which, a, b))


@defines(r"mov\.([sub](?:16|32|64)|f32|f64|pred)")
def _move(kind: str) -> Meaning:
    return same(kind, 1, lambda a: a)


# --- conversions ----------------------------------------------------------------------------------

_NUMBERS = r"[su](?:8|16|32|64)|f16|f32|f64|bf16"
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@defines(rf"cvt(?:\.(rn|rni|rzi|rmi|rpi))?(\.ftz)?\.({_NUMBERS})\.({_NUMBERS})")
def _convert(mode: str | None, ftz: str | None, to: str, of: str) -> Meaning:
    from_float, to_float = "f" in of, "f" in to
    whole = None if mode in (None, "rn") else _WHOLE[mode]
    if (whole is not None) != (from_float and not to_float) and not (whole and to == of):
        raise Fault(f"the conversion {mode} from {of} to {to} is unknown")
    if to in ("f16", "bf16") and of in ("s64", "u64"):
        raise Fault(f"the conversion from {of} to {to} is unknown")
    if ftz and "f32" not in (to, of):
        raise Fault(f"the modifier .ftz of a conversion from {of} to {to} is unknown")

    def convert(x: Array) -> Array:
        if ftz and of == "f32":
            x = flushed(x)
        if from_float and not to_float:
            return _saturated(whole(x.astype("f8")), of, to)  # type: ignore[misc]
        y = x if whole is None else whole(x)
        if to in ("f16", "bf16"):
            return y.astype("f8")
        y = y.astype(VIEWS.get(to, BITS[to]))
        return flushed(y) if ftz and to == "f32" else y

    return Meaning((to,), (of,), convert)


def _saturated(x: Array, of: str, to: str) -> Array:
    """Convert whole numbers to integers; those outside the range become its end.

    NaN becomes 0; if either type has 64 bits, the number whose highest bit alone is set.
    """
    kind = np.dtype(VIEWS.get(to, BITS[to]))
    limits, bits = np.iinfo(kind), int(to[1:])
    over, under = x >= 2.0 ** (bits - (to[0] == "s")), x < float(limits.min)
    inside = np.where(over | under | np.isnan(x), 0, x)
    result = np.where(over, limits.max, np.where(under, limits.min, inside.astype(kind)))
    nan = np.array(1 << (bits - 1) if "64" in (of[1:], to[1:]) else 0, f"u{bits // 8}").view(kind)
    return np.where(np.isnan(x), nan, result).astype(kind)


@defines(r"cvt\.rn\.(bf16x2|f16x2)\.f32")
def _pack(kind: str) -> Meaning:
    def pack(upper: Array, lower: Array) -> Array:
        return np.stack(np.broadcast_arrays(lower, upper), -1).astype("f8")

    return Meaning((kind,), ("f32", "f32"), pack)


@defines(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32")
def _pack_eight(kind: str) -> Meaning:
    fraction, least, most = {"e4m3": (3, -6, 0x7E), "e5m2": (2, -14, 0x7B)}[kind]

    def code(x: Array) -> Array:
        size = np.minimum(np.abs(np.where(np.isnan(x), 0, x).astype("f8")), 1e6)
        power = np.where(size == 0, least, np.maximum(np.frexp(size)[1] - 1, least))
        steps = np.rint(np.ldexp(size, fraction - power))
        found = np.minimum(steps + (power - least) * 2**fraction, most).astype("u2")
        return np.where(np.isnan(x), 0x7F, found | np.signbit(x) * np.uint16(0x80)).astype("u2")

    def pack(upper: Array, lower: Array) -> Array:
        return code(upper) << np.uint16(8) | code(lower)

    return Meaning(("b16",), ("f32", "f32"), pack)


# --- warps ----------------------------------------------------------------------------------------


@defines(r"shfl\.sync\.(bfly|idx)\.b32")
def _shuffle(mode: str) -> Meaning:
    def shuffle(a: Array, b: Array, c: Array, members: Array) -> tuple[Array, Array]:
        _all_lanes(members, "shfl.sync")
        lane = np.arange(32)
        b, segment, clamp = (x.astype("i8") & 31 for x in (b, c >> np.uint32(8), c))
        first = lane & segment
        source = lane ^ b if mode == "bfly" else first | (b & ~segment)
        valid = source <= (first | (clamp & ~segment))
        source = np.where(valid, source, lane)
        return np.take_along_axis(a, np.broadcast_to(source, a.shape), 1), valid

    return Meaning(("b32", "pred"), ("b32", "u32", "u32", "u32"), shuffle, whole=True)


@defines(r"redux\.sync\.((?:min|max)(?:\.NaN)?\.f32)")
def _reduce(name: str) -> Meaning:
    pair = meaning_of(name, 2).function

    def reduce(a: Array, members: Array) -> Array:
        _all_lanes(members, "redux.sync")
        total = functools.reduce(pair, [a[:, i] for i in range(32)])
        return np.repeat(total[:, None], 32, 1)

    return Meaning(("f32",), ("f32", "u32"), reduce, whole=True)


def _all_lanes(members: Array, name: str) -> None:
    if (members != 0xFFFFFFFF).any():
        raise Fault(f"{name} among some lanes of a warp is unknown")
