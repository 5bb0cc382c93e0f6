"""Test every rotary function of a library by itself: is it recognised, and does the replacement
equal it in values and gradients?

The status of a row is:

- equal: recognised, and no bit of a result or gradient changes, in float32, in bfloat16, and in bfloat16 by
  float32 tables;
- delegates: it only calls functions that are equal;
- left: not recognised, for the given reason;
- not loaded: its file cannot be imported, or does not define it, for the given reason;
- different: a bit changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from tightrope.forms import unwrapped
from tightrope.integrations import Recognition
from tightrope.integrations._find import BODY, Constants
from tightrope.integrations._recognise import recognise_member, to_the_bit

from ..transformers_coverage import functions
from ..transformers_coverage.functions import measured
from ..transformers_coverage.models import sentence
from .catalogue import Library, Rotary, rotary

PAIRS = (*functions.PAIRS, (torch.bfloat16, torch.float32))


def run(library: Library) -> list[dict[str, Any]]:
    """A row for each rotary function and combination of constants."""
    from tqdm import tqdm

    progress = tqdm(rotary(library), file=sys.stderr, mininterval=5, unit="function")
    found = [(each, row) for each in progress for row in rows(each)]
    equal = {each.code: each.last for each, row in found if row["status"] == "equal"}
    for each, row in found:
        if row["status"] == "left" and row["reason"] != BODY:
            names = ", ".join(dict.fromkeys(equal[code] for code in each.called() if code in equal))
            if names:
                row |= {"status": "delegates", "reason": f"calls {names}, which is replaced"}
    return [row for _, row in found]


def rows(each: Rotary) -> Iterator[dict[str, Any]]:
    """Yield the row of a rotary function with each combination of constants."""
    blank: dict[str, Any] = {
        "file": each.file, "function": each.name, "constants": {}, "recognised": None,
    }  # fmt: skip
    if (each.file, each.name) in each.library.bodies:
        yield {**blank, "status": "left", "reason": BODY}
        return
    try:
        value, owner = each.found()
        several = each.constants(value)
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        yield {**blank, "status": "not loaded", "reason": sentence(error)}
        return
    for constants in several:
        yield blank | {"constants": dict(constants)} | _one(value, owner, constants)


def _one(value: Any, owner: type | None, constants: Constants) -> dict[str, Any]:
    plain = unwrapped(value)
    found: Recognition = to_the_bit(recognise_member(plain, owner, constants))
    if found.candidate is None:
        return {"status": "left", "reason": found.reason}
    try:
        return measured(found.candidate, plain, owner is not None, PAIRS)
    except Exception as error:  # noqa: BLE001 - third-party code can raise anything
        return {
            "status": "different",
            "reason": sentence(error),
            "recognised": str(found.candidate),
        }
