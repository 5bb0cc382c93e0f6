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


@defines(r"(mul|mad)\.(lo|wide|hi)\.([su])(16|32|64)")
def _product(name: str, part: str, sign: str, bits: str) -> Meaning:
    kind, double = f"{sign}{bits}", f"{sign}{2 * int(bits)}"
    to = double if part == "wide" else kind
    if part == "wide" and bits == "64":
        raise Fault(f"the instruction {name}.wide.{kind} is unknown")

    def product(a: Array, b: Array) -> Array:
        if part == "lo":
            return a * b
        if bits == "64":
            return high_of(a, b)
        wide = np.dtype(f"{'i' if sign == 's' else 'u'}{int(bits) // 4}")
        exact = a.astype(wide) * b.astype(wide)
        return exact if part == "wide" else (exact >> wide.type(int(bits))).astype(a.dtype)

    if name == "mul":
        return Meaning((to,), (kind, kind), product)
    return Meaning((to,), (kind, kind, to), lambda a, b, c: product(a, b) + c)


def high_of(a: Array, b: Array) -> Array:
    """Return the upper 64 bits of products of 64-bit integers."""
    u, v = a.view("u8"), b.view("u8")
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (u0, u1), (v0, v1) = (u & mask, u >> half), (v & mask, v >> half)
    middle = u1 * v0 + (u0 * v0 >> half)
    low = u0 * v1 + (middle & mask)
    high = u1 * v1 + (middle >> half) + (low >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, v, 0).astype("u8") - np.where(b < 0, u, 0).astype("u8")
    return high.view(a.dtype)


@defines(r"(add|sub|addc|subc|mad\.lo|mad\.hi|madc\.lo|madc\.hi)(\.cc)?\.([su]32|b32)")
def _carries(name: str, cc: str | None, kind: str) -> Meaning:
    takes = name.partition(".")[0][-1] == "c"
    if not takes and not cc:
        return meaning_of(f"{name}.{kind}", 3 if name[0] == "m" else 2)

    def carried(*given: Array) -> Any:
        values = [np.asarray(x).astype("u8") & np.uint64(0xFFFFFFFF) for x in given]
        carry = values.pop() if takes else np.uint64(0)
        if name[0] == "m":
            product = values[0] * values[1]
            high = name.endswith("hi")
            part = product >> np.uint64(32) if high else product & np.uint64(0xFFFFFFFF)
            total = part + values[2] + carry
        else:
            total = (
                values[0] + carry + values[1] if name[0] == "a" else values[0] - values[1] - carry
            )
        low = (total & np.uint64(0xFFFFFFFF)).astype("u4")
        return (low, (total >> np.uint64(32) & np.uint64(1)) != 0) if cc else low

    sources = ("u32",) * (3 if name[0] == "m" else 2)
    return Meaning(("u32",), sources, carried, takes_carry=takes, sets_carry=bool(cc))


@defines(r"(div|rem)\.([su](?:16|32|64))")
def _divide(name: str, kind: str) -> Meaning:
    def divide(a: Array, b: Array) -> Array:
        if (b == 0).any():
            raise Fault(f"{name}.{kind} by zero")
        rest = np.fmod(a, b)
        return rest if name == "rem" else (a - rest) // b

    return same(kind, 2, divide)


@defines(r"(min|max)\.([su](?:16|32|64|16x2))")
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


@defines(r"shf\.(l|r)\.(wrap|clamp)\.b32")
def _funnel(way: str, mode: str) -> Meaning:
    def shift(low: Array, high: Array, by: Array) -> Array:
        both = low.astype("u8") | high.astype("u8") << np.uint64(32)
        n = (by & 31 if mode == "wrap" else np.minimum(by, 32)).astype("u8")
        return (both >> n if way == "r" else both << n >> np.uint64(32)).astype("u4")

    return same("u32", 3, shift)


@defines(r"bfe\.([su])(32|64)")
def _extract(sign: str, bits: str) -> Meaning:
    size = int(bits)

    def extract(a: Array, at: Array, count: Array) -> Array:
        at, count = (np.int64(1) * (x & 255) for x in (at, count))
        unsigned = a.view(f"u{size // 8}")
        zero = unsigned.dtype.type(0)
        shifted = np.where(
            at < size, unsigned >> np.minimum(at, size - 1).astype(unsigned.dtype), zero
        )
        field = np.where(count < size, shifted & low_bits(count, size), shifted)
        if sign == "u":
            return field
        last = np.minimum(at + count - 1, size - 1)
        negative = (
            unsigned >> np.maximum(last, 0).astype(unsigned.dtype) & zero.dtype.type(1)
        ) != 0
        kept = np.minimum(count, np.maximum(size - at, 0))
        fill = np.where(negative & (count > 0), ~low_bits(kept, size), zero)
        return (field | fill).view(a.dtype)

    return Meaning((f"{sign}{bits}",), (f"{sign}{bits}", "u32", "u32"), extract)


def low_bits(count: Array, size: int) -> Array:
    """Return words whose lowest bits are 1."""
    kind = np.dtype(f"u{size // 8}").type
    some = (kind(1) << np.minimum(count, size - 1).astype(kind)) - kind(1)
    return np.where(count >= size, ~kind(0), some)


@defines(r"bfi\.b(32|64)")
def _insert(bits: str) -> Meaning:
    size = int(bits)

    def insert(a: Array, b: Array, at: Array, count: Array) -> Array:
        at, count = (np.int64(1) * (x & 255) for x in (at, count))
        by = np.minimum(at, size - 1).astype(a.dtype)
        mask = np.where(at < size, low_bits(count, size) << by, a.dtype.type(0))
        return (b & ~mask) | (a << by & mask)

    return Meaning((f"b{bits}",), (f"b{bits}", f"b{bits}", "u32", "u32"), insert)


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


@defines(r"lop3\.b32")
def _lookup() -> Meaning:
    def lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
        result = np.zeros(1, "u4")
        for i in range(8):
            chosen = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result = result | np.where(table >> i & 1, chosen, 0).astype("u4")
        return result

    return same("b32", 4, lookup)


@defines(r"(clz|popc|brev)\.b(32|64)")
def _count(name: str, bits: str) -> Meaning:
    def count(a: Array) -> Array:
        digits = np.unpackbits(
            a.astype(f">u{int(bits) // 8}").view("u1").reshape(len(a), -1), axis=1
        )
        if name == "popc":
            return digits.sum(1, dtype="u4")
        if name == "brev":
            back = np.packbits(digits[:, ::-1], axis=1)
            return np.ascontiguousarray(back).view(f">u{int(bits) // 8}")[:, 0].astype(a.dtype)
        return np.where(a == 0, int(bits), digits.argmax(1)).astype("u4")

    return Meaning((f"b{bits}" if name == "brev" else "u32",), (f"b{bits}",), count)


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


@defines(r"(div|sqrt|rcp)\.rn(\.ftz)?\.(f32|f64)")
def _quotient(name: str, ftz: str | None, kind: str) -> Meaning:
    functions: dict[str, Any] = {"div": np.divide, "sqrt": np.sqrt, "rcp": lambda x: 1 / x}
    ftz = _of_float32(ftz, kind)
    return same(kind, 2 if name == "div" else 1, either(ftz, functions[name]))


@defines(rf"(min|max)(\.ftz)?(\.NaN)?\.(f32|f64|{_HALVES})")
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
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@defines(r"setp\.([a-z]+)(?:\.(and|or|xor))?(\.ftz)?\.([a-z]+\d+(?:x2)?)")
def _compare(order: str, joined: str | None, ftz: str | None, kind: str) -> Meaning:
    """Return whether a comparison holds, and for two results also whether it does not.

    Comparisons with NaN do not hold, except those that end with "u". Of a packed type the two
    results are those of its two elements.
    """
    floating, packed = "f" in kind, kind.endswith("x2")
    known = order in _ORDERS or (
        (order in ("num", "nan") or (order[-1] == "u" and order[:-1] in _ORDERS))
        if floating
        else order in _UNSIGNED and kind[0] == "u"
    )
    if kind not in BITS or not known or (packed and joined):
        raise Fault(f"the comparison {order} of {kind} is unknown")

    def compare(a: Array, b: Array, other: Array | None = None) -> Any:
        if ftz:
            a, b = flushed(a), flushed(b)
        unordered = np.isnan(a) | np.isnan(b) if floating else np.False_
        if order in ("num", "nan"):
            holds = unordered if order == "nan" else ~unordered
        elif floating and order[-1] == "u":
            holds = _ORDERS[order[:-1]](a, b) | unordered
        else:
            holds = _ORDERS[_UNSIGNED.get(order, order)](a, b) & ~unordered
        if packed:
            return holds[:, 0], holds[:, 1]
        if joined is None:
            return holds, ~holds
        join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[joined]
        return join(holds, other), join(~holds, other)

    _of_float32(ftz, kind)
    return Meaning(("pred", "pred"), (kind, kind, *(["pred"] if joined else [])), compare)


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


@defines(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _shuffle(mode: str) -> Meaning:
    def shuffle(a: Array, b: Array, c: Array, members: Array) -> tuple[Array, Array]:
        _all_lanes(members, "shfl.sync")
        lane = np.arange(32)
        b, segment, clamp = (x.astype("i8") & 31 for x in (b, c >> np.uint32(8), c))
        first = lane & segment
        last = first | (clamp & ~segment)
        source = {
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
            "idx": first | (b & ~segment),
        }[mode]
        valid = source >= last if mode == "up" else source <= last
        source = np.where(valid, source, lane)
        return np.take_along_axis(a, np.broadcast_to(source, a.shape), 1), valid

    return Meaning(("b32", "pred"), ("b32", "u32", "u32", "u32"), shuffle, whole=True)


@defines(r"redux\.sync\.(add|min|max|and|or|xor)(\.NaN)?\.([sub]32|f32)")
def _reduce(name: str, nan: str | None, kind: str) -> Meaning:
    if name in ("add", "min", "max"):
        pair = meaning_of(f"{name}{nan or ''}.{kind}", 2).function
    else:
        pair = meaning_of(f"{name}.{kind}", 2).function
    if (kind == "f32" and name == "add") or (nan and kind != "f32"):
        raise Fault(f"the instruction redux.sync.{name}{nan or ''}.{kind} is unknown")

    def reduce(a: Array, members: Array) -> Array:
        _all_lanes(members, "redux.sync")
        total = functools.reduce(pair, [a[:, i] for i in range(32)])
        return np.repeat(total[:, None], 32, 1)

    return Meaning((kind,), (kind, "u32"), reduce, whole=True)


def _all_lanes(members: Array, name: str) -> None:
    if (members != 0xFFFFFFFF).any():
        raise Fault(f"{name} among some lanes of a warp is unknown")
