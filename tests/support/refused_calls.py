"""Calls that must raise errors, from files with a JSON object per line.

Each has the name of the function, the arguments by position and by name that are wrong, and of the error its
type and a phrase; see `refusals` in helpers.py. In arguments, "float32[2, 3]" stands for zeros of this dtype and
shape, {"int64": [0, 3]} for a tensor of these numbers and {"tuple": [1, 2]} for a tuple.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import assert_refused


def value_of(given: Any) -> Any:
    """Return the argument that a value of a row stands for."""
    if isinstance(given, str) and (zeros := re.fullmatch(r"(\w+)\[([\d, ]*)\]( on meta)?", given)):
        shape = [int(size) for size in zeros[2].split(",") if size.strip()]
        device = "meta" if zeros[3] else "cpu"
        return torch.zeros(shape, dtype=getattr(torch, zeros[1]), device=device)
    if isinstance(given, dict):
        ((kind, values),) = given.items()
        if kind == "tuple":
            return tuple(map(value_of, values))
        return torch.tensor(values, dtype=getattr(torch, kind))
    return [value_of(each) for each in given] if isinstance(given, list) else given


def refused_calls(
    path: Path, functions: Mapping[str, Callable[..., object]]
) -> Callable[..., None]:
    """Return a test with a case for each line of a file; `functions` have valid other arguments."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    @pytest.mark.parametrize("row", rows, ids=lambda row: f"[{row['call']}] {row['text']}")
    def test(row: Mapping[str, Any]) -> None:
        positional = [value_of(each) for each in row.get("args", ())]
        named = {name: value_of(each) for name, each in row.get("with", {}).items()}
        assert_refused(
            getattr(builtins, row["error"]),
            row["call"],
            row["text"],
            lambda: functions[row["call"]](*positional, **named),
        )

    return test
