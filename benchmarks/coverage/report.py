"""The sections of libraries on the coverage page."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ..pages import table
from ..transformers_coverage.report import divided, shapes, threads

Row = dict[str, Any]
SERVED = ("equal", "delegates")


def summary(data: list[Row]) -> str:
    """A line for the functions and one for the models, with the count of each status."""
    return "\n".join(
        f"{kind}: " + ", ".join(f"{n} {status}" for status, n in counted.most_common())
        for kind in ("functions", "models")
        if (counted := Counter(row["status"] for row in _rows(data, kind)))
    )


def section(data: list[Row]) -> str:
    """The Markdown section of one library, or of several under one heading with a table of counts."""
    several, first = len(data) > 1, next(each for each in data if "torch" in each)
    title = "Other libraries" if several else f"{data[0]['library']} {data[0]['version']}"
    how = f"With torch {first['torch']}, on a CPU, with {threads(first['threads'])}."
    lines = [f"## {title}", "", how]
    if several:
        counts = ([each["library"], each["version"], *_counts(each)] for each in data)
        lines += ["", *table(["library", "version", "functions replaced", "models equal"], counts)]
    of = ["library"] if several else []
    if rows := _rows(data, "functions"):
        known = sum(row["status"] in SERVED for row in rows)
        lines += [
            "",
            f"{known} of {len(rows)} rotary functions are replaced, and no bit of a result or "
            f"gradient changes in calls with {shapes(first['shapes'], rows)}, in float32 and in bfloat16.",
            "",
            *table([*of, "function", "recognised as, or reason"], map(_function, rows)),
        ]
    if rows := _rows(data, "models"):
        ran = [row for row in rows if row["calls"]]
        equal = [row for row in ran if row["status"] == "equal"]
        rest = sorted(
            (row for row in rows if row not in ran), key=lambda r: (r["reason"], r["model"])
        )
        lines += [
            "",
            f"Of {len(ran)} model classes in whose small model rotary functions run, {len(equal)} are equal "
            "before and after `patch`: no bit of an output or gradient changes, a fault of one per "
            f"cent is detected, and `unpatch` restores the model.{divided(equal)}",
            "",
            *table([*of, "model", "status", "bfloat16", "left"], map(_model, ran)),
        ]
        if rest:
            others = ([*row["of"], row["model"], row["reason"]] for row in rest)
            lines += ["", *table([*of, "other model", "reason"], others)]
    return "\n".join(lines)


def _rows(data: list[Row], kind: str) -> list[Row]:
    """All functions or models; "of" names the library if there are several.

    Functions that delegate are not listed as left.
    """
    rows = []
    for each in data:
        of = [each["library"]] if len(data) > 1 else []
        passing = {_short(r) for r in each.get("functions", []) if r["status"] == "delegates"}
        rows += [{**row, "of": of, "passing": passing} for row in each.get(kind, [])]
    return rows


def _short(row: Row) -> str:
    return f"{row['file'].rpartition('/')[2]}.{row['function']}"


def _counts(data: Row) -> list[str]:
    return [
        f"{sum(row['status'] in SERVED for row in rows)} of {len(rows)}" if rows else ""
        for rows in (data.get("functions"), data.get("models"))
    ]


def _function(row: Row) -> list[str]:
    constants = ", ".join(f"{k}={v!r}" for k, v in row["constants"].items())
    name = f"`{row['file']}`: `{row['function']}`" + (f" with `{constants}`" if constants else "")
    text = (
        row["recognised"] if row["status"] == "equal" else f"**{row['status']}**: {row['reason']}"
    )
    return [*row["of"], name, str(text)]


def _model(row: Row) -> list[str]:
    status = row["status"] + (f": {row['reason']}" if row["reason"] else "")
    # Only functions of which the model called the original say something about it.
    back = {n: c for n, c in row.get("given_back", {}).items() if n not in row["passing"]}
    left = [each for each in row["left"] if re.split(r"[:(]", each)[0] in back]
    left += [f"{c} call{'s' * (c > 1)} of {n}" for n, c in back.items()]
    left += [f"{name} without gradients" for name in row["frozen"]]
    return [*row["of"], row["model"], status, row["bfloat16"], "; ".join(left)]
