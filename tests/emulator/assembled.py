"""Kernels written in PTX for the tests of the emulator, and their runs on tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from tests.emulator.launch import execute
from tests.emulator.machine import Grid, Program
from tests.emulator.parse import parse


def kernel(body: str, pointers: int, threads: int = 32, head: str = "") -> str:
    """Return a kernel; %rd0 and following are its pointers, %r0 is the thread and %r1 the program."""
    parameters = ",\n".join(
        f".param .u64 .ptr .global .align 1 made_param_{i}" for i in range(pointers)
    )
    loads = "\n".join(f"ld.param.b64 %rd{i}, [made_param_{i}];" for i in range(pointers))
    return f"""
.version 8.7
.target sm_90
.address_size 64
{head}
.extern .shared .align 16 .b8 global_smem[];
.visible .entry made({parameters}
)
.reqntid {threads}
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<40>;
    {loads}
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    {body}
    ret;
}}
"""


def run(
    ptx: str,
    tensors: Sequence[torch.Tensor],
    size: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    seed: int | None = None,
) -> Grid:
    """Run a kernel on tensors, which it changes."""
    values = [struct.pack("<Q", x.data_ptr()) for x in tensors]
    given = [(x.data_ptr(), x) for x in tensors]
    return execute(Program(parse(ptx)), size, values, shared, given, seed)
