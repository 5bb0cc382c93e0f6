"""Make a Markdown table of the results of `python -m benchmarks.speed --out RESULTS.json`.

    python -m benchmarks.speed.report RESULTS.json [--page PAGE.md] [--png PICTURE]
    python -m benchmarks.speed.report RESULTS.json --before OLDER.json

With `--page`, the table replaces the text between `<!-- benchmark table -->` and
`<!-- end of benchmark table -->` in that file. With `--before`, two result files are compared by their ratios
to `neg_` and `clone`, because seconds measured on different days cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ..pages import between_marks, table
from . import FLOORS

MARK = "benchmark table"
COLUMNS = (
    *FLOORS,
    "0..n-1",
    "rotation",
    "eager",
    "compiled eager",
    "transformers",
    "transformers, compiled",
    "definition, compiled",
    "onnxruntime",
    "jax jit",
)


def span(values: list[float]) -> str:
    """Format sorted ratios as "lowest–highest", or as one number if both look the same."""
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low}–{high}"


def row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file keeps of a result of :func:`benchmarks.speed.measure`, rounded.

    These are the case's name, the median time of this library, and for each contender the sorted ratios of the runs:
    the time of this library divided by the contender's.
    """
    ours = median(result["seconds"]["tightrope"])
    ratios = {n: [float(f"{x:.5g}") for x in values] for n, values in result["ratios"].items()}
    return {"case": result["case"]["name"], "us": float(f"{1e6 * ours:.3g}"), "ratios": ratios}


def ratios(data: dict[str, Any], columns: Iterable[str] = COLUMNS) -> str:
    """Return a Markdown table of our time, and of our time over each contender's, and a line about the runs."""
    results = data["results"]
    present = [name for name in columns if any(name in each["ratios"] for each in results)]
    lines = table(
        ["time of tightrope / time of", "µs", *(f"`{name}`" for name in present)],
        (
            [
                each["case"],
                f"{each['us']:.3g}" if each["us"] < 100 else f"{each['us']:.0f}",
                *(span(each["ratios"][c]) if c in each["ratios"] else "" for c in present),
            ]
            for each in results
        ),
    )
    return "\n".join([*lines, "", f"Range over {where(data)}."])


def where(data: dict[str, Any]) -> str:
    """Describe the number of runs and the machine in one line."""
    here = data["machine"]
    return (
        f"{data['runs']} runs of medians of {data['rounds']} interleaved rounds; "
        f"{here['processor']}, {here['cores']} cores, {here['instruction_set']}, torch "
        f"{here['torch']}, commit {here['commit']}, {here['date']}"
    )


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return a table of old and new ratios, marked "slower" or "faster" where the ranges are disjoint."""
    now = {result["case"]: result["ratios"] for result in after["results"]}
    rows = []
    for result in before["results"]:
        name = result["case"]
        for floor in FLOORS:
            a, b = result["ratios"].get(floor), now.get(name, {}).get(floor)
            if a is not None and b is not None:
                mark = "slower" if b[0] > a[-1] else "faster" if b[-1] < a[0] else ""
                rows.append([f"{name} / {floor}", span(a), span(b), mark])
    return "\n".join(table(["time of tightrope / time of", "before", "after", ""], rows))


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and write the outputs; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="regular expression for the names of cases")
    parser.add_argument(
        "--page", type=Path, help="file in which to replace the table between the marks"
    )
    parser.add_argument("--png", type=Path, help="picture file to draw: .png, .pdf or .svg")
    parser.add_argument("--before", type=Path, help="file of older results to compare with")
    options = parser.parse_args(arguments)
    data = json.loads(options.results.read_text())
    data["results"] = [r for r in data["results"] if re.search(options.only, r["case"])]
    if options.png:
        from .picture import draw

        draw(options.png, data["results"], where(data).partition("; ")[2])
    if options.before:
        print(changes(json.loads(options.before.read_text()), data))
    elif options.page:
        try:
            between_marks(options.page, MARK, ratios(data))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    else:
        print(ratios(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
