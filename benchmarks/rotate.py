"""Measure the rotation: `python -m benchmarks.rotate`.

Prints a row for each case as it is done, and writes JSON with the machine, the versions and the commit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from tightrope.workbench.bench import CONTENDERS, measure, method
from tightrope.workbench.environment import read_environment

from .cases import CASES


def machine() -> dict[str, Any]:
    """Where this runs."""
    here = read_environment()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": here.processor,
        "cores": here.threads,
        "instruction set": here.instruction_set,
        "python": here.python,
        "torch": here.torch,
        "tightrope": here.tightrope,
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
            took = {"runs": options.runs, "rounds": options.rounds}
            results.append(measure(case, CONTENDERS, **took, wanted=wanted))
            print(row(results[-1]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        written = {"machine": where, "runs": options.runs, "rounds": options.rounds}
        options.out.write_text(json.dumps({**written, "results": results}, indent=1) + "\n")
    return 0 if results else 2


if __name__ == "__main__":
    sys.exit(main())
