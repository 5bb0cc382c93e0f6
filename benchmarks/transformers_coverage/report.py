"""The committed coverage page: counts and Markdown tables from rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..pages import table
from .comparing import GRAIN

Row = dict[str, Any]


def file_status(rows: list[Row]) -> dict[str, str]:
    """Status of each file: different if any function is; equal if all are, partly if some, else left."""
    by_file: dict[str, set[str]] = {}
    for row in rows:
        by_file.setdefault(row["file"], set()).add(row["status"])
    return {
        file: "different" if "different" in found else found.pop() if len(found) == 1 else "partly"
        for file, found in by_file.items()
    }


def summary(data: dict[str, Any]) -> str:
    """A few lines with the counts of each status."""
    lines = []
    if rows := data.get("functions"):
        files = Counter(file_status(rows).values())
        functions = Counter(row["status"] for row in rows)
        lines.append(
            f"functions: {_counts(functions)}, in {sum(files.values())} files: {_counts(files)}"
        )
    if rows := data.get("models"):
        lines.append(f"models: {_counts(Counter(row['status'] for row in rows))}")
    return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def page(data: dict[str, Any]) -> str:
    """The Markdown page."""
    lines = [
        "# Coverage of transformers",
        "",
        f"Written by `python -m benchmarks.transformers_coverage` with transformers "
        f"{data['transformers']} and torch {data['torch']}, on a CPU, with "
        f"{threads(data['threads'])}; the numbers are in `benchmarks/results/transformers-coverage.json`. "
        "What is different on other numbers of threads and on GPUs is in "
        "[Models of any library](models.md#threads-and-sizes).",
        "",
    ]
    if rows := data.get("functions"):
        lines += _functions(rows, data["shapes"])
    if rows := data.get("models"):
        lines += _models(rows)
    return "\n".join(lines).rstrip() + "\n"


def threads(count: int) -> str:
    """The number of threads in words."""
    return f"{count} thread{'s' * (count != 1)} of torch"


def shapes(each: list[list[int]], rows: list[Row]) -> str:
    """The shapes with which functions were called, and in how many functions the original served some."""
    texts = " or ".join(" × ".join(map(str, shape)) for shape in each)
    back = sum(min(row["served"]) < 2 for row in rows if row.get("served"))
    words = f", some of which the original rotated in {back} functions" if back else ""
    return f"tensors of {texts} (rows × tokens × heads × channels){words}"


def divided(rows: list[Row]) -> str:
    """A sentence on the rows whose tensors torch divides among threads; empty if sizes are not known."""
    count = sum(row.get("elements", 0) > GRAIN for row in rows)
    return (
        f" In {count} of the {len(rows)}, the largest rotated tensor has more than {GRAIN:,} elements, or pairs "
        "of channels where numbers are complex, so that torch divides operations on it among its threads."
        if any("elements" in row for row in rows)
        else ""
    )


def _functions(rows: list[Row], sizes: list[list[int]]) -> list[str]:
    files = file_status(rows)
    equal = sum(status == "equal" for status in files.values())
    lines = [
        "## Functions",
        "",
        f"{len(rows)} rotary functions and methods in {len(files)} modeling files, each called by itself, "
        f"the original against its replacement, with {shapes(sizes, rows)}. In "
        f"{equal} files all of them are recognised and replaced, and no bit of a result or gradient changes, "
        "in float32 and in bfloat16.",
        "",
    ]
    found = Counter(r["recognised"] or r["reason"] for r in rows if r["status"] == "equal")
    lines += [
        *table(["recognised as", "functions"], ([text, str(n)] for text, n in found.most_common())),
        "",
        "Left unchanged:",
        "",
        *table(
            ["function", "reason"],
            (
                [f"`{row['file']}`, `{row['function']}`", row["reason"]]
                for row in rows
                if row["status"] != "equal"
            ),
        ),
    ]
    return [*lines, ""]


def _models(rows: list[Row]) -> list[str]:
    counts = Counter(row["status"] for row in rows)
    equal = [row for row in rows if row["status"] == "equal"]
    still = counts["does not rotate"]
    lines = [
        "## Models",
        "",
        f"{len(rows)} model types, a small random model of each, with rows of tokens or with small images, "
        "videos or sounds, in float32 and in bfloat16, forward and "
        f"backward before and after `patch(model)`. {still} types do not rotate; of the other "
        f"{len(rows) - still}, {len(equal)} are equal.{divided(equal)}",
        "",
        *table(
            ["", "types", ""],
            ([name, str(counts[name]), text] for name, text in STATUSES.items()),
        ),
        "",
        "### Equal",
        "",
    ]
    by_file: dict[str, list[Row]] = {}
    for row in equal:
        by_file.setdefault(row["file"], []).append(row)
    found = []
    for file, group in sorted(by_file.items()):
        types = ", ".join(row["model_type"] for row in group)
        only = [row["bfloat16"] for row in group if row["bfloat16"] != "equal"]
        found.append([file.rpartition("/")[0], types, "; ".join(dict.fromkeys(only))])
    lines += table(["file", "types", "in float32 only"], found)
    if aside := [row for row in equal if row.get("given_back") or row.get("left")]:
        lines += [
            "",
            "In these types the original functions served some calls, or were left:",
            "",
            *table(
                ["type", "calls of originals", "left"],
                (
                    [
                        row["model_type"],
                        ", ".join(f"`{name}` {calls}" for name, calls in row["given_back"].items()),
                        "; ".join(row["left"]),
                    ]
                    for row in aside
                ),
            ),
        ]
    for status in list(STATUSES)[1:]:
        if counts[status]:
            which = ([row["model_type"], _reason(row)] for row in rows if row["status"] == status)
            lines += ["", f"### {status.capitalize()}", "", *table(["type", "reason"], which)]
    return [*lines, ""]


#: The meaning of each status of a model type; equal first.
STATUSES = {
    "equal": "no bit of an output or gradient changes, the operator runs in calls of its own rotary functions, a "
    "fault of one per cent in them is detected, and `unpatch` restores the model",
    "different": "a bit changes",
    "not exercised": "it ran, but did not test the replacement",
    "not built": "no small model of it could be built or run",
    "does not rotate": "it ran, and no method of its modules, nor a function that they call, names a rotary "
    "function, or none names a cosine to rotate by",
}


def _reason(row: Row) -> str:
    return "; ".join([row["reason"], *row["left"]])
