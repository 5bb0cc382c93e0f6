"""A table and a picture from committed results: `python -m benchmarks.report RESULTS.json`.

With `--readme README.md` the table replaces what stands between the two marks there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmark table -->", "<!-- end of benchmark table -->"
COLUMNS = (
    "neg_",
    "clone",
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
    """The range of a ratio over the runs."""
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low}–{high}"


def table(data: dict[str, Any]) -> str:
    """Markdown: our time as a share of each contender's; below 1 is faster."""
    present = [c for c in COLUMNS if any(c in result["ratios"] for result in data["results"])]
    lines = [
        "| time of tightrope / time of | " + " | ".join(f"`{c}`" for c in present) + " |",
        "|---|" + "---|" * len(present),
    ]
    for result in data["results"]:
        cells = [span(result["ratios"][c]) if c in result["ratios"] else "" for c in present]
        lines.append(f"| {result['case']['name']} | " + " | ".join(cells) + " |")
    machine = data["machine"]
    lines += [
        "",
        f"Range over {data['runs']} runs of medians of {data['rounds']} interleaved rounds; "
        f"{machine['processor']}, {machine['cores']} cores, {machine['instruction set']}, torch "
        f"{machine['torch']}, commit {machine['commit']}, {machine['date']}.",
    ]
    return "\n".join(lines)


def picture(data: dict[str, Any], path: Path) -> None:
    """Bars: how many times as long the others take."""
    from matplotlib.figure import Figure

    results = [r for r in data["results"] if "eager" in r["ratios"]]
    figure = Figure(figsize=(8, 0.34 * len(results) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for shift, name, colour in ((-0.2, "eager", "#b0b7c3"), (0.2, "compiled eager", "#4c78a8")):
        for y, result in enumerate(results):
            if name not in result["ratios"]:
                continue
            values = result["ratios"][name]
            times = 1 / values[len(values) // 2]
            axes.barh(y + shift, times, 0.38, color=colour, label=name if y == 0 else None)
            axes.text(times * 1.03, y + shift, f"{times:.1f}×", va="center", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), [r["case"]["name"] for r in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlabel("times as long as tightrope (median of the runs, log scale)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="regular expression for the names of cases")
    parser.add_argument("--readme", type=Path, help="file whose marked table is replaced")
    parser.add_argument("--png", type=Path, help="picture to write")
    options = parser.parse_args(arguments)
    data = json.loads(options.results.read_text())
    data["results"] = [r for r in data["results"] if re.search(options.only, r["case"]["name"])]
    if options.png:
        picture(data, options.png)
    text = table(data)
    if options.readme:
        page = options.readme.read_text()
        if BEGIN not in page or END not in page:
            print(f"{options.readme} has no marks {BEGIN} … {END}", file=sys.stderr)
            return 2
        before, rest = page.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        options.readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
