"""Calls that are written as rows of JSON: a tensor by its dtype and shape, another object by a name and a value.

`"int64[2, 5]"` is a tensor of zeros, `"meta int64[2, 5]"` one without data, `"learned float32[5]"` one that
requires grad, `{"per_row": "int64[3]"}` what a maker of this name makes of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tightrope.activations import ACTS
from tightrope.ops import schema

_TENSOR = re.compile(r"(meta |learned |)(bool|u?int\d+|b?float\w+|complex\d+)\[([\d, ]*)\]")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def value_of(written: Any, makers: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return what a value of a row stands for."""
    if isinstance(written, str) and (found := _TENSOR.fullmatch(written)):
        kind, dtype, sizes = found.groups()
        shape = [int(size) for size in sizes.split(",") if size]
        device = "meta" if kind == "meta " else "cpu"
        made = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        return made.requires_grad_() if kind == "learned " else made
    if isinstance(written, dict):
        ((name, inner),) = written.items()
        return makers[name](value_of(inner, makers))
    if isinstance(written, list):
        return [value_of(one, makers) for one in written]
    return written


def options_of(written: Mapping[str, Any] | int, **fields: Any) -> int:
    """Return the packed options that a row has beside others; words name codes."""
    if isinstance(written, int):
        return written
    names = {name: number for number, name in enumerate(ACTS)} | vars(schema)
    given = {key: names.get(value, value) for key, value in written.items()}
    return schema.Options(**fields | given).pack()
