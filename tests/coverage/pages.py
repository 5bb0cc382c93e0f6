"""The pages of the documentation that are written from rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from benchmarks.pages import between_marks, table
from tests.support.helpers import ROOT
from tests.support.model_configs import MODELS, REFUSED

from .libraries import LIBRARIES
from .rows import Row, read
from .runs import SERVED

PAGES = {"coverage": ROOT / "docs/coverage.md", "config-coverage": ROOT / "docs/config-coverage.md"}
REPLACED = (*SERVED, "delegates")
# What is left -> library -> names.
Notes = dict[tuple[str, str], dict[str, list[str]]]


def write() -> None:
    """Write both pages."""
    for name, text in texts().items():
        between_marks(PAGES[name], name, text)


def texts() -> dict[str, str]:
    """The text of each page between its marks."""
    data = {name: rows for name in LIBRARIES if (rows := read(name))}
    return {
        "coverage": "\n".join(_libraries(data)),
        "config-coverage": "\n".join(_configurations(read("configs"))),
    }


def _libraries(data: dict[str, list[Row]]) -> Iterator[str]:
    rows = []
    for library, (first, *found) in data.items():
        functions = [row for row in found if "function" in row]
        models = [row for row in found if row.get("calls")]
        rows.append([library, first["version"], _share(functions), _share(models)])
    yield from table(["library", "version", "functions replaced", "models replaced"], rows)
    notes: Notes = defaultdict(lambda: defaultdict(list))
    for library, (_, *found) in data.items():
        for row in found:
            for key, name in _notes(row, _passing(found)):
                notes[key][library].append(name)
    for what, heading in (
        ("function", "Functions that stay"),
        ("model", "Models with a reservation"),
    ):
        lines = [
            [why, "; ".join(f"{library}: {', '.join(names)}" for library, names in each.items())]
            for (kind, why), each in notes.items()
            if kind == what
        ]
        yield from ("", f"## {heading}", "", *table(["why", what + "s"], lines))
    yield from ("", "## Models that are served", "")
    for library, (_, *found) in data.items():
        names = [f"`{row['model']}`" for row in found if row["status"] in SERVED and "calls" in row]
        if names:
            yield f"- {library}: {', '.join(names)}"


def _share(rows: list[Row]) -> str:
    return f"{sum(row['status'] in REPLACED for row in rows)} of {len(rows)}" if rows else ""


def _last(row: Row) -> str:
    return str(row["file"]).rpartition("/")[2].removeprefix("modeling_")


def _passing(rows: list[Row]) -> set[str]:
    """The labels of functions that only call others."""
    return {f"{_last(row)}.{row['function']}" for row in rows if row["status"] == "delegates"}


def _notes(row: Row, passing: set[str]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield why something of a row is left, and its name."""
    status, why = row["status"], row.get("reason", "").partition(":")[0]
    model = f"`{row.get('model')}`"
    if "function" in row:
        if status not in REPLACED:
            reason = f"{status}: {why}" if status == "not loaded" else why
            yield ("function", reason), f"`{row['function']}` of {_last(row)}"
        return
    if status not in (*SERVED, "does not rotate"):
        yield ("model", f"{status}: {why}"), model
        return
    for name, count in row.get("given_back", {}).items():
        if name.partition(" ")[0] not in passing:
            calls = f"{model} ({count} of `{name}`)"
            yield ("model", "replaced, but some calls run the original"), calls
    if row.get("bfloat16", "").startswith("the model does not run"):
        yield ("model", "replaced, but run in float32 only"), model
    if "frozen" in row:
        without = "without any gradients" if row["frozen"] == ["*"] else "without some gradients"
        yield ("model", f"replaced, but run {without}"), model


def _configurations(found: list[Row]) -> Iterator[str]:
    first, *rows = found
    count = Counter(row["status"] for row in rows)
    total = len(MODELS) + len(REFUSED)
    yield (
        f"transformers {first['version']}: {count['equal']} of {len(rows)} types that rotate are read as their models "
        f"rotate, {count['different']} otherwise. {len(MODELS)} of {total} published configurations give the spec "
        "that papers, model cards and modeling code state."
    )
    why: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["status"] != "equal":
            why[_short(row["reason"])].append(f"`{row['model']}`")
    for each in REFUSED:
        why[_short(each.why.removeprefix("[from_config] "))].append(each.origin)
    cells = [[reason, ", ".join(names)] for reason, names in sorted(why.items())]
    yield from ("", *table(["refused, or not tried, because", "model types, files"], cells))
    parts: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if "part" in row:
            parts[row["part"]].append(f"`{row['model']}`")
    yield from ("", "Of these types with several parts, a plain call reads:", "")
    yield from (f"- `{part}` of {', '.join(names)}" for part, names in sorted(parts.items()))


def _short(reason: str) -> str:
    """The beginning of a reason, without names of types and without advice."""
    begin = re.split("; |, as ", re.sub(r"model_type '\w+' has no spec: ", "", reason))[0]
    return re.sub(r"model_type '\w+'", "the type", begin).removesuffix(".")
