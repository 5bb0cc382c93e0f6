"""The results of a library as a file, and the coverage page: counts and Markdown tables from rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..pages import table, written

Row = dict[str, Any]
SERVED = ("equal", "close", "delegates")


def write(path: Path, data: Row) -> None:
    """Write the results of a library; functions that differ only in their file share a row."""
    groups: dict[str, list[str]] = {}
    for row in data.get("functions", []):
        rest = {key: value for key, value in row.items() if key != "file"}
        groups.setdefault(json.dumps(rest), []).append(row["file"])
    if groups:
        rows = [{**json.loads(rest), "files": files} for rest, files in groups.items()]
        data = {**data, "functions": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written(data), encoding="utf-8")


def read(path: Path) -> Row:
    """Read the results of a library, with a row for each function; nothing if there are none."""
    data: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if rows := data.get("functions"):
        every = [{"file": file, **row} for row in rows for file in row.pop("files")]
        data["functions"] = sorted(every, key=lambda row: row["file"])
    return data


def summary(data: Row) -> str:
    """A library with the count of each status of its functions and of its models, in one line."""
    counts = [
        f"{kind}: {_counts(Counter(row['status'] for row in data[kind]))}"
        for kind in ("functions", "models")
        if data.get(kind)
    ]
    return f"{data['library']} {data['version']}; {'; '.join(counts)}"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def page(data: list[Row]) -> str:
    """A table of all libraries, then a section for each."""
    headings = ["library", "version", "functions replaced", "models replaced", "measured with"]
    rows = []
    for each in data:
        functions, models = each.get("functions", []), each.get("models", [])
        how = f"torch {each['torch']}, {threads(each)}" if "torch" in each else ""
        rows.append([each["library"], each["version"], _of(functions), _of(rotating(models)), how])
    lines = table(headings, rows)
    for each in data:
        if each.get("functions") or each.get("models"):
            lines += ["", f"## {each['library']} {each['version']}"]
            lines += [*_functions(each), *_models(each)]
    return "\n".join(lines)


def threads(data: Row) -> str:
    """The number of threads in words."""
    return f"{data['threads']} thread{'s' * (data['threads'] != 1)}"


def rotating(models: list[Row]) -> list[Row]:
    """The models in which rotary functions ran."""
    return [row for row in models if row.get("calls")]


def _of(rows: list[Row]) -> str:
    return f"{sum(row['status'] in SERVED for row in rows)} of {len(rows)}" if rows else ""


def _functions(data: Row) -> Iterator[str]:
    rows: list[Row] = data.get("functions", [])
    if not rows:
        return
    count = Counter(row["status"] for row in rows)
    yield from (
        "",
        f"{_of(rows)} rotary functions are replaced: {count['equal']} with equal bits of results and gradients, and "
        f"{count['close']} that multiply complex numbers, whose last bits may differ.",
        "",
    )
    by_text: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["status"] in ("equal", "close"):
            text = row["recognised"] + "; the last bit may differ" * (row["status"] == "close")
            names = by_text.setdefault(text, {})
            names.setdefault(f"`{row['function']}`", []).append(_last(row))
    found = []
    for text, names in sorted(by_text.items(), key=lambda item: -sum(map(len, item[1].values()))):
        each = (f"{name} of {', '.join(files)}" for name, files in names.items())
        found.append([text, str(sum(map(len, names.values()))), "; ".join(each)])
    yield from table(["kind", "number", "functions"], found)
    if rest := [row for row in rows if row["status"] not in ("equal", "close")]:
        cells = ([r["file"], f"`{r['function']}`", r["status"], _reason(r)] for r in rest)
        yield from ("", *table(["file", "function", "status", "reason"], cells))


def _reason(row: Row) -> str:
    kind = f"{row['recognised']}: " if "recognised" in row else ""
    return f"{kind}{row['reason']}"


def _last(row: Row) -> str:
    return str(row["file"]).rpartition("/")[2].removeprefix("modeling_")


def _models(data: Row) -> Iterator[str]:
    rows: list[Row] = data.get("models", [])
    if not rows:
        return
    ran = rotating(rows)
    count = Counter(row["status"] for row in ran)
    served = [row for row in ran if row["status"] in SERVED]
    passing = {
        f"{_last(row)}.{row['function']}"
        for row in data.get("functions", [])
        if row["status"] == "delegates"
    }
    whole = sum(not _back(row, passing) for row in served)
    yield from (
        "",
        f"Of {len(rows)} small models, rotary functions run in {len(ran)}. {count['equal']} of these have equal bits "
        f"before and after `patch`, and {count['close']} differ by the last bits of complex products. In {whole} of "
        "them no call reaches an original.",
        "",
    )
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in served:
        close = row["reason"] if row["status"] == "close" else ""
        key = row["file"], close, row.get("bfloat16", ""), "; ".join(_left(row, passing))
        groups.setdefault(key, []).append(row["model"])
    found = ([file, ", ".join(names), *texts] for (file, *texts), names in sorted(groups.items()))
    yield from table(["file", "replaced", "not equal", "in float32 only", "left"], found)
    for status in ("different", "not exercised", "not built", "does not rotate"):
        if those := [row for row in rows if row["status"] == status]:
            cells = (
                [row["model"], "; ".join([row["reason"], *_left(row, passing)])] for row in those
            )
            yield from ("", *table([status, "reason"], cells))


def _back(row: Row, passing: set[str]) -> dict[str, int]:
    """The calls that still reached an original, by its label, without functions that delegate."""
    calls = row.get("given_back", {}).items()
    return {name: count for name, count in calls if name.partition(" ")[0] not in passing}


def _left(row: Row, passing: set[str]) -> Iterator[str]:
    """Calls and reasons of originals that the patched model called, without functions that delegate."""
    back = _back(row, passing)
    yield from (each for each in row.get("left", []) if re.split(r"[:(]", each)[0] in back)
    yield from (f"{c} call{'s' * (c > 1)} of {n}" for n, c in back.items())
    yield from (f"{name} without gradients" for name in row.get("frozen", []))
