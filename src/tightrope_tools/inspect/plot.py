"""Draw a rotation: wavelengths, scaling, decay of scores, and errors of angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes

from tightrope import angles
from tightrope.config.files import NAMES

from ..figures import COLOURS, INK, MUTED, new_figure, save, styled
from .exactness import (
    EXACT,
    FLOAT32,
    FREQUENCIES,
    POSITIONS,
    ROUNDINGS,
    WORDS,
    errors_at,
    phases_at,
    sample,
)
from .report import Inspection, PartReport, inspect

__all__ = ["draw"]

_NO_CONTEXT = 131072
_LONGEST_NAME = 32
_BINS = 12  # of an octave of positions


class _Curve(NamedTuple):
    label: str
    colour: str
    part: PartReport

    @property
    def context(self) -> int:
        return self.part.context or _NO_CONTEXT


def draw(path: Path, inspections: Sequence[Inspection]) -> None:
    """Draw one or several inspected configurations.

    Args:
        path: .png, .pdf or .svg.
        inspections: the configurations; the errors are those of the first rotation.

    Raises:
        OSError: the path cannot be written.
        ValueError: matplotlib does not support the format, there is no rotation or more than six, or
            in one of them no pair turns.
    """
    curves = _curves(inspections)
    scaled = any(curve.part.spec.scaling is not None for curve in curves)
    panels = [_wavelengths, *[_scaling] * scaled, _decay, _errors]
    with styled():
        figure = new_figure(10.0, 7.6)
        names = " and ".join(_short(each.name) for each in inspections)
        figure.suptitle(names, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(2, 2, number + 1)
            panel(axes, curves)
            axes.set_title(f"{'abcd'[number]}   {axes.get_title(loc='left')}")
            axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.19), ncols=2, borderaxespad=0.0)
        save(figure, path)


def _curves(inspections: Sequence[Inspection]) -> list[_Curve]:
    found = [(_short(one.name), part) for one in inspections for part in one.parts]
    if not 1 <= len(found) <= len(COLOURS):
        raise ValueError(
            f"[draw] a picture must have 1 to {len(COLOURS)} rotations but got {len(found)}: choose "
            "a section or a layer type."
        )
    curves = []
    for colour, (name, part) in zip(COLOURS, found, strict=False):
        label = f"{name}, {part.name}" if len(inspections) > 1 and part.name else part.name or name
        if all(math.isinf(pair.wavelength) for pair in part.pairs):
            raise ValueError(
                f"[draw] every rotation must have a pair that turns but {label} has none."
            )
        curves.append(_Curve(label, colour, part))
    if len(curves) == 1 and part.spec.scaling is not None:
        (plain,) = inspect(replace(part.spec, scaling=None), context=part.context).parts
        curves.append(_Curve("unscaled", COLOURS[1], plain))
    return curves


def _short(name: str) -> str:
    """Shorten a path to its distinctive part."""
    path = Path(name)
    return ((path.parent if path.name in NAMES else path).name or name)[:_LONGEST_NAME]


# --- panels ---------------------------------------------------------------------------------------


def _wavelengths(axes: Axes, curves: list[_Curve]) -> None:
    axes.set(title="Wavelength of each pair", yscale="log")
    axes.set(xlabel="pair of channels", ylabel="positions per turn")
    lengths = {}
    for place, curve in enumerate(curves):
        # Later curves lie on top, with smaller markers so that the first stays visible.
        size = 5.0 / (1 + 0.4 * place)
        waves = [pair.wavelength for pair in curve.part.pairs]
        axes.plot(waves, "o", ms=size, color=curve.colour, label=curve.label)
        lengths[curve.part.trained] = "training"
    lengths[max(curve.context for curve in curves)] = "context"
    for length, name in lengths.items():
        if length is not None:
            dashes = "--" if name == "training" else ":"
            axes.axhline(length, color=INK, lw=0.9, ls=dashes, label=f"{name}, {length:,}")


def _scaling(axes: Axes, curves: list[_Curve]) -> None:
    axes.set(title="What scaling does to each pair")
    axes.set(xlabel="pair of channels", ylabel="times slower than unscaled")
    axes.set_yscale("log", base=2, nonpositive="mask")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for label, colour, part in curves:
        if part.spec.scaling is not None:
            slower = [pair.slower for pair in part.pairs]
            axes.plot(slower, "o-", ms=3.5, lw=1.2, color=colour, label=label)
    slow = [pair.index for pair in curves[0].part.pairs if (pair.turns_trained or 1.0) < 1]
    if slow:
        name = "no whole turn in training"
        axes.axvspan(slow[0] - 0.5, slow[-1] + 0.5, color=MUTED, alpha=0.14, lw=0, label=name)


def _decay(axes: Axes, curves: list[_Curve]) -> None:
    axes.set(title="Score of equal content by distance", xscale="log")
    axes.set(xlabel="distance, positions", ylabel="mean of cos over pairs")
    for curve in curves:
        distances = sample(curve.context)[1:]
        phases = phases_at(curve.part.spec, distances, curve.context)
        scores = angles.cos_sin(phases, torch.float64)[0].mean(-1)
        bins, places = (distances.log2() * _BINS).floor().unique(return_inverse=True)
        lowest, mean, highest = (
            torch.zeros(len(bins), dtype=torch.float64).scatter_reduce(
                0, places, scores, how, include_self=False
            )
            for how in ("amin", "mean", "amax")
        )
        middles = 2.0 ** ((bins + 0.5) / _BINS)
        axes.fill_between(middles, lowest, highest, color=curve.colour, alpha=0.18, lw=0)
        axes.plot(middles, mean, color=curve.colour, lw=1.4, label=curve.label)
    axes.axhline(0, color=MUTED, lw=0.8)


def _errors(axes: Axes, curves: list[_Curve]) -> None:
    first = curves[0]
    axes.set(title="Error of cos and sin up to a position", xscale="log", xlabel="position")
    axes.set(ylabel=f"largest error in {first.label}", yscale="log", ylim=(1e-8, 6))
    positions = sample(min(EXACT, max(4 * first.context, 2**20)))[1:]
    errors = errors_at(first.part.spec, positions, first.context)
    for method, colour in zip((WORDS, FLOAT32, POSITIONS, FREQUENCIES), COLOURS, strict=False):
        axes.plot(positions, errors[method].cummax(0).values, color=colour, label=method)
    limit = ROUNDINGS["bfloat16"]
    axes.axhline(limit, color=MUTED, lw=1.1, ls="-.", label="rounding of a bfloat16")
    axes.axvline(first.context, color=INK, lw=0.9, ls="--", label=f"context, {first.context:,}")
