"""Rows of data beside the tests: one JSON object per line, each with what it is `of`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path, *inherited: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by name.

    A row has what its `base` has and it has not itself; mappings of the keys `inherited` are merged, where false
    stands for none.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        base = found[row["base"]] if "base" in row else {}
        for key in inherited:
            own = row.get(key, {})
            row[key] = own if own is False else {**(base.get(key) or {}), **own}
        assert row["of"] not in found, row["of"]
        found[row["of"]] = {**base, **row}
    return found
