"""An evaluator in numpy for the PTX of small element-wise kernels, for all threads at once.

Triton's interpreter runs the source of a kernel; this evaluator runs the PTX that a GPU gets, with
the rounding that PTX prescribes for each instruction. Approximate arithmetic is not supported, nor
arithmetic that flushes subnormal numbers, except in floor.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LINE = re.compile(r"^\s*(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s+(.*?);", re.ASCII)
_INTEGERS = {
    **{f"{kind}{bits}": f"i{bits // 8}" for kind in "s" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"u{bits // 8}" for kind in "ub" for bits in (16, 32, 64)},
}
_TYPES = {**_INTEGERS, "f32": "f4", "f64": "f8", "pred": "?"}


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a · b + c in float32, rounded once.

    It is computed in float64, where the product is exact and the sum is rounded to odd.
    """
    product = a.astype("f8") * b.astype("f8")
    wide = c.astype("f8")
    total = product + wide
    part = total - product
    rest = (product - (total - part)) + (wide - part)
    bits = total.view("i8").copy()
    finite = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    outward = (rest > 0) == (total > 0)
    bits = np.where(finite, np.where(outward, bits | 1, bits - 1), bits)
    return bits.view("f8").astype("f4")


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, b: a << b.astype(a.dtype),
    "shr": lambda a, b: a >> b.astype(a.dtype),
    "min": np.fmin,
    "max": np.fmax,
    "div": np.divide,
}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
_COMPARE |= {
    f"{name}u": (lambda a, b, f=f: f(a, b) | np.isnan(a) | np.isnan(b))
    for name, f in list(_COMPARE.items())[:6]
}


class Threads:
    """One thread block, which runs on construction.

    It holds the registers of all threads, and one flat memory per pointer parameter.

    Args:
        ptx: the PTX of a kernel without loops, shared memory or barriers.
        tensors: the tensors of the kernel's pointer parameters, in order; stores change them.
        threads: number of threads.
    """

    def __init__(self, ptx: str, tensors: list[Array], threads: int) -> None:
        self.threads = threads
        self.tensors = tensors
        self.at: dict[str, Array] = {}
        body = ptx[ptx.index("{", ptx.index(".entry")) :]
        for line in re.sub(r"//.*", "", body).splitlines():
            found = _LINE.match(line)
            if found is None:
                continue
            negated, guard, operation, operands = found.groups()
            on = np.ones(threads, bool) if guard is None else self.at[guard] ^ (negated == "!")
            if operation == "ret":
                return
            self._run(operation.split("."), _operands(operands), on)

    def _value(self, operand: str, kind: str) -> Array:
        """Return the value of an operand in each thread, as PTX type `kind`."""
        dtype = np.dtype(_TYPES[kind])
        if operand in self.at:
            raw = self.at[operand]
            if kind == "pred" or raw.dtype == bool:
                return raw
            return raw.astype(f"u{dtype.itemsize}").view(dtype)
        if operand == "%tid.x":
            return np.arange(self.threads, dtype=dtype)
        if operand.startswith("0f"):
            number = struct.unpack(">f", bytes.fromhex(operand[2:]))[0]
        elif operand.startswith("0d"):
            number = struct.unpack(">d", bytes.fromhex(operand[2:]))[0]
        else:
            bits = 8 * dtype.itemsize
            whole = int(operand.rstrip("U"), 0) % (1 << bits)
            return np.full(self.threads, whole, f"u{dtype.itemsize}").view(dtype)
        return np.full(self.threads, number, dtype)

    def _set(self, name: str, value: Array, on: Array) -> None:
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
        if not on.all():
            value = np.where(on, value, self.at.get(name, np.zeros_like(value)).astype(value.dtype))
        self.at[name] = value

    def _run(self, words: list[str], operands: list[str], on: Array) -> None:
        name, kind = words[0], words[-1]
        with np.errstate(all="ignore"):
            if name in ("ld", "st"):
                self._memory(words, operands, on)
            elif name == "cvta":
                self._set(operands[0], self._value(operands[1], "u64"), on)
            elif name == "mov" and operands[1].startswith("{"):
                halves = [self._value(x, "b16").astype("u4") for x in _listed(operands[1])]
                self._set(operands[0], halves[0] | halves[1] << 16, on)
            elif name == "mov" and operands[0].startswith("{"):
                wide, each = self._value(operands[1], kind), int(kind[1:]) // 2
                for i, into in enumerate(_listed(operands[0])):
                    self._set(into, (wide >> wide.dtype.type(i * each)).astype(f"u{each // 8}"), on)
            elif name == "mov":
                kind = "b64" if kind == "u64" else kind
                self._set(operands[0], self._value(operands[1], kind), on)
            elif name == "cvt":
                self._convert(words, operands, on)
            elif name == "setp":
                a, b = (self._value(x, kind) for x in operands[1:3])
                self._set(operands[0], _COMPARE[words[1]](a, b), on)
            elif name == "selp":
                a, b = (self._value(x, kind) for x in operands[1:3])
                self._set(operands[0], np.where(self.at[operands[3]], a, b), on)
            elif name in ("neg", "abs", "not"):
                unary = {"neg": np.negative, "abs": np.abs, "not": np.invert}[name]
                self._set(operands[0], unary(self._value(operands[1], kind)), on)
            elif name in ("fma", "mad"):
                self._fused(words, operands, on)
            elif name in _BINARY:
                self._binary(words, operands, on)
            else:
                raise NotImplementedError(".".join(words))

    def _binary(self, words: list[str], operands: list[str], on: Array) -> None:
        name, kind = words[0], words[-1]
        assert not {"approx", "full", "ftz", "sat", "hi"} & set(words), words
        a, b = (
            self._value(operands[1], kind),
            self._value(operands[2], "u32" if name in ("shl", "shr") else kind),
        )
        if name == "mul" and "wide" in words:
            a, b = a.astype(f"{a.dtype.kind}8"), b.astype(f"{b.dtype.kind}8")
        self._set(operands[0], _BINARY[name](a, b), on)

    def _fused(self, words: list[str], operands: list[str], on: Array) -> None:
        kind = words[-1]
        if words[0] == "fma":
            a, b, c = (self._value(x, kind) for x in operands[1:4])
            if kind == "f64":
                # numpy rounds the product too, which must therefore be exact.
                product = a * b
                exact = product == a.astype("g") * b.astype("g")
                assert exact[np.isfinite(product)].all(), (words, operands)
                self._set(operands[0], product + c, on)
                return
            assert words[1:] == ["rn", "f32"], words
            self._set(operands[0], fma(a, b, c), on)
            return
        a, b = (self._value(x, kind) for x in operands[1:3])
        if "wide" in words:
            a, b = a.astype(f"{a.dtype.kind}8"), b.astype(f"{b.dtype.kind}8")
            kind = f"{kind[0]}64"
        self._set(operands[0], a * b + self._value(operands[3], kind), on)

    def _convert(self, words: list[str], operands: list[str], on: Array) -> None:
        to, of = words[-2], words[-1]
        x = self._value(operands[1], of)
        if "rmi" in words:
            # Flush subnormal numbers to 0 if the instruction requires it.
            flat = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x) if "ftz" in words else x
            x = np.floor(flat).astype("f4")
        elif "rzi" in words:
            limits = np.iinfo(_TYPES[to])
            wide = np.clip(np.nan_to_num(np.trunc(x.astype("f8")), nan=0.0), limits.min, limits.max)
            x = wide.astype(_TYPES[to])
        else:
            assert "approx" not in words, words
            x = x.astype(_TYPES[to])
        self._set(operands[0], x, on)

    def _memory(self, words: list[str], operands: list[str], on: Array) -> None:
        bits = int(words[-1][1:])
        if words[1] == "param":
            index = int(re.findall(r"param_(\d+)", operands[1])[0])
            # Tensors lie 2^40 bytes apart. Parameters after them point to memory that is not read.
            self._set(operands[0], np.full(self.threads, (index + 1) << 40, "u8"), on)
            return
        where, registers = (operands[1], operands[0]) if words[0] == "ld" else operands[:2]
        base = re.match(r"\[\s*(%rd\d+)\s*(?:\+\s*(\d+))?\s*\]", where)
        assert base is not None, where
        address = self.at[base[1]] + np.uint64(int(base[2] or 0))
        for i, register in enumerate(_listed(registers)):
            place = address + np.uint64(i * bits // 8)
            assert len(set((place >> np.uint64(40)).tolist())) == 1
            memory = self.tensors[int(place[0] >> np.uint64(40)) - 1].view(f"u{bits // 8}")
            index_ = ((place & np.uint64((1 << 40) - 1)) // np.uint64(bits // 8)).astype("i8")
            if words[0] == "ld":
                self._set(register, memory[np.where(on, index_, 0)], on)
            else:
                memory[index_[on]] = self._value(register, f"b{bits}")[on]


def _operands(text: str) -> list[str]:
    """Split the operands; braces group several registers."""
    return [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", text) if x.strip()]


def _listed(text: str) -> list[str]:
    return [x.strip() for x in text.strip("{} ").split(",")]
