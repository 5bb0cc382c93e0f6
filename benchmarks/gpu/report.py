"""The tables of a GPU run: budgets, ratios, block shapes, failures. Printing them needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ..speed import Case, floor_of
from ..speed.report import span
from .cases import CASES, SHARES
from .contenders import CONTENDERS, OURS, RIVALS

#: The budgets: the least share of a copy's bandwidth, and the most microseconds of host time per call.
SHARE, HOST = 0.92, 25.0
HOST_CALLS = ("rotate_qk_, prepared", "rotate_qk, prepared")

#: Exit codes of pytest that are not reported: all passed, some failed, none selected.
USUAL_EXITS = (0, 1, 5)

_FAILED = ("failed", "crashed", "hung")

Units = list[dict[str, Any]]


def failures(units: Units) -> Units:
    """Return the units that failed, crashed or hung, without those of other contenders."""
    return [
        unit
        for unit in units
        if unit["outcome"] in _FAILED and unit.get("contender", OURS.name) == OURS.name
    ]


def _named(units: Units, test: str) -> dict[str, dict[str, Any]]:
    """Return case name -> unit for one test; the name is "" for a unit without a case."""
    return {str(unit.get("case", "")): unit for unit in units if f"::{test}" in unit["unit"]}


def _within(values: list[float], most: float) -> str:
    """Return "held" if all sorted values are within a bound, "NOT HELD" if none is, else "open"."""
    return "held" if values[-1] <= most else "NOT HELD" if values[0] > most else "open"


def _why_not(unit: Mapping[str, Any] | None) -> str:
    if unit is None:
        return "not measured: not selected"
    return f"not measured: {_summary(unit)}"


def _summary(unit: Mapping[str, Any]) -> str:
    """Return the outcome of a unit, and the most informative line of its note."""
    lines = [line.strip() for line in unit.get("note", "").splitlines() if line.strip()] or [""]
    error = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[0])
    return f"{unit['outcome']}: {error}".removesuffix(": ")


def _cut(result: Mapping[str, Any]) -> bool:
    """Return whether a case was measured at a reduced size."""
    case = Case(**result["case"])
    whole = next(one for one in (*CASES, *SHARES) if one.name == case.name)
    return case.moved != whole.moved


def budgets(units: Units) -> Iterator[tuple[str, str, str]]:
    """Yield (budget, bound, result), where the result states whether the budget is held."""
    shares = _named(units, "test_share_of_the_copy")
    for case in SHARES:
        name, result = f"bandwidth of {case.name}", shares.get(case.name, {}).get("result", {})
        if "clone" not in result.get("ratios", {}):
            yield name, f"≥ {SHARE:.0%} of a copy's", _why_not(shares.get(case.name))
            continue
        taken = result["ratios"]["clone"]
        found = span([100 / value for value in reversed(taken)]) + " %"
        held = "open: measured on a smaller case" if _cut(result) else _within(taken, 1 / SHARE)
        yield name, f"≥ {SHARE:.0%} of a copy's", f"{found}: {held}"
    unit = _named(units, "test_host_time").get("")
    for call in HOST_CALLS:
        host = (unit or {}).get("result", {}).get(call)
        found = _why_not(unit) if host is None else f"{host:.1f} µs: {_within([host], HOST)}"
        yield f"host time of {call}", f"≤ {HOST:.0f} µs", found
    unit = _named(units, "test_compilations").get("")
    counts = list((unit or {}).get("result", {}).values())
    text = f"{counts[0]}, then {counts[1]}: " if counts else _why_not(unit)
    held = "" if not counts else "held" if counts[0] == counts[1] else "NOT HELD"
    yield "kernels compiled, over lengths and offsets", "none after the first calls", text + held
    times = _named(units, "test_time")
    for rival in RIVALS:
        found = [
            (unit["result"]["ratios"][rival], name)
            for name, unit in times.items()
            if rival in unit["result"].get("ratios", {})
        ]
        slower = [f"{name} ({span(r)})" for r, name in found if _within(r, 1.0) == "NOT HELD"]
        unclear = [f"{name} ({span(r)})" for r, name in found if _within(r, 1.0) == "open"]
        text = f"NOT HELD in {', '.join(slower)}" if slower else "held" if found else "not measured"
        text += f"; open in {', '.join(unclear)}" if unclear else ""
        yield f"time relative to {rival}", f"≤ 1 in each of {len(found)} cases", text


def _table(units: Units) -> Iterator[str]:
    yield "| budget | bound | found |"
    yield "|---|---|---|"
    for row in budgets(units):
        yield f"| {' | '.join(row)} |"
    yield ""


def ratios(units: Units) -> Iterator[str]:
    """Yield the lines of a Markdown table: our time and bandwidth, and our time over each contender's."""
    results = [unit["result"] for unit in _named(units, "test_time").values()]
    results = [result for result in results if "seconds" in result]
    found = {name for result in results for name in result["ratios"]}
    names = [one.name for one in CONTENDERS if one.name in found]
    yield "| case | µs | GB/s | " + " | ".join(f"/ `{name}`" for name in names) + " |"
    yield "|---|---|---|" + "---|" * len(names)
    for result in results:
        ours = median(result["seconds"][OURS.name])
        moved = Case(**result["case"]).moved
        cells = [span(result["ratios"][n]) if n in result["ratios"] else "" for n in names]
        label = result["case"]["name"] + (" (cut)" if _cut(result) else "")
        yield f"| {label} | {1e6 * ours:.4g} | {moved / ours / 1e9:.0f} | {' | '.join(cells)} |"


def shapes(units: Units) -> Iterator[str]:
    """Yield a line per case: its fastest block shape, timed relative to that in `blocks.py`."""
    found: dict[str, list[tuple[float, str]]] = {}
    for unit in units:
        result = unit["result"]
        if "::test_blocks" in unit["unit"] and "ratios" in result:
            ratio = median(floor_of(result["ratios"]))
            found.setdefault(result["case"]["name"], []).append((ratio, str(result["change"])))
    for name, every in found.items():
        table = next((ratio for ratio, change in every if change == "{}"), None)
        best, change = min(every)
        if table:
            yield f"- {name}: {change}, {best / table:.3f} of the time of the table's shape"


def written(data: Mapping[str, Any]) -> str:
    """Return all tables of a run, as Markdown."""
    units: Units = data["units"]
    outcomes = [unit["outcome"] for unit in units]
    count = ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes))
    machine = next(iter(_named(units, "test_machine").values()), {}).get("result", {})
    here = machine.get("environment", {})
    parts = [*here.get("gpus", []), f"torch {here.get('torch', 'unknown')}", machine.get("gpu", "")]
    lines = [
        *(["**A dry run: times mean nothing.**", ""] if data["dry"] else []),
        f"{data['date']}, commit {here.get('commit') or 'unknown'}: {'; '.join(str(part) for part in parts if part)}",
        "",
        f"{count}, in {data['seconds']:.0f} s",
        "",
        *(_table(units) if not data["dry"] else ()),
        *ratios(units),
    ]
    if best := list(shapes(units)):
        lines += ["", "The fastest block shapes:", "", *best]
    if wrong := failures(units):
        lines += ["", "Failures:", ""]
        lines += [f"- {unit['unit']}: {_summary(unit)}" for unit in wrong]
    lines += [f"\npytest ended with {code}" for code in data["pytest"] if code not in USUAL_EXITS]
    return "\n".join(lines)
