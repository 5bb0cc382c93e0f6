"""Read and run the machine code of a kernel for sm_90, without a GPU.

NVIDIA's disassembler prints the machine code (SASS). :class:`Program` runs the integer instructions of
one program of a grid, for all of its threads. So the number of instructions and the addresses of
all accesses to memory are exact. Values that are loaded or floating-point are unknown; a branch on an
unknown value skips subroutines, which handle rare numbers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = Any  # uint64, with one element or one for each thread; None if unknown

_MASK = np.uint64(0xFFFFFFFF)


class Pipe(NamedTuple):
    """A pipe of a multiprocessor: lanes per clock, clocks until a result, beginnings of its opcodes."""

    lanes: int
    clocks: int
    opcodes: tuple[str, ...]


#: The pipes of an sm_90 multiprocessor; the last one runs all other opcodes. Lanes are those of the
#: table "Throughput of Native Arithmetic Instructions" in the CUDA C++ Programming Guide, for compute
#: capability 9.0. It lists neither uniform and control instructions nor the packing of two bfloat16
#: (F2FP), which is taken to be as fast as integers. The clocks are estimates.
PIPES = {
    "FP32": Pipe(128, 4, ("FFMA", "FMUL", "FADD")),
    "IMAD": Pipe(64, 5, ("IMAD", "HFMA2")),
    "FP64": Pipe(64, 8, ("DADD", "DMUL", "DFMA", "DSETP")),
    "XU": Pipe(16, 20, ("MUFU", "I2F.", "F2I.", "F2F.")),
    "memory": Pipe(32, 30, ("LDG", "STG", "LDS", "STS", "SHFL")),
    "uniform": Pipe(64, 10, ("U", "S2UR", "R2UR")),
    "control": Pipe(64, 20, ("BRA", "EXIT", "BAR", "BS", "CALL", "RET", "NOP", "LDC", "S2R", "CS2R")),
    "integer": Pipe(64, 5, ("",)),
}  # fmt: skip

#: Clocks until a load from global memory arrives, while the memory is busy: 800 ns.
LOAD = 1400


def disassembled(cubin: bytes) -> str:
    """Return the machine code of a kernel, with its lines in the source, as NVIDIA's disassembler writes it."""
    return _ran("nvdisasm", cubin, "-g", "-c")


class Usage(NamedTuple):
    """Registers of a thread, bytes of shared memory of a program, bytes of a thread that spill."""

    registers: int
    shared: int
    spills: int


def usage_of(cubin: bytes) -> Usage:
    """Return what a kernel uses, without the shared memory that a launch adds."""
    text = _ran("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"[usage_of] cuobjdump's output must name registers: {text!r}.")
    registers, stack, shared, local = map(int, found.groups())
    return Usage(registers, shared, stack + local)


def _ran(tool: str, cubin: bytes, *options: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        at: its address.
        predicate: the flag that it depends on, or "".
        opcode: with its modifiers.
        operands: the registers that it writes come first.
        source: name of the source file.
        to: index of the instruction that it jumps to, or None.
    """

    at: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]
    source: str
    to: int | None = None


_LINE = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def read(sass: str) -> list[Instruction]:
    """Return the instructions of a listing."""
    code: list[Instruction] = []
    places: dict[str, int] = {}
    source = ""
    for line in sass.splitlines():
        if found := re.match(r'\s*//## File "(?:.*/)?([^/"]+)", line \d+', line):
            source = found[1]
        elif found := re.match(r"([.$]\S+):$", line):
            places[found[1]] = len(code)
        elif found := _LINE.match(line):
            at, predicate, opcode, rest = found.groups("")
            places[f"{int(at, 16):#x}"] = len(code)
            operands = tuple(re.split(r",\s*", rest)) if rest else ()
            code.append(Instruction(int(at, 16), predicate, opcode, operands, source))
    jumps = {i for i, one in enumerate(code) if one.opcode.startswith(("BRA", "CALL"))}
    return [
        one._replace(to=places[one.operands[-1].strip("`()")]) if i in jumps else one
        for i, one in enumerate(code)
    ]


@cache
def pipe_of(opcode: str) -> str:
    """Return the name of the pipe that runs an opcode.

    >>> pipe_of("IMAD.WIDE.U32"), pipe_of("I2FP.F32.S32"), pipe_of("ULDC.64"), pipe_of("LOP3.LUT")
    ('IMAD', 'integer', 'uniform', 'integer')
    """
    return next(name for name, pipe in PIPES.items() if opcode.startswith(pipe.opcodes))


def in_flight(code: Sequence[Instruction]) -> int:
    """Return the bytes that a thread loads before it uses the first of them, in the loop over heads.

    If there are several such loops, this is the least number; without a loop it is 0.
    """
    found = []
    for i, one in enumerate(code):
        if not one.opcode.startswith("BRA") or one.to is None or one.to >= i:
            continue
        waiting: set[str] = set()
        asked_for = 0
        for inside in code[one.to : i]:
            if waiting & set(_reads(inside)):
                break
            if inside.opcode.startswith("LDG") and ".128" in inside.opcode:
                waiting |= set(_several(inside.operands[0], 4))
                asked_for += 16
        if waiting:
            found.append(asked_for)
    return min(found, default=0)


@cache
def _reads(one: Instruction) -> list[str]:
    """Return the registers and flags that an instruction reads; of pairs, the first register."""
    stores = one.opcode.startswith(("ST", "BRA", "RET"))
    rest = " ".join((one.predicate, *one.operands[0 if stores else 1 :]))
    return re.findall(r"\bU?(?:R|P)\d+\b", rest)


def _several(first: str, count: int) -> list[str]:
    """Return the names of consecutive registers; none for the register that is always zero."""
    found = re.fullmatch(r"(U?R)(\d+)", first)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(count)] if found else []


class Access(NamedTuple):
    """Accesses of one instruction to global memory: the bytes of each, and the threads' addresses."""

    store: bool
    size: int
    addresses: Array


_FLAG = re.compile(r"!?U?P[\dT]")
_SILENT = ("BRA", "CALL", "RET", "EXIT", "BAR", "BSSY", "BSYNC", "NOP", "STG", "STS", "STSM")
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def _size(opcode: str) -> int:
    """Return the bytes that an access to memory moves."""
    return next((_SIZES[part] for part in opcode.split(".") if part in _SIZES), 4)


def _registers(opcode: str) -> int:
    """Return how many registers an instruction writes."""
    name, *parts = opcode.split(".")
    if name in ("LDG", "LDS", "LDC", "ULDC"):
        return max(_size(opcode) // 4, 1)
    if name == "LDSM":
        return int(parts[-1]) if parts[-1].isdigit() else 1
    pairs = ("CS2R", "DADD", "DMUL", "DFMA", "F2I.S64", "F2I.U64", "F2F.F64", "I2F.F64")
    return 2 if "WIDE" in parts or opcode.startswith(pairs) else 1


def _table(lut: int, a: Array, b: Array, c: Array) -> Array:
    """Return the bits that a table of 8 bits gives for the bits of a, b and c."""
    found = a ^ a
    for i in range(8):
        if lut >> i & 1:
            each = [x if i & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            found = found | (each[0] & each[1] & each[2])
    return found


def _word(x: int) -> Array:
    return np.array([x & 0xFFFFFFFF], np.uint64)


def _signed(x: Array) -> Array:
    return x.astype(np.uint32).view(np.int32).astype(np.int64)


class Program:
    """One program of a grid, which runs on construction.

    Attributes:
        executed: how often a warp issues each instruction, by its index.
        accesses: all accesses to global memory, in order.
        guesses: addresses of the branches on unknown values.
        loop: index of the first instruction of the first loop; None without a loop.
        clocks: the time that a warp takes if nothing else runs.
        before: the part of it before the first loop.

    Args:
        code: the instructions.
        constants: the 32-bit words of constant bank 0, by their offsets in bytes.
        place: the program's indices in the grid.
        threads: number of threads.
    """

    def __init__(
        self,
        code: Sequence[Instruction],
        constants: Mapping[int, int],
        place: Sequence[int],
        threads: int,
    ) -> None:
        self.executed: Counter[int] = Counter()
        self.accesses: list[Access] = []
        self.guesses: set[int] = set()
        self.loop: int | None = None
        self.clocks = self.before = 0
        self._code, self._live = code, np.ones(threads, bool)
        self._known: dict[str, Array] = {
            f"c[0x0][{at:#x}]": _word(word) for at, word in constants.items()
        }
        self._known |= {f"SR_CTAID.{axis}": _word(n) for axis, n in zip("XYZ", place)}
        self._known |= {"SR_TID.X": np.arange(threads, dtype=np.uint64), "SR_CgaCtaId": _word(0)}
        self._known |= {"PT": np.ones(1, bool), "UPT": np.ones(1, bool)}
        self._known |= {"RZ": _word(0), "URZ": _word(0), "SRZ": _word(0)}
        self._ready: dict[str, int] = {}  # the clock at which a register or flag is known
        begins: dict[int, int] = {}
        i = 0
        while self._live.any():
            one = code[i]
            self.executed[i] += 1
            if self.executed[i] > 100_000:
                raise RuntimeError("[Program] the program must end.")
            self.clocks = max([self.clocks + 1, *(self._ready.get(x, 0) for x in _reads(one))])
            begins.setdefault(i, self.clocks)
            if one.opcode.startswith("BRA") and one.to is not None and one.to < i:
                if self.loop is None:
                    self.loop, self.before = one.to, begins[one.to]
            to = self._step(one)
            i = i + 1 if to is None else to

    def _step(self, one: Instruction) -> int | None:
        """Run one instruction; return the index of the next one if it jumps there."""
        on = self._flag(one.predicate or "PT")
        name, *parts = one.opcode.split(".")
        if name in ("BRA", "CALL", "RET"):
            return self._jump(one, on)
        if name == "EXIT":
            if on is None:
                raise RuntimeError(f"[Program] the exit at {one.at:#x} must not depend on data.")
            self._live &= ~on
        if name in ("LDG", "STG"):
            self._access(one, on)
        if name == "BAR":
            self.clocks += PIPES["memory"].clocks
        if name in _SILENT:
            return None
        rest = list(one.operands)
        flags = [rest.pop(0)] if _FLAG.fullmatch(rest[0]) else []
        target = "" if flags and name not in ("LOP3", "ULOP3", "SHFL") else rest.pop(0)
        while rest and _FLAG.fullmatch(rest[0]) and len(flags) < 2:
            flags.append(rest.pop(0))
        value, carries = self._computed(name.removeprefix("U"), parts, rest)
        clock = self.clocks + (LOAD if name == "LDG" else PIPES[pipe_of(one.opcode)].clocks)
        for i, register in enumerate(_several(target, _registers(one.opcode))):
            part = None if value is None else (value >> np.uint64(32 * i)) & _MASK
            self._write(register, part, on, clock)
        for flag, carry in zip(flags, (*carries, None)):
            if flag not in ("PT", "UPT"):
                self._write(flag, carry, on, clock)
        return None

    def _write(self, name: str, value: Array, on: Array, clock: int) -> None:
        """Write a register or a flag where `on` is true."""
        old = self._known.get(name)
        if on is None:
            value = None
        elif value is not None and old is not None:  # else other threads do not use it
            value = np.where(on, value, old)
        self._known[name] = value if on is None or on.any() else old
        self._ready[name] = clock

    def _jump(self, one: Instruction, on: Array) -> int | None:
        for flag in one.operands[:-1]:
            also = self._flag(flag) if _FLAG.fullmatch(flag) else self._flag("PT")
            on = None if on is None or also is None else on & also
        if on is None:
            self.guesses.add(one.at)
            place = next(i for i, x in enumerate(self._code) if x.at == one.at)
            skipped = (x.opcode for x in self._code[place : one.to])
            return one.to if any(opcode.startswith("CALL") for opcode in skipped) else None
        on = np.broadcast_to(on, self._live.shape)[self._live]
        if on.any() != on.all():
            raise RuntimeError(f"[Program] the branch at {one.at:#x} must not diverge.")
        if not on[0]:
            return None
        if one.opcode.startswith("RET"):
            back = int(self._known[one.operands[0].split()[0]][0])
            return next(i for i, x in enumerate(self._code) if x.at == back)
        return one.to

    def _access(self, one: Instruction, on: Array) -> None:
        # A load whose predicate depends on data counts as one that happens.
        on = self._live if on is None else self._live & on
        if not on.any():
            return
        text = next(x for x in one.operands if x.startswith("desc"))
        found = re.search(r"\]\[(R\d+\.64)(?:\+(-?0x[0-9a-f]+))?\]$", text)
        base = None if found is None else self._value(found[1])
        if found is None or base is None:
            raise RuntimeError(f"[Program] the address at {one.at:#x} must be known: {text}.")
        at = base + np.array([int(found[2] or "0", 16)], np.int64).astype(np.uint64)
        at = np.broadcast_to(at, on.shape)[on]
        self.accesses.append(Access(one.opcode.startswith("STG"), _size(one.opcode), at))

    def _flag(self, text: str) -> Array:
        found = self._known.get(text.lstrip("!"))
        return ~found if found is not None and text[0] == "!" else found

    def _value(self, text: str, borrow: bool = False) -> Array:
        """Return the value of an operand; with `borrow`, the negative of 0 is 2^32.

        The suffix ".64" takes the next register, or the next word of constants, as the upper half.
        """
        sign, name = (text[0], text[1:]) if text[0] in "-~" else ("", text)
        name = name.removesuffix(".reuse")
        if name.endswith(".64"):
            name = name.removesuffix(".64")
            start = re.match(r"(.*?)(0x[0-9a-f]+|\d+)(\]?)$", name)
            if start is None:  # RZ
                return _word(0)
            step = 4 if start[3] else 1
            number = int(start[2], 0) + step
            other = f"{start[1]}{hex(number) if start[3] else number}{start[3]}"
            low, high = self._known.get(name), self._known.get(other)
            return None if low is None or high is None else low | (high << np.uint64(32))
        number = re.fullmatch(r"0x[0-9a-f]+|\d+", name)
        found = self._known.get(name) if number is None else _word(int(name, 0))
        if found is None or not sign:
            return found
        found = found ^ _MASK if sign == "~" else np.uint64(1 << 32) - found
        return found if borrow else found & _MASK

    def _computed(
        self, name: str, parts: Sequence[str], operands: Sequence[str]
    ) -> tuple[Array, Sequence[Array]]:
        """Return the value of an instruction and the flags that it sets; None for what is unknown."""
        values = [x for x in operands if not _FLAG.fullmatch(x)]
        flags = [self._flag(x) for x in operands if _FLAG.fullmatch(x)]
        nothing: tuple[Array, Sequence[Array]] = None, ()
        if name == "CS2R":
            return _word(0), ()
        if name in ("LDC", "S2R", "MOV", "R2UR", "S2UR"):
            return self._value(values[0] + (".64" if "64" in parts else "")), ()
        if name == "P2R":  # the flags of a mask, as bits
            bits = [i for i in range(7) if int(values[-1], 0) >> i & 1]
            kept = [self._flag(f"P{i}") for i in bits]
            if any(flag is None for flag in kept):
                return nothing
            both = zip(bits, kept)
            return sum((f.astype(np.uint64) << np.uint64(i) for i, f in both), _word(0)), ()
        if name == "HFMA2":  # a constant of two float16
            halves = [np.float16(x).view(np.uint16) for x in values[-2:]]
            return _word(int(halves[0]) << 16 | int(halves[1])), ()
        if name == "IMAD" and ("WIDE" in parts or "HI" in parts) and values[2] not in ("RZ", "URZ"):
            values[2] += ".64"
        if name == "I2F" and parts[0] == "U64":
            values[0] += ".64"
        negative = name == "LEA" and values[0].startswith("-")
        if negative:
            values[0] = values[0][1:]
        v = [self._value(x, name == "IADD3") for x in values]
        if any(flag is None for flag in flags):
            return nothing
        if name == "SEL" and flags[0].all() != (~flags[0]).all():
            return v[0] if flags[0].all() else v[1], ()
        if any(x is None for x in v):
            return nothing
        carried = (
            sum((flag.astype(np.uint64) for flag in flags), _word(0)) if "X" in parts else _word(0)
        )
        if name in ("IADD3", "VIADD"):
            total = sum(v, carried)
            over = total >> np.uint64(32)
            return total & _MASK, (over >= 1, over >= 2)
        if name == "IMAD":
            if "WIDE" in parts or "HI" in parts:
                a, b = v[:2] if "U32" in parts else [_signed(x).astype(np.uint64) for x in v[:2]]
                total = a * b + v[2] + carried
                return total >> np.uint64(32) if "HI" in parts else total, (total < v[2],)
            total = (v[0] * v[1] & _MASK) + v[2] + carried
            return total & _MASK, (total > _MASK,)
        if name == "LEA":
            *both, shift = v
            first = both[0] | both[2] << np.uint64(32) if "HI" in parts else both[0]
            shifted = (first << shift) >> np.uint64(32 * ("HI" in parts)) & _MASK
            if negative:  # the negative of the shifted number; that of 0 is 2^32
                shifted = np.uint64(1 << 32) - shifted
            total = shifted + both[1] + carried
            return total & _MASK, (total > _MASK,)
        if name == "SHF":
            low, shift, high = v
            both = high << np.uint64(32) | low
            if "L" in parts:
                both = both << shift
                return both >> np.uint64(32) if "HI" in parts else both & _MASK, ()
            if "S32" in parts:
                return (_signed(high) >> shift.astype(np.int64)).astype(np.uint64) & _MASK, ()
            return high >> shift if "HI" in parts else (both >> shift) & _MASK, ()
        if name == "LOP3":
            found = _table(int(v[3][0]), *v[:3]) & _MASK
            return found, (found != 0,)
        if name == "PLOP3":
            return None, (_table(int(v[0][0]), *flags[:3]),)
        if name == "SEL":
            return np.where(flags[0], v[0], v[1]), ()
        if name == "SGXT" and "U32" in parts:
            return v[0] & ((np.uint64(1) << v[1]) - np.uint64(1)), ()
        if name == "ISETP":
            a, b = v if "U32" in parts else map(_signed, v)
            found = _COMPARE[parts[0]](a, b)
            if "EX" in parts:  # the upper half of a 64-bit comparison
                if parts[0] in ("EQ", "NE"):
                    found = found & flags[1] if parts[0] == "EQ" else found | flags[1]
                else:
                    found = _COMPARE[parts[0][0] + "T"](a, b) | ((a == b) & flags[1])
            return None, (found & flags[0] if "AND" in parts else found | flags[0],)
        if name == "PRMT":
            both, found = v[0] | (v[2] << np.uint64(32)), _word(0)
            for i in range(4):
                byte = v[1] >> np.uint64(4 * i) & np.uint64(7)
                found = found | (both >> byte * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i)
            return found, ()
        # The estimate of a reciprocal, by which integers are divided; what follows corrects it.
        if name == "I2F" and "RP" in parts:
            near = v[0].astype(np.float32)
            up = np.nextafter(near, np.float32(np.inf))
            return np.where(near.astype(np.float64) < v[0], up, near).view(np.uint32).astype(
                np.uint64
            ), ()
        if name == "MUFU" and parts == ["RCP"]:
            one = np.float32(1) / v[0].astype(np.uint32).view(np.float32)
            return one.view(np.uint32).astype(np.uint64), ()
        if name == "F2I" and parts[0] != "S64" and "F64" not in parts:
            return v[0].astype(np.uint32).view(np.float32).astype(np.uint64), ()
        return nothing
