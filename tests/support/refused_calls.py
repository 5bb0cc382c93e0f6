"""Calls that must raise errors, from files with a JSON object per line.

Each has of the error its type, a phrase and the operation that it names; see `assert_refused` in helpers.py. A call is
written in one of two ways:

- `call`, the name of a function, with the arguments that are wrong: by position (`args`) and by name (`with`), in
  the language of written_calls.py and its `MAKERS` here, or by name as JSON has them (`given`).
- `python`, an expression that makes the call, or returns it. A star before it: it returns a list of them.

A row with `kernel` needs the compiled operators, which check what their definitions do not.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import assert_refused, on
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_same_bits
from tests.support.written_calls import value_of
from tightrope import RopeSpec, axes, frequencies, functional, gates, nn, phases, positions, stacks
from tightrope.activations import RMSNorm
from tightrope.backends import use

DTYPES = ("bool", "int32", "int64", "float32", "float64")
#: What expressions may name, beside the names of their test file. `Given` is that of frequencies.
NAMES: dict[str, Any] = {
    name: getattr(module, name)
    for module in (gates, axes, functional, nn, positions, frequencies)
    for name in getattr(module, "__all__", dir(module))
}
for value in (torch, copy, dataclasses, functional, gates, nn, phases, positions, stacks):
    NAMES[value.__name__.rpartition(".")[2]] = value
for value in (RopeSpec, RMSNorm, partial, on, use):
    NAMES[value.__name__] = value

#: {"int64": [0, 3]} is a tensor of these numbers.
MAKERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(torch.tensor, dtype=getattr(torch, name)) for name in DTYPES},
    **{name: getattr(positions, name) for name in ("per_row", "multi_axis")},
    **{name: getattr(gates, name) for name in ("Exp", "Slope", "Given")},
    "XPos": lambda centre: gates.XPos(centre=centre),
    "given": phases.given,
    "tuple": tuple,
    "tensor": torch.tensor,
    "sparse": torch.Tensor.to_sparse,
    "expanded": lambda x: x[:1].expand(x.shape),
}


def calls_of(
    row: Mapping[str, Any], functions: Mapping[str, Callable[..., object]], names: dict[str, Any]
) -> list[Callable[[], object]]:
    """Return the calls of a row."""
    if "call" in row:

        def function() -> object:
            positional = [value_of(each, MAKERS) for each in row.get("args", ())]
            named = {name: value_of(given, MAKERS) for name, given in row.get("with", {}).items()}
            return functions[row["call"]](*positional, **named, **row.get("given", {}))

        return [function]
    if row["python"].startswith("*"):
        return list(eval(row["python"][1:], names))

    def expression() -> object:
        made = eval(row["python"], names)
        return made() if callable(made) else made

    return [expression]


def refused_calls(
    path: Path, functions: Mapping[str, Callable[..., object]], names: Mapping[str, Any]
) -> Callable[..., None]:
    """Return a test with a case for each call of a file: it is refused, and no tensor that has a name is written.

    Args:
        functions: what has valid other arguments, by the names that `call` gives.
        names: what expressions may name beside `NAMES`.
    """
    cases = [
        pytest.param(
            row,
            call,
            id=f"[{row.get('of', row.get('call', ''))}] {row['text']}",
            marks=needs_kernel if "kernel" in row else (),
        )
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for call in calls_of(row, functions, {**NAMES, **names})
    ]

    tensors = [x for x in names.values() if type(x) is torch.Tensor and x.device.type == "cpu"]
    dense = [x for x in tensors if x.layout == torch.strided and not x.is_nested]

    @pytest.mark.parametrize("row, call", cases)
    def test(row: Mapping[str, Any], call: Callable[[], object]) -> None:
        of, before = row.get("of", row.get("call", "")), [x.clone() for x in dense]
        for _ in range(2):  # perhaps the first call keeps something
            if row["error"] == "RuntimeError":  # of a raw operator: torch adds to its sentences
                with pytest.raises(RuntimeError, match=re.escape(row["text"])):
                    call()
            else:
                assert_refused(getattr(builtins, row["error"]), of, row["text"], call)
        assert_same_bits(dense, before)

    return test
