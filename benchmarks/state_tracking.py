"""Draw the results of `examples/state_tracking.py --longest 262144 --out RESULTS.json`.

python -m benchmarks.state_tracking RESULTS.json --png PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from examples.state_tracking import KINDS, ONE_BY_ONE, WINDOW
from tightrope_tools.figures import BLUE, GREEN, INK, MUTED, VERMILION, new_figure, save, styled

# Ways to rotate: name, colour, line.
WAYS = {
    "positions": ("positions", MUTED, "-"),
    ONE_BY_ONE: ("float32 sums, token by token", VERMILION, "--"),
    "float32": ("float32 sums, chunks of 2048", GREEN, "-"),
    "exact": ("phases.running, any chunks", BLUE, "-"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw training curves, accuracy by length and the errors of sums."""
    with styled():
        figure = new_figure(11, 3.6)
        training, accuracy, sums = figure.subplots(1, 3)
        runs = [(kind, run) for kind in KINDS for run in results[kind]["runs"]]
        for kind, run in runs:
            steps = range(0, WINDOW * len(run["losses"]), WINDOW)
            training.plot(steps, run["losses"], color=WAYS[kind][1])
        training.set(yscale="log", xlabel="step", ylabel="loss", title="Training, up to 64 tokens")
        for way, (name, colour, style) in WAYS.items():
            found = [run["accuracy"][way] for _, run in runs if way in run["accuracy"]]
            at = [int(n) for n in found[0]]
            each = [[100 * run[n] for run in found] for n in found[0]]
            means = [statistics.mean(one) for one in each]
            accuracy.plot(at, means, style, marker="o", markersize=3, color=colour, label=name)
            least, most = map(min, each), map(max, each)
            accuracy.fill_between(at, [*least], [*most], color=colour, alpha=0.12, linewidth=0)
            errors = results["sums"].get(way, {})
            sums.plot([int(n) for n in errors], list(errors.values()), style, color=colour)
        accuracy.axvline(64, color=INK, linewidth=0.6, linestyle=":")
        accuracy.set(xscale="log", ylim=(0, 105), xlabel="tokens", ylabel="right sums, %")
        accuracy.set_title("Accuracy: mean and range")
        sums.set(xscale="log", yscale="log", ylim=(1e-18, 1e2), xlabel="tokens", ylabel="radians")
        sums.set_title("Error of a running sum")
        figure.legend(loc="outside lower center", ncols=len(WAYS))
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
