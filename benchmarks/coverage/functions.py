"""Test every rotary function of a library by itself: is it recognised, and does the replacement
equal it in values and gradients?

The status of a row is:

- equal: recognised, and no bit of a result or gradient changes, in float32 and in bfloat16;
- delegates: it only calls functions in its body that are equal;
- left: not recognised, for the given reason;
- different: a bit changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tightrope.forms import unwrapped
from tightrope.integrations import Recognition, recognise
from tightrope.integrations._find import INNER, Constants
from tightrope.integrations._graft import Swap, replacement_of
from tightrope.integrations._recognise import recognise_method, to_the_bit

from ..transformers_coverage.functions import arguments, compare
from ..transformers_coverage.models import sentence
from .catalogue import Library, Rotary, rotary

BODY = "it rotates in the body of a method that does more than rotate"


def rows(library: Library) -> Iterator[dict[str, Any]]:
    """Yield a row for each rotary function and combination of constants."""
    from tqdm import tqdm

    for each in tqdm(rotary(library), file=sys.stderr, mininterval=5, unit="function"):
        found = list(_rows(each))
        yield from found


def run(library: Library) -> list[dict[str, Any]]:
    """All rows. A function that is left delegates if every function in its body is equal."""
    found = list(rows(library))
    for row in found:
        inner = [r for r in found if r["function"].startswith(row["function"] + INNER)]
        if row["status"] == "left" and any(r["status"] == "equal" for r in inner):
            names = ", ".join(r["function"].rpartition(".")[2] for r in inner)
            row |= {"status": "delegates", "reason": f"calls {names}, which is replaced"}
    return found


def _rows(each: Rotary) -> Iterator[dict[str, Any]]:
    blank: dict[str, Any] = {
        "file": each.file,
        "function": each.name,
        "constants": {},
        "recognised": None,
    }
    if (each.file, each.name) in each.library.bodies:
        yield {**blank, "status": "left", "reason": BODY}
        return
    try:
        value, owner = each.found()
        for constants in each.constants(value):
            yield blank | {"constants": dict(constants)} | _one(each, value, owner, constants)
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        yield {**blank, "status": "left", "reason": sentence(error)}


def _one(each: Rotary, value: Any, owner: type | None, constants: Constants) -> dict[str, Any]:
    plain = unwrapped(value)
    found: Recognition = (
        recognise(plain, constants=constants) if owner is None else recognise_method(plain, owner)
    )
    candidate = to_the_bit(found).candidate
    if candidate is None:
        return {"status": "left", "reason": to_the_bit(found).reason}
    replaced = replacement_of(Swap(each.module.__name__, each.name, (candidate,)))
    make = arguments(candidate, None if owner is None else object())

    def with_constants(dtype: Any) -> dict[str, Any]:
        return make(dtype) | dict(constants)

    return compare(plain, replaced, with_constants) | {"recognised": str(candidate)}
