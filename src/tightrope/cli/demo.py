"""`tightrope demo`: train with tightrope and with eager rotation, time both, draw a picture."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.speed import Case

from ..environment import read_environment
from ..examples.train_bytes import Attention, NoTextError, Size, load_text
from ..workbench.demo import Results, polar, race, rotations, write_sample
from ..workbench.demo.race import MakeAttention
from . import _demo as report
from ._console import Ticker, make_console
from ._interrupt import Interrupt
from ._mistakes import FINDING, as_mistakes, check_can_draw, stop

_SECONDS = 75.0
_POLAR_SHARE = 0.48
_WRONG_BASE = 9900.0


class Extent(str, Enum):
    """Size of the demo: `full`, or `tiny` for the tests."""

    FULL = "full"
    TINY = "tiny"


@dataclass(frozen=True)
class _Plan:
    model: Size
    sample_bytes: int
    cases: list[Case]
    rounds: int
    polar: Size


_PLANS = {
    Extent.FULL: _Plan(
        Size(layers=4, heads=4, head_dim=64, context=256, batch=8),
        sample_bytes=320,
        cases=rotations.cases(2048, 32, 8, 128),
        rounds=7,
        polar=Size(layers=3, heads=4, head_dim=32, context=64, batch=16),
    ),
    Extent.TINY: _Plan(
        Size(layers=2, heads=2, head_dim=16, context=32, batch=4),
        sample_bytes=16,
        cases=rotations.cases(64, 4, 2, 32),
        rounds=2,
        polar=Size(layers=2, heads=2, head_dim=16, context=16, batch=4),
    ),
}


def demo(
    out: Annotated[
        Path,
        typer.Option(file_okay=False, writable=True, help="Folder for demo.png and demo.json."),
    ] = Path("tightrope-demo"),
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop training after this many steps, or earlier after --seconds."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds to train the first two models; the other two get about half of that. By "
            "default 75; with --steps, no limit.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of weights, batches and sample.")
    ] = 0,
    size: Annotated[
        Extent, typer.Option(hidden=True, help="`tiny` runs every part in seconds, for the tests.")
    ] = Extent.FULL,
) -> None:
    """Compare tightrope with eager rotation, and polar attention with plain RoPE attention.

    Trains two pairs of small transformers, times rotations alone, and draws one picture.

    Takes under three minutes on two cores; Ctrl-C stops early and keeps the results so far.

    Examples:

    `tightrope demo`

    `tightrope demo --steps 100 --seed 7 --out /tmp/demo`
    """
    if seconds is not None and not math.isfinite(seconds):
        stop(f"--seconds must be a finite number but got {seconds}.")
    check_can_draw()
    console = make_console()
    with as_mistakes():
        out.mkdir(parents=True, exist_ok=True)
    if steps is None and seconds is None:
        seconds = _SECONDS
    with Interrupt() as interrupt:
        plan = _PLANS[size]
        try:
            results = _set_up(plan, seed)
        except NoTextError as error:
            stop(str(error), FINDING)
        report.print_setting(console, results)
        _train(console, plan, results, interrupt, steps=steps, seconds=seconds)
        report.print_training(console, results)
        report.print_sample(console, results)
        _time(console, plan, results, interrupt)
        report.print_timings(console, results.timings)
        _contest(console, results, interrupt, steps=steps, seconds=seconds)
        report.print_contest(console, results.contest)
        results.interrupted = interrupt.requested
        _write(console, results, out)
    if results.interrupted:
        raise typer.Exit(130)


def _set_up(plan: _Plan, seed: int) -> Results:
    size, text = plan.model, load_text()
    attentions: dict[str, MakeAttention] = {
        "tightrope": Attention,
        "eager": rotations.EagerAttention,
    }
    return Results(
        seed=seed,
        environment=read_environment(),
        spec=Attention(size).spec,
        size=size,
        corpus=text,
        race=race.prepare(size, attentions, seed),
        contest=polar.set_up(plan.polar, seed),
        wrong_gradient_difference=race.wrong_rotation_difference(
            size, Attention, partial(Attention, base=_WRONG_BASE), text, seed
        ),
    )


def _train(
    console: Console,
    plan: _Plan,
    results: Results,
    interrupt: Interrupt,
    *,
    steps: int | None,
    seconds: float | None,
) -> None:
    with Ticker(console, "training") as ticker:
        race.train(
            results.race,
            results.corpus,
            limit=(steps, seconds),
            seed=results.seed,
            stop=lambda: interrupt.requested,
            report=lambda done: ticker.update(done, _progress(results.race)),
        )
    if interrupt.requested:
        return
    race.validate_both(results.race, results.corpus, lambda: interrupt.requested)
    if interrupt.requested:
        return
    results.in_model = rotations.time_case(rotations.case_in_model(plan.model), plan.rounds)
    results.sample = write_sample(
        results.race.runs[0].model,
        prompt="def ",
        count=plan.sample_bytes,
        temperature=0.6,
        seed=results.seed,
        stop=lambda: interrupt.requested,
    )


def _progress(both: race.Race) -> str:
    if both.steps == 0:
        return "step 0"
    ours, other = both.runs
    size, recent = ours.model.size, median(ours.seconds[-10:])
    return (
        f"step {both.steps}  loss {ours.losses[-1]:.4f}, {other.name} {other.losses[-1]:.4f}  "
        f"{size.batch * size.context / recent:,.0f} tokens/s"
    )


def _time(console: Console, plan: _Plan, results: Results, interrupt: Interrupt) -> None:
    with Ticker(console, "timing rotations") as ticker:
        for index, case in enumerate(plan.cases):
            if interrupt.requested:
                return
            ticker.update(index / len(plan.cases), f"{case.name}, {case.work}")
            results.timings.append(rotations.time_case(case, plan.rounds))


def _contest(
    console: Console,
    results: Results,
    interrupt: Interrupt,
    *,
    steps: int | None,
    seconds: float | None,
) -> None:
    contest = results.contest
    with Ticker(console, "polar attention") as ticker:
        race.train(
            contest.race,
            results.corpus,
            limit=(steps, seconds and _POLAR_SHARE * seconds),
            seed=results.seed,
            stop=lambda: interrupt.requested,
            report=lambda done: ticker.update(done, _progress(contest.race)),
            peak_rate=polar.PEAK_RATE,
            alike=False,
        )
    if contest.race.steps:
        polar.read_longer(contest, results.corpus, lambda: interrupt.requested)


def _write(console: Console, results: Results, out: Path) -> None:
    from ..workbench.demo.picture import draw

    picture, numbers = out / "demo.png", out / "demo.json"
    with as_mistakes():
        results.write_json(numbers)
        draw(
            picture,
            results,
            title="tightrope and eager rotation; polar attention and plain RoPE",
            caption=report.caption(results),
        )
    if results.interrupted:
        console.print("Stopped by Ctrl-C; these are the results so far.")
    console.print(f"picture  {picture}\nnumbers  {numbers}", markup=False, soft_wrap=True)
