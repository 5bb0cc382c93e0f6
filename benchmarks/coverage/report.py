"""The results of a library as a file, and the coverage page: counts and Markdown tables from rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..pages import table, written
from .comparing import GRAIN

Row = dict[str, Any]
SERVED = ("equal", "delegates")


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
    headings = ["library", "version", "functions replaced", "models equal", "measured with"]
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
    shapes = " or ".join(" × ".join(map(str, shape)) for shape in data["shapes"])
    back = sum("given_back" in row for row in rows)
    some = f", some of which the original rotated in {back} functions" if back else ""
    yield from (
        "",
        f"{_of(rows)} rotary functions are replaced, and no bit of a result or gradient changes in calls with "
        f"tensors of {shapes} (rows × tokens × heads × channels){some}, in float32 and in bfloat16.",
        "",
    )
    by_text: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["status"] == "equal":
            names = by_text.setdefault(row["recognised"], {})
            names.setdefault(_name(row), []).append(_last(row))
    found = []
    for text, names in sorted(by_text.items(), key=lambda item: -sum(map(len, item[1].values()))):
        each = (f"{name} of {', '.join(files)}" for name, files in names.items())
        found.append([text, str(sum(map(len, names.values()))), "; ".join(each)])
    yield from table(["recognised as", "number", "functions"], found)
    if rest := [row for row in rows if row["status"] != "equal"]:
        cells = ([row["file"], _name(row), row["status"], row["reason"]] for row in rest)
        yield from ("", *table(["file", "function", "status", "reason"], cells))


def _last(row: Row) -> str:
    return str(row["file"]).rpartition("/")[2].removeprefix("modeling_")


def _name(row: Row) -> str:
    constants = ", ".join(f"{k}={v!r}" for k, v in row.get("constants", {}).items())
    return f"`{row['function']}`" + (f" with `{constants}`" if constants else "")


def _models(data: Row) -> Iterator[str]:
    rows: list[Row] = data.get("models", [])
    if not rows:
        return
    ran = rotating(rows)
    equal = [row for row in ran if row["status"] == "equal"]
    divided = sum("elements" not in row for row in equal)
    yield from (
        "",
        f"Of {len(rows)} small models, rotary functions run in {len(ran)}. {len(equal)} of these are equal before and "
        "after `patch`: no bit of an output or gradient changes, a fault of one per cent is detected, and `unpatch` "
        f"restores the model. In {divided} of the {len(equal)}, the largest rotated tensor has more than {GRAIN:,} "
        "elements, or pairs of channels where numbers are complex, so that torch divides operations on it among its "
        "threads.",
        "",
    )
    passing = {
        f"{_last(row)}.{row['function']}"
        for row in data.get("functions", [])
        if row["status"] == "delegates"
    }
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in equal:
        key = row["file"], row.get("bfloat16", ""), "; ".join(_left(row, passing))
        groups.setdefault(key, []).append(row["model"])
    found = ([file, ", ".join(names), *texts] for (file, *texts), names in sorted(groups.items()))
    yield from table(["file", "equal", "in float32 only", "left"], found)
    for status in ("different", "not exercised", "not built", "does not rotate"):
        if those := [row for row in rows if row["status"] == status]:
            cells = (
                [row["model"], "; ".join([row["reason"], *_left(row, passing)])] for row in those
            )
            yield from ("", *table([status, "reason"], cells))


def _left(row: Row, passing: set[str]) -> Iterator[str]:
    """Calls and reasons of originals that the patched model called, without functions that delegate."""
    back = {n: c for n, c in row.get("given_back", {}).items() if n not in passing}
    yield from (each for each in row.get("left", []) if re.split(r"[:(]", each)[0] in back)
    yield from (f"{c} call{'s' * (c > 1)} of {n}" for n, c in back.items())
    yield from (f"{name} without gradients" for name in row.get("frozen", []))
