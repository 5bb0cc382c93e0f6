"""The output of `tightrope bench`: its lists, its table and its notes."""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.speed import CONTENDERS, FLOORS, Case, copies, floor_of
from rich.console import Console
from rich.text import Text

from ..workbench.environment import Environment
from ..workbench.text import duration
from ._tables import titled

# If a contender was absent for several reasons, one that begins with one of these is reported.
_FAULTS = ("its result is off", "its results have", "it failed")

# Above this average number of running processes for each core, a warning is printed.
BUSY = 0.5

# Names that are too long for a column heading -> their short forms.
_SHORT = {
    "compiled eager": "compiled",
    "rotary-embedding-torch": "r-e-torch",
    "transformers, compiled": "transf., comp.",
    "tightrope, compiled": "tightr., comp.",
    "definition, compiled": "def., comp.",
}


def where(here: Environment, threads: int) -> str:
    """Return one line that describes the machine, the threads and the versions."""
    many = "" if threads == 1 else "s"
    return (
        f"{here.processor}, {threads} thread{many}, {here.instruction_set or 'no native library'}, "
        f"torch {here.torch}, tightrope {here.tightrope}"
    )


def copies_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the time of each contender in a case, relative to a copy of q and k."""
    found = {name: copies(result, name) for name in result["seconds"]}
    return {name: value for name, value in found.items() if value is not None}


def print_list(console: Console, cases: Sequence[Case], wanted: re.Pattern[str]) -> None:
    """Print the cases, and in how many each contender takes part, or why it takes part in none."""
    console.print(Text("Cases", style="bold"))
    for case in cases:
        console.print(Text(f"  {case.name}"))
    console.print(Text("Contenders", style="bold"))
    for contender in CONTENDERS:
        if contender.name in FLOORS or contender.name == "tightrope":
            state = "always"
        elif not wanted.search(contender.name):
            state = "only with --against"
        else:
            reasons = [contender.why_not(case) for case in cases]
            able = [reason for reason in reasons if reason is None]
            state = f"in {len(able)} of {len(cases)} cases"
            if not able:
                state = str(reasons[0])
        console.print(Text(f"  {contender.name}: {state}"))


def print_results(
    console: Console,
    here: Environment,
    results: Sequence[Mapping[str, Any]],
    document: Mapping[str, Any],
) -> None:
    """Print one row per case: the time of a copy, and each contender's time relative to it."""
    if document["interrupted"]:
        console.print("Stopped by Ctrl-C; these are the results so far.")
    if not results:
        return
    console.print(Text(where(here, results[0]["case"]["threads"])))
    if here.why_not_faster is not None:
        console.print(Text(here.why_not_faster))
    load = document["load"]
    if load is not None and load > BUSY * here.cores:
        console.print(
            f"This machine was busy: on average {load:.1f} processes ran on its {here.cores} cores in the minute "
            "before the measurement. Ratios may be wrong; repeat it when the machine is idle."
        )
    console.print()
    names: dict[str, None] = {}
    for result in results:
        names.update(dict.fromkeys(name for name in result["seconds"] if name not in FLOORS))
    table = titled("Time to rotate q and k, relative to copying them (1 = memory traffic alone)")
    table.add_column("case", overflow="fold")
    table.add_column("a copy", justify="right", no_wrap=True)
    narrow = console.width < 100
    for name in names:
        table.add_column(
            _SHORT.get(name, name) if narrow else name, justify="right", overflow="fold"
        )
    for result in results:
        row = [_cell(result, name) for name in names]
        table.add_row(result["case"]["name"], duration(_floor(result)), *row)
    console.print(table)
    summary = _faster(results)
    if summary:
        console.print(Text(summary))
    for name, reason in _absent(results, list(names)).items():
        console.print(Text(f"not measured: {name}: {reason}", style="dim"))
    console.print(
        f"Medians of {document['rounds']} interleaved rounds"
        + (f", median of {document['runs']} runs" if document["runs"] > 1 else "")
        + "; unless a case states otherwise, q has 32 heads and k 8, of 128 channels, as transposed "
        "views; a copy is neg_ for calls in place, otherwise clone."
    )


def _cell(result: Mapping[str, Any], name: str) -> Text:
    value = copies(result, name)
    if value is None:
        return Text("-", style="dim")
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return Text(text, style="bold" if name == "tightrope" else "")


def _floor(result: Mapping[str, Any]) -> float:
    seconds: Mapping[str, Sequence[float]] = result["seconds"]
    return median(floor_of(seconds))


def _faster(results: Sequence[Mapping[str, Any]]) -> str:
    spans = []
    for name in ("eager", "compiled eager", "transformers"):
        times = [
            1 / median(result["ratios"][name]) for result in results if name in result["ratios"]
        ]
        if times:
            low, high = f"{min(times):.1f}", f"{max(times):.1f}"
            spans.append(f"{name} {low if low == high else f'{low} to {high}'}")
    return f"Time relative to tightrope: {', '.join(spans)}." if spans else ""


def _absent(results: Sequence[Mapping[str, Any]], present: list[str]) -> dict[str, str]:
    """Return the selected contenders that took part in no case, with the reason."""
    found: dict[str, str] = {}
    for result in results:
        for name, reason in result["absent"].items():
            if name not in present and name not in FLOORS and reason != "not selected":
                # A failure or a wrong result matters more than a case that does not apply.
                if name not in found or reason.startswith(_FAULTS):
                    found[name] = reason
    return found
