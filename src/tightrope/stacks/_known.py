"""The known stacks, each with the files and the version that it follows.

known.json has a row for each, with the fields of :class:`Stack`. A stack with the rules of another names that one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ._stack import BY_NAME, Stack

_FILE = Path(__file__).with_name("known.json")
for row in json.loads(_FILE.read_text(encoding="utf-8")):
    if isinstance(row["rules"], str):
        row["rules"] = BY_NAME[row["rules"]].rules
    if "rounding" in row:
        row["rounding"] = tuple(row["rounding"])
    for field in {"table_dtype", "dtype"} & row.keys():
        row[field] = getattr(torch, row[field])
    BY_NAME[row["name"]] = Stack(**row)
