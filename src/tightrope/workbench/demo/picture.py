"""The picture of a demo: loss curves, wavelengths of the pairs, timing bars, polar attention."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ...spec import RopeSpec
from ..figures import GRID, INK, MUTED, new_figure, save, styled
from ..text import duration
from .polar import TIMES_LONGER, Contest, means
from .race import Race
from .results import Results
from .rotations import Timing, seconds

_EAGER = "#f2b37a"
_OURS = "#0b5fa5"
_SLOW = "#9cc3e4"
_POLAR = "#0d7f6f"
_PLAIN = "#c8553d"


def draw(path: Path, results: Results, *, title: str, caption: str) -> None:
    """Draw the results of a demo; the panel of a part that was not reached shows a note.

    Raises:
        OSError: the file cannot be written.
    """
    race, contest = results.race, results.contest
    with styled():
        figure = new_figure(16.5, 10.6, dpi=140)
        figure.suptitle(title, x=0.008, ha="left", fontsize=14, fontweight="bold")
        figure.supxlabel(caption, x=0.008, ha="left", fontsize=8.5, color=MUTED)
        top, bottom = figure.subplots(2, 3, width_ratios=(1.15, 0.85, 1.2), height_ratios=(1.25, 1))
        _losses(top[0], race, results.entropy)
        _wavelengths(top[1], results.spec, results.size.context)
        _bars(top[2], results.timings)
        _contest(bottom[0], contest)
        _half_distances(bottom[1], contest)
        _by_position(bottom[2], contest)
        save(figure, path)


def _losses(axes: Axes, race: Race, entropy: float) -> None:
    axes.set_title("Training loss, the same model twice")
    if race.steps == 0:
        _not_reached(axes)
        return
    steps = range(1, race.steps + 1)
    ours, eager = race.runs
    marker = "o" if race.steps == 1 else None
    axes.plot(steps, eager.losses, color=_EAGER, lw=5, marker=marker, label="eager rotation")
    axes.plot(steps, ours.losses, color=_OURS, lw=1.3, marker=marker, label="tightrope")
    axes.axhline(entropy, color=MUTED, lw=1, ls=(0, (4, 3)), label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.legend(loc="lower left")

    inset = axes.inset_axes((0.45, 0.66, 0.54, 0.3))
    # A log axis cannot show a difference of zero: draw it at the floor.
    floor = 1e-8
    inset.semilogy(
        steps, [max(value, floor) for value in race.differences], color=INK, lw=0.9, marker=marker
    )
    inset.set_title("|difference| of the two curves", fontsize=8.5, fontweight="normal")
    inset.set_ylim(floor, 1.0)
    inset.tick_params(labelsize=7.5)


def _wavelengths(axes: Axes, spec: RopeSpec, context: int) -> None:
    axes.set_title("Wavelength of each channel pair")
    lengths: list[float] = (2 * math.pi / spec.frequencies().inv_freq).tolist()
    groups = (
        (_OURS, "turns within the context", [n for n in lengths if n <= context]),
        (_SLOW, "turns less than once", [n for n in lengths if n > context]),
    )
    start = 0
    for color, label, group in groups:
        pairs = range(start, start + len(group))
        axes.scatter(pairs, group, s=130 / math.sqrt(len(lengths)), color=color, label=label)
        start += len(group)
    axes.axhline(context, color=INK, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"context: {context} tokens",
        (0, context),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=8.5,
    )
    axes.set_yscale("log")
    axes.set_xlabel(f"pair (head dim {spec.head_dim}, base {spec.base:g})")
    axes.set_ylabel("tokens per turn")
    axes.legend(loc="lower right")


def _bars(axes: Axes, timings: list[Timing]) -> None:
    axes.set_title("Time of one rotation of q and k, eager = 100 %")
    if not timings:
        _not_reached(axes)
        return
    rows = range(len(timings))
    ours = [seconds(each, "tightrope") / seconds(each, "eager") for each in timings]
    floor = [seconds(each, "floor") / seconds(each, "eager") for each in timings]
    axes.barh(rows, 1.0, height=0.62, color=_EAGER, label="eager")
    axes.barh(rows, ours, height=0.62, color=_OURS, label="tightrope")
    axes.scatter(floor, rows, marker="|", s=170, lw=2, color=INK, label="neg_ or clone", zorder=3)
    end = max(1.0, *ours)
    for row, (each, share) in enumerate(zip(timings, ours, strict=True)):
        text = f"{duration(seconds(each, 'eager'))} → {duration(seconds(each, 'tightrope'))}"
        axes.text(end * 1.03, row, text, va="center", fontsize=8.5)
        ratio = f"{1 / share:.1f}x"
        axes.text(end * 1.62, row, ratio, va="center", ha="right", fontweight="bold", fontsize=9.5)
    labels = [f"{each['case']['name']}\n{each['case']['work']}" for each in timings]
    axes.set_yticks(rows, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1.65)
    axes.set_xticks((0, 0.25, 0.5, 0.75, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.35, -0.07), ncols=3, columnspacing=1.2)


def _contest(axes: Axes, contest: Contest) -> None:
    axes.set_title("Training loss, polar attention and plain RoPE")
    race = contest.race
    if race.steps == 0:
        _not_reached(axes)
        return
    # Single losses scatter by more than the curves differ, so means of successive steps are drawn on top.
    width = max(1, race.steps // 40)
    middles = [1 + min(at + (width - 1) / 2, race.steps - 1) for at in range(0, race.steps, width)]
    marker = "o" if len(middles) == 1 else None
    smooth = {run.name: means(run.losses, width) for run in race.runs}
    for run, color in zip(race.runs, (_POLAR, _PLAIN), strict=True):
        axes.plot(range(1, race.steps + 1), run.losses, color=color, lw=0.6, alpha=0.3)
        axes.plot(middles, smooth[run.name], color=color, lw=2, marker=marker, label=run.name)
    axes.set(xlabel=f"step (windows of {contest.size.context} bytes)", ylabel="nats per byte")
    axes.legend(loc="lower left")

    inset = axes.inset_axes((0.4, 0.52, 0.59, 0.36))
    ours, plain = smooth.values()
    apart = [b - a for a, b in zip(ours, plain, strict=True)]
    inset.plot(middles, apart, color=INK, lw=0.9, marker=marker)
    inset.axhline(0.0, color=MUTED, lw=0.8)
    first, second = smooth
    inset.set_title(f"{second} - {first}", fontsize=8.5, fontweight="normal")
    inset.tick_params(labelsize=7.5)


def _half_distances(axes: Axes, contest: Contest) -> None:
    axes.set_title("Half distances that the gates learned")
    if contest.race.steps == 0:
        _not_reached(axes)
        return
    pairs = contest.half_distances
    size = 260 / len(pairs)
    for pair, distances in enumerate(pairs):
        axes.scatter([pair] * len(distances), distances, s=size, color=_POLAR, alpha=0.45, lw=0)
    axes.axhline(
        contest.first_half_distance, color=INK, lw=1, ls=(0, (4, 3)), label="before training"
    )
    axes.margins(y=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("pair, fastest first (one point per head and layer)")
    axes.set_ylabel("half distance of its score contribution (bytes)")
    axes.legend(loc="lower right")


def _by_position(axes: Axes, contest: Contest) -> None:
    context = contest.size.context
    axes.set_title(f"Read at {TIMES_LONGER} times the training length")
    if not contest.by_position:
        _not_reached(axes)
        return
    width = max(1, context // 4)
    for run, color in zip(contest.race.runs, (_POLAR, _PLAIN), strict=True):
        losses = means(contest.by_position[run.name], width)
        middles = [(i + 0.5) * width for i in range(len(losses))]
        axes.plot(middles, losses, color=color, lw=2, marker="o", ms=3.5, label=run.name)
    axes.axvspan(0, context, color=GRID, alpha=0.6, lw=0)
    axes.text(
        context / 2, 0.97, "training", transform=axes.get_xaxis_transform(), ha="center", va="top"
    )
    axes.set(xlabel="position of the byte in its window", ylabel="nats per byte, other files")
    axes.set_xlim(0, TIMES_LONGER * context)
    axes.set_xticks(range(0, TIMES_LONGER * context + 1, context))
    axes.legend(loc="best")


def _not_reached(axes: Axes) -> None:
    axes.text(0.5, 0.5, "stopped before this part", ha="center", color=MUTED, fontsize=11)
    axes.set_axis_off()
