"""Draw the results of `examples/state_tracking.py --out RESULTS.json`.

    python -m benchmarks.state_tracking RESULTS.json --png PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from tightrope.workbench.figures import BLUE, GREEN, INK, MUTED, VERMILION, new_figure, save, styled

NAMES = {"rope": "positions", "float32": "float32 sums", "exact": "phases.running"}
COLOURS = {"rope": MUTED, "float32": VERMILION, "exact": BLUE}
WINDOW = 20  # steps that a point of a training curve averages


def _training(axes: Axes, kinds: dict[str, Any]) -> None:
    for kind, found in kinds.items():
        for i, run in enumerate(found["runs"]):
            losses = run["losses"]
            parts = [losses[at : at + WINDOW] for at in range(0, len(losses), WINDOW)]
            axes.plot(
                [WINDOW * at for at in range(len(parts))],
                [statistics.median(part) for part in parts],
                color=COLOURS[kind],
                label=None if i else NAMES[kind],
            )
    axes.set(yscale="log", xlabel="step", ylabel="loss", title="Training, up to 64 tokens")


def _accuracy(axes: Axes, kinds: dict[str, Any]) -> None:
    lines = [(kind, "accuracy", "-", NAMES[kind]) for kind in kinds]
    lines.append(("float32", "one by one", "--", "float32 sums, token by token"))
    for kind, key, style, name in lines:
        for i, run in enumerate(kinds[kind]["runs"]):
            lengths = [int(n) for n in run[key]]
            axes.plot(
                lengths,
                [100 * right for right in run[key].values()],
                style,
                marker="o",
                markersize=3,
                color=COLOURS[kind],
                label=None if i else name,
            )
    axes.axvline(64, color=INK, linewidth=0.6, linestyle=":")
    axes.set(xscale="log", ylim=(0, 105), xlabel="tokens", ylabel="right sums, %")
    axes.set(title="Accuracy by length")
    axes.legend(loc="center left", bbox_to_anchor=(0, 0.55))


def _sums(axes: Axes, sums: dict[str, dict[str, float]]) -> None:
    names = {
        "float32": ("float32, token by token", VERMILION, "--"),
        "float32 at once": ("float32, torch.cumsum", GREEN, "-"),
        "exact": ("phases.running", BLUE, "-"),
    }
    for key, (name, colour, style) in names.items():
        errors = sums[key]
        shown = [max(error, 1e-19) for error in errors.values()]
        axes.plot([int(n) for n in errors], shown, style, color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="radians")
    axes.set(title="Error of a running sum")
    axes.legend(loc="center left")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw training curves, accuracy by length and the errors of sums."""
    with styled():
        figure = new_figure(11, 3.6)
        axes = figure.subplots(1, 3)
        _training(axes[0], results["kinds"])
        _accuracy(axes[1], results["kinds"])
        _sums(axes[2], results["sums"])
        axes[0].legend(loc="lower left")
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
