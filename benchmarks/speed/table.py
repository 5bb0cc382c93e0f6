"""The output of `python -m benchmarks.speed` in plain text: its lists, its table and its notes."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tightrope.environment import Environment

from .case import Case
from .contender import FLOORS, copies, floor_of
from .contenders import CONTENDERS

# If a contender was absent for several reasons, one that begins with one of these is reported.
_FAULTS = ("its result is off", "its results have", "it failed")

# Above this average number of running processes for each core, a warning is printed.
BUSY = 0.5

# The width where the output is not a terminal, unless COLUMNS is set.
_PLAIN_WIDTH = 110
# A column of cases that is narrower than this is hard to read.
_READABLE = 20
# Headings break at spaces and hyphens into lines of this width.
_HEADING = 12
_BETWEEN = "  "

TITLE = "Time to rotate q and k, relative to copying them (1 = memory traffic alone)"


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


def duration(seconds: float) -> str:
    """Format a time in s, ms or us, to three digits: `1.20 s`, `12.3 ms`, `4.56 us`."""
    if seconds >= 1.0:
        unit, value = "s", seconds
    elif seconds >= 1e-3:
        unit, value = "ms", seconds * 1e3
    else:
        unit, value = "us", seconds * 1e6
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def width_here() -> int:
    """Return the width of the terminal; without one, `COLUMNS` or 110."""
    return shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns


def listed(cases: Sequence[Case], wanted: re.Pattern[str]) -> str:
    """Return the cases, and in how many each contender takes part, or why it takes part in none."""
    lines = ["Cases", *(f"  {case.name}" for case in cases), "Contenders"]
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
        lines.append(f"  {contender.name}: {state}")
    return "\n".join(lines)


def summary(
    here: Environment,
    results: Sequence[Mapping[str, Any]],
    document: Mapping[str, Any],
    width: int,
) -> str:
    """Return the table of measured cases, with the machine before it and notes after it."""
    parts = []
    if document["interrupted"]:
        parts.append("Stopped by Ctrl-C; these are the results so far.")
    if not results:
        return "\n".join(parts)
    parts.append(where(here, results[0]["case"]["threads"]))
    if here.why_not_faster is not None:
        parts.append(here.why_not_faster)
    load = document["load"]
    if load is not None and load > BUSY * here.cores:
        parts.append(
            f"This machine was busy: on average {load:.1f} processes ran on its {here.cores} cores in the minute "
            "before the measurement. Ratios may be wrong; repeat it when the machine is idle."
        )
    names: dict[str, None] = {}
    for result in results:
        names.update(dict.fromkeys(name for name in result["seconds"] if name not in FLOORS))
    rows = [
        [
            result["case"]["name"],
            duration(median(floor_of(result["seconds"]))),
            *(_ratio(copies(result, name)) for name in names),
        ]
        for result in results
    ]
    notes = [_faster(results)]
    notes += [
        f"not measured: {name}: {reason}" for name, reason in _absent(results, list(names)).items()
    ]
    notes.append(
        f"Medians of {document['rounds']} interleaved rounds"
        + (f", median of {document['runs']} runs" if document["runs"] > 1 else "")
        + "; unless a case states otherwise, q has 32 heads and k 8, of 128 channels, as transposed "
        "views; a copy is neg_ for calls in place, otherwise clone."
    )
    parts = [textwrap.fill(part, width) for part in parts]
    table = [TITLE, *_table(["case", "a copy", *names], rows, width)]
    return "\n".join(
        [*parts, "", *table, "", *(textwrap.fill(note, width) for note in notes if note)]
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table, in which the first column wraps and the others are numbers.

    If that column would be too narrow, each row becomes a short paragraph.
    """
    heads = [textwrap.wrap(heading, _HEADING) for heading in headings[1:]]
    widths = [
        max(len(text) for text in (*head, *column))
        for head, column in zip(heads, list(zip(*rows))[1:], strict=True)
    ]
    longest = max(len(row[0]) for row in rows)
    first = min(longest, width - sum(len(_BETWEEN) + each for each in widths))
    if first < min(longest, _READABLE):
        return _paragraphs(headings, rows, width)
    height = max(len(head) for head in heads)
    tall = [[""] * (height - len(head)) + head for head in heads]
    headed = zip([""] * (height - 1) + [headings[0]], zip(*tall), strict=True)
    lines = [_line(name, first, texts, widths) for name, texts in headed]
    lines.append("-" * max(map(len, lines)))
    for name, *numbers in rows:
        begin, *more = textwrap.wrap(name, first)
        lines += [_line(begin, first, numbers, widths), *more]
    return lines


def _line(name: str, first: int, texts: Sequence[str], widths: Sequence[int]) -> str:
    cells = (text.rjust(width) for text, width in zip(texts, widths, strict=True))
    return _BETWEEN.join([name.ljust(first), *cells]).rstrip()


def _paragraphs(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    lines = []
    for name, *numbers in rows:
        cells = [f"{heading} {text}" for heading, text in zip(headings[1:], numbers, strict=True)]
        lines.append(name)
        lines += textwrap.wrap(", ".join(cells), width, initial_indent="  ", subsequent_indent="  ")
    return lines


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


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
