"""Tables of a run: for whoever waits for it, and for the documentation."""

from __future__ import annotations

import contextlib
from typing import Any, TextIO

from .cases import CONTENDERS, FLOOR, OURS
from .summary import NOT_MEASURED, failures, not_run, units

Data = dict[str, Any]

#: Those that have a column each in the documentation, where they took part.
COLUMNS = tuple(name for name in CONTENDERS if name not in (OURS, FLOOR))

#: So many shapes of blocks are told of a case.
BEST = 4

#: So many names are told in a line.
NAMES = 12


def tell(text: str, to: TextIO | None = None) -> None:
    """Print, if anybody listens; a pipe that was closed is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=to, flush=True)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return "; ".join(names[:NAMES]) + more


def progress(data: Data, stage: str, seconds: float) -> str:
    """One line for a stage, and one for each of its failures."""
    found, wrong, left = units(data, stage), failures(data, stage), not_run(data, stage)
    absent = sum("absent" in unit for unit in found.values())
    lines = [
        f"{stage}: {len(found)} units, {len(wrong)} failed, {absent} absent, {len(left)} not run, "
        f"after {seconds:.0f} s"
    ]
    lines += [f"  {name}: {reason[:160]}" for name, reason in list(wrong.items())[:NAMES]]
    lines += [f"  … and {len(wrong) - NAMES} more"] if len(wrong) > NAMES else []
    lines += [f"  not run: {_few(left)}"] if left else []
    troubles = data["stages"].get(stage, {"troubles": ["it was not begun"]})["troubles"]
    return "\n".join([*lines, *(f"  {(text.splitlines() or ['?'])[0]}" for text in troubles)])


def _span(values: list[float] | None) -> str:
    if values is None:
        return ""
    low, _, high = (f"{x:.2f}" for x in values)
    return low if low == high else f"{low}–{high}"


def _name(entry: Data) -> str:
    return f"{entry['name']} (cut {entry['cut']})" if "cut" in entry else str(entry["name"])


def _microseconds(values: list[float] | None) -> str:
    return "" if values is None else f"{1e3 * values[1]:,.1f}".replace(",", " ")


def printed(data: Data) -> str:
    """What the command says last."""
    lines = [f"{'case':36} {'µs device':>10} {'GB/s':>7} {'of copy':>10}  our time / theirs"]
    for entry in data["summary"]["cases"]:
        mine = entry["contenders"].get(OURS, {})
        ratios = "  ".join(
            f"{name} {_span(line['tightrope / it'].get('device'))}"
            for name, line in entry["contenders"].items()
            if name not in (OURS, FLOOR) and line.get("tightrope / it", {}).get("device")
        )
        lines.append(
            f"{_name(entry):36} {_microseconds(mine.get('device, ms')):>10} "
            f"{mine.get('GB/s', ''):>7} {_span(entry.get('share of copy')):>10}  {ratios}"
        )
    lines += [f"blocks, {text}" for text in _best(data)]
    for budget in _told(data):
        mark = budget["said"].upper() if budget["held"] is False else budget["said"]
        note = f"; {budget['note']}" if "note" in budget else ""
        lines.append(
            f"{mark:13} {budget['name']}: {_said(budget['found'])} ({budget['asked']}{note})"
        )
    return "\n".join(lines)


def _best(data: Data) -> list[str]:
    """Of each case the shapes of blocks that took least, of the time that the table's took."""
    return [
        f"{entry['name']}: "
        + "; ".join(f"{shape['shape']}: {shape['ratio']:.3f}" for shape in entry["shapes"][:BEST])
        for entry in data["summary"].get("blocks", [])
    ]


def _told(data: Data) -> list[Data]:
    """Budgets, of which those that held beside a rival are only counted."""
    every: list[Data] = data["summary"]["budgets"]
    beside = [b for b in every if b["held"] and b["asked"] == "<= 1 of its time"]
    counted = {"name": "no slower than a rival", "held": True, "said": "held", "asked": "each"}
    counted["found"] = f"{len(beside)} times"
    return [b for b in every if b not in beside] + ([counted] if beside else [])


def markdown(data: Data) -> str:
    """Tables for the documentation, from what was committed."""
    cases = data["summary"]["cases"]
    present = [c for c in COLUMNS if any(c in entry["contenders"] for entry in cases)]
    lines = [
        "| case | device, µs | GB/s | share of a copy | host, µs | "
        + " | ".join(f"÷ {name}" for name in present)
        + " |",
        "|---" * (5 + len(present)) + "|",
    ]
    for entry in cases:
        mine = entry["contenders"].get(OURS)
        if mine is None:
            continue
        cells = [
            _name(entry),
            _microseconds(mine.get("device, ms")),
            f"{mine['GB/s']:.0f}" if "GB/s" in mine else "",
            _span(entry.get("share of copy")),
            _microseconds(mine.get("host, ms")),
        ]
        for name in present:
            other = entry["contenders"].get(name, {}).get("tightrope / it", {})
            cells.append(_span(other.get("device")))
        lines.append("| " + " | ".join(cells) + " |")
    where, device = data["machine"], units(data, "machine").get("device", {}).get("result", {})
    lines += [
        "",
        "÷: our time over theirs, by the device's clock, below 1 is faster; least and most of the "
        "rounds. Share: bytes that must be moved over time, beside a copy on the same tensors.",
        "",
        f"{device.get('name', 'unknown device')}, driver "
        f"{where.get('gpu before', {}).get('driver_version', 'unknown')}, torch {where.get('torch')}, "
        f"Triton {where.get('triton')}, commit {where.get('commit', 'unknown')[:12]}"
        f"{' (changed)' if where.get('changed') else ''}, sources {where.get('sources')}, "
        f"{where.get('date', '')[:10]}.",
        "",
        "| asked for | found | held |",
        "|---|---|---|",
    ]
    for budget in _told(data):
        mark = f"**{budget['said']}**" if budget["held"] is False else budget["said"]
        note = f": {budget['note']}" if "note" in budget else ""
        name = f"{budget['name']} {budget['asked']}".replace("|", "\\|")
        lines.append(f"| {name} | {_said(budget['found'])} | {mark}{note} |")
    if _best(data):
        lines += [
            "",
            "Shapes of blocks, their time over that of the table's, the best of each case:",
            "",
        ]
        lines += [f"- {text}" for text in _best(data)]
    return "\n".join(lines)


def _said(found: Any) -> str:
    if isinstance(found, list):
        return _span(found)
    if isinstance(found, dict):
        return f"{found['median']:.1f} ({found['least']:.1f}–{found['most']:.1f})"
    return NOT_MEASURED if found is None else str(found)
