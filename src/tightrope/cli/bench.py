"""`tightrope bench`: time rotations on this machine and compare with installed libraries."""

import dataclasses
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.speed import CONTENDERS, FLOORS, SUITES, Case, measure

from ..workbench.environment import Environment, read_environment
from ..workbench.place import write_whole
from . import _bench as report
from ._console import Ticker, make_console
from ._interrupt import Interrupt
from ._mistakes import FINDING, as_mistakes, check_can_draw, stop

# The default contenders: the eager expression, also compiled, and other libraries.
_AGAINST = "^(eager|compiled eager|transformers|rotary-embedding-torch|onnxruntime|jax jit)$"
_FLOORS = f"^({'|'.join(FLOORS)})$"


def bench(
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Cases to measure: {' or '.join(SUITES)} (half an hour per run)."
        ),
    ] = "short",
    only: Annotated[
        str, typer.Option(metavar="REGEX", help="Cases whose names match, such as 'decode|fp32'.")
    ] = "",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Contenders whose names match; by default eager, compiled eager and installed "
            "libraries.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads of each contender; by default torch's."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Tokens of all cases but decoding.")
    ] = None,
    runs: Annotated[
        int, typer.Option(min=1, max=100, help="Number of runs; each measures everything.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Rounds per run; each calls every contender.")
    ] = 9,
    listing: Annotated[
        bool, typer.Option("--list", help="List the cases and contenders; measure nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Write the numbers as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE", help="Draw a picture: .png, .pdf or .svg."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress on the error stream.")
    ] = False,
) -> None:
    """Time rotations on this machine's CPU, relative to copying q and k.

    Each round calls every contender, in a new random order; medians are compared.

    Caches are flushed before each call, except in decode and warm cases.

    A contender with wrong results is not timed.

    Takes a few minutes; Ctrl-C stops early and keeps the results so far.

    Exit codes: 0 success, 1 a result of this library is wrong, 2 invalid arguments, 130 interrupted.

    Examples:

    `tightrope bench --plot bench.png`

    `tightrope bench --only 'prefill.*bf16' --against 'eager|transformers' --json`
    """
    if suite not in SUITES:
        stop(f"--suite must be {' or '.join(SUITES)} but got {suite!r}.")
    wanted = _regex("--against", _AGAINST if against is None else against)
    chosen = _regex("--only", only)
    cases = [_sized(case, threads, tokens) for case in SUITES[suite]]
    cases = [case for case in cases if chosen.search(case.name)]
    if not cases:
        stop(f"--only {only!r} matches no case; --list shows them.")
    contenders = [one.name for one in CONTENDERS]
    if against is not None and not any(wanted.search(name) for name in contenders):
        stop(f"--against {against!r} matches no contender; --list shows them.")
    console = make_console()
    if listing:
        report.print_list(console, cases, wanted)
        return
    if plot is not None:
        check_can_draw()
    here = read_environment()
    for place in (out, plot):
        if place is not None and not place.absolute().parent.is_dir():
            stop(f"{place.parent}: there is no such folder.")
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    results, stopped = _measure_all(cases, wanted, runs, rounds, as_json)
    document = _document(here, load, results, runs, rounds, stopped)
    with as_mistakes():
        text = json.dumps(document, indent=2, allow_nan=False)
        if out is not None:
            write_whole(out, (text + "\n").encode())
        if plot is not None and results:
            from benchmarks.speed.picture import draw

            draw(plot, results, report.where(here, cases[0].threads))
    if as_json:
        console.print(text, markup=False, soft_wrap=True)
    else:
        report.print_results(console, here, results, document)
        for name, place in (("numbers", out), ("picture", plot)):
            if place is not None and (results or place is out):
                console.print(f"{name}  {place}", markup=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(130)


def _regex(option: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        stop(f"{option} {text!r} is not a valid regular expression: {error}.")


def _sized(case: Case, threads: int | None, tokens: int | None) -> Case:
    case = replace(case, threads=threads or case.threads or torch.get_num_threads())
    if tokens is None or case.tokens == 1:
        return case
    name = case.name.replace(str(case.tokens), str(tokens))
    return replace(case, tokens=tokens, name=name)


def _measure_all(
    cases: list[Case], wanted: re.Pattern[str], runs: int, rounds: int, as_json: bool
) -> tuple[list[dict[str, Any]], bool]:
    results = []
    included = re.compile(f"{_FLOORS}|{wanted.pattern}")
    with Interrupt() as interrupt, Ticker(make_console(stderr=as_json), "measuring") as ticker:
        for index, case in enumerate(cases):
            if interrupt.requested:
                break
            ticker.update(index / len(cases), case.name)
            try:
                results.append(measure(case, CONTENDERS, runs=runs, rounds=rounds, wanted=included))
            except RuntimeError as error:
                stop(str(error), FINDING)
        return results, interrupt.requested


def _document(
    here: Environment,
    load: float | None,
    results: list[dict[str, Any]],
    runs: int,
    rounds: int,
    stopped: bool,
) -> dict[str, Any]:
    for result in results:
        result["copies"] = report.copies_of(result)
    return {
        "machine": dataclasses.asdict(here),
        "load": load,
        "runs": runs,
        "rounds": rounds,
        "interrupted": stopped,
        "results": results,
    }
