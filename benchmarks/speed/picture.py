"""The picture of a benchmark: each contender's time relative to a copy, case by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator

from tightrope_tools.figures import BLUE, COLOURS, INK, MUTED, new_figure, save, styled

from .contender import FLOORS, floor_of

NAMES = ("tightrope", "eager", "compiled eager")
_OTHERS = (*COLOURS[1:], INK, MUTED)
_MARKERS = "s^Dv<>P"


def draw(path: Path, results: Sequence[Mapping[str, Any]], caption: str) -> None:
    """Draw measured cases: one row each, one mark per contender.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not support the format.
    """
    with styled():
        figure = new_figure(8.6, 0.36 * len(results) + 1.9)
        axes = figure.add_subplot()
        figure.suptitle(
            "Time to rotate q and k, relative to copying them", x=0.01, ha="left", fontweight="bold"
        )
        axes.set_title(caption, x=0.0, fontsize=8, fontweight="normal", color=MUTED)
        for place, name in reversed(list(enumerate(NAMES))):
            ours = name == "tightrope"
            at = [(copies(result, name), row) for row, result in enumerate(results)]
            marks = [(value, row) for value, row in at if value is not None]
            axes.scatter(
                [value for value, _ in marks],
                [row for _, row in marks],
                s=64 if ours else 34,
                marker="o" if ours else _MARKERS[(place - 1) % len(_MARKERS)],
                color=BLUE if ours else _OTHERS[(place - 1) % len(_OTHERS)],
                zorder=4 if ours else 3,
                label=name,
            )
        axes.axvline(1, color=INK, lw=1)
        axes.set_yticks(range(len(results)), [result["case"] for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.set_xlabel("time / time of a copy (log scale; 1 = memory traffic alone)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles[::-1],
            labels[::-1],
            loc="outside lower left",
            ncols=4,
            columnspacing=1.2,
            handletextpad=0.3,
        )
        save(figure, path)


def copies(result: Mapping[str, Any], name: str) -> float | None:
    """Return a contender's time relative to `neg_` or `clone`; None if it was absent."""
    ratios: Mapping[str, Sequence[float]] = result["ratios"]
    if not any(floor in ratios for floor in FLOORS) or name not in ("tightrope", *ratios):
        return None
    ours = median(floor_of(ratios))
    return ours if name == "tightrope" else ours / median(ratios[name])
