"""Read the PTX text of a kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Fault(Exception):
    """An error: what a kernel must not do, or what the emulator does not know."""


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        guard: the register of its predicate, or "".
        negated: whether it runs where the predicate is false.
        opcode: its name with all modifiers, such as "add.rn.f32".
        operands: the operands; one in braces is a tuple of registers.
        text: the instruction as it was written, for messages.
    """

    guard: str
    negated: bool
    opcode: str
    operands: tuple[str | tuple[str, ...], ...]
    text: str


class Kernel(NamedTuple):
    """A kernel.

    Attributes:
        name: its name.
        code: its instructions.
        labels: the index of the instruction that follows each label.
        parameters: name of each parameter and its number of bytes, in order.
        threads: number of threads of a program.
        types: the type of the registers with each prefix, such as "b32" for "%r".
        local: bytes of a thread's local memory, by name.
        constants: the contents of constant arrays, by name.
    """

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[tuple[str, int], ...]
    threads: int
    types: dict[str, str]
    local: dict[str, int]
    constants: dict[str, npt.NDArray[np.uint8]]


_STATEMENT = re.compile(
    r"""\s*(?:
        (?P<label> [$\w]+ ) : (?!:)
      | (?P<directive> \.(?:loc|file|section)\b [^\n]* | \.[^;]*; )
      | (?: @(?P<negated>!?)(?P<guard>%?\w+) \s+ )? (?P<opcode> [a-z][\w.:]* ) (?P<operands> [^;]* ) ;
      | (?P<brace> [{}] )
    )""",
    re.VERBOSE,
)
_OPERAND = re.compile(r"\s*(\{[^{}]*\}|\[[^\[\]]*\]|[^,{}\[\]]+?)\s*(?:,|$)")
_CONSTANT = re.compile(r"\.(?:global|const) [^;={]*\.b8 (\w+)\[(\d+)\] = \{([^}]*)\}")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%?[A-Za-z]\w*?)(?:<\d+>)?\s*;")
_LOCAL = re.compile(r"\.local\s.*\.b8\s+(\w+)\[(\d+)\]")


def parse(ptx: str) -> Kernel:
    """Return the only kernel of a PTX module."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    head, _, rest = ptx.partition(".entry")
    signature, _, body = rest.partition("{")
    name, threads = re.match(r"\s*(\w+)", rest), re.search(r"\.reqntid\s+(\d+)", signature)
    if ".entry" in rest or name is None or threads is None:
        raise Fault("there must be one kernel, and it must require a number of threads")
    parameters = re.findall(r"\.param\s+\.[a-z](\d+)\s[^,)]*?(\w+_param_\d+)", signature)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    types: dict[str, str] = {}
    local: dict[str, int] = {}
    at, depth = 0, 1
    while depth:
        found = _STATEMENT.match(body, at)
        if found is None:
            raise Fault(f"cannot read {body[at : at + 80].strip()!r}")
        at = found.end()
        if found["brace"]:
            depth += 1 if found["brace"] == "{" else -1
        elif found["label"]:
            labels[found["label"]] = len(code)
        elif found["directive"]:
            if register := _REGISTERS.match(found["directive"]):
                types[register[2]] = register[1]
            elif memory := _LOCAL.match(found["directive"]):
                local[memory[1]] = int(memory[2])
        else:
            text = " ".join(found[0].split())
            operands = operands_of(found["operands"], text)
            guard = found["guard"] or ""
            code.append(Instruction(guard, bool(found["negated"]), found["opcode"], operands, text))
    return Kernel(
        name[1],
        tuple(code),
        labels,
        tuple((parameter, int(bits) // 8) for bits, parameter in parameters),
        int(threads[1]),
        types,
        local,
        {
            found[1]: np.array([int(x, 0) & 255 for x in found[3].split(",")], np.uint8)
            for found in _CONSTANT.finditer(head)
        },
    )


def operands_of(text: str, instruction: str) -> tuple[str | tuple[str, ...], ...]:
    """Split operands; those in braces are tuples of registers."""
    operands: list[str | tuple[str, ...]] = []
    at, text = 0, text.strip()
    while at < len(text):
        found = _OPERAND.match(text, at)
        if found is None:
            raise Fault(f"cannot read the operands of {instruction!r}")
        at, operand = found.end(), found[1]
        braced = operand.startswith("{")
        operands.append(tuple(operand[1:-1].replace(" ", "").split(",")) if braced else operand)
    return tuple(operands)
