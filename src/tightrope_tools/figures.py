"""The common style of all pictures, with colours that colour-blind readers can distinguish."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from .place import write_whole

INK, MUTED, GRID = "#1d2733", "#66717d", "#e3e7ec"
#: Okabe and Ito's colours that are readable on white, with a darker purple.
BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"
PURPLE, ORANGE, SKY = "#a0508a", "#e69f00", "#56b4e9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, `width` by `height` inches; no display is needed."""
    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def styled() -> Any:
    """Return a context in which figures have the common style."""
    return mpl.rc_context(STYLE)


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's extension names, or png if it has none.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not support the format.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix(".") or "png")
    write_whole(path, drawn.getvalue())
