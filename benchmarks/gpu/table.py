"""Tables of a run: for whoever waits for it, and for the documentation."""

from __future__ import annotations

from typing import Any

from .summary import FLOOR, failures, units

Data = dict[str, Any]

#: Those that have a column each in the documentation, where they took part.
COLUMNS = (
    "torch.compile",
    "definition, torch.compile",
    "flash-attention",
    "Liger",
    "FLA",
    "xopes",
    "transformers",
    "eager",
)


def progress(data: Data, stage: str, seconds: float) -> str:
    """One line for a stage, and one for each of its failures."""
    found, wrong = units(data, stage), failures(data, stage)
    absent = sum("absent" in unit for unit in found.values())
    lines = [
        f"{stage}: {len(found)} units, {len(wrong)} failed, {absent} absent, after {seconds:.0f} s"
    ]
    lines += [f"  {name}: {reason[:160]}" for name, reason in list(wrong.items())[:12]]
    lines += [f"  … and {len(wrong) - 12} more"] if len(wrong) > 12 else []
    lines += [f"  {text.splitlines()[0]}" for text in data["stages"][stage]["troubles"]]
    return "\n".join(lines)


def _span(values: list[float] | None) -> str:
    if values is None:
        return ""
    low, _, high = (f"{x:.2f}" for x in values)
    return low if low == high else f"{low}–{high}"


def _microseconds(values: list[float] | None) -> str:
    return "" if values is None else f"{1e3 * values[1]:,.1f}".replace(",", " ")


def printed(data: Data) -> str:
    """What the command says last."""
    lines = [f"{'case':36} {'µs device':>10} {'GB/s':>7} {'of copy':>10}  our time / theirs"]
    for entry in data["summary"]["cases"]:
        mine = entry["contenders"].get("tightrope", {})
        ratios = "  ".join(
            f"{name} {_span(line['tightrope / it'].get('device'))}"
            for name, line in entry["contenders"].items()
            if name not in ("tightrope", FLOOR) and line.get("tightrope / it", {}).get("device")
        )
        lines.append(
            f"{entry['name']:36} {_microseconds(mine.get('device, ms')):>10} "
            f"{mine.get('GB/s', ''):>7} {_span(entry.get('share of copy')):>10}  {ratios}"
        )
    marks = {True: "held", False: "NOT HELD", None: "open"}
    lines += [f"{marks[b['held']]:9} {b['name']}: {b['found']} ({b['asked']})" for b in _few(data)]
    return "\n".join(lines)


def _few(data: Data) -> list[Data]:
    """Budgets, of which those that held beside a rival are only counted."""
    every: list[Data] = data["summary"]["budgets"]
    beside = [b for b in every if b["held"] and b["asked"] == "<= 1 of its time"]
    return [b for b in every if b not in beside] + (
        [{"name": "no slower than others", "held": True, "found": len(beside), "asked": "cases"}]
        if beside
        else []
    )


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
        mine = entry["contenders"].get("tightrope")
        if mine is None:
            continue
        cells = [
            entry["name"],
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
        f"{where['gpu before'].get('driver_version', 'unknown')}, torch {where['torch']}, Triton "
        f"{where['triton']}, commit {where['commit'][:12]}{' (changed)' if where['changed'] else ''}, "
        f"sources {where['sources']}, {where['date'][:10]}.",
        "",
        "| asked for | found | held |",
        "|---|---|---|",
    ]
    marks = {True: "yes", False: "**no**", None: "open"}
    lines += [
        f"| {b['name'].replace(' | ', ': ')} {b['asked']} | {_said(b['found'])} | {marks[b['held']]} |" for b in _few(data)
    ]
    return "\n".join(lines)


def _said(found: Any) -> str:
    if isinstance(found, list):
        return _span(found)
    if isinstance(found, dict):
        return f"{found['median']:.1f} ({found['least']:.1f}–{found['most']:.1f})"
    return "not measured" if found is None else str(found)
