"""Find the kind of every rotary function of a library by itself, as `patch` does.

Laws in tests/unit/patching compare replacements of every kind at sizes that verification never tries; `models` compares
whole models. The status of a row is:

- equal: `patch` replaces it, and found equal bits of results and gradients;
- close: the same, but it multiplies complex numbers, whose last bits may differ;
- delegates: it only calls functions that are replaced;
- left: it is of no known kind, or for the given reason;
- not loaded: its file cannot be imported, or does not define it, for the given reason.
"""

from __future__ import annotations

import re
import sys
from types import CodeType
from typing import Any

from tightrope.patching._verify import find

from .catalogue import Library, Rotary, rotary
from .models import sentence

BODY = "it rotates in its body"
COMPLEX = "the last bits of complex products may differ"


def run(library: Library, only: str = "") -> list[dict[str, Any]]:
    """A row for each rotary function of the files whose names match `only`; equal code is measured once."""
    from tqdm import tqdm

    chosen = [each for each in rotary(library) if re.search(only, each.file)]
    progress = tqdm(chosen, file=sys.stderr, mininterval=5, unit="function")
    measured: dict[Any, dict[str, Any]] = {}
    found = []
    for each in progress:
        key = _code_of(each)
        if key not in measured:
            measured[key] = row(each)
        found.append((each, {**measured[key], "file": each.file}))
    served = {each.code: each.last for each, row in found if row["status"] in ("equal", "close")}
    for each, row_ in found:
        if row_["status"] == "left" and row_["reason"] != BODY:
            names = ", ".join(
                dict.fromkeys(served[code] for code in each.called() if code in served)
            )
            if names:
                row_ |= {"status": "delegates", "reason": f"calls {names}, which is replaced"}
    return [row for _, row in found]


def _code_of(each: Rotary) -> Any:
    """The code of a function and of those that it calls, without places; the function itself if it has none."""
    try:
        codes = [each.code, *each.called()]
    except Exception:  # noqa: BLE001 - `row` records why
        return each
    kept = (tuple(c for c in code.co_consts if not isinstance(c, CodeType)) for code in codes)
    return each.name, repr([(code.co_code, code.co_names, c) for code, c in zip(codes, kept)])


def row(each: Rotary) -> dict[str, Any]:
    """The row of a rotary function."""
    blank: dict[str, Any] = {"file": each.file, "function": each.name}
    if (each.file, each.name) in each.library.bodies:
        return {**blank, "status": "left", "reason": BODY}
    try:
        member = each.found()
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        return {**blank, "status": "not loaded", "reason": sentence(error)}
    kind = find(member.function(), method=member.takes_self())
    if kind is None:
        return {**blank, "status": "left", "reason": "it is of no known kind"}
    blank["recognised"] = str(kind)
    if not kind.same_bits:
        return {**blank, "status": "left", "reason": "it rounds in another way"}
    close = {"status": "close", "reason": COMPLEX}
    return blank | (close if kind.is_complex else {"status": "equal"})
