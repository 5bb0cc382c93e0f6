"""The section of a library on the coverage page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..pages import table

Row = dict[str, Any]


def summary(data: dict[str, Any]) -> str:
    """A line for the functions and one for the models, with the count of each status."""
    return "\n".join(
        f"{kind}: " + ", ".join(f"{n} {status}" for status, n in counted.most_common())
        for kind in ("functions", "models")
        if (counted := Counter(row["status"] for row in data.get(kind, [])))
    )


def section(data: dict[str, Any]) -> str:
    """The Markdown section: two counts, and a line for each function and each model."""
    lines = [f"## {data['library']} {data['version']}", "", f"With torch {data['torch']}."]
    if rows := data.get("functions"):
        known = sum(row["status"] in ("equal", "delegates") for row in rows)
        lines += [
            "",
            f"{known} of {len(rows)} rotary functions are replaced, and no bit of a result or "
            "gradient changes, in float32 and in bfloat16.",
            "",
            *table(["function", "recognised as, or reason"], map(_function, rows)),
        ]
    if rows := data.get("models"):
        ran = [row for row in rows if row["calls"]]
        equal = sum(row["status"] == "equal" for row in ran)
        rest = sorted(
            (row for row in rows if row not in ran), key=lambda r: (r["reason"], r["model"])
        )
        lines += [
            "",
            f"Of {len(ran)} model classes in whose small model rotary functions run, {equal} are equal "
            "before and after `patch`: no bit of an output or gradient changes, a fault of one per "
            "cent is detected, and `unpatch` restores the model.",
            "",
            *table(["model", "status", "bfloat16", "left"], map(_model, ran)),
            "",
            *table(["other model", "reason"], ([r["model"], r["reason"]] for r in rest)),
        ]
    return "\n".join(lines)


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
