"""Run the tests with many versions of Python and torch: `make versions`, or `python -m ci.versions`.

For each pair, uv makes an environment in build/versions, with this checkout's wheel and the tools of
constraints.txt, runs the fast tests there, and removes it. The Pythons are those that uv finds, or may
download; torch comes from the package index, with several gigabytes of CUDA for some versions. A pair takes
about eight minutes on two cores; with `--one-in 10` it takes about two, and other pairs run other tests.
After each pair the numbers go into benchmarks/results/versions.json and the table of docs/versions.md, so
the command can be stopped, and run again for other pairs. A part of the tests does not replace all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import pages
from tightrope import environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
MARK = "tested versions"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10", "2.11", "2.12", "2.13")
# Tests of the checkout's tools, which run with the pinned versions only.
ELSEWHERE = ("docs", "site", "prose", "architecture")

Result = dict[str, Any]


def uv(*arguments: str) -> str:
    """Run uv and return its output; raise CalledProcessError with its errors if it fails."""
    command = [shutil.which("uv") or str(Path(sys.executable).with_name("uv")), *arguments]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def constraints(folder: Path, torch: str) -> Path:
    """Write the pins of all tools, without torch and what each torch chooses: Triton, setuptools."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.match(r"(torch|triton|setuptools)==", line)]
    if _number(torch) < [2, 12]:
        # It brings Triton 3.6, whose interpreter fails with NumPy from 2.4 on.
        kept = [line for line in kept if not line.startswith("numpy==")] + ["numpy<2.4"]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def run(python: str, torch: str, wheel: Path, one_in: int, arguments: list[str]) -> Result:
    """Run the tests with one pair, and return their counts, or the reason why they did not run."""
    folder = ROOT / "build" / "versions" / f"python{python}-torch{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = folder / "venv" / "bin" / "python"
    begin = time.monotonic()
    try:
        uv("venv", "--quiet", "--seed", "--python", python, str(folder / "venv"))
        pins = ["--constraints", str(constraints(folder, torch))]
        packages = [
            f"torch=={torch}.*",
            f"tightrope[tools,dev] @ {wheel.as_uri()}",
            "setuptools",
            "wheel",
        ]
        uv("pip", "install", "--quiet", "--python", str(own), *pins, *packages)
        show = "import platform, torch; print(platform.python_version(), torch.__version__)"
        versions = subprocess.run(
            [own, "-c", show], check=True, text=True, capture_output=True
        ).stdout.split()
    except subprocess.CalledProcessError as error:
        return {"not_run": error.stderr.strip().splitlines()[-1]}
    log = folder / "log.txt"
    ignored = [f"--ignore=tests/repository/test_{name}.py" for name in ELSEWHERE]
    command = [
        own,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-p",
        "ci.hardening.one_in",
    ]
    chosen = {
        "PYTHONPATH": str(ROOT),  # one_in
        "TIGHTROPE_ONE_IN": str(one_in),
        "TIGHTROPE_ONE_IN_SEED": f"{python} {torch}",
    }
    with log.open("w") as out:
        subprocess.run(
            [*command, *ignored, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **chosen},
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    shutil.rmtree(folder / "venv")
    last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
    found = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    }
    if not found:
        return {"not_run": f"pytest ended early: {last[:200]}"}
    counts = {word: found.get(word, 0) for word in ("passed", "skipped")}
    counts["failed"] = found.get("failed", 0) + found.get("error", 0)
    return {
        "python": versions[0],
        "torch": versions[1],
        "one_in": one_in,
        **counts,
        "seconds": round(time.monotonic() - begin),
    }


def table(pairs: dict[str, Result]) -> str:
    """Return the page's table: a row for each Python, a column for each torch."""
    keys = [key.split() for key in pairs]
    rows, columns = (sorted(set(part), key=_number) for part in zip(*keys, strict=True))
    lines = pages.table(
        ["Python", *(f"torch {torch}" for torch in columns)],
        [
            [python, *(_cell(pairs.get(f"{python} {torch}")) for torch in columns)]
            for python in rows
        ],
    )
    return "\n".join(lines)


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if "not_run" in result:
        return "not run"
    failed = f", {result['failed']} failed" if result["failed"] else ""
    share = f" (1 in {result['one_in']})" if result["one_in"] > 1 else ""
    return f"{result['passed']:,} passed{failed}{share}"


def main(arguments: list[str]) -> int:
    """Run the pairs, and return 1 if a test failed or a pair could not be run."""
    parser = argparse.ArgumentParser(prog="python -m ci.versions", description=__doc__)
    parser.add_argument("--python", default=",".join(PYTHONS), help="versions, separated by commas")
    parser.add_argument("--torch", default=",".join(TORCHES), help="versions, separated by commas")
    parser.add_argument(
        "--wheel", type=Path, help="the wheel to test; default: the only one in dist/"
    )
    parser.add_argument("--one-in", type=int, default=1, help="run one in so many tests")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    options, for_pytest = parser.parse_known_args(arguments)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    good, commit = True, environment.commit()  # before this command changes a file
    if not options.table:
        wheel = options.wheel or next(iter(sorted((ROOT / "dist").glob("*.whl"))))
        pairs = results.setdefault("pairs", {})
        for python, torch in product(options.python.split(","), options.torch.split(",")):
            result = run(python, torch, wheel.resolve(), options.one_in, for_pytest)
            print(f"Python {python}, torch {torch}: {result}", flush=True)
            good = good and not result.get("failed", 1)
            # Chosen tests are no result, and part of the tests is less than all.
            before = pairs.get(f"{python} {torch}", {})
            if not for_pytest and options.one_in <= before.get("one_in", options.one_in):
                pairs[f"{python} {torch}"] = {**result, "commit": commit}
                results["processor"] = environment.processor()
                RESULTS.write_text(pages.written(results), encoding="utf-8")
    if not for_pytest:
        pages.between_marks(PAGE, MARK, table(results["pairs"]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
