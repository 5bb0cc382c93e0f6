"""Definitions of the instructions of PTX in exact arithmetic, with Python's integers and fractions.

They share nothing with the emulator that they test.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

Number: TypeAlias = int | float | Fraction | bool
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


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by fractions where its arguments are finite and the result is not zero."""

    def exact(*xs: float) -> Any:
        found = function(*map(Fraction, xs)) if all(map(math.isfinite, xs)) else 0
        return found or function(*xs)

    return exact


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


def least(sign: int, nan: bool, a: float, b: float) -> float:
    """Return the lesser of two numbers, or with sign -1 the greater; NaN only if asked to, or if both are."""
    lost = [math.isnan(x) for x in (a, b)]
    if any(lost):
        return math.nan if nan or all(lost) else b if lost[0] else a
    return min(a, b, key=lambda x: (sign * x, sign * math.copysign(1, x)))


def compared(order: str, a: Any, b: Any) -> tuple[bool, bool]:
    """Return whether a comparison holds, and whether it does not."""
    unordered = a != a or b != b
    if order == "nan":
        holds = unordered
    elif len(order) == 3:
        holds = unordered or getattr(operator, order[:2])(a, b)
    else:
        holds = not unordered and getattr(operator, order)(a, b)
    return holds, not holds


def permuted(a: int, b: int, selectors: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    found = []
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = source[selector & 7]
        found.append((255 if byte > 127 else 0) if selector > 7 else byte)
    return int.from_bytes(bytes(found), "little")


def field(a: int, at: int, count: int) -> int:
    """Return some of 32 digits, the lowest first; above those of a are its sign's."""
    at, count = at & 255, count & 255
    digits = [a >> min(at + i, 64) & 1 for i in range(min(count, 32))]
    return sum(digit << i for i, digit in enumerate(digits))


def signed_field(a: int, at: int, count: int) -> int:
    """Return the same as a signed number."""
    count &= 255
    found = field(a, at, count)
    return found - (1 << count) if 0 < count < 32 and found >> (count - 1) else found


def whole(rounded: Callable[[float], int], x: float) -> float:
    return math.copysign(float(rounded(x)), x) if math.isfinite(x) else x


def saturated(rounded: Callable[[Any], int], x: Any, of: str, to: str) -> int:
    """Return a whole number of a type; those outside of its range become its end."""
    low = -(1 << (bits_in(to) - 1)) if to[0] == "s" else 0
    high = low + (1 << bits_in(to)) - 1
    if math.isnan(x):
        return 1 << (bits_in(to) - 1) if "64" in (of[1:], to[1:]) else 0
    return (high if x > 0 else low) if math.isinf(x) else min(max(rounded(x), low), high)


def truncated(a: int, b: int) -> tuple[int, int]:
    """Return quotient and rest of a division that rounds toward zero."""
    whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return whole, a - whole * b


def nearest(x: float, kind: str) -> int:
    return quiet(encoded(x, kind), kind)


@functools.cache
def numbers_of(kind: str) -> list[Fraction]:
    """Return the positive numbers of a format of 8 bits, by their codes."""
    fraction, bias, most = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}[kind]
    numbers = []
    for bits in range(most + 1):
        power, part = bits >> fraction, bits & ((1 << fraction) - 1)
        whole = part + (1 << fraction if power else 0)
        numbers.append(Fraction(whole) * Fraction(2) ** (max(power, 1) - bias - fraction))
    return numbers


def eighth(x: float, kind: str) -> int:
    """Return the code of the nearest number of a format of 8 bits, of two as near the even one."""
    if math.isnan(x):
        return 0x7F
    numbers, sign = numbers_of(kind), 0x80 if math.copysign(1, x) < 0 else 0
    size = numbers[-1] if math.isinf(x) else min(abs(Fraction(x)), numbers[-1])
    at = bisect.bisect_left(numbers, size)
    near = [i for i in (at - 1, at) if i >= 0]
    return sign | min(near, key=lambda i: (abs(numbers[i] - size), i % 2))


def packed(of: Rule) -> Rule:
    """Return the instruction of a packed type: it does what another does, for both elements."""
    kind = f"{of.sources[0]}x2"

    def function(*xs: int) -> Any:
        found = [wanted(of, each) for each in zip(*(halves(x, kind) for x in xs))]
        if of.results[0] == "pred":
            return found[0][0], found[1][0]
        low, high = (quiet(x[0], of.results[0]) for x in found)
        return low | high << bits_in(kind)

    results = of.results if of.results[0] == "pred" else (kind,)
    return Rule(f"{of.opcode}x2", results, (kind,) * len(of.sources), function)


def rules() -> Iterator[Rule]:
    """Yield every instruction: the rows of definitions.jsonl.

    A row defines an opcode for each kind of number `k`, where `w` is the one of twice the bits, and for each of `o`.
    It has the types of the sources a, b and c, those of the results, and the result in exact arithmetic; `exact` where
    floats become fractions. Numbers of the kinds `packed` may also be elements of a packed type.
    """
    for line in Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        for k, o in itertools.product(row.get("k", "u16").split(), row.get("o", "eq").split()):
            names = {"k": k, "o": o, "w": f"{k[0]}{2 * bits_in(k)}" if "{w}" in line else ""}
            opcode, of, to, result = (
                row[x].format(**names) for x in ("opcode", "from", "to", "is")
            )
            sources = tuple(of.split())
            function = eval(f"lambda {', '.join('abc'[: len(sources)])}: {result}", globals())
            function = exactly(function) if "exact" in row else function
            yield (rule := Rule(opcode, tuple(to.split()), sources, function, ".ftz" in opcode))
            if sources[0] in row.get("packed", "").split():
                yield packed(rule)


RULES = {f"{rule.opcode} of {len(rule.sources)}": rule for rule in rules()}

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
