"""Markdown tables of results, written into pages between marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


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
    old = page.read_text(encoding="utf-8")
    before, found, rest = old.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{page} must contain {begin} and {end}.")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")
