"""Files of results, one row per line, and Markdown tables of them, written into pages between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [_line(headings), "|" + "---|" * len(headings), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return re.sub("(`[^`]*`)|<", lambda found: found[1] or "&lt;", text)  # code is literal


def between_marks(page: Path, name: str, text: str) -> None:
    """Replace the text of a page between `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises:
        ValueError: the page lacks one of the two marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{page} must contain {begin} and {end}.")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")


def written(data: dict[str, Any]) -> str:
    """Return JSON with a line for each entry, and for each row of an entry that is a list or a dict.

    >>> print(written({"torch": "2.13", "rows": [[1, 2], [3]], "none": []}), end="")
    {
    "torch": "2.13",
    "rows": [
    [1,2],
    [3]
    ],
    "none": []
    }
    """
    lines = [f"{json.dumps(key)}: {_on_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _on_lines(value: Any) -> str:
    rows = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(row, (dict, list)) for row in rows):
        return json.dumps(value)
    keys = (
        [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    )
    lines = [key + json.dumps(row, separators=(",", ":")) for key, row in zip(keys, rows)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(lines) + "\n" + end
