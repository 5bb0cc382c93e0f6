"""Compile the Triton kernels without a GPU: run by tests/kernel/triton/test_machine_code.py.

The script has a process of its own, because Triton chooses compiler or interpreter at import.
It prints JSON: for all calls, or with the argument "some" for one of each kind of kernel. With the argument "table" it
prints the table of docs/gpu.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.support.triton.machine_code import accesses_of, disassembled, in_flight, usage_of
from tightrope.activations import ACTS
from tightrope.angles import words_from
from tightrope.backends.triton import launch, operators, phases, rotation, slots, sums
from tightrope.ops.schema import FACTOR, LOG, PHASES, SLOPE, Options

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}

# With the argument "some", these are compiled for sm_90, and those of ON_AMD for both.
ON_AMD = ("bfloat16", "log gate", "rms_norm backward", "running")
SOME = (
    *(*ON_AMD, "float32 interleaved", "M-RoPE", "tables", "silu", "softmax", "float8"),
    *("frequencies", "positions", "running, backward", "gates"),
)
# Kernels whose loads are counted; to disassemble one takes 0.4 s.
COUNTED = (
    *("bfloat16", "bfloat16 interleaved", "float32", "float32 interleaved", "M-RoPE", "tables"),
    *("phases", "silu", "silu backward", "softmax", "rms_norm", "rms_norm backward", "log gate"),
    *("slopes", "frequencies", "positions", "float8"),
)

asked: list[tuple[Any, ...]] = []


def note(kernel: Any, grid: Any, values: Any, aligned: Any, blocks: Any, device: Any) -> Any:
    """Replace `launch.launcher`: record the arguments and launch nothing."""
    asked.append((kernel, values, aligned, blocks))
    return lambda *_: None


def words(pairs: int, axes: int = 1, rows: int = 1, heads: int = 1) -> torch.Tensor:
    return words_from(torch.rand(axes, rows, heads, pairs, dtype=torch.float64))[0]


def heads(n: int, dtype: torch.dtype, width: int = 128) -> torch.Tensor:
    """Return heads as a model passes them: a transposed view."""
    return torch.empty(2, 64, n, width, dtype=dtype).transpose(1, 2)


def calls(width: int = 128) -> dict[str, Any]:
    """Return the calls whose kernels are compiled, by name; those of the table on heads of any width."""
    q, k = heads(32, torch.bfloat16, width), heads(8, torch.bfloat16, width)
    f, g = heads(32, torch.float32), heads(8, torch.float32)
    pairs, token = width // 2, slice(1)
    ids = torch.zeros(3, 2, 64, dtype=torch.int64)
    table = torch.empty(1, 1, 64, 128)

    def into(q: torch.Tensor, k: torch.Tensor | None, *rest: Any) -> Any:
        return lambda: operators.rotate(q, k, *rest)

    def call(options: Options, *extras: torch.Tensor, axes: int = 1) -> tuple[Any, ...]:
        at = None if options.add_index else ids[:axes]
        return words(pairs, axes), None, at, 3, options.pack(), 1.0, list(extras), 1e-6

    def apart(n: int) -> torch.Tensor:
        return torch.empty(2, 64, n, 256, dtype=torch.bfloat16)[..., ::2].transpose(1, 2)

    gelu = Options(act=ACTS.index("gelu"), gate=LOG, direction=1)
    gate = torch.empty(2, 1, 64, 128)
    rms = ACTS.index("rms_norm")
    weights = torch.empty(1, width), torch.empty(1, width)
    gates = torch.empty(1, 1, 1, width), torch.empty(1, 1, 1, width)
    own = torch.empty(2, 64, 1, 64, dtype=torch.int32).transpose(1, 2)
    of_heads = torch.empty(2, 64, 8, 64, dtype=torch.int32).transpose(1, 2)
    angles = torch.empty(2, 300, 8, 64).transpose(1, 2)
    state, reset = torch.zeros(2, 8, 64, dtype=torch.int64), torch.zeros(1, 300, dtype=torch.bool)
    by_phases, at_ids = Options(source=PHASES).pack(), Options(add_index=False).pack()
    logs = torch.empty(2, 32, 64, 128), torch.empty(1, 8, 1, 128)
    return {
        "bfloat16": into(q, k, *call(Options())),
        "bfloat16 interleaved": into(q, k, *call(Options(interleaved=True))),
        "float32": into(f, g, *call(Options())),
        "float32 interleaved": into(f, g, *call(Options(interleaved=True))),
        "phases": into(q, k, own, words(64), None, 3, by_phases, 1.0),
        "phases of each head": into(
            heads(8, torch.bfloat16), k, of_heads, words(64), None, 3, by_phases, 1.0
        ),
        "M-RoPE": into(q, k, *call(Options(add_index=False), axes=3)),
        "tables": into(q, k, table, table, None, 0, Options(source=1).pack(), 1.0),
        "unaligned": into(q[..., 1:], None, words(63), None, None, 0, Options().pack(), 1.0),
        "apart": into(apart(32), apart(8), *call(gelu, gate, gate, apart(32), apart(8))),
        "slice": into(q, k, words(16), None, None, 0, Options(start=32).pack(), 1.0),
        "silu": into(q, k, *call(Options(act=ACTS.index("silu")))),
        "silu backward": into(q, k, *call(Options(act=ACTS.index("silu"), direction=1), q, k)),
        "softmax": into(q, k, *call(Options(act=ACTS.index("softmax")))),
        "rms_norm": into(q, k, *call(Options(act=rms), *weights)),
        "rms_norm backward": into(q, k, *call(Options(act=rms, direction=1), *weights, q, k)),
        "log gate": into(q, k, *call(Options(gate=LOG), *logs)),
        "slopes": into(q, k, *call(Options(gate=SLOPE), torch.empty(32, 128), torch.empty(8, 128))),
        "backward": into(q, k, *call(Options(direction=1))),
        "a token": into(q[:1, :, token], k[:1, :, token], *call(Options())),
        "norm, then factor": into(q, k, *call(Options(act=rms, gate=FACTOR), *weights, *gates)),
        "float8": lambda: in_8_bits(q, k, *call(Options())),
        "frequencies": lambda: operators.angle_gradients(
            q, k, q, k, words(pairs), None, None, 3, Options().pack(), False, True
        ),
        "positions": lambda: operators.angle_gradients(
            q, k, q, k, words(64), None, ids[:1].float(), 3, at_ids, True, False
        ),
        "by phases": lambda: operators.angle_gradients(
            q, k, q, k, own, words(64), None, 3, by_phases, False, True
        ),
        "running": lambda: phases.phase_words(angles, state, reset, True, False),
        "running, a token": lambda: phases.phase_words(
            angles[:, :, :1].double(), state, None, True, True
        ),
        "given": lambda: phases.phase_words(angles.bfloat16(), None, None, False, False),
        "running, backward": lambda: phases.phase_sums(angles, None, reset),
        "gates": lambda: operators.gate_gradients(
            q, None, q, None, torch.empty(1, 32, 1, 128), None, None, 0, Options(gate=LOG).pack()
        ),
    }


def in_8_bits(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
    """Rotate into a cache in 8 bits, with k as its own values."""
    cache, scale = torch.empty(k.shape, dtype=torch.float8_e4m3fn), torch.ones(k.shape[1])
    into = q.clone(), cache, cache.clone(), None, scale, scale
    operators.rotate_slots_extras(q, k, k, *into, *rest)


# --- the table of docs/gpu.md ---------------------------------------------------------------------

WIDTHS = (64, 128, 256)


# The rows of the table, and the names of their calls.
OF_TABLE = {
    "rotation": "bfloat16",
    "rotation, backward": "backward",
    "rotation, interleaved": "bfloat16 interleaved",
    "rotation of one token": "a token",
    "norm": "rms_norm",
    "norm, backward": "rms_norm backward",
    "norm without weight, then `Factor`": "norm, then factor",
    "float8 cache": "float8",
    "gradient of frequencies": "frequencies",
}


def table() -> str:
    """Return registers, spills, and the loads and stores of a thread in machine code for sm_90, by call and width."""
    lines = [
        f"| bfloat16, sm_90 | {' | '.join(map(str, WIDTHS))} |",
        f"|---|{'---|' * len(WIDTHS)}",
    ]
    cells: dict[str, list[str]] = {}
    for width in WIDTHS:
        for name, of in OF_TABLE.items():
            asked.clear()
            calls(width)[of]()
            kernel, values, aligned, blocks = asked[0]
            source, goal = launch.source_of(kernel, values, aligned), TARGETS["sm_90"]
            made = triton.compile(source, target=goal, options=launch.options_of(blocks, goal))
            usage, found = usage_of(made.asm["cubin"]), accesses_of(disassembled(made.asm["cubin"]))
            texts = [f"{usage.registers} / {usage.spills}"]
            texts += [
                ", ".join(f"{n} × {size}" for size, n in sorted(found[kind].items(), reverse=True))
                for kind in ("LDG", "STG")
            ]
            cells.setdefault(name, []).append("; ".join(texts))
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in cells.items())])


# --- facts ----------------------------------------------------------------------------------------


def facts(target: str, source: Any, blocks: Any, count: bool) -> dict[str, Any]:
    """Return facts about the machine code of a kernel; count the bytes in flight if asked to."""
    goal = TARGETS[target]
    kernel = triton.compile(source, target=goal, options=launch.options_of(blocks, goal))
    if target == "gfx942":
        code = kernel.asm["amdgcn"]
        spills = [int(n) for n in re.findall(r"\bvgpr_spill_count:\s*(\d+)", code)]
        wide = len(re.findall(r"(?:load|store)_dwordx4", code))
        return {"wide": wide, "spills": sum(spills), "float64": "_f64" in code}
    ptx = kernel.asm["ptx"]
    cubin = kernel.asm["cubin"]
    usage = usage_of(cubin)
    every = re.findall(r"(?:ld|st)\.global\S*", ptx)
    flying = {"in flight": in_flight(disassembled(cubin))} if count else {}
    return flying | {
        "loads": len([x for x in every if x.startswith("ld")]),
        "stores": len([x for x in every if x.startswith("st")]),
        "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "wide stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
        "registers": usage.registers,
        "spills": usage.spills,
        "float64": ".f64" in ptx,
        "approximations": sorted(
            set(re.findall(r"(?:sin|cos|ex2|lg2|rsqrt|rcp|div|sqrt)\.approx", ptx))
        ),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
    }


def compiled(some: bool) -> dict[str, Any]:
    """Return the facts about every kernel, by call and target."""
    result: dict[str, Any] = {}
    for name, call in calls().items():
        if some and name not in SOME:
            continue
        targets = [each for each in TARGETS if each == "sm_90" or name in ON_AMD or not some]
        asked.clear()
        call()
        # Sums of several chunks take three launches.
        for part, (kernel, values, aligned, blocks) in zip(("", ", totals", ", between"), asked):
            part = ", values" if kernel.__name__ == "copy_values" else part
            source = launch.source_of(kernel, values, aligned)
            result[name + part] = {
                target: facts(target, source, blocks, name in COUNTED) for target in targets
            }
    return result


def main(what: str) -> int:
    # Triton 3.4 links AMD's code with a ROCm program; this script inspects the code before that step.
    os.environ.setdefault("TRITON_HIP_LLD_PATH", shutil.which("true") or "")
    torch.accelerator.current_device_index = lambda: None
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()
    rotation.launcher = sums.launcher = phases.launcher = slots.launcher = note
    rotation.rounds_by_bits = slots.rounds_by_bits = lambda: False
    print(table() if what == "table" else json.dumps(compiled(what == "some")))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["every"]))
