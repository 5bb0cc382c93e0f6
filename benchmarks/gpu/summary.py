"""From what a run took down to what it says: times and ratios by case, and what was asked of them.

Nothing here needs torch: a run that was cut off anywhere can be read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from .cases import CASES, FLOOR, OURS, RIVALS, TABLE, Case

#: The share of a copy's bandwidth, and the microseconds of the host, that DESIGN 11 asks for.
SHARE, HOST = 0.92, 25.0

#: The call whose host time that is about, and the one that is made of the operator alone.
HOST_CALLS = ("rotate_qk_, prepared", "rotate_qk, prepared")

#: By the ways of timing, what they are called here.
KEYS = {"replays": "device", "calls": "calls", "host": "host"}

NOT_MEASURED = "not measured"

Data = dict[str, Any]


def units(data: Data, stage: str) -> dict[str, Data]:
    """The units of a stage."""
    found: dict[str, Data] = data["stages"].get(stage, {}).get("units", {})
    return found


def last_line(text: str) -> str:
    """What a traceback comes to; of pytest's, the first line that says what was wrong."""
    lines = text.strip().splitlines() or ["?"]
    return next((line[2:].strip() for line in lines if line.startswith("E ")), lines[-1])


def why_not(unit: Data | None) -> str:
    """Why a unit has no result."""
    if unit is None:
        return "nobody came to it"
    if "failed" in unit:
        failed: str = unit["failed"]
        # What its process printed last follows the reason that it died of.
        return failed.splitlines()[0] if unit.get("kind") in ("late", "died") else last_line(failed)
    return str(unit.get("absent") or unit.get("not run") or "there is no number")


def right(data: Data) -> dict[str, list[str]]:
    """By case, the contenders that gave what they must."""
    found: dict[str, list[str]] = {}
    for name, unit in units(data, "prepare").items():
        case, _, contender = name.partition(" | ")
        if "result" in unit and contender:
            found.setdefault(case, []).append(contender)
    return found


def failures(data: Data, stage: str) -> dict[str, str]:
    """Units that failed, and why in a line."""
    return {name: why_not(unit) for name, unit in units(data, stage).items() if "failed" in unit}


def not_run(data: Data, stage: str) -> list[str]:
    """Units that there was no time for."""
    return [name for name, unit in units(data, stage).items() if "not run" in unit]


def _times(data: Data, stage: str, case: Case) -> dict[str, Data]:
    found: dict[str, Data] = {}
    for name, unit in units(data, stage).items():
        parts = name.split(" | ")
        if parts[0] != case.name or len(parts) != 4 or "result" not in unit:
            continue
        rounds = found.setdefault(parts[1], {key: {} for key in KEYS.values()})
        rounds[KEYS[parts[3]]][int(parts[2])] = unit["result"]["ms"][2]
    return found


def times(data: Data, case: Case) -> dict[str, Data]:
    """By contender: milliseconds of the device, of single calls and of the host, by round.

    Of the stage where all take turns; of the one before it, where we and a copy do, if that has more.
    """

    def complete(found: dict[str, Data]) -> int:
        both = [found[name] for name in (OURS, FLOOR) if name in found]
        return sum(len(turns) for rounds in both for turns in rounds.values())

    return max((_times(data, stage, case) for stage in ("times", "budgets")), key=complete)


def size(data: Data, case: Case) -> Case:
    """A case as it was measured: smaller where memory was."""
    for stage in ("times", "budgets"):
        found = units(data, stage).get(f"{case.name} | inputs", {}).get("result", {})
        if "rows" in found:
            return replace(case, rows=found["rows"], tokens=found["tokens"])
    return case


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
    for whole in CASES:
        every, case = times(data, whole), size(data, whole)
        if not every:
            continue
        entry: Data = {"name": case.name, "case": asdict(case), "contenders": {}}
        if case != whole:
            entry["cut"] = f"to {case.rows} x {case.tokens}"
        mine = every.get(OURS)
        for name, rounds in every.items():
            line: Data = {f"{key}, ms": _span(list(v.values())) for key, v in rounds.items() if v}
            if rounds["device"]:
                moved = case.copied if name == FLOOR else case.moved
                line["GB/s"] = round(moved / median(rounds["device"].values()) / 1e6, 1)
            if mine is not None and name != OURS:
                line["tightrope / it"] = _ratios(mine, rounds)
            entry["contenders"][name] = line
        floor = every.get(FLOOR)
        if mine and floor:
            both = sorted(set(mine["device"]) & set(floor["device"]))
            if both:
                per_byte = case.moved / case.copied
                shares = [floor["device"][t] * per_byte / mine["device"][t] for t in both]
                entry["share of copy"] = _span(shares)
        entry["absent"] = {
            name.partition(" | ")[2]: why_not(unit)
            for name, unit in units(data, "prepare").items()
            if name.startswith(f"{case.name} | ") and "result" not in unit
        }
        found.append(entry)
    return found


def by_shape(data: Data) -> list[Data]:
    """What other shapes of blocks take, of the time that the table's take: the best of each case first."""
    found: dict[str, list[Data]] = {}
    every = {
        name: unit["result"]["ms"][2]
        for name, unit in units(data, "blocks").items()
        if "shape" in unit.get("result", {})
    }
    for name, ms in every.items():
        case, _, shape = name.partition(" | ")
        table = every.get(f"{case} | {TABLE}")
        if table is not None:
            found.setdefault(case, []).append(
                {"shape": shape, "ms": ms, "ratio": float(f"{ms / table:.4g}")}
            )
    return [
        {"name": case, "shapes": sorted(shapes, key=lambda shape: shape["ms"])}
        for case, shapes in found.items()
    ]


def _budget(name: str, held: bool | None, found: Any, asked: str, note: str = "") -> Data:
    """One entry; `held` is null where it was not measured, or a bound lies within the spread."""
    said = {True: "held", False: "not held", None: "open"}[held]
    if found is None:
        said = NOT_MEASURED
    entry = {"name": name, "held": held, "said": said, "found": found, "asked": asked}
    return entry | ({"note": note} if note else {})


def _correct(data: Data) -> Iterator[Data]:
    for stage in ("budgets", "counts", "checks", "tests", "prepare", "times"):
        every = units(data, stage)
        if stage in ("prepare", "times"):
            # What fails of others is theirs.
            every = {name: unit for name, unit in every.items() if f" | {OURS}" in name}
        wrong = sorted(name for name, unit in every.items() if "failed" in unit)
        done = sum("result" in unit for unit in every.values())
        left = len(not_run(data, stage))
        text = f"{done} done, {len(wrong)} failed, {left} not run"
        held = False if wrong else True if done and not left else None
        yield _budget(f"no failure: {stage}", held, text if done or wrong else None, "0 failed")


def _shares(data: Data, cases: dict[str, Data]) -> Iterator[Data]:
    for case in CASES:
        if not case.budget:
            continue
        entry = cases.get(case.name, {})
        share, note = entry.get("share of copy"), entry.get("cut", "")
        if share is None:
            failed = [units(data, s).get(f"{case.name} | {OURS}") for s in ("prepare", "budgets")]
            note = next(
                (why_not(unit) for unit in failed if unit and "result" not in unit), "no time"
            )
        # A smaller case than is asked for holds nothing.
        held = None if share is None or note else _beyond(SHARE, share)
        yield _budget(f"share of the copy: {case.name}", held, share, f">= {SHARE}", note)


def _rivals(data: Data, cases: dict[str, Data]) -> Iterator[Data]:
    prepared = units(data, "prepare")
    for rival in RIVALS:
        every = [unit for name, unit in prepared.items() if name.endswith(f" | {rival}")]
        missing = next((unit for unit in every if unit.get("missing")), None)
        if missing is not None or not every:
            yield _budget(f"all cases: {rival}", None, None, "<= 1 of its time", why_not(missing))
            continue
        for case in CASES:
            unit = prepared.get(f"{case.name} | {rival}")
            contenders = cases.get(case.name, {}).get("contenders", {})
            ratio = contenders.get(rival, {}).get("tightrope / it", {}).get("device")
            if unit is None or "absent" in unit:
                continue  # who has no such thing is no rival in it; `absent` of the case says so
            held = None if ratio is None else _beyond(-1.0, [-x for x in reversed(ratio)])
            note = "" if ratio else "right, but not timed" if "result" in unit else why_not(unit)
            yield _budget(f"{case.name}: {rival}", held, ratio, "<= 1 of its time", note)


def _counted(data: Data) -> Iterator[Data]:
    counted = units(data, "counts")

    def result(name: str) -> tuple[Data | None, str]:
        unit = counted.get(name)
        found = (unit or {}).get("result")
        return found, "" if found else why_not(unit)

    for call in HOST_CALLS:
        found, note = result(f"host | {call}")
        held = None if found is None else bool(found["median"] <= HOST)
        yield _budget(f"microseconds of the host: {call}", held, found, f"<= {HOST}", note)
    for call in HOST_CALLS:
        found, note = result(f"launches | {call}")
        number = found["launches"] or None if found else None
        note = "the profiler saw none" if found and not number else note
        held = None if number is None else number == 1
        yield _budget(f"launches: {call}", held, number, "1", note)
    found, note = result("compilations")
    before, after = found.values() if found else (0, None)
    held = before == after if before else None
    yield _budget(
        "compilations over lengths and offsets", held, after, f"{before or 1}, as one call", note
    )


def budgets(data: Data, cases: list[Data]) -> list[Data]:
    """What is asked for, each with what was found, and whether it held."""
    found = list(_correct(data))
    if not data["machine"]["dry"]:
        named = {entry["name"]: entry for entry in cases}
        found += [*_shares(data, named), *_counted(data), *_rivals(data, named)]
    return found


def _beyond(bound: float, span: list[float]) -> bool | None:
    """Whether all of a span reaches a bound; None if only some of it does."""
    if span[0] >= bound:
        return True
    return False if span[-1] < bound else None


def conclude(data: Data) -> Data:
    """All of it."""
    cases = by_case(data)
    return {"cases": cases, "budgets": budgets(data, cases), "blocks": by_shape(data)}
