"""Definitions of the instructions of PTX in exact arithmetic, with Python's integers and fractions.

They share nothing with the emulator that they test.
"""

from __future__ import annotations

import bisect
import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

Number: TypeAlias = int | float | Fraction | bool
ORDERS = ("eq", "ne", "lt", "le", "gt", "ge")
HALVES = ("f16", "bf16")
FORMATS = {
    "f64": (11, 52),
    "f32": (8, 23),
    "f16": (5, 10),
    "bf16": (8, 7),
}  # bits: exponent, fraction


class Rule(NamedTuple):
    """An instruction.

    Attributes:
        opcode: its name.
        results, sources: types of the results and of the sources.
        function: returns the exact result, or a tuple of results; floats are rounded afterwards.
        flushes: whether it flushes subnormal numbers.
    """

    opcode: str
    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable[..., Any]
    flushes: bool = False


# --- numbers and bits -----------------------------------------------------------------------------


def bits_in(kind: str) -> int:
    """Return the number of bits of a type, or of an element of a packed one."""
    return 1 if kind == "pred" else int(kind.lstrip("bfsu").removesuffix("x2"))


def whole_bits(kind: str) -> int:
    return bits_in(kind) * (2 if kind.endswith("x2") else 1)


def decoded(bits: int, kind: str) -> Number:
    """Return the number that bits mean; every floating-point number here is a float."""
    if kind in FORMATS:
        exponent, fraction = FORMATS[kind]
        sign = -1.0 if bits >> (exponent + fraction) else 1.0
        power, part = bits >> fraction & ((1 << exponent) - 1), bits & ((1 << fraction) - 1)
        bias = (1 << (exponent - 1)) - 1
        if power == (1 << exponent) - 1:
            return math.nan if part else sign * math.inf
        whole = part + (1 << fraction if power else 0)
        return sign * math.ldexp(whole, max(power, 1) - bias - fraction)
    if kind == "pred":
        return bool(bits)
    if kind.endswith("x2"):
        return bits
    return bits - (1 << bits_in(kind)) if kind[0] == "s" and bits >> (bits_in(kind) - 1) else bits


def encoded(x: Number, kind: str) -> int | None:
    """Return the bits of a number, rounded to nearest, ties to even; None for NaN."""
    if kind not in FORMATS:
        return int(x) % (1 << whole_bits(kind))
    exponent, fraction = FORMATS[kind]
    if isinstance(x, float) and math.isnan(x):
        return None
    negative = math.copysign(1, x) < 0 if isinstance(x, float) else x < 0
    endless = ((1 << exponent) - 1) << fraction
    if isinstance(x, float) and math.isinf(x):
        bits = endless
    else:
        size = abs(Fraction(x))
        least = 2 - (1 << (exponent - 1))
        power = least
        if size:
            power = size.numerator.bit_length() - size.denominator.bit_length()
            power = max(power - (size < Fraction(2) ** power), least)
        steps = round(size / Fraction(2) ** (power - fraction))
        bits = min(((power - least) << fraction) + steps, endless)
    return bits | negative << (exponent + fraction)


def flushed(bits: int | None, kind: str) -> int | None:
    """Return the bits of float32 with subnormal numbers replaced by zeros of their sign."""
    if bits is None or kind != "f32" or bits & 0x7F800000:
        return bits
    return bits & 0x80000000


def halves(bits: int, kind: str) -> tuple[int, int]:
    """Return the bits of both elements of a number of a packed type."""
    return bits % (1 << bits_in(kind)), bits >> bits_in(kind)


def normal(bits: int, kind: str) -> Any:
    """Return bits, of a packed type those of both elements, and None for NaN."""
    if kind.endswith("x2"):
        return [normal(half, kind.removesuffix("x2")) for half in halves(bits, kind)]
    number = decoded(bits, kind)
    return None if isinstance(number, float) and math.isnan(number) else bits


def quiet(bits: int | None, kind: str) -> int:
    """Return the bits of a result, and of NaN those that the manual names."""
    return (1 << (bits_in(kind) - 1)) - 1 if bits is None else bits


def wanted(rule: Rule, given: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the bits of the results by the definition."""
    bits = [flushed(x, kind) if rule.flushes else x for x, kind in zip(given, rule.sources)]
    found = rule.function(*(decoded(x or 0, kind) for x, kind in zip(bits, rule.sources)))
    found = found if isinstance(found, tuple) else (found,)
    rounded = [encoded(x, kind) for x, kind in zip(found, rule.results)]
    if rule.flushes:
        rounded = [flushed(x, kind) for x, kind in zip(rounded, rule.results)]
    return tuple(rounded)


# --- the definitions ------------------------------------------------------------------------------


def exactly(fractions: Callable[..., Any], floats: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of floats: by fractions if they are finite and the result is not zero."""

    def function(*xs: float) -> Any:
        if all(map(math.isfinite, xs)):
            found = fractions(*map(Fraction, xs))
            return found if found else floats(*xs)
        return floats(*xs)

    return function


def quotient(a: float, b: float) -> Any:
    if math.isfinite(a) and math.isfinite(b) and a and b:
        return Fraction(a) / Fraction(b)
    if math.isnan(a) or math.isnan(b) or (a == 0 == b) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    sign = math.copysign(1, a) * math.copysign(1, b)
    return sign * (math.inf if b == 0 or math.isinf(a) else 0.0)


def root(a: float) -> Any:
    """Return the square root, or where it is not a fraction one of 300 more bits that rounds like it."""
    if a < 0:
        return math.nan
    if not math.isfinite(a) or a == 0:
        return a
    exact = Fraction(a)
    scaled = exact.numerator * exact.denominator << 600
    whole = math.isqrt(scaled)
    sticky = Fraction(0) if whole * whole == scaled else Fraction(1, 2)
    return (whole + sticky) / (Fraction(exact.denominator) * (1 << 300))


def least(sign: int, nan: bool) -> Callable[..., Any]:
    """Return the function that takes the lesser of two numbers, or with sign -1 the greater."""

    def function(a: float, b: float) -> float:
        if math.isnan(a) or math.isnan(b):
            return (
                math.nan if nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
            )
        pairs = sorted([a, b], key=lambda x: (sign * x, sign * math.copysign(1, x)))
        return pairs[0]

    return function


def compares(order: str) -> Callable[..., tuple[bool, bool]]:
    def function(a: Any, b: Any) -> tuple[bool, bool]:
        unordered = a != a or b != b
        if order == "nan":
            holds = unordered
        elif len(order) == 3:
            holds = unordered or getattr(operator, order[:2])(a, b)
        else:
            holds = not unordered and getattr(operator, order)(a, b)
        return holds, not holds

    return function


def shifted(opcode: str, kind: str) -> Callable[[int, int], int]:
    if opcode == "shl":
        return lambda a, n: a << n if n < 64 else 0
    return lambda a, n: a >> min(n, 64)


def permuted(a: int, b: int, selectors: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    found = []
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = source[selector & 7]
        found.append((255 if byte > 127 else 0) if selector > 7 else byte)
    return int.from_bytes(bytes(found), "little")


def field(a: int, at: int, count: int) -> int:
    """Return some of 32 digits, the lowest first, and above them their last one, or 0 for an unsigned number."""
    at, count = at & 255, count & 255
    digits = [a >> min(at + i, 64) & 1 for i in range(count)]
    return sum(digit << i for i, digit in enumerate(digits[:32])) if count else 0


def signed_field(a: int, at: int, count: int) -> int:
    count &= 255
    found = field(a, at, count)
    return found - (1 << count) if 0 < count < 32 and found >> (count - 1) else found


def converted(of: str, to: str, mode: str) -> Callable[[Any], Any]:
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}

    def function(x: Any) -> Any:
        if of not in FORMATS or to in FORMATS:
            if mode in whole and math.isfinite(x):
                return math.copysign(float(whole[mode](x)), x)
            return x
        low = -(1 << (bits_in(to) - 1)) if to[0] == "s" else 0
        high = low + (1 << bits_in(to)) - 1
        if math.isnan(x):
            return 1 << (bits_in(to) - 1) if "64" in (of[1:], to[1:]) else 0
        return (high if x > 0 else low) if math.isinf(x) else min(max(whole[mode](x), low), high)

    return function


def truncated(a: int, b: int) -> tuple[int, int]:
    """Return quotient and rest of a division that rounds toward zero."""
    whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return whole, a - whole * b


def rules() -> Iterator[Rule]:
    """Yield every instruction."""
    yield from integers()
    yield from comparisons()
    yield from floats()
    yield from conversions()


def integers() -> Iterator[Rule]:

    def same(opcode: str, kind: str, count: int, function: Callable[..., Any]) -> Rule:
        return Rule(opcode, (kind,), (kind,) * count, function, ".ftz" in opcode)

    kinds = [f"{sign}{bits}" for sign in "su" for bits in (16, 32, 64)]
    for kind in kinds:
        bits, wide = bits_in(kind), f"{kind[0]}{2 * bits_in(kind)}"
        yield same(f"add.{kind}", kind, 2, operator.add)
        yield same(f"sub.{kind}", kind, 2, operator.sub)
        yield same(f"mul.lo.{kind}", kind, 2, operator.mul)
        yield same(f"mad.lo.{kind}", kind, 3, lambda a, b, c: a * b + c)
        yield same(f"min.{kind}", kind, 2, min)
        yield same(f"max.{kind}", kind, 2, max)
        yield same(f"div.{kind}", kind, 2, lambda a, b: truncated(a, b)[0])
        yield same(f"rem.{kind}", kind, 2, lambda a, b: truncated(a, b)[1])
        if bits < 64:
            yield Rule(f"mul.wide.{kind}", (wide,), (kind, kind), operator.mul)
            yield Rule(f"mad.wide.{kind}", (wide,), (kind, kind, wide), lambda a, b, c: a * b + c)
        yield Rule(f"shr.{kind}", (kind,), (kind, "u32"), shifted("shr", kind))
        if kind[0] == "s":
            yield same(f"neg.{kind}", kind, 1, operator.neg)
            yield same(f"abs.{kind}", kind, 1, abs)
    for size in (16, 32, 64):
        kind = f"b{size}"
        for name in ("and", "or", "xor"):
            yield same(
                f"{name}.{kind}", kind, 2, getattr(operator, f"{name}_" if name != "xor" else "xor")
            )
        yield same(f"not.{kind}", kind, 1, operator.invert)
        yield Rule(f"shl.{kind}", (kind,), (kind, "u32"), shifted("shl", kind))
        yield Rule(f"selp.{kind}", (kind,), (kind, kind, "pred"), lambda a, b, p: a if p else b)
        yield same(f"mov.{kind}", kind, 1, lambda a: a)
        yield same(f"mov.u{size}", f"u{size}", 1, lambda a: a)
    for name in ("and", "or", "xor"):
        function = {"and": min, "or": max, "xor": operator.ne}[name]
        yield same(f"{name}.pred", "pred", 2, function)
    yield same("not.pred", "pred", 1, operator.not_)
    yield same("mov.pred", "pred", 1, lambda a: a)
    wrapped = lambda a, b, n: (b << 32 | a) << (n & 31) >> 32  # noqa: E731
    yield same("shf.l.wrap.b32", "u32", 3, wrapped)
    yield same("prmt.b32", "b32", 3, permuted)
    yield Rule("bfe.u32", ("u32",), ("u32", "u32", "u32"), field)
    yield Rule("bfe.s32", ("s32",), ("s32", "u32", "u32"), signed_field)


def comparisons() -> Iterator[Rule]:
    for order in ORDERS:
        for kind in ("s16", "s32", "s64", "u16", "u32", "u64", *FORMATS):
            yield Rule(f"setp.{order}.{kind}", ("pred", "pred"), (kind, kind), compares(order))
        for kind in FORMATS:
            name = f"setp.{order}u.{kind}"
            yield Rule(name, ("pred", "pred"), (kind, kind), compares(f"{order}u"))
    for kind in FORMATS:
        yield Rule(f"setp.nan.{kind}", ("pred", "pred"), (kind, kind), compares("nan"))
    for order in ("eq", "ne"):
        for kind in ("b16", "b32", "b64"):
            yield Rule(f"setp.{order}.{kind}", ("pred", "pred"), (kind, kind), compares(order))
    yield Rule("setp.lt.ftz.f32", ("pred", "pred"), ("f32", "f32"), compares("lt"), True)


def floats() -> Iterator[Rule]:
    for kind in FORMATS:
        for mode in ("rn.ftz", "rn") if kind == "f32" else ("rn",):
            flushes = mode != "rn"

            def same(
                name: str,
                count: int,
                function: Callable[..., Any],
                kind: str = kind,
                mode: str = mode,
                flushes: bool = flushes,
            ) -> Rule:
                return Rule(f"{name}.{mode}.{kind}", (kind,), (kind,) * count, function, flushes)

            yield same("add", 2, exactly(operator.add, operator.add))
            yield same("sub", 2, exactly(operator.sub, operator.sub))
            yield same("mul", 2, exactly(operator.mul, operator.mul))
            fused = lambda a, b, c: a * b + c  # noqa: E731
            yield same("fma", 3, exactly(fused, fused))
            if kind in ("f32", "f64"):
                yield same("div", 2, quotient)
                yield same("sqrt", 1, root)
        for ftz in ("", ".ftz") if kind == "f32" else ("",):
            for name, sign in (("min", 1), ("max", -1)) if kind not in HALVES else ():
                for nan in ("", ".NaN"):
                    opcode = f"{name}{ftz}{nan}.{kind}"
                    yield Rule(opcode, (kind,), (kind, kind), least(sign, bool(nan)), bool(ftz))
            yield Rule(f"neg{ftz}.{kind}", (kind,), (kind,), operator.neg, bool(ftz))
            yield Rule(f"abs{ftz}.{kind}", (kind,), (kind,), abs, bool(ftz))
        if kind == "f32":
            for nan in (False, True):
                three = lambda a, b, c, nan=nan: least(-1, nan)(least(-1, nan)(a, b), c)  # noqa: E731
                yield Rule(f"max{'.NaN' if nan else ''}.f32", ("f32",), ("f32",) * 3, three)
        if kind in ("f16", "bf16"):
            for name, function in (("add", operator.add), ("sub", operator.sub)):
                opcode = f"{name}.rn.f32.{kind}"
                yield Rule(opcode, ("f32",), (kind, "f32"), exactly(function, function))
            opcode = f"fma.rn.f32.{kind}"
            yield Rule(opcode, ("f32",), (kind, kind, "f32"), exactly(fused, fused))
        if kind in ("f32", "f64"):
            yield Rule(f"selp.{kind}", (kind,), (kind, kind, "pred"), lambda a, b, p: a if p else b)


def packed() -> Iterator[Rule]:
    """Yield the instructions of packed types: each does what another does, for both elements."""
    for opcode in (
        *("add.s16x2", "sub.u16x2", "add.rn.f32x2", "mul.rn.f32x2", "sub.rn.f32x2"),
        *("fma.rn.f32x2", "fma.rn.bf16x2", "fma.rn.f16x2"),
        *("neg.bf16x2", "neg.f16x2", "abs.bf16x2", "abs.f16x2"),
        "add.rn.ftz.f32x2",
        *(f"{name}.rn.{kind}x2" for name in ("add", "sub", "mul") for kind in HALVES),
        *(f"setp.{order}.{kind}x2" for order in (*ORDERS, "nan", "ltu", "neu") for kind in HALVES),
    ):
        name, kind = opcode.removesuffix("x2"), opcode.rpartition(".")[2]
        of = next(rule for rule in rules() if rule.opcode == name)

        def function(*xs: int, of: Rule = of, kind: str = kind) -> Any:
            found = [wanted(of, each) for each in zip(*(halves(x, kind) for x in xs))]
            if of.results[0] == "pred":
                return found[0][0], found[1][0]
            low, high = (quiet(x[0], of.results[0]) for x in found)
            return low | high << bits_in(kind)

        results = ("pred", "pred") if opcode.startswith("setp") else (kind,)
        yield Rule(opcode, results, (kind,) * len(of.sources), function)
    for kind in HALVES:
        yield Rule(
            f"cvt.rn.{kind}x2.f32",
            (f"{kind}x2",),
            ("f32", "f32"),
            lambda high, low, kind=kind: (
                quiet(encoded(high, kind), kind) << 16 | quiet(encoded(low, kind), kind)
            ),
        )


def eighth(kind: str) -> Callable[[float], int]:
    """Return the function to the code of the nearest number of a format of 8 bits, of two as near the even one."""
    fraction, bias, most = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}[kind]
    numbers = []
    for bits in range(most + 1):
        power, part = bits >> fraction, bits & ((1 << fraction) - 1)
        whole = part + (1 << fraction if power else 0)
        numbers.append(Fraction(whole) * Fraction(2) ** (max(power, 1) - bias - fraction))

    def code(x: float) -> int:
        if math.isnan(x):
            return 0x7F
        sign = 0x80 if math.copysign(1, x) < 0 else 0
        size = numbers[-1] if math.isinf(x) else min(abs(Fraction(x)), numbers[-1])
        at = bisect.bisect_left(numbers, size)
        near = [i for i in (at - 1, at) if i >= 0]
        return sign | min(near, key=lambda i: (abs(numbers[i] - size), i % 2))

    return code


def conversions() -> Iterator[Rule]:
    for kind in ("e4m3", "e5m2"):
        code = eighth(kind)
        both = lambda high, low, code=code: code(high) << 8 | code(low)  # noqa: E731
        yield Rule(f"cvt.rn.satfinite.{kind}x2.f32", ("b16",), ("f32", "f32"), both)
    for of in ("s16", "s32", "s64", "u16", "u32", "u64"):
        for to in ("s16", "s32", "s64", "u16", "u32", "u64"):
            yield Rule(f"cvt.{to}.{of}", (to,), (of,), converted(of, to, ""))
        for to in ("f32", "f64"):
            yield Rule(f"cvt.rn.{to}.{of}", (to,), (of,), converted(of, to, ""))
    for of in ("f32", "f64", "f16", "bf16"):
        for to in ("s32", "s64", "u32", "u64"):
            for mode in ("rni", "rzi", "rmi", "rpi"):
                yield Rule(f"cvt.{mode}.{to}.{of}", (to,), (of,), converted(of, to, mode))
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for kind in ("f32", "f64"):
            name = f"cvt.{mode}.{kind}.{kind}"
            yield Rule(name, (kind,), (kind,), converted(kind, kind, mode))
    name = "cvt.rni.ftz.s32.f32"
    yield Rule(name, ("s32",), ("f32",), converted("f32", "s32", "rni"), True)
    yield Rule("cvt.rmi.ftz.f32.f32", ("f32",), ("f32",), converted("f32", "f32", "rmi"), True)
    for of, to in (("f64", "f32"), *((wide, kind) for wide in ("f32", "f64") for kind in HALVES)):
        yield Rule(f"cvt.rn.{to}.{of}", (to,), (of,), lambda x: x)
        yield Rule(f"cvt.{of}.{to}", (of,), (to,), lambda x: x)


RULES = {f"{rule.opcode} of {len(rule.sources)}": rule for rule in (*rules(), *packed())}

#: What other tests test: control, memory, exchanges, and chains of carries.
_ELSEWHERE = re.compile(
    r"bra(\.uni)?|ret|exit|bar\.sync|bar\.warp\.sync"
    r"|(ld|st)\.(global|shared(::cta)?|local|param)(\.nc|\.L1::\w+)?(\.v[24])?\.[bsu](8|16|32|64)"
    r"|(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared(::cta)?\.b16"
    r"|shfl\.sync\.(bfly|idx)\.b32|redux\.sync\.\w+(\.NaN)?\.f32|mad\.lo\.cc\.u32|madc\.hi\.u32"
)


def is_tested(opcode: str) -> bool:
    """Return whether the tests of the emulator execute an opcode and check what it does."""
    defined = any(rule.opcode == opcode for rule in RULES.values())
    return defined or _ELSEWHERE.fullmatch(opcode) is not None
