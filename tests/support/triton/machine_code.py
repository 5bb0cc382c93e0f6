"""Registers, spills and loads in the machine code of a kernel for NVIDIA's GPUs, from NVIDIA's own programs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton


class Usage(NamedTuple):
    """Registers of a thread, and bytes of a thread that spill."""

    registers: int
    spills: int


def usage_of(cubin: bytes) -> Usage:
    """Return what a kernel uses."""
    text = _ran("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"[usage_of] cuobjdump's output must name registers: {text!r}.")
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local)


def disassembled(cubin: bytes) -> str:
    """Return the instructions of a kernel, as NVIDIA's disassembler writes them."""
    return _ran("nvdisasm", cubin, "-c")


def _ran(tool: str, cubin: bytes, *options: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def accesses_of(listing: str) -> dict[str, Counter[int]]:
    """Return the bytes of each load and of each store of global memory, by LDG and STG."""
    found: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for name, more in re.findall(r"\b(LDG|STG)\.E([.\w]*)", listing):
        size = re.search(r"\.(128|64|U16|S16|U8|S8)\b", more)
        found[name][int(size[1].strip("US")) // 8 if size else 4] += 1
    return found


_INSTRUCTION = re.compile(
    r"\s*/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)


def in_flight(listing: str) -> int:
    """Return the bytes that a thread loads before it uses the first of them, in the loop over heads.

    If there are several such loops, this is the least number; without a loop it is 0.
    """
    code: list[tuple[str, str, list[str]]] = []  # predicate, opcode, operands
    places: dict[str, int] = {}  # label or address -> index
    for line in listing.splitlines():
        if found := re.match(r"([.$]\S+):$", line):
            places[found[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            at, predicate, opcode, rest = found.groups("")
            places[f"{int(at, 16):#x}"] = len(code)
            code.append((predicate, opcode, re.split(r",\s*", rest)))
    loops = []
    for i, (_, opcode, operands) in enumerate(code):
        start = places[operands[-1].strip("`()")] if opcode.startswith("BRA") else i
        waiting: set[str] = set()
        asked_for = 0
        for predicate, name, (first, *rest) in code[start:i]:
            writes = not name.startswith(("ST", "BRA", "RET"))
            read = " ".join((predicate, *rest, *([] if writes else [first])))
            if waiting & set(re.findall(r"\bU?[RP]\d+\b", read)):
                break
            if name.startswith("LDG") and ".128" in name:
                register = int(first.removeprefix("R"))
                waiting |= {f"R{register + n}" for n in range(4)}
                asked_for += 16
        if waiting:
            loops.append(asked_for)
    return min(loops, default=0)
