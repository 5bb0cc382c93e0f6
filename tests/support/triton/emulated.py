"""Execute calls of the Triton kernels, compiled for a GPU, on the CPU: run by tests/kernel/triton/test_emulated.py.

The script has a process of its own, because Triton chooses compiler or interpreter at import. Its
arguments are the value of TIGHTROPE_EMULATE (see cases.py) and what to run: "core" for some of the
calls that contain every pair of values of two options and of plain rotations, "calls" for all of them, "tests" for
the tests of the kernels, "planted" for PLANTS, "decode" for the instructions of a decoded token, or "sums" for sums over channels. It prints
JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.triton.ptx.machine import At, Grid, Program, Step
from tests.support.triton.ptx.parse import Kernel

EVERY = 4

# Run by "tests". Those of launches and of machine code have processes of their own.
FILES = ("rotation", "edges", "phases", "slots", "backend", "device", "trial")


def digest_of(results: list[torch.Tensor]) -> str:
    """Return a hash of results; all NaN are equal."""
    found = hashlib.sha256()
    for x in results:
        bits = x.detach().where(~x.isnan(), torch.nan).contiguous().view(torch.uint8)
        found.update(bytes(bits.flatten().tolist()))
    return found.hexdigest()


def calls(step: int, **changes: Any) -> dict[str, Any]:
    """Check every call whose number is a multiple of `step`; return facts about it, by its number and changes."""
    from tests.support import pairwise
    from tests.support.triton import cases, running

    found = {}
    for number, case in enumerate(pairwise.covering(cases.AXES, cases.allowed)):
        if number % step:
            continue
        case |= changes
        launches = cases.emulator.launches
        facts: dict[str, Any] = {"error": ""}
        try:
            running.check(cases.make(case))
        except Exception as error:  # noqa: BLE001
            facts["error"] = f"{type(error).__name__}: {error}"[:500]
        results = running.run(cases.make(case))
        facts["digest"] = digest_of(results)
        facts["launches"] = cases.emulator.launches - launches
        found[f"{number}{changes or ''}"] = facts | {
            "case": {name: str(x) for name, x in case.items()}
        }
    return found


def of_one_token(step: int) -> dict[str, Any]:
    """Check calls as :func:`calls` does, with one token per row: programs then have one token each."""
    from tightrope.backends.triton import blocks

    with mock.patch.object(blocks, "PROGRAMS", 2):
        return calls(step, tokens=1)


def bits(step: int) -> dict[str, Any]:
    """Return how plain rotations, from one in `step`, differ from the CPU kernel, by case."""
    from tests.support.triton import cases, running

    found = {}
    for number, (dtype, interleaved, positions, direction) in enumerate(
        product(
            cases.AXES["dtype"][:3],
            cases.AXES["interleaved"],
            cases.AXES["positions"],
            cases.AXES["direction"],
        )
    ):
        if number % step:
            continue
        case = running.PLAIN | {"dtype": dtype, "interleaved": interleaved, "positions": positions}
        case |= {"channels": cases.AXES["channels"][number % 4], "direction": direction}
        made = cases.make(case)
        own = torch.ops.tightrope.rotate(made.q, made.k, *made.arguments)
        name = f"{dtype}, {interleaved}, {positions}, {direction}"
        found[name] = sum(int((x != y).sum()) for x, y in zip(running.run(made), own, strict=True))
    return found


class Plant(NamedTuple):
    """A fault: what it replaces in PTX by what, as a regular expression, the call that has it, and the error's begin."""

    pattern: str
    replacement: str
    call: str
    error: str = ""


PLANTS = {
    "nothing, plain": Plant(r"$^", "", "plain"),
    "nothing, aligned": Plant(r"$^", "", "aligned"),
    "nothing, exchanged": Plant(r"$^", "", "exchanged"),
    "a load without its mask": Plant(
        r"@!?%p\d+ (ld\.global)", r"\1", "plain", "AssertionError: the error is"
    ),
    "a store without its mask": Plant(
        r"@!?%p\d+ (st\.global)", r"\1", "plain", "Fault: race: a store to what another warp stores"
    ),
    "a mask of one too many": Plant(
        r"setp\.lt\.", "setp.le.", "aligned", r"Fault: out of bounds: ld\.global"
    ),
    # The fifth, which is doubled within the bounds of its tensor.
    "a wrong stride": Plant(
        r"(?s)^((?:.*?shl\.b64\s+\S+ \S+ 2;){4}.*?shl\.b64\s+\S+ \S+) 2;",
        r"\1 3;",
        "plain",
        "AssertionError: the error is",
    ),
    "missing barriers": Plant(
        r"bar\.sync\s+0;", "", "exchanged", "Fault: race: a load of what another warp stores"
    ),
    "a misaligned load": Plant(
        r"(ld\.global\.v4.*\[ %rd\d+ \+ )\d+",
        r"\g<1>4",
        "aligned",
        r"Fault: misaligned: .*ld\.global\.v4",
    ),
    "a misaligned store": Plant(
        r"(st\.global\.v4.*\[ %rd\d+ \+ )\d+",
        r"\g<1>4",
        "aligned",
        r"Fault: misaligned: .*st\.global\.v4",
    ),
    "a sign": Plant(r"add\.rn\.f32", "sub.rn.f32", "aligned", "AssertionError: the error is"),
    "an unknown instruction": Plant(
        r"mul\.rn\.f32",
        "tanh.approx.f32",
        "aligned",
        "Fault: the instruction tanh.approx.f32 is unknown",
    ),
}


def planted() -> dict[str, Any]:
    """Return the error of a call into whose kernel a fault is planted, and how often it was, by fault."""
    from tests.support.triton import cases, running
    from tests.support.triton.ptx import launch

    norm = {"act": "rms_norm", "positions": "tables", "amplitude": 1.0}
    changes: dict[str, dict[str, Any]] = {
        "plain": norm | {"channels": (24, 4, 12)},
        "aligned": norm | {"channels": (128, 32, 64)},
        "exchanged": {"act": "rms_norm", "direction": 1, "interleaved": True},
    }
    ptx_of, found = launch.ptx_of, {}
    for name, plant in PLANTS.items():
        count = 0

        def edited(function: int, plant: Plant = plant) -> str:
            nonlocal count
            text, n = re.subn(plant.pattern, plant.replacement, ptx_of(function))
            count += n
            return text

        cases.emulator.forget()
        error = ""
        with mock.patch.object(launch, "ptx_of", edited):
            try:
                running.check(cases.make(running.PLAIN | changes[plant.call]))
            except Exception as caught:  # noqa: BLE001
                error = f"{type(caught).__name__}: {caught}"[:300]
        found[name] = {"error": error, "count": count}
    return found


class Counting(Program):
    """A program that counts the instructions, but for branches, that each thread executes.

    Attributes:
        counts: in each thread of the last launch.
        before: those in each thread before its first load of a tensor.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.counts = self.before = np.zeros(0, int)
        self.steps = [
            (*rest, self.counted(step, code.opcode.startswith("ld.global")), whole)
            for (*rest, step, whole), code in zip(self.steps, kernel.code, strict=True)
        ]

    def counted(self, step: Step, loads: bool) -> Step:
        """Return a step that counts itself."""

        def counting(grid: Grid, at: At) -> None:
            if len(self.counts) != grid.size:
                self.counts, self.before = np.zeros(grid.size, int), np.full(grid.size, -1)
            if loads:
                self.before[at] = np.where(self.before[at] < 0, self.counts[at], self.before[at])
            self.counts[at] += 1
            step(grid, at)

        return counting


def decode() -> dict[str, Any]:
    """Return the most instructions of a thread before its first load, and of all, when rows decode a token each."""
    from tests.support.triton import cases
    from tests.support.triton.ptx import launch
    from tightrope.backends.triton import blocks, operators
    from tightrope.ops.schema import Options

    found, words, programs = {}, cases.words(1, 1, 1, 64), []
    cases.emulator.seen = lambda grid: programs.append(grid.program)
    calls = product((torch.bfloat16, torch.float32), ((1, None), (32, torch.tensor([[[5]]]))))
    with (
        mock.patch.object(blocks, "PROGRAMS", 512),
        mock.patch.object(launch, "Program", Counting),
    ):
        for dtype, (rows, ids) in calls:
            q, k = (torch.ones(rows, heads, 1, 128, dtype=dtype) for heads in (32, 8))
            operators.rotate_(q, k, words, None, ids, 7, Options().pack(), 1.0)
            last = programs[-1]
            found[f"{dtype}, {rows} rows"] = [int(last.before.max()), int(last.counts.max())]
    return found


def sums() -> dict[str, list[str]]:
    """Return hashes of results in float32 by activation and direction: contiguous, with gaps, and of one token each."""
    from tests.support.triton import cases, running
    from tightrope.backends.triton import blocks, rotation

    found: dict[str, list[str]] = {}
    for act, direction in (("rms_norm", 0), ("softmax", 1)):
        for strides, programs in (("contiguous", 1), ("gaps", 1), ("contiguous", 512)):
            case = {"act": act, "direction": direction, "strides": strides, "k": "none"}
            rotation._plans.clear()
            with mock.patch.object(blocks, "PROGRAMS", programs):
                first = running.run(cases.make(running.PLAIN | {"channels": (128, 0, 128)} | case))[
                    0
                ]
            found.setdefault(f"{act}, {direction}", []).append(digest_of([first]))
    return found


class Results:
    """A plugin of pytest that collects the results of tests by their names."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = "" if report.passed else f": {report.longreprtext[-800:]}"
            self.found[report.outcome].append(report.nodeid + text)


def tests() -> dict[str, list[str]]:
    """Run the tests of the kernels; return their names by result, with the error of those that failed."""
    results = Results()
    paths = [f"tests/kernel/triton/test_{name}.py" for name in FILES]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "not test_every_pair_of_values"]
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main([*options, *paths], plugins=[results])
    return results.found


def main(target: str, what: str) -> int:
    os.environ["TIGHTROPE_EMULATE"] = target
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    torch.set_num_threads(1)
    from tests.support.triton import cases
    from tightrope.backends.triton import blocks

    run: dict[str, Callable[[], Any]] = {
        "core": lambda: {
            "calls": calls(EVERY) | of_one_token(8 * EVERY),
            "bits": bits(5 * EVERY),
        },
        "calls": lambda: {"calls": calls(1) | of_one_token(1), "bits": bits(1)},
        "tests": tests,
        "planted": planted,
        "decode": decode,
        "sums": sums,
    }
    with mock.patch.object(blocks, "PROGRAMS", 1):
        found = run[what]()
    emulator = cases.emulator
    facts = {"launches": emulator.launches, "opcodes": sorted(emulator.opcodes)}
    print(json.dumps({"found": found, **facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
