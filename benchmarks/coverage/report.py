"""The sections of libraries on the coverage page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..pages import table

Row = dict[str, Any]


def summary(data: list[Row]) -> str:
    """A line for the functions and one for the models, with the count of each status."""
    return "\n".join(
        f"{kind}: " + ", ".join(f"{n} {status}" for status, n in counted.most_common())
        for kind in ("functions", "models")
        if (counted := Counter(row["status"] for each in data for row in each.get(kind, [])))
    )


def page(data: list[Row]) -> str:
    """The Markdown sections of libraries; of several, under one heading with a table of counts."""
    if len(data) == 1:
        return "\n".join(_section(data[0], "##"))
    counts = (
        [
            each["library"],
            each.get("version", each.get("absent", "")),
            f"{_served(each['functions'])} of {len(each['functions'])}" if "functions" in each else "",
            f"{_equal(each['models'])} of {len(each['models'])}" if each.get("models") else "",
        ]
        for each in data
    )
    lines = ["## Other libraries", "", *table(["library", "version", "functions", "models"], counts)]
    for each in data:
        lines += ["", *_section(each, "###")] if "version" in each else []
    return "\n".join(lines)


def _served(rows: list[Row]) -> int:
    return sum(row["status"] in ("equal", "delegates") for row in rows)


def _equal(rows: list[Row]) -> int:
    return sum(row["status"] == "equal" for row in rows)


def _section(data: Row, level: str) -> list[str]:
    """The section of a library: two counts, and a line for each function and each model."""
    lines = [f"{level} {data['library']} {data['version']}", "", f"With torch {data['torch']}."]
    if rows := data.get("functions"):
        lines += [
            "",
            f"{_served(rows)} of {len(rows)} rotary functions are replaced, and no bit of a result or "
            "gradient changes, in float32 and in bfloat16.",
            "",
            *table(["function", "recognised as, or reason"], map(_function, rows)),
        ]
    if rows := data.get("models"):
        ran = [row for row in rows if row["calls"]]
        rest = sorted(
            (row for row in rows if row not in ran), key=lambda r: (r["reason"], r["model"])
        )
        lines += [
            "",
            f"Of {len(ran)} model classes in whose small model rotary functions run, {_equal(ran)} are "
            "equal before and after `patch`: no bit of an output or gradient changes, a fault of one per "
            "cent is detected, and `unpatch` restores the model.",
            "",
            *table(["model", "status", "bfloat16", "left"], map(_model, ran)),
        ]
        if rest:
            others = ([r["model"], r["reason"]] for r in rest)
            lines += ["", *table(["other model", "reason"], others)]
    return lines


def _function(row: Row) -> list[str]:
    constants = ", ".join(f"{k}={v!r}" for k, v in row["constants"].items())
    name = f"`{row['file']}`: `{row['function']}`" + (f" with `{constants}`" if constants else "")
    text = (
        row["recognised"] if row["status"] == "equal" else f"**{row['status']}**: {row['reason']}"
    )
    return [name, str(text)]


def _model(row: Row) -> list[str]:
    status = row["status"] + (f": {row['reason']}" if row["reason"] else "")
    left = [*row["left"], *(f"{n} of {c} calls" for n, c in row.get("given_back", {}).items())]
    left += [f"{name} without gradients" for name in row["frozen"]]
    return [row["model"], status, row["bfloat16"], "; ".join(left)]
