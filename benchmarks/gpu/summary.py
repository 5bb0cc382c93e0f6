"""From what a run took down to what it says: times and ratios by case, and what was asked of them."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from .cases import CASES, Case
from .contenders import FLOOR
from .counts import HOST
from .timing import ROUNDS

#: The share of a copy's bandwidth that DESIGN 11 asks for.
SHARE = 0.92

#: Whom DESIGN 11 wants us never to be slower than.
RIVALS = (
    "torch.compile",
    "definition, torch.compile",
    "Liger",
    "flash-attention",
    "xopes",
    "FLA",
)

Data = dict[str, Any]


def units(data: Data, stage: str) -> dict[str, Data]:
    """The units of a stage."""
    found: dict[str, Data] = data["stages"].get(stage, {}).get("units", {})
    return found


def right(data: Data) -> dict[str, list[str]]:
    """By case, the contenders that gave what they must."""
    found: dict[str, list[str]] = {}
    for name, unit in units(data, "prepare").items():
        case, contender = name.split(" | ")
        if "result" in unit:
            found.setdefault(case, []).append(contender)
    return found


def failures(data: Data, stage: str) -> dict[str, str]:
    """Units that failed, and the last line of why."""
    return {
        name: (unit["failed"].strip().splitlines() or ["?"])[-1]
        for name, unit in units(data, stage).items()
        if "failed" in unit
    }


def times(data: Data, case: Case) -> dict[str, Data]:
    """By contender: milliseconds of the device, of single calls and of the host, by round."""
    found: dict[str, Data] = {}
    measured = units(data, "times")
    for name in right(data).get(case.name, []):
        rounds: Data = {"device": {}, "calls": {}, "host": {}}
        for turn in range(1, ROUNDS + 1):
            for way, key in (("replays", "device"), ("calls", "calls"), ("host", "host")):
                unit = measured.get(f"{case.name} | {name} | {turn} | {way}", {})
                if "result" in unit:
                    rounds[key][turn] = unit["result"]["ms"][2]
        if rounds["device"] or rounds["calls"]:
            found[name] = rounds
    return found


def _span(values: list[float]) -> list[float]:
    """The least, the median and the most."""
    return [float(f"{x:.4g}") for x in (min(values), median(values), max(values))]


def _ratios(ours: Data, other: Data) -> Data:
    found = {}
    for key in ("device", "calls"):
        both = sorted(set(ours[key]) & set(other[key]))
        if both:
            found[key] = _span([ours[key][turn] / other[key][turn] for turn in both])
    return found


def by_case(data: Data) -> list[Data]:
    """What was measured of each case."""
    found = []
    for case in CASES:
        every = times(data, case)
        if not every:
            continue
        entry: Data = {"name": case.name, "case": asdict(case), "contenders": {}}
        mine = every.get("tightrope")
        for name, rounds in every.items():
            line: Data = {f"{key}, ms": _span(list(v.values())) for key, v in rounds.items() if v}
            if rounds["device"]:
                moved = case.copied if name == FLOOR else case.moved
                line["GB/s"] = round(moved / median(rounds["device"].values()) / 1e6, 1)
            if mine is not None and name != "tightrope":
                line["tightrope / it"] = _ratios(mine, rounds)
            entry["contenders"][name] = line
        floor = every.get(FLOOR)
        if mine and floor:
            both = sorted(set(mine["device"]) & set(floor["device"]))
            if both:
                per_byte = case.moved / case.copied
                shares = [floor["device"][t] * per_byte / mine["device"][t] for t in both]
                entry["share of copy"] = _span(shares)
        absent = {
            name.split(" | ")[1]: unit.get("absent") or unit["failed"].strip().splitlines()[-1]
            for name, unit in units(data, "prepare").items()
            if name.startswith(f"{case.name} | ") and "result" not in unit
        }
        entry["absent"] = absent
        found.append(entry)
    return found


def _budget(name: str, held: bool | None, found: Any, asked: Any) -> Data:
    return {"name": name, "held": held, "found": found, "asked": asked}


def budgets(data: Data, cases: list[Data]) -> list[Data]:
    """What is asked for, and whether it held: null where that was not measured, or lies in the spread."""
    found = []
    for stage in ("checks", "tests", "prepare"):
        every = units(data, stage)
        if stage == "prepare":
            every = {name: unit for name, unit in every.items() if name.endswith("| tightrope")}
        wrong = sorted(name for name, unit in every.items() if "failed" in unit)
        text = f"{len(every)} units, {len(wrong)} failed"
        found.append(_budget(f"right: {stage}", not wrong if every else None, text, "none failed"))
    if data["machine"]["dry"]:
        return found
    wanted = [case for case in CASES if case.budget]
    shares = {entry["name"]: entry.get("share of copy") for entry in cases}
    for case in wanted:
        share = shares.get(case.name)
        held = None if share is None else _beyond(SHARE, share)
        found.append(_budget(f"share of the copy: {case.name}", held, share, f">= {SHARE}"))
    for entry in cases:
        for rival in RIVALS:
            ratio = entry["contenders"].get(rival, {}).get("tightrope / it", {}).get("device")
            if ratio is not None:
                held = _beyond(-1.0, [-x for x in reversed(ratio)])
                found.append(_budget(f"{entry['name']}: {rival}", held, ratio, "<= 1 of its time"))
    counted = units(data, "counts")
    for name, unit in counted.items():
        result = unit.get("result", {})
        if name.startswith("host | ") and result:
            held = bool(result["median"] <= HOST)
            found.append(_budget(f"microseconds of the {name}", held, result, f"<= {HOST}"))
        elif name.startswith("launches | ") and result:
            one = result["launches"] == 1 if result["launches"] else None
            found.append(_budget(name, one, result["launches"], "1"))
        elif name == "compilations" and result:
            before, after = result.values()
            same = before == after if before else None
            found.append(_budget(name, same, after, f"{before}, after one call"))
    return found


def _beyond(bound: float, span: list[float]) -> bool | None:
    """Whether all of a span reaches a bound; None if only some of it does."""
    if span[0] >= bound:
        return True
    return False if span[-1] < bound else None


def conclude(data: Data) -> Data:
    """All of it."""
    cases = by_case(data)
    return {"cases": cases, "budgets": budgets(data, cases)}
