"""Compile parts of the Triton kernels for sm_90 and execute their PTX: run by tests/kernel/triton/test_machine_code.py.

The script has a process of its own, because Triton chooses compiler or interpreter at import.
It prints JSON: errors of cosine, sine, exp and sigmoid against float64, and exp of infinities, NaN
and -0; and how many phase words differ from those of the definition.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.triton.ptx.launch import execute
from tests.support.triton.ptx.machine import Program
from tests.support.triton.ptx.parse import parse
from tightrope.angles import NO_TURNS, words_from
from tightrope.backends.triton import blocks, launch
from tightrope.backends.triton.kernels.angles import cos_sin
from tightrope.backends.triton.kernels.elementary import exp, sigmoid
from tightrope.backends.triton.kernels.phases import words_of

SIZE = 512  # elements of a program, which has 128 threads
Array = npt.NDArray[Any]


@triton.jit
def angles_of(phases, cosines, sines, SIZE: tl.constexpr):
    """Store cosines and sines of phases."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    c, s = cos_sin(tl.load(phases + i), False)
    tl.store(cosines + i, c)
    tl.store(sines + i, s)


@triton.jit
def elementary_of(xs, exps, sigmoids, SIZE: tl.constexpr):
    """Store e^x and the logistic function of x."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(xs + i)
    tl.store(exps + i, exp(x))
    tl.store(sigmoids + i, sigmoid(x))


@triton.jit
def words_of_angles(angles, words, lost, SIZE: tl.constexpr):
    """Store phase words of angles, and 1 for those that are lost."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    word, gone = words_of(tl.load(angles + i))
    tl.store(words + i, word)
    tl.store(lost + i, gone.to(tl.int64))


def evaluated(
    kernel: Any, pointer: str, values: Array, result: str = "*fp32"
) -> tuple[Array, Array]:
    """Return both results of a kernel for values whose number is a multiple of SIZE."""
    types = dict(zip(kernel.arg_names, (pointer, result, result, "constexpr")))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    target = GPUTarget("cuda", 90, 32)
    options = launch.options_of(blocks.Blocks(SIZE, 4, 1, SIZE), target)
    source = ASTSource(kernel, types, {(3,): SIZE}, aligned)
    compiled = triton.compile(source, target=target, options=options)
    program = Program(parse(compiled.asm["ptx"]))
    kind = torch.float32 if result == "*fp32" else torch.int64
    found = [torch.zeros(len(values), dtype=kind) for _ in range(2)]
    tensors = [(x.data_ptr(), x) for x in (torch.from_numpy(values), *found)]
    pointers = [struct.pack("<Q", address) for address, _ in tensors]
    # Parameters after these point to memory that the kernel does not need.
    pointers += [bytes(8)] * (len(program.kernel.parameters) - len(pointers))
    size = (len(values) // SIZE, 1, 1)
    execute(program, size, pointers, compiled.metadata.shared, tensors)
    return found[0].numpy(), found[1].numpy()


def phases() -> Array:
    """Return random phases, and phases around each multiple of an eighth of a turn."""
    rng = np.random.default_rng(1)
    random = rng.integers(-(2**63), 2**63 - 1, 1 << 17, dtype="i8")
    small = rng.integers(-(2**63), 2**63 - 1, 1 << 15, dtype="i8") >> rng.integers(0, 63, 1 << 15)
    near = np.arange(-64, 64, dtype="i8")
    edges = (np.arange(8, dtype="i8") << 61)[:, None, None] + (near[:, None] << np.arange(0, 60, 4))
    every = np.concatenate((random, small, edges.ravel()))
    return every[: len(every) // SIZE * SIZE]


def angles() -> dict[str, Any]:
    every = phases()
    cosine, sine = evaluated(angles_of, "*i64", every)
    # The same angles another way: subtract whole quarter turns in exact integers, then use float64.
    quarter = np.round(every.astype(np.longdouble) / 2**62).astype("i8")
    rest = (every - (quarter.astype("u8") << np.uint64(62)).view("i8")).astype("f8") * (
        2 * np.pi / 2**64
    )
    c, s = np.cos(rest), np.sin(rest)
    turn = quarter % 4
    want_c = np.choose(turn, [c, -s, -c, s])
    want_s = np.choose(turn, [s, c, -s, -c])
    return {
        "phases": len(every),
        "cosine": float(np.abs(cosine - want_c).max()),
        "sine": float(np.abs(sine - want_s).max()),
    }


def elementary() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    x = np.concatenate((rng.uniform(-110, 92, 1 << 15), rng.standard_normal(1 << 14), [0.0] * SIZE))
    x = x.astype("f4")
    got, logistic = evaluated(elementary_of, "*fp32", x)
    with np.errstate(over="ignore"):
        wide = np.exp(x.astype("f8"))
        fair = 1 / (1 + np.exp(-x.astype("f8")))
    tiny, large = 2.0**-126, np.finfo("f4").max
    usual = (wide > tiny) & (wide < large)
    special = evaluated(
        elementary_of,
        "*fp32",
        np.resize(np.array([np.inf, -np.inf, np.nan, -0.0], "f4"), SIZE),
    )[0][:4]
    return {
        "exp": float((np.abs(got - wide) / wide)[usual].max()),
        "exp, subnormal": float(np.abs(got.astype("f8") - wide)[wide <= tiny].max() / 2.0**-149),
        "sigmoid": float((np.abs(logistic - fair) / fair)[fair > tiny].max()),
        "special": [repr(float(value)) for value in special],
    }


def words() -> dict[str, dict[str, int]]:
    rng = np.random.default_rng(3)
    half = np.pi * np.arange(1, 1 << 12)
    every = np.concatenate(
        (
            rng.standard_normal(1 << 13) * 10.0 ** rng.uniform(-20, 22, 1 << 13),
            half,
            np.nextafter(half, 0),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, 3.9e38, 1e308],
        )
    )
    every = np.resize(every, -(-len(every) // SIZE) * SIZE)
    found = {}
    for name, kind in (("fp32", "f4"), ("fp64", "f8")):
        with np.errstate(over="ignore"):
            given = every.astype(kind)
        word, lost = evaluated(words_of_angles, f"*{name}", given, "*i64")
        want, turns = (x.numpy() for x in words_from(torch.from_numpy(given)))
        wrong = (word != want) | (lost != (turns == NO_TURNS))
        found[name] = {"angles": len(given), "wrong": int(wrong.sum())}
    return found


if __name__ == "__main__":
    print(json.dumps({"angles": angles(), "elementary": elementary(), "words": words()}))
    sys.exit(0)
