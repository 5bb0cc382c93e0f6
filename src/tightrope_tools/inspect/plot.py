"""Draw a rotation: wavelengths, scaling, decay of scores, and errors of angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from tightrope import angles
from tightrope.spec import RopeSpec

from ..figures import COLOURS, INK, MUTED, legend_below, new_figure, save, styled
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
from .pairs import PairRow, pairs_of
from .report import Inspection

__all__ = ["draw"]

_NO_CONTEXT = 131072
_MOST_CURVES = 6
_BINS = 140
_LONGEST_NAME = 32
_PER_BIN = 48
_MARKERS = "os^Dv<"
_DASHED = (0, (4, 3))


@dataclass(frozen=True)
class _Curve:
    label: str
    spec: RopeSpec
    context: int
    trained: int | None
    colour: str
    marker: str
    filled: bool = True

    @property
    def pairs(self) -> tuple[PairRow, ...]:
        return pairs_of(self.spec, self.context, self.trained)


def draw(path: Path, inspections: Sequence[Inspection]) -> None:
    """Draw one or several inspected configurations.

    Args:
        path: .png, .pdf or .svg.
        inspections: with several, the angles of each are compared with those of the first.

    Raises:
        OSError: the path cannot be written.
        ValueError: matplotlib does not support the format, there is no rotation or more than six, or
            in one of them no pair turns.
    """
    curves = _curves(inspections)
    if not curves or len(curves) > _MOST_CURVES:
        raise ValueError(
            f"[draw] a picture must have 1 to {_MOST_CURVES} rotations but got {len(curves)}: choose "
            "a section or a layer type."
        )
    still = [one.label for one in curves if all(math.isinf(pair.wavelength) for pair in one.pairs)]
    if still:
        raise ValueError(
            f"[draw] every rotation must have a pair that turns but {still[0]} has none."
        )
    several = len(inspections) > 1
    scaled = any(curve.spec.scaling is not None for curve in curves)
    with styled():
        count = 4 if several or scaled else 3
        figure = new_figure(10.0, 7.6) if count == 4 else new_figure(13.0, 4.2)
        figure.suptitle(
            " and ".join(_short(each.name) for each in inspections), x=0.01, ha="left", fontsize=12,
            fontweight="bold",
        )  # fmt: skip
        grid = figure.subplots(2, 2) if count == 4 else figure.subplots(1, 3)
        panels: list[Axes] = list(grid.flat)
        _wavelengths(panels[0], curves)
        if count == 4:
            if several:
                _disagreement(panels[1], curves)
            else:
                _scaling(panels[1], [one for one in curves if one.spec.scaling is not None])
        _decay(panels[-2], curves)
        _errors(panels[-1], curves, several)
        for letter, axes in zip("abcd", panels, strict=False):
            axes.set_title(f"{letter}   {axes.get_title(loc='left')}")
            if axes.axison:
                legend_below(axes)
        save(figure, path)


def _curves(inspections: Sequence[Inspection]) -> list[_Curve]:
    several = len(inspections) > 1
    made: list[_Curve] = []
    for inspection in inspections:
        for part in inspection.parts:
            names = [_short(inspection.name)] if several else []
            names += [part.name] if part.name else []
            label = ", ".join(names) or _rule_of(part.spec)
            place = len(made) % _MOST_CURVES
            made.append(
                _Curve(
                    label, part.spec, part.context or _NO_CONTEXT, part.trained, COLOURS[place],
                    _MARKERS[place],
                )
            )  # fmt: skip
    if len(made) == 1 and made[0].spec.scaling is not None:
        plain = replace(
            made[0], label="unscaled", spec=replace(made[0].spec, scaling=None),
            colour=COLOURS[1], marker=_MARKERS[1], filled=False,
        )  # fmt: skip
        made.append(plain)
    return made


def _rule_of(spec: RopeSpec) -> str:
    if spec.scaling is None:
        return f"base {spec.base:g}"
    factor = getattr(spec.scaling, "factor", None)
    name = type(spec.scaling).__name__
    return name if factor is None else f"{name}, factor {factor:g}"


def _short(name: str) -> str:
    """Shorten a path to its distinctive part."""
    path = Path(name)
    plain = path.name in ("config.json", "params.json") and path.parent.name
    short = path.parent.name if plain else path.name or name
    return short if len(short) <= _LONGEST_NAME else f"{short[: _LONGEST_NAME - 1]}…"


# --- panels ---------------------------------------------------------------------------------------


def _wavelengths(axes: Axes, curves: list[_Curve]) -> None:
    for place, curve in enumerate(curves):
        turning = [pair for pair in curve.pairs if math.isfinite(pair.wavelength)]
        count = max(len(curve.pairs), 1)
        axes.scatter(
            [pair.index for pair in turning],
            [pair.wavelength for pair in turning],
            # Later curves lie on top, with smaller markers so that the first stays visible.
            s=min(26.0, 1600 / count) * (1.0 if not curves[-1].filled else 1.5 / (1 + 1.4 * place)),
            marker=curve.marker,
            facecolors=curve.colour if curve.filled else "none",
            edgecolors=curve.colour,
            linewidths=1.0,
            label=curve.label,
            zorder=2.1 if not curve.filled else 3 + 0.1 * place,
        )
    axes.set(title="Wavelength of each pair", yscale="log")
    axes.set(xlabel="pair of channels", ylabel="positions per turn")
    context = max(curve.context for curve in curves)
    lines = {context: f"context, {context:,}"}
    for trained in {curve.trained for curve in curves if curve.trained is not None}:
        lines.setdefault(trained, f"training, {trained:,}")
    for length, text in sorted(lines.items()):
        axes.axhline(length, color=INK, lw=0.9, ls=_DASHED, zorder=1)
        axes.annotate(
            text, (0.01, length), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", fontsize=8.5, color=INK,
        )  # fmt: skip


def _scaling(axes: Axes, curves: list[_Curve]) -> None:
    axes.set_title("What scaling does to each pair")
    for curve in curves:
        moving = [pair for pair in curve.pairs if math.isfinite(pair.slower) and pair.slower > 0]
        axes.plot(
            [pair.index for pair in moving], [pair.slower for pair in moving], color=curve.colour,
            marker=curve.marker, ms=3.5, lw=1.2, label=curve.label,
        )  # fmt: skip
    axes.set(xlabel="pair of channels", ylabel="times slower than unscaled")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 2.2))
    known = [pair for pair in curves[0].pairs if pair.turns_trained is not None]
    slow = [pair.index for pair in known if (pair.turns_trained or 0) < 1]
    if slow and len(curves) == 1:
        axes.axvspan(slow[0] - 0.5, slow[-1] + 0.5, color=MUTED, alpha=0.14, lw=0,
                     label="no whole turn in training")  # fmt: skip


def _disagreement(axes: Axes, curves: list[_Curve]) -> None:
    axes.set_title("Difference of angles from the first")
    first = curves[0]
    context = max(curve.context for curve in curves)
    positions = sample(context)
    positions = positions[positions > 0]
    drawn = False
    for curve in curves[1:]:
        mine, theirs = (phases_at(one.spec, positions, context) for one in (first, curve))
        if mine.shape != theirs.shape:
            continue
        apart = (mine - theirs).double().abs().amax(-1) * (2 * math.pi * 2.0**-64)
        _plot_worst(axes, positions, apart, 1e-6, color=curve.colour, lw=1.5, label=curve.label)
        drawn = True
    if not drawn:
        axes.text(0.5, 0.5, "numbers of pairs differ", ha="center", color=MUTED,
                  transform=axes.transAxes)  # fmt: skip
        axes.set_axis_off()
        return
    axes.set(xscale="log", yscale="log", xlabel="position", ylim=(None, 6))
    axes.set_ylabel("largest difference of any pair, rad")


def _decay(axes: Axes, curves: list[_Curve]) -> None:
    axes.set_title("Score of equal content by distance")
    for curve in curves:
        edges = torch.logspace(0, math.log10(curve.context), _BINS + 1, dtype=torch.float64)
        bands: list[tuple[float, float, float, float]] = []
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            start, stop = math.ceil(low), max(math.ceil(high), math.ceil(low) + 1)
            if bands and start <= bands[-1][0]:
                continue
            step = max(1, (stop - start) // _PER_BIN)
            score = _scores(curve, torch.arange(start, stop, step))
            middle = math.sqrt(start * max(stop - 1, start))
            bands.append((middle, float(score.min()), float(score.mean()), float(score.max())))
        middles, lows, means, highs = zip(*bands, strict=True)
        alpha = 0.22 if curve.filled else 0.12
        axes.fill_between(middles, lows, highs, color=curve.colour, alpha=alpha, lw=0)
        style = "-" if curve.filled else "--"
        axes.plot(middles, means, style, color=curve.colour, lw=1.4, label=curve.label)
    axes.axhline(0, color=MUTED, lw=0.8)
    axes.set(xscale="log", xlabel="distance, positions", ylabel="mean of cos over pairs")


def _errors(axes: Axes, curves: list[_Curve], several: bool) -> None:
    axes.set_title("Error of cos and sin up to a position")
    context = max(curve.context for curve in curves)
    end = min(EXACT, max(4 * context, 2**20))
    positions = sample(end)
    positions = positions[positions > 0]
    lines: list[tuple[_Curve, str, str, str, Any, float]]
    if several:
        lines = [(one, FLOAT32, f"{one.label}, float32", one.colour, "-", 1.4) for one in curves]
        lines[:1] = [
            (*lines[0][:-1], 3.2),
            (curves[0], WORDS, "phase words", INK, "-", 1.4),
        ]
    else:
        one = curves[0]
        lines = [
            (one, FREQUENCIES, FREQUENCIES, COLOURS[1], _DASHED, 1.5),
            (one, POSITIONS, POSITIONS, COLOURS[4], (0, (1, 1.4)), 1.5),
            (one, FLOAT32, FLOAT32, COLOURS[1], "-", 1.5),
            (one, WORDS, WORDS, COLOURS[0], "-", 1.5),
        ]
    errors = {one: errors_at(one.spec, positions, one.context) for one, *_ in lines}
    for one, method, label, colour, dashes, width in lines:
        worst = errors[one][method].cummax(0).values
        _plot_worst(axes, positions, worst, 1e-9, color=colour, lw=width, ls=dashes, label=label)
    axes.axhline(
        ROUNDINGS["bfloat16"], color=MUTED, lw=1.1, ls=(0, (6, 2, 1, 2)),
        label="rounding of a bfloat16",
    )  # fmt: skip
    axes.axvline(context, color=INK, lw=0.9, ls=_DASHED)
    axes.annotate(
        "context", (context, 2.5e-7), xytext=(-3, 0),
        textcoords="offset points", fontsize=8.5, color=INK, rotation=90, ha="right", va="bottom",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="position", ylim=(1e-8, 6))
    axes.set_ylabel("largest error of any pair")


# --- numbers --------------------------------------------------------------------------------------


def _scores(curve: _Curve, distances: torch.Tensor) -> torch.Tensor:
    """Return q·k of equal q and k by distance, relative to distance 0, if pairs are equally long."""
    cos, _ = angles.cos_sin(phases_at(curve.spec, distances, curve.context), torch.float64)
    return cos.mean(-1)


def _plot_worst(
    axes: Axes, positions: torch.Tensor, values: torch.Tensor, floor: float, **style: Any
) -> None:
    """Plot the largest value in each twelfth of an octave of positions, but at least ``floor``."""
    place = (positions.double().log2() * 12).floor().long()
    kinds, inverse = place.unique(return_inverse=True)
    worst = torch.full((len(kinds),), floor, dtype=torch.float64)
    worst.scatter_reduce_(0, inverse, values.double(), "amax")
    axes.plot(2.0 ** ((kinds.double() + 0.5) / 12), worst, **style)
