"""A model of the kernels on an H200, from their machine code: `python -m benchmarks.gpu.model`.

It needs no GPU. Each case of the benchmark is called with tensors on the meta device. Every kernel that
the call would launch is compiled for sm_90, and some of its programs are run by :mod:`.sass`. The bytes
that they access must be those of the case, else :func:`checked` raises an error.

The model gives two times. The lower one is the largest of three: bytes at the bandwidth of a copy;
instructions at the rate of the schedulers or of the busiest pipe; the latency of a program times the
number of programs that run one after the other. The higher one assumes that the programs of a
multiprocessor run in step: each wave of programs takes as long as its slowest part, hides all but
one program's share of the shorter part, and the first wave computes all of its angles first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..pages import between_marks, table
from ..speed import CONTENDERS, Case
from ..speed._measure import inputs
from .cases import CASES, SHARES
from .sass import LOAD, PIPES, Program, Usage, disassembled, in_flight, pipe_of, read, usage_of

#: An H200: multiprocessors, clocks per second, bytes per second of a copy (read and written).
PROCESSORS, CLOCK, COPY = 132, 1.755e9, 4.3e12

#: A multiprocessor of sm_90: schedulers, warps, programs, bytes of shared memory, registers per scheduler.
SCHEDULERS, WARPS, PROGRAMS, SHARED, REGISTERS = 4, 64, 32, 228 * 1024, 16384

#: Where the parameters of a kernel begin in constant bank 0.
PARAMETERS = 0x210

#: The cases with a budget, in bfloat16 and float32.
BUDGETS = (
    *SHARES,
    *(replace(case, name=f"{case.name}, float32", dtype="float32") for case in SHARES),
)

#: The cases of the table in docs/gpu.md.
MAIN = (
    *(case.name for case in BUDGETS),
    *("prefill 32k, interleaved", "prefill 2k", "packed 32k", "M-RoPE 32k"),
    *("phases 32k", "running phases 32k", "running phases, per head 32k", "rms_norm 32k"),
    *("rms_norm 32k, training", "silu 32k", "silu 32k, training", "softmax 32k", "exp gate 32k"),
    "slope gate 32k",
)

Result = dict[str, Any]


class Launch(NamedTuple):
    """A call of `launch.launcher`, and the arguments of its launch."""

    kernel: Any
    grid: tuple[int, int, int]
    values: Any
    aligned: frozenset[str]
    blocks: Any
    arguments: tuple[Any, ...] = ()


def resident(usage: Usage, shared: int, warps: int) -> int:
    """Return the number of programs that a multiprocessor holds.

    Args:
        shared: bytes of shared memory that a launch asks for.
        warps: warps of a program.

    >>> resident(Usage(72, 1024, 0), 4096, 4), resident(Usage(32, 1024, 0), 0, 1)
    (7, 32)
    """
    each = -(-usage.registers * 32 // 256) * 256  # registers of a warp, allocated in units of 256
    held = SCHEDULERS * (REGISTERS // each)
    by_memory = SHARED // max(usage.shared + shared, 1)
    return min(min(held, WARPS) // warps, PROGRAMS, by_memory)


def _constants(launch: Launch) -> tuple[dict[int, int], dict[int, str]]:
    """Return the words of constant bank 0 by their offsets, and the names of tensors by their places.

    Each tensor is given an address of its own: its place times 2^40.
    """
    from tightrope.backends.triton.launch import _leaves, signature_of

    types = signature_of(launch.kernel, launch.values)
    leaves = _leaves(launch.kernel.arg_names, types, launch.values)
    words = {0: 32 * launch.blocks.warps, 4: 1, 8: 1, 0x28: 0}
    words |= dict(zip((0xC, 0x10, 0x14), launch.grid))
    names: dict[int, str] = {}
    at = PARAMETERS
    for (_, name, kind, _), value in zip(leaves, launch.arguments, strict=True):
        if kind == "constexpr":
            continue
        if kind[0] == "*":
            names[len(names) + 1] = name
            value = len(names) << 40
        size = 4 if kind == "fp32" else 8
        at = -(-at // size) * size
        bits = int(np.float32(value).view(np.uint32)) if size == 4 else value
        words |= {at + i: bits >> 8 * i & 0xFFFFFFFF for i in range(0, size, 4)}
        at += size
    return words, names


def _sampled(count: int) -> dict[int, int]:
    """Return indices that stand for all: the first, one between, the last; and for how many each stands.

    >>> _sampled(1), _sampled(9)
    ({0: 1}, {0: 1, 4: 7, 8: 1})
    """
    return dict(Counter({0: 1, count // 2: max(count - 2, 0), count - 1: 1})) if count > 2 else dict.fromkeys(range(count), 1)  # fmt: skip


def modelled(launch: Launch) -> Result:
    """Compile and run a launch; return its counts and times, in seconds."""
    import triton
    from triton.backends.compiler import GPUTarget

    from tightrope.backends.triton import launch as real

    target = GPUTarget("cuda", 90, 32)
    source = real.source_of(launch.kernel, launch.values, launch.aligned)
    options = real.options_of(launch.blocks, target)
    kernel = triton.compile(source, target=target, options=options)
    usage = usage_of(kernel.asm["cubin"])
    code = read(disassembled(kernel.asm["cubin"]))
    words, names = _constants(launch)
    warps, (across, down, _) = launch.blocks.warps, launch.grid
    issued: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    parts: defaultdict[tuple[str, bool, int], list[tuple[int, Any]]] = defaultdict(list)
    alone = before = first = guesses = 0
    for x, of_x in _sampled(across).items():
        for y, of_y in (dict.fromkeys(range(down), 1) if down <= 16 else _sampled(down)).items():
            program, weight = Program(code, words, (x, y, 0), 32 * warps), of_x * of_y
            guesses = max(guesses, len(program.guesses))
            if program.clocks > alone:
                alone, before = program.clocks, program.before
                end = program.loop or 0
                first = sum(n for i, n in program.executed.items() if i < end)
            for i, n in program.executed.items():
                issued[pipe_of(code[i].opcode)] += weight * warps * n
                sources[code[i].source] += weight * warps * n
            found = defaultdict(list)
            for access in program.accesses:
                if access.addresses.size:
                    name = names[int(access.addresses[0]) >> 40]
                    found[name, access.store, access.size].append(access.addresses)
            for key, many in found.items():
                parts[key].append((weight, np.unique(np.concatenate(many))))
    moved: dict[str, int] = {}
    for (name, _, size), many in parts.items():
        # Programs that read the same addresses share them in the cache.
        same = len(many) > 1 and np.array_equal(many[0][1], many[-1][1])
        count = many[0][1].size if same else sum(weight * at.size for weight, at in many)
        moved[name] = moved.get(name, 0) + count * size
    programs, seats = across * down, resident(usage, kernel.metadata.shared, warps)
    busy = min(PROCESSORS, programs) * CLOCK
    rates = {name: 32 * n / PIPES[name].lanes / busy for name, n in issued.items()}
    rates["issue"] = sum(issued.values()) / SCHEDULERS / busy
    result = {
        "kernel": launch.kernel.__name__,
        "programs": programs,
        "registers": usage.registers,
        "shared": usage.shared + kernel.metadata.shared,
        "spills": usage.spills,
        "resident": seats,
        "in flight": in_flight(code),
        "instructions": dict(issued),
        "sources": dict(sources),
        "before the first head": first,
        "branches on unknown values": guesses,
        "moved": moved,
        "wide": sorted({name for name, _, size in parts if size == 16}),
        "memory": sum(moved.values()) / COPY,
        "pipes": rates,
        "arithmetic": max(rates.values()),
        "latency": alone / CLOCK * max(1.0, programs / (PROCESSORS * seats)),
    }
    start = max(before, min(seats, -(-programs // PROCESSORS)) * warps * first / SCHEDULERS) / CLOCK
    return result | _times(result, alone / CLOCK, start)


def _times(one: Result, alone: float, start: float) -> dict[str, float]:
    """Return the lower and the higher time of a launch; see the module.

    Args:
        one: its counts and times so far.
        alone: the time of a program if nothing else runs.
        start: the time of the first wave before its first head.
    """
    total = one["programs"]

    def wave(programs: int, start: float) -> float:
        each = min(one["resident"], -(-programs // PROCESSORS))
        both = sorted(one[name] * programs / total for name in ("memory", "arithmetic"))
        return max(start + both[1] + both[0] / each, alone)

    most = PROCESSORS * one["resident"]
    waves = [min(most, total - done) for done in range(0, total, most)]
    higher = sum(wave(n, start if i == 0 else 0.0) for i, n in enumerate(waves))
    return {"lower": max(one["memory"], one["arithmetic"], one["latency"]), "higher": higher}


def checked(case: Case, launches: Iterable[Result]) -> None:
    """Check that launches access each channel of their tensors once.

    Raises:
        RuntimeError: they access fewer or more bytes.
    """
    each = getattr(torch, case.dtype).itemsize * case.rows * case.tokens * case.head_dim
    wanted = dict.fromkeys(("q", "out_q", "input_q", "y", "grad_y"), each * case.q_heads)
    wanted |= dict.fromkeys(("k", "out_k", "input_k", "z", "grad_z"), each * case.k_heads)
    total = 0
    for one in launches:
        if one["kernel"] not in ("rotate", "add_angles"):
            continue
        needed = {"q", "k", "out_q", "out_k"} if one["kernel"] == "rotate" else {"y", "z"}
        for name in sorted(needed | wanted.keys() & one["moved"].keys()):
            found = one["moved"].get(name, 0) if name in one["wide"] else 0
            total += found
            if found != wanted[name]:
                raise RuntimeError(
                    f"[checked] {case.name} must access {wanted[name]} bytes of {name} in units of "
                    f"16, but the machine code accesses {found}."
                )
    if case.phases is None and total != case.moved:
        raise RuntimeError(f"[checked] {case.name} must move {case.moved} bytes, not {total}.")


def launches_of(case: Case) -> list[Launch]:
    """Return the launches of a call, which starts nothing; :func:`without_gpu` must have been called."""
    case = replace(case, device="meta")
    contender = CONTENDERS[0]
    made = contender.make(case, *inputs(case))
    _recorded.clear()
    made.call()
    return list(_recorded)


_recorded: list[Launch] = []


def _recorder(*given: Any) -> Any:
    launch = Launch(*given[:5])
    return lambda *arguments: _recorded.append(launch._replace(arguments=arguments))


def without_gpu() -> None:
    """Let calls with tensors on the meta device record their launches; for the rest of the process."""
    from tightrope.backends.triton import operators, phases, registration, rotation, sums

    rotation.launcher = sums.launcher = phases.launcher = _recorder
    rotation._check_memory = lambda *_: None  # all addresses are 0
    torch.accelerator.current_device_index = lambda: None  # type: ignore[assignment]
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.Generator = _Generator  # type: ignore[misc]
    _kept.append(torch.library.Library("tightrope", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in registration.OPERATORS.items():
            _kept[0].impl(name, getattr(operators, function), "Meta", allow_override=True)


_kept: list[Any] = []


class _Generator(torch.Generator):
    """A generator for the meta device, where torch has none."""

    def __new__(cls, *_: object) -> Any:
        return super().__new__(cls)


def model(cases: Iterable[Case]) -> Iterator[tuple[str, Result]]:
    """Yield name and result of each case."""
    known: dict[str, Result] = {}
    for case in cases:
        found = []
        for launch in launches_of(case):
            key = repr(launch)
            if key not in known:
                known[key] = modelled(launch)
            found.append(known[key])
        checked(case, found)
        lower, higher = (sum(one[name] for one in found) for name in ("lower", "higher"))
        # A short call takes the latency of one program, as a copy of its size does.
        short = all(one["programs"] <= PROCESSORS * one["resident"] for one in found)
        yield (
            case.name,
            {
                "bytes": case.moved,
                "tokens": case.rows * case.tokens,
                "share": None if short else [case.moved / COPY / t for t in (higher, lower)],
                "seconds": [lower, higher],
                "launches": found,
            },
        )


def rows(cases: dict[str, Result]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for name, one in cases.items():
        parts = one["launches"]

        def total(what: str) -> float:
            return sum(part[what] for part in parts)  # noqa: B023

        threads = 32 * sum(sum(part["instructions"].values()) for part in parts)
        angles = 32 * sum(part["sources"].get("angles.py", 0) for part in parts)
        share = one["share"] and "–".join(f"{100 * value:.0f}" for value in one["share"])
        yield [
            name,
            ", ".join(dict.fromkeys(f"{part['registers']}" for part in parts)),
            ", ".join(dict.fromkeys(f"{part['resident']}" for part in parts)),
            f"{sum(sum(part['moved'].values()) for part in parts) / one['bytes']:.2f}",
            f"{threads / one['bytes'] * 16:.1f}",
            f"{angles / one['bytes'] * 16:.1f}",
            *(f"{100 * total(what) / total('memory'):.0f} %" for what in ("arithmetic", "latency")),
            f"{share} %" if share else "–",
        ]


HEADINGS = (
    "case",
    "registers",
    "programs",
    "bytes",
    "instructions",
    "of angles",
    "arithmetic",
    "latency",
    "share of a copy",
)


def main(arguments: list[str] | None = None) -> None:
    """Model the cases and print the table; write it into a page, or all numbers into a file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="regular expression for the names of cases")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="page whose table is replaced: docs/gpu.md")
    options = parser.parse_args(arguments)
    import triton

    without_gpu()
    cases = {case.name: case for case in (*BUDGETS, *CASES) if not case.neighbours}
    found = dict(model(c for c in cases.values() if re.search(options.only, c.name)))
    text = "\n".join(table(HEADINGS, rows(found)))
    print(text)
    if options.page:
        shown = {name: found[name] for name in MAIN if name in found}
        between_marks(options.page, "model", "\n".join(table(HEADINGS, rows(shown))))
    if options.out:
        from triton.backends.nvidia.compiler import get_ptxas

        assumed = {
            "target": "sm_90", "triton": triton.__version__, "ptxas": get_ptxas(90).version,
            "multiprocessors": PROCESSORS, "clock": CLOCK, "copy": COPY, "load": LOAD / CLOCK,
            "lanes": {name: pipe.lanes for name, pipe in PIPES.items()},
            "clocks": {name: pipe.clocks for name, pipe in PIPES.items()},
        }  # fmt: skip
        data = {"assumed": assumed, "cases": found}
        options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
