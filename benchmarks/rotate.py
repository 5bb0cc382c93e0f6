"""Measure the rotation: `python -m benchmarks.rotate`.

Prints a row for each case as it is done, and writes JSON with the machine, the versions and the commit.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

import tightrope
from tightrope import positions
from tightrope.backends import cpu
from tightrope.functional import rotate_qk

from . import method
from .baselines import CONTENDERS, Made, spec_of
from .cases import CASES, Case

# The gate is there to catch wrong pairings, signs and positions. Peers hold their tables in the
# dtype of x, so a 16-bit peer may be off by a few of its roundings.
GATE = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 0.2, "float16": 0.03}


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and ids of a case."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def make(heads: int) -> torch.Tensor:
        shape = (case.rows, case.tokens, heads, case.head_dim)
        x = torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)
        return x if case.strided else x.contiguous()

    ids = torch.arange(case.tokens).expand(case.rows, -1)
    if case.positions == "ids per row":
        ids = (ids + torch.arange(case.rows)[:, None]).contiguous()
    elif case.positions == "packed":
        ids = ids % (case.tokens // 3 + 1)
    elif case.positions == "M-RoPE":
        ids = torch.stack((ids, ids // 7, ids % 31))
    return make(case.q_heads), make(case.k_heads), ids


def expected(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q and k by the definition in float64."""
    with torch.no_grad():
        where = positions.multi_axis(ids) if ids.dim() == 3 else ids
        return rotate_qk(q.double(), k.double(), spec_of(case), where, backend="reference")


def gate(case: Case, made: Made, wanted: tuple[torch.Tensor, ...]) -> str | None:
    """Why a contender's result is wrong, or None."""
    if made.result is None:
        return None
    for got, want in zip(made.result, wanted, strict=True):
        error = (got.double() - want).abs().max().item()
        if not error <= GATE[case.dtype]:
            return f"its result is off by {error:.2g}"
    return None


def measure(case: Case, runs: int, rounds: int, wanted: re.Pattern[str]) -> dict[str, Any]:
    """Time all contenders of a case."""
    torch.set_num_threads(case.threads)
    q, k, ids = inputs(case)
    right = expected(case, q, k, ids)
    calls, absent = {}, {}
    for contender in CONTENDERS:
        reason = contender.why_not(case)
        if reason is None and not wanted.search(contender.name):
            reason = "not asked for"
        if reason is None:
            # Copies keep the strides; each contender has its own, as some change theirs.
            made = contender.make(case, q.clone(), k.clone(), ids)
            reason = gate(case, made, right)
        if reason is None:
            calls[contender.name] = made.call
        else:
            absent[contender.name] = reason
    rng = random.Random(0)
    rest = any(contender.own_threads for contender in CONTENDERS if contender.name in calls)
    results = [
        method.medians(calls, cold=case.cold, rounds=rounds, rng=rng, rest=rest)
        for _ in range(runs)
    ]
    return {
        "case": asdict(case),
        "seconds": {name: [run[name] for run in results] for name in calls},
        "ratios": {
            name: sorted(run["tightrope"] / run[name] for run in results)
            for name in calls
            if name != "tightrope"
        },
        "absent": absent,
    }


def machine() -> dict[str, Any]:
    """Where this runs."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": model,
        "cores": torch.get_num_threads(),
        "instruction set": cpu.instruction_set(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tightrope": tightrope.__version__,
        "commit": commit,
        "date": date.today().isoformat(),
    }


def row(result: dict[str, Any]) -> str:
    """One line for a case: our median, and the range of our ratio to each contender."""
    ours = 1e6 * sorted(result["seconds"]["tightrope"])[len(result["seconds"]["tightrope"]) // 2]
    ratios = "  ".join(
        f"{name} {values[0]:.2f}-{values[-1]:.2f}" for name, values in result["ratios"].items()
    )
    return f"{result['case']['name']:32} {ours:9.1f} us   tightrope / {ratios}"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rotate",
        description=method.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="regular expression for the names of cases")
    parser.add_argument("--against", default="", help="regular expression for contenders")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="turns of a contender in a run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    wanted = re.compile(f"^tightrope$|{options.against}")
    where = machine()
    print(json.dumps(where), file=sys.stderr)
    results = []
    for case in CASES:
        if re.search(options.only, case.name):
            results.append(measure(case, options.runs, options.rounds, wanted))
            print(row(results[-1]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        written = {"machine": where, "runs": options.runs, "rounds": options.rounds}
        options.out.write_text(json.dumps({**written, "results": results}, indent=1) + "\n")
    return 0 if results else 2


if __name__ == "__main__":
    sys.exit(main())
