"""Execute calls of the Triton kernels, compiled for a GPU, on the CPU: run by tests/kernel/triton/test_emulated.py.

The script has a process of its own, because Triton chooses compiler or interpreter at import. Its
arguments are the value of TIGHTROPE_EMULATE (see cases.py) and what to run: "core" for some tests of the kernels, "more"
for some others, "tests" for all of them, or "decode" for the instructions of a decoded token. It prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.emulator.machine import At, Grid, Program, Step
from tests.emulator.parse import Kernel
from tightrope.ops.schema import Options

# Run by "tests". Those of launches and of machine code have processes of their own.
FILES = ("calls", "device", "numerics", "operators", "phases", "registration")
# Run by "core" and "more": of the laws of calls one case in so many, or in a multiple; by "core" also these tests.
EVERY = 30
LAWS = {
    "results_and_gradients_are_those_of_the_definition": 1,
    "plain_rotations_have_the_bits_of_the_cpu_kernel": 1,
    "bits_depend_on_neither_programs_nor_strides_nor_place": 3,
    "entries_rotate_in_place": 3,
}
CORE = (
    "numerics.py::test_cosines_and_sines_of_critical_phases",
    "numerics.py::test_sums_over_many_heads",
    "phases.py::test_each_angle_has_the_phase_word_of_the_definition",
    "operators.py::test_every_bfloat16_in_8_bits[torch.float8_e4m3fn-slots]",
    "operators.py::test_every_bfloat16_in_8_bits[torch.float8_e5m2-contiguous]",
)


# --- tests of the kernels -------------------------------------------------------------------------


class Results:
    """A plugin of pytest that collects the results of tests by their names."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = "" if report.passed else f": {report.longreprtext[-800:]}"
            self.found[report.outcome].append(report.nodeid + text)


def tests(*names: str) -> dict[str, list[str]]:
    """Run tests of the kernels; return their names by result, with the error of those that failed."""
    results = Results()
    paths = [f"tests/kernel/triton/test_{name}" for name in names]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main([*options, *paths], plugins=[results])
    return results.found


def laws(first: int) -> list[str]:
    """Return the names of tests: some cases of the laws of calls, from the case of this number on."""
    from tests.support.calls import CASES

    some = range(first, len(CASES), EVERY)
    return [f"calls.py::test_{law}[{number}]" for law, n in LAWS.items() for number in some[::n]]


# --- instructions ---------------------------------------------------------------------------------


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
    from tests.emulator import launch
    from tests.support.triton import cases
    from tightrope.backends.triton import blocks, operators

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


def main(target: str, what: str) -> int:
    os.environ["TIGHTROPE_EMULATE"] = target
    torch.set_num_threads(1)
    from tests.support.triton import cases
    from tightrope.backends.triton import blocks

    run: dict[str, Callable[[], Any]] = {
        "core": lambda: tests(*laws(0), *CORE),
        "more": lambda: tests(*laws(EVERY // 2)),
        "tests": lambda: tests(*[f"{name}.py" for name in FILES]),
        "decode": decode,
    }
    with mock.patch.object(blocks, "PROGRAMS", 1):
        found = run[what]()
    emulator = cases.emulator
    facts = {"launches": emulator.launches, "opcodes": sorted(emulator.opcodes)}
    print(json.dumps({"found": found, **facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
