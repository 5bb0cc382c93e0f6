"""Files of results, one row per line, and Markdown tables of them, written into pages between marks."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
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
    before, after = _around(page, name)
    page.write_text(f"{before}\n{text.strip()}\n{after}", encoding="utf-8")


def _around(page: Path, name: str) -> tuple[str, str]:
    """Return the text of a page up to the first mark and from the second on."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{page} must contain {begin} and {end}.")
    return before + begin, end + after


def with_marks(name: str) -> Callable[[str], Path]:
    """Return a type for an argument of a command: a page with these marks, which is checked at once."""

    def page(text: str) -> Path:
        try:
            _around(Path(text), name)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return Path(text)

    return page


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
