"""Draw the results of `examples/state_tracking.py --longest 262144 --out RESULTS.json`.

python -m benchmarks.state_tracking RESULTS.json --png PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from examples.state_tracking import ONE_BY_ONE, WINDOW
from tightrope_tools.figures import BLUE, GREEN, INK, MUTED, VERMILION, new_figure, save, styled

COLOURS = {"rope": MUTED, "float32": VERMILION, "exact": BLUE}
KINDS = {"rope": "positions", "float32": "float32 sums", "exact": "phases.running"}
# Ways to add up increments: name, colour, line.
WAYS = {
    "positions": ("positions", MUTED, "-"),
    ONE_BY_ONE: ("float32 sums, token by token", VERMILION, "--"),
    "float32": ("float32 sums, chunks of 2048", GREEN, "-"),
    "exact": ("phases.running, any chunks", BLUE, "-"),
}


def _training(axes: Axes, kinds: dict[str, Any]) -> None:
    for kind, found in kinds.items():
        for i, run in enumerate(found["runs"]):
            starts = range(0, WINDOW * len(run["losses"]), WINDOW)
            name = None if i else KINDS[kind]
            axes.plot(list(starts), run["losses"], color=COLOURS[kind], label=name)
    axes.set(yscale="log", xlabel="step", ylabel="loss", title="Training, up to 64 tokens")
    axes.legend(loc="lower left")


def _accuracy(axes: Axes, kinds: dict[str, Any]) -> None:
    for way, (name, colour, style) in WAYS.items():
        runs = [run["accuracy"] for found in kinds.values() for run in found["runs"]]
        lines = [run[way] for run in runs if way in run]
        lengths = list(lines[0])
        means = [100 * statistics.mean(line[n] for line in lines) for n in lengths]
        least = [100 * min(line[n] for line in lines) for n in lengths]
        most = [100 * max(line[n] for line in lines) for n in lengths]
        at = [int(n) for n in lengths]
        axes.plot(at, means, style, marker="o", markersize=3, color=colour, label=name)
        axes.fill_between(at, least, most, color=colour, alpha=0.12, linewidth=0)
    axes.axvline(64, color=INK, linewidth=0.6, linestyle=":")
    axes.set(xscale="log", ylim=(0, 105), xlabel="tokens", ylabel="right sums, %")
    axes.set(title="Accuracy: mean and range")


def _sums(axes: Axes, sums: dict[str, dict[str, float]]) -> None:
    for way, errors in sums.items():
        name, colour, style = WAYS[way]
        axes.plot([int(n) for n in errors], list(errors.values()), style, color=colour, label=name)
    axes.set(xscale="log", yscale="log", ylim=(1e-18, 1e2), xlabel="tokens", ylabel="radians")
    axes.set(title="Error of a running sum")
    axes.legend(loc="center left", bbox_to_anchor=(0, 0.33))


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw training curves, accuracy by length and the errors of sums."""
    with styled():
        figure = new_figure(11, 3.6)
        axes = figure.subplots(1, 3)
        kinds = {kind: results[kind] for kind in KINDS}
        _training(axes[0], kinds)
        _accuracy(axes[1], kinds)
        _sums(axes[2], results["sums"])
        save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    """Draw the results of a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args(arguments)
    draw(json.loads(options.results.read_text(encoding="utf-8")), options.png)


if __name__ == "__main__":
    main()
