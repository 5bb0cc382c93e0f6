"""Each instruction of the emulator against a definition in exact arithmetic, with Python's integers and fractions."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.emulator.assembled import kernel, run
from tests.emulator.definitions import (
    FORMATS,
    RULES,
    Rule,
    bits_in,
    decoded,
    encoded,
    is_tested,
    normal,
    quiet,
    wanted,
    whole_bits,
)
from tests.emulator.instructions import _TABLE, meaning_of
from tests.emulator.parse import Fault
from tests.support.rows import read_rows


def special(kind: str) -> list[int]:
    """Return bits of numbers at which mistakes are likely."""
    if kind == "pred":
        return [0, 1]
    size = bits_in(kind)
    if kind not in FORMATS:
        edges = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 0x5410, 1 << (size - 1), (1 << size) - 1]
        return [x % (1 << size) for x in (*edges, (1 << (size - 1)) - 1, (1 << size) - 2)]
    exponent, fraction = FORMATS[kind]
    numbers = (0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 126.5, 2.0**31, 2.0**32, 2.0**63, 2.0**64, math.inf)
    found = [encoded(x, kind) or 0 for x in numbers]
    found += [1, (1 << fraction) - 1, 1 << fraction, (1 << fraction) + 1]
    top = ((1 << exponent) - 1) << fraction
    found += [top - 1, top - (1 << fraction), top + (1 << (fraction - 1))]
    return [*found, *[x | 1 << (exponent + fraction) for x in found]]


def draws(rule: Rule, count: int) -> list[tuple[int, ...]]:
    """Return bits of sources: special ones, random ones, and ones that nearly cancel."""
    chance = random.Random(rule.opcode)

    def one(kind: str) -> int:
        if kind.endswith("x2"):
            half = kind.removesuffix("x2")
            return one(half) | one(half) << bits_in(kind)
        if chance.random() < 0.4:
            return chance.choice(special(kind))
        bits = chance.getrandbits(bits_in(kind))
        if kind in FORMATS and chance.random() < 0.7:  # of the usual size
            exponent, fraction = FORMATS[kind]
            bias = (1 << (exponent - 1)) - 1
            power = bias + chance.randint(-min(9, bias - 1), 9)
            bits = bits & ~(((1 << exponent) - 1) << fraction) | power << fraction
        return bits

    found = []
    for _ in range(count):
        drawn = [one(kind) for kind in rule.sources]
        last = rule.sources[-1]
        if last in FORMATS and len(drawn) > 1 and chance.random() < 0.3:
            a, b = (decoded(x, last) for x in drawn[:2])
            near = encoded(-float(a) * float(b) if len(drawn) == 3 else -float(a), last) or 0
            drawn[-1] = max(0, min(near + chance.randint(-2, 2), (1 << bits_in(last)) - 1))
        found.append(tuple(drawn))
    return found


# --- the run of an instruction --------------------------------------------------------------------

_REGISTERS = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd", 8: "%rs"}


def results_of(
    rule: Rule, drawn: list[tuple[int, ...]], operands: str = ""
) -> list[tuple[int, ...]]:
    """Run an instruction once for each tuple of sources, in a thread of its own.

    The sources are in registers from 10 on, or 20 if they have 64 bits; the results in those from 17
    or 27 on.
    """
    count = len(rule.sources) + len(rule.results)
    lines = ["mad.lo.s32 %r2, %r1, 32, %r0;"]
    lines += [f"mad.wide.u32 %rd{10 + i}, %r2, 8, %rd{i};" for i in range(count)]
    names = []
    for i, kind in enumerate(rule.sources):
        name = f"{_REGISTERS[whole_bits(kind)]}{10 + i + 10 * (whole_bits(kind) == 64)}"
        names.append(name)
        if kind == "pred":
            lines += [f"ld.global.b32 %r9, [%rd{10 + i}];", f"setp.ne.b32 {name}, %r9, 0;"]
        else:
            lines.append(f"ld.global.b{whole_bits(kind)} {name}, [%rd{10 + i}];")
    into = [
        f"{_REGISTERS[whole_bits(kind)]}{17 + i + 10 * (whole_bits(kind) == 64)}"
        for i, kind in enumerate(rule.results)
    ]
    operands = operands or f"{'|'.join(into)}, {', '.join(names)}"
    lines.append(f"{rule.opcode} {operands};")
    for i, (name, kind) in enumerate(zip(into, rule.results), len(rule.sources)):
        if kind == "pred":
            lines += [f"selp.b32 %r9, 1, 0, {name};", f"st.global.b32 [%rd{10 + i}], %r9;"]
        else:
            lines.append(f"st.global.b{whole_bits(kind)} [%rd{10 + i}], {name};")
    assert len(drawn) % 32 == 0
    columns = [
        torch.tensor([struct.unpack("<q", struct.pack("<Q", x))[0] for x in column])
        for column in zip(*drawn)
    ]
    made = [torch.zeros(len(drawn), dtype=torch.int64) for _ in rule.results]
    run(kernel("\n".join(lines), count), [*columns, *made], (len(drawn) // 32, 1, 1))
    return list(
        zip(*([int(x) % (1 << whole_bits(kind)) for x in y] for y, kind in zip(made, rule.results)))
    )


COUNT = 320


def usable(rule: Rule, drawn: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Leave out divisions by zero, which have no result."""
    if rule.opcode.startswith(("div.s", "div.u", "rem.")):
        drawn = [one if one[1] else (one[0], 1) for one in drawn]
    return drawn


@pytest.mark.one_in(3)
@pytest.mark.parametrize("opcode", RULES)
def test_every_result_is_that_of_the_definition(opcode: str) -> None:
    rule = RULES[opcode]
    drawn = usable(rule, draws(rule, COUNT))
    for given, found in zip(drawn, results_of(rule, drawn), strict=True):
        want = [quiet(x, kind) for x, kind in zip(wanted(rule, given), rule.results)]
        for one, other, kind in zip(found, want, rule.results, strict=True):
            assert normal(one, kind) == normal(other, kind), [hex(x) for x in given]


def test_no_definition_is_missing() -> None:
    """There is one for an opcode of every entry of the emulator's table, or a test elsewhere."""
    opcodes = [rule.opcode for rule in RULES.values()]
    opcodes += ["shfl.sync.idx.b32", "redux.sync.max.f32", "madc.hi.u32"]
    assert all(map(is_tested, opcodes))
    assert not is_tested("add.f128")
    for pattern, _ in _TABLE:
        assert any(map(pattern.fullmatch, opcodes)), pattern.pattern


UNKNOWN = read_rows(Path(__file__).with_name("unknown.jsonl"))


@pytest.mark.parametrize("opcode", UNKNOWN)
def test_what_is_unknown_is_an_error(opcode: str) -> None:
    with pytest.raises(Fault, match=f"^{UNKNOWN[opcode]['text']}$"):
        meaning_of(opcode, 1)


@pytest.mark.parametrize("opcode", ["div.s32", "div.u64", "rem.s16"])
def test_division_by_zero_is_an_error(opcode: str) -> None:
    kind = opcode.partition(".")[2]
    with pytest.raises(Fault, match=f"^{opcode} by zero$"):
        results_of(Rule(opcode, (kind,), (kind, kind), max), [(1, 0)] * 32)


def test_a_carry_goes_from_the_lower_to_the_upper_half() -> None:
    drawn = draws(Rule("carry", ("u64",), ("u64", "u64", "u64"), max), COUNT)
    split = "mov.b64 {%r10, %r11}, %rd20; mov.b64 {%r12, %r13}, %rd21; mov.b64 {%r14, %r15}, %rd22;"
    code = "mad.lo.cc.u32 %r16, %r10, %r12, %r14; madc.hi.u32 %r17, %r10, %r12, %r15;"
    rule = Rule(f"{split} {code} mov.b64", ("u64",), ("u64", "u64", "u64"), max)
    found = results_of(rule, drawn, "%rd27, {%r16, %r17}")
    wanted = [(a % 2**32) * (b % 2**32) + c for a, b, c in drawn]
    assert [x for (x,) in found] == [total % 2**64 for total in wanted]
