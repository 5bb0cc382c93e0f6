"""`tightrope demo`: a transformer trained beside eager rotation, timings, polar attention, a picture."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console

from .. import RopeSpec
from ..workbench.environment import read_environment
from . import _report as report
from ._console import Ticker, make_console
from ._interrupt import Interrupt
from ._mistakes import as_mistakes
from ._model import MakeAttention, ModelSize, RotatedAttention
from ._plot import draw
from ._polar import PEAK_RATE, read_longer, set_up
from ._results import Results
from ._rotations import EagerRotation, TightropeRotation
from ._sample import write_sample
from ._text import NoTextError, load_corpus
from ._timings import BOTH_WAYS, Case, large_cases, time_case
from ._train import Race, prepare, train, validate, wrong_rotation_difference

_SECONDS = 75.0
_POLAR_SHARE = 0.48
_BASE = 10000.0
_WRONG_BASE = 9900.0


class Size(str, Enum):
    """How much a demo does: `full` is the demo, `tiny` is for the tests."""

    FULL = "full"
    TINY = "tiny"


@dataclass(frozen=True)
class _Plan:
    model: ModelSize
    sample_bytes: int
    cases: list[Case]
    seconds_per_case: float
    polar: ModelSize


_PLANS = {
    Size.FULL: _Plan(
        ModelSize(layers=4, heads=4, head_dim=64, context=256, batch=8),
        sample_bytes=320,
        cases=large_cases(2048, 32, 8, 128),
        seconds_per_case=2.0,
        polar=ModelSize(layers=3, heads=4, head_dim=32, context=64, batch=16),
    ),
    Size.TINY: _Plan(
        ModelSize(layers=2, heads=2, head_dim=16, context=32, batch=4),
        sample_bytes=16,
        cases=large_cases(64, 4, 2, 32),
        seconds_per_case=0.0,
        polar=ModelSize(layers=2, heads=2, head_dim=16, context=16, batch=4),
    ),
}


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def demo(
    out: Annotated[
        Path,
        typer.Option(file_okay=False, writable=True, help="Folder for demo.png and demo.json."),
    ] = Path("tightrope-demo"),
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Train exactly this many steps, unless --seconds ends it first."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            callback=_finite,
            help="Time to train the first two models, and half of it for the second two: 75 by "
            "default, or as long as --steps takes.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of weights, batches and sample.")
    ] = 0,
    size: Annotated[
        Size, typer.Option(hidden=True, help="`tiny` runs every part in seconds, for the tests.")
    ] = Size.FULL,
) -> None:
    """Train a small transformer beside eager rotation, time rotations, train polar attention beside
    plain RoPE, draw one picture.

    Under three minutes on two cores; Ctrl-C stops it early and keeps what there is.

    Examples:

    `tightrope demo`

    `tightrope demo --steps 100 --seed 7 --out /tmp/demo`
    """
    console = make_console()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{out} cannot be made: {error.strerror}.") from None
    if steps is None and seconds is None:
        seconds = _SECONDS
    with Interrupt() as interrupt:
        plan = _PLANS[size]
        try:
            results = _set_up(plan, seed)
        except NoTextError as error:
            make_console(stderr=True).print(f"Error: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
        report.print_setting(console, results)
        _train(console, plan, results, interrupt, steps=steps, seconds=seconds)
        report.print_training(console, results)
        report.print_sample(console, results)
        _time(console, plan, results, interrupt)
        report.print_timings(console, results.timings)
        _contest(console, plan, results, interrupt, steps=steps, seconds=seconds)
        report.print_contest(console, results.contest)
        results.interrupted = interrupt.requested
        _write(console, results, out)
    if results.interrupted:
        raise typer.Exit(130)


def _set_up(plan: _Plan, seed: int) -> Results:
    size = plan.model
    spec = RopeSpec(head_dim=size.head_dim, base=_BASE)
    length = size.context + plan.sample_bytes
    corpus = load_corpus()
    wrong = TightropeRotation(RopeSpec(head_dim=size.head_dim, base=_WRONG_BASE))
    attentions: dict[str, MakeAttention] = {
        "tightrope": partial(RotatedAttention, rotation=TightropeRotation(spec)),
        "eager": partial(RotatedAttention, rotation=EagerRotation(size.head_dim, _BASE, length)),
    }
    return Results(
        seed=seed,
        environment=read_environment(),
        spec=spec,
        size=size,
        corpus=corpus,
        race=prepare(size, attentions, seed),
        contest=set_up(plan.polar, seed),
        wrong_gradient_difference=wrong_rotation_difference(
            size,
            right=attentions["tightrope"],
            wrong=partial(RotatedAttention, rotation=wrong),
            corpus=corpus,
            seed=seed,
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
    race, size = results.race, plan.model
    with Ticker(console, "training") as ticker:
        train(
            race,
            results.corpus,
            limit=(steps, seconds),
            seed=results.seed,
            interrupt=interrupt,
            report=lambda done: ticker.update(done, _progress(race, size)),
        )
    if interrupt.requested:
        return
    validate(race, results.corpus, interrupt)
    case = Case(
        label="one layer of the model",
        what=BOTH_WAYS,
        dtype=torch.float32,
        batch=size.batch,
        length=size.context,
        q_heads=size.heads,
        k_heads=size.heads,
        head_dim=size.head_dim,
    )
    results.in_model = time_case(
        case, seconds=plan.seconds_per_case, seed=results.seed, interrupt=interrupt
    )
    if interrupt.requested:
        return
    results.sample = write_sample(
        race.runs[0].model,
        prompt="def ",
        count=plan.sample_bytes,
        temperature=0.6,
        seed=results.seed,
        interrupt=interrupt,
    )


def _progress(race: Race, size: ModelSize) -> str:
    if race.steps == 0:
        return "step 0"
    ours, other = race.runs
    recent = median(ours.seconds[-10:])
    return (
        f"step {race.steps}  loss {ours.losses[-1]:.4f}, {other.name} {other.losses[-1]:.4f}  "
        f"{size.batch * size.context / recent:,.0f} tokens/s"
    )


def _time(console: Console, plan: _Plan, results: Results, interrupt: Interrupt) -> None:
    with Ticker(console, "timing rotations") as ticker:
        for index, case in enumerate(plan.cases):
            if interrupt.requested:
                return
            text = f"{case.label}, {case.what}, {case.dtype_name}"
            ticker.update(index / len(plan.cases), text)
            timing = time_case(
                case, seconds=plan.seconds_per_case, seed=results.seed, interrupt=interrupt
            )
            if timing is not None:
                results.timings.append(timing)


def _contest(
    console: Console,
    plan: _Plan,
    results: Results,
    interrupt: Interrupt,
    *,
    steps: int | None,
    seconds: float | None,
) -> None:
    contest = results.contest
    with Ticker(console, "polar attention") as ticker:
        train(
            contest.race,
            results.corpus,
            limit=(steps, seconds and _POLAR_SHARE * seconds),
            seed=results.seed,
            interrupt=interrupt,
            report=lambda done: ticker.update(done, _progress(contest.race, plan.polar)),
            peak_rate=PEAK_RATE,
            alike=False,
        )
    if contest.race.steps:
        read_longer(contest, results.corpus, interrupt)


def _write(console: Console, results: Results, out: Path) -> None:
    picture, numbers = out / "demo.png", out / "demo.json"
    with as_mistakes():
        results.write_json(numbers)
        draw(
            picture,
            race=results.race,
            entropy=results.entropy,
            spec=results.spec,
            context=results.size.context,
            timings=results.timings,
            contest=results.contest,
            texts=(
                "tightrope beside eager rotation, and polar attention beside plain RoPE",
                report.caption(results),
            ),
        )
    if results.interrupted:
        console.print("Stopped by Ctrl-C; this is what there is so far.")
    console.print(f"picture  {picture}\nnumbers  {numbers}", markup=False, soft_wrap=True)
