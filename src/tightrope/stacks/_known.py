"""The known stacks, each with the files and the version that it follows.

known.json has a row for each, with the fields of :class:`Stack`. Its ``rules`` map the name of a frequency
rule, or "default" for none, to the name of a formula, or to a formula and the only values of the rule's fields
that it takes. A stack with the rules of another names that one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..frequencies import RULES
from . import _formulas
from ._formulas import Formula, fixed
from ._stack import BY_NAME, Stack


def _formula(given: Any) -> Formula:
    name, only = (given, {}) if isinstance(given, str) else given
    return fixed(getattr(_formulas, name), **only)


def _stack(row: dict[str, Any]) -> Stack:
    rules = row["rules"]
    made: dict[str, Any] = {
        field: getattr(torch, row[field]) for field in ("table_dtype", "dtype") if field in row
    }
    if "rounding" in row:
        made["rounding"] = tuple(row["rounding"])
    if isinstance(rules, str):
        made["rules"] = BY_NAME[rules].rules
    else:
        made["rules"] = {
            None if name == "default" else RULES[name]: _formula(each)
            for name, each in rules.items()
        }
    return Stack(**row | made)


_FILE = Path(__file__).with_name("known.json")
for _row in json.loads(_FILE.read_text(encoding="utf-8")):
    BY_NAME[_row["name"]] = _stack(_row)
