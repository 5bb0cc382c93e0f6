"""Measure the GPU kernels: `python -m benchmarks.gpu --out benchmarks/results/gpu-NAME.json`.

First the results of small calls on the device are compared with the definition in float64; then
compilations over lengths and offsets are counted, the host's time of a call is measured and a CUDA graph
replayed; then cases are timed: medians of triton.testing.do_bench, over sets of inputs that are together
larger than twice the L2 cache. A wrong result ends the run before anything is timed. It needs torch,
triton and this tree; other libraries take part where they are installed, or lie in benchmarks/gpu/peers/.

--dry-run does all of it at tiny sizes under Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import tightrope
from tightrope.backends.triton import blocks

from .cases import CASES

# What a case may take before its process is given up, in seconds.
LONGEST = 90


def machine(dry: bool) -> dict[str, Any]:
    """Where this runs."""
    import triton

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    name = "Triton's interpreter" if dry else torch.cuda.get_device_name()
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "tightrope": tightrope.__version__,
        "blocks": blocks.MEASURED_ON,
        "commit": commit,
        "date": date.today().isoformat(),
    }


def lines_of(arguments: list[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What a worker says, and what is wrong with it if it did not end well."""
    command = [sys.executable, "-m", "benchmarks.gpu.worker", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=max(seconds, 1)
        )
        said, trouble = done.stdout, done.stderr[-2000:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        trouble = f"it took more than {seconds:.0f} s"
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return found, trouble


def timed(names: list[str], rest: list[str], deadline: float) -> list[dict[str, Any]]:
    """Results of all cases: a process that fails costs the case that it was at."""
    results: list[dict[str, Any]] = []
    while names:
        left = deadline - time.monotonic()
        if left <= 0:
            return results + [{"end": name, "failed": "no time was left"} for name in names]
        found, trouble = lines_of(["cases", *rest, *names], min(left, LONGEST * len(names)))
        ended = [line for line in found if "end" in line]
        results += ended
        begun = [line["begin"] for line in found if "begin" in line]
        done = {line["end"] for line in ended}
        if not trouble:
            break
        failed = next((name for name in begun if name not in done), names[0])
        results.append({"end": failed, "failed": trouble})
        names = [name for name in names if name not in done and name != failed]
    return results


def row(result: dict[str, Any]) -> str:
    """One line for a case."""
    if "failed" in result:
        return f"{result['end']:34} failed: {result['failed'].strip().splitlines()[-1]}"
    times = result["milliseconds"]
    if "tightrope" not in times:
        return f"{result['end']:34} failed: {result['absent'].get('tightrope')}"
    ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in result["ratios"].items())
    share = result["ratios"].get("copy")
    of_copy = f"{100 / share:.0f} % of copy" if share else ""
    return f"{result['end']:34} {times['tightrope']:9.4f} ms {result['GB/s']['tightrope']:8.0f} GB/s {of_copy:14} {ratios}"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="regular expression for the names of cases")
    parser.add_argument("--against", default="", help="contenders' names must contain this")
    parser.add_argument(
        "--budget", type=float, default=60.0, help="milliseconds of timed calls each"
    )
    parser.add_argument("--seconds", type=float, default=460.0, help="for the whole run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--dry-run", action="store_true", help="tiny, under Triton's interpreter")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here; --dry-run needs none", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    where = machine(options.dry_run)
    print(json.dumps(where), file=sys.stderr)
    mode = "dry" if options.dry_run else "real"
    checks, trouble = lines_of(["checks", mode], options.seconds / 2)
    written: dict[str, Any] = {"machine": where, "checks": {}, "results": []}
    for line in checks:
        written["checks"] |= line
    if trouble:
        written["checks"]["failed"] = trouble
    print(json.dumps(written["checks"], indent=1), flush=True)
    wrong = bool(trouble or written["checks"].get("wrong"))
    if not wrong:
        names = [case.name for case in CASES if re.search(options.only, case.name)]
        rest = [mode, str(options.budget), options.against]
        written["results"] = timed(names, rest, deadline)
        for result in written["results"]:
            print(row(result), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    failed = any("failed" in result for result in written["results"])
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
