"""Files of results, and their tables and picture.

A file has the results of one machine. For each suite it says by which command, from which tree and when
it was measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tightrope.environment import read_environment

from .calls import EVERY
from .cases import BETTER, MICROSECONDS, SUITES, Case
from .contenders import FLOORS
from .measure import OURS
from .pages import table, written

Document = dict[str, Any]

_MACHINE = "processor cores instruction_set system gpus torch python packages".split()
#: What must be the same for results to be added to a file.
_SAME = ("processor", "cores", "instruction_set", "gpus", "torch")

#: The contenders in the picture.
DRAWN = (OURS, "eager", "compiled eager")


def new(suite: str, command: str, runs: int) -> Document:
    """Return the document of a suite that is measured here, without results yet."""
    here = read_environment()
    how = {"command": command, "tree": here["commit"], "date": here["date"], "runs": runs}
    return {
        "machine": {key: here[key] for key in _MACHINE},
        "suites": {suite: {**how, "threads": here["threads"]}},
        "results": [],
    }


def save(path: Path, document: Document) -> None:
    """Write a document, or add it to a file of the same machine, in which it replaces its suites.

    Raises:
        ValueError: the file has results of another machine.
    """
    if path.exists():
        old = json.loads(path.read_text("utf-8"))
        if other := [key for key in _SAME if old["machine"][key] != document["machine"][key]]:
            key = other[0]
            raise ValueError(
                f"{path} must have results of this machine but its {key} is "
                f"{old['machine'][key]}, not {document['machine'][key]}."
            )
        rest = [one for one in old["results"] if one["suite"] not in document["suites"]]
        document = {
            "machine": document["machine"],
            "suites": old["suites"] | document["suites"],
            "results": rest + document["results"],
        }
    path.write_text(written(document), encoding="utf-8")


def span(values: Iterable[float]) -> str:
    """Format values as "lowest–highest", or as one number if both look the same."""
    low, *_, high = (f"{x:.2f}" if x >= 0.01 else f"{x:.1g}" for x in sorted([*values] * 2))
    return low if low == high else f"{low}–{high}"


def ratios(document: Document, suite: str) -> str:
    """Return a Markdown table of our time, and of our time over each contender's, and a line about the runs."""
    rows = [one for one in document["results"] if one["suite"] == suite]
    found = {name for row in rows for name in row.get("ratios", {})}
    known = [one.name for one in EVERY if one.name in found]
    names = dict.fromkeys([*known, *(name for row in rows for name in row.get("ratios", {}))])
    cases = {case.name: case for case in SUITES[suite].cases}
    on_gpu = SUITES[suite].device == "cuda"
    lines = []
    for row in rows:
        us, each = row.get("us"), row.get("ratios", {})
        cells = [
            row["case"] + " (cut)" * row.get("cut", False) + " (busy)" * row.get("busy", False)
        ]
        cells.append("" if us is None else f"{us:.3g}" if us < 100 else f"{us:.0f}")
        if on_gpu:
            case = cases.get(row["case"], Case(""))
            whole = us and not row.get("cut") and any(one in each for one in FLOORS)
            cells.append(f"{case.moved / us / 1e3:.0f}" if whole else "")
        lines.append([*cells, *(span(each[name]) if name in each else "" for name in names)])
    headings = [f"time of {OURS} / time of", "µs", *["GB/s"] * on_gpu, *(f"`{n}`" for n in names)]
    return "\n".join([*table(headings, lines), "", f"Range over {where(document, suite)}."])


def where(document: Document, suite: str) -> str:
    """Describe the runs, the machine, the tree and the command in one line."""
    here, how = document["machine"], document["suites"][suite]
    on_gpu = SUITES[suite].device == "cuda" and here["gpus"]
    device = ", ".join(here["gpus"]) if on_gpu else here["processor"]
    return (
        f"{how['runs']} runs of interleaved medians; {device}, {here['cores']} cores, "
        f"{here['instruction_set']}, torch {here['torch']}, commit {how['tree']}, {how['date']}, "
        f"`{how['command']}`"
    )


def verdicts(suite: str, results: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield a verdict, "held", "open" or "MISSED", and a sentence for each bound of the results' cases."""
    cases = {case.name: case for case in SUITES[suite].cases}
    for result in results:
        case = cases.get(result["case"], Case(""))
        known = {MICROSECONDS: [result["us"]]} if "us" in result else {}
        known |= {name: [value] for name, value in result.get("numbers", {}).items()}
        known |= result.get("ratios", {})
        for name, most in case.bounds:
            if name in known:
                low, high = min(known[name]), max(known[name])
                verdict = "held" if high <= most else "MISSED" if low > most else "open"
                verdict = "open" if result.get("cut") else verdict
                text = f"{case.name}: {name} {span(known[name])}, at most {most:.3g}: {verdict}"
                yield verdict, text


def summary(results: Sequence[Mapping[str, Any]], every: Sequence[tuple[str, str]]) -> str:
    """Return how many bounds hold, the others one by one, and who failed, and why.

    Args:
        every: the verdicts; see :func:`verdicts`.
    """
    lines = [sentence for verdict, sentence in every if verdict != "held"]
    if every:
        lines.insert(0, f"{sum(v == 'held' for v, _ in every)} of {len(every)} bounds held")
    absent = {n: why for one in results for n, why in one.get("absent", {}).items()}
    there = {name for result in results for name in result.get("ratios", {})}
    lines += [f"not measured: {n}: {why}" for n, why in absent.items() if n not in there]
    lines += [
        f"{one['case']}: {n}: {x:g}" for one in results for n, x in one.get("numbers", {}).items()
    ]
    return "\n".join(lines)


def across(documents: Sequence[Document], suite: str) -> str:
    """Return a table of the grid's ratios, the other way round, with a column for each machine."""
    machines = [one["machine"] for one in documents]
    names = [f"{one['processor']}, {one['instruction_set']}" for one in machines]
    names = [name.replace("(R)", "").replace(" Processor", "") for name in names]
    every = [[one for one in each["results"] if one["suite"] == suite] for each in documents]
    bounds = {case.name: dict(case.bounds)[BETTER] for case in SUITES[suite].cases}
    rows, missed = [], [0] * len(documents)
    for results in zip(*every, strict=True):
        cells = []
        for at, one in enumerate(results):
            low, *_, high = values = sorted(1 / x for x in one["ratios"][BETTER])
            middle = statistics.median(values)
            text = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            miss = middle < 1 / bounds[one["case"]]
            missed[at] += miss
            cells.append(f"**{text}**" if miss else text)
        rows.append([results[0]["case"], *cells])
    kept = "; ".join(f"{len(rows) - m} of {len(rows)} on {n}" for m, n in zip(missed, names))
    last = f"So many reach their goal (1, or 0.9 below 64 Ki elements): {kept}. "
    last += f"{machines[0]['cores']} cores."
    for each, name in zip(every, names):
        if wrong := "; ".join(one["case"] for one in each if one.get("wrong")):
            last += f" Torch's results were wrong on {name} in: {wrong}."
    return "\n".join([*table([f"time of {BETTER} code / ours", *names], rows), "", last])


def changes(before: Document, after: Document) -> str:
    """Return a table of old and new ratios, marked "slower" or "faster" where the ranges are disjoint."""
    now = {(one["suite"], one["case"]): one.get("ratios", {}) for one in after["results"]}
    rows = []
    for one in before["results"]:
        for name, old in one.get("ratios", {}).items():
            found = now.get((one["suite"], one["case"]), {}).get(name)
            if found is not None:
                mark = (
                    "slower" if min(found) > max(old) else "faster" if max(found) < min(old) else ""
                )
                rows.append([f"{one['case']} / {name}", span(old), span(found), mark])
    return "\n".join(table([f"time of {OURS} / time of", "before", "after", ""], rows))


def copies(result: Mapping[str, Any], name: str) -> float | None:
    """Return a contender's time relative to `neg_` or `clone`; None if it was absent."""
    each: Mapping[str, Sequence[float]] = result.get("ratios", {})
    floor = next((each[one] for one in FLOORS if one in each), None)
    if floor is None or name not in (OURS, *each):
        return None
    ours = statistics.median(floor)
    return ours if name == OURS else ours / statistics.median(each[name])


def draw(path: Path, document: Document, suite: str) -> None:
    """Draw each contender's time relative to a copy: one row per case, one mark per contender.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not support the format.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    from tightrope_tools.figures import COLOURS, INK, MUTED, new_figure, save as save_figure, styled

    results = [one for one in document["results"] if one["suite"] == suite]
    with styled():
        figure = new_figure(8.6, 0.36 * len(results) + 1.9)
        axes = figure.add_subplot()
        title = "Time to rotate q and k, relative to copying them"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        caption = where(document, suite).partition("; ")[2].rpartition(", ")[0]
        axes.set_title(caption, x=0.0, fontsize=8, fontweight="normal", color=MUTED)
        for place, name in reversed(list(enumerate(DRAWN))):
            at = [(copies(result, name), row) for row, result in enumerate(results)]
            marks = [(value, row) for value, row in at if value is not None]
            axes.scatter(
                [value for value, _ in marks],
                [row for _, row in marks],
                s=34 if place else 64,
                marker="os^"[place],
                color=COLOURS[place],
                zorder=3 if place else 4,
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
        figure.legend(handles[::-1], labels[::-1], loc="outside lower left", ncols=4)
        save_figure(figure, path)
