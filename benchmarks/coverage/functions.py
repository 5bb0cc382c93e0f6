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
from tightrope.integrations import Recognition, recognise
from tightrope.integrations._find import Constants
from tightrope.integrations._graft import Swap
from tightrope.integrations._inline import INLINE, function_of, inlined
from tightrope.integrations._recognise import recognise_member, to_the_bit

from ..transformers_coverage import functions
from ..transformers_coverage.functions import measured
from ..transformers_coverage.models import sentence
from .catalogue import Library, Rotary, rotary

PAIRS = (*functions.PAIRS, (torch.bfloat16, torch.float32))
BODY = "it rotates in the body of a method that does more than rotate"


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
        yield from (blank | row for row in _inline(each))
        return
    try:
        value, owner = each.found()
        several = each.constants(value)
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        yield {**blank, "status": "not loaded", "reason": sentence(error)}
        return
    for constants in several:
        yield blank | {"constants": dict(constants)} | _one(each, value, owner, constants)


def _inline(each: Rotary) -> list[dict[str, Any]]:
    """Entries of a row for each rotation in the body of a function; one that has none is left."""
    found: dict[str, dict[str, Any]] = {}

    def tried(text: str) -> str | None:
        value = function_of(function.__globals__, text)
        recognition = to_the_bit(recognise(value))
        if recognition.candidate is not None and text not in found:
            name = f"{each.name}{INLINE}{text}"
            swap = Swap(each.module.__name__, name, (recognition.candidate,))
            found[text] = {"inline": text, **measured(swap, value, None, PAIRS)}
        return text if recognition else None

    try:
        function = unwrapped(each.found()[0])
        inlined(function, tried)
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        return [{"status": "not loaded", "reason": sentence(error)}]
    return list(found.values()) or [{"status": "left", "reason": BODY}]


def _one(each: Rotary, value: Any, owner: type | None, constants: Constants) -> dict[str, Any]:
    plain = unwrapped(value)
    found: Recognition = to_the_bit(recognise_member(plain, owner is not None, constants))
    if found.candidate is None:
        return {"status": "left", "reason": found.reason}
    swap = Swap(each.module.__name__, each.name, (found.candidate,))
    try:
        return measured(swap, plain, None if owner is None else object(), PAIRS)
    except Exception as error:  # noqa: BLE001 - third-party code can raise anything
        return {
            "status": "different",
            "reason": sentence(error),
            "recognised": str(found.candidate),
        }
