"""Measure the rows of a library: every rotary function by itself, and small models before and after `patch`.

The status of a function is:

- equal: `patch` replaces it, and its trials found no other bit of a result or gradient;
- close: the same, but it multiplies complex numbers, whose last bits may differ;
- delegates: it only calls functions that are replaced;
- left: it is of no known kind, or for the given reason;
- not loaded: its file cannot be imported, or does not define it, for the given reason.

The status of a model is:

- equal: no bit of any output or gradient changes, in float32 and, unless the row states why not, in bfloat16; this library
  served calls of the rotary functions, of transformers those of the model's file; a fault of one per cent in the
  replacements is detected; `unpatch` restores the model;
- close: the same, but the model multiplies complex numbers, whose last bit differs;
- different: more changes, `unpatch` did not restore the model, or two runs of the original differ;
- not exercised: the model ran, but did not test the replacement, for the given reason;
- not built: no small model could be built or run, for the given reason;
- does not rotate: the model ran no rotary function, and no code of its modules can reach one, or none computes a cosine
  to rotate by. For example a vision tower whose text model, in the same file, rotates.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from tests.support.verified import find, verified_once
from tightrope.patching import _find

from . import building, small, stand_ins
from .libraries import FOLDER, TRANSFORMERS, Library, Rotary
from .runs import SERVED

Row = dict[str, Any]
BODY = "it rotates in its body"
COMPLEX = "the last bits of complex products may differ"


def read(name: str) -> list[Row]:
    """The committed rows of a library, the first about all of them; none if it was not measured."""
    path = FOLDER / "rows" / f"{name}.jsonl"
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def write(name: str, rows: list[Row]) -> None:
    """Write the rows of a library, one in a line."""
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (FOLDER / "rows" / f"{name}.jsonl").write_text(text, encoding="utf-8")


@contextmanager
def loadable(library: Library) -> Iterator[None]:
    """Import stand-ins for what a library only imports, silence its warnings, and verify each function once."""
    logging.getLogger(library.name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), stand_ins.installed(library.stand_ins), verified_once():
        warnings.simplefilter("ignore")
        yield


def of_functions(library: Library, only: str = "") -> list[Row]:
    """A row for each rotary function of the files whose names match; equal code is measured once."""
    measured: dict[Any, Row] = {}
    found = []
    for each in library.functions:
        if re.search(only, each.file):
            key = _code_of(each)
            if key not in measured:
                measured[key] = of_function(each)
            found.append((each, {"function": each.name, "file": each.file, **measured[key]}))
    served = {
        each.code: each.name.rpartition(".")[2] for each, row in found if row["status"] in SERVED
    }
    for each, row in found:
        if row["status"] == "left" and row["reason"] != BODY:
            names = dict.fromkeys(served[code] for code in each.called() if code in served)
            if names:
                reason = f"calls {', '.join(names)}, which is replaced"
                row |= {"status": "delegates", "reason": reason}
    return [row for _, row in found]


def _code_of(each: Rotary) -> Any:
    """The code of a function and of those that it calls, without places; the function itself if it has none."""
    try:
        codes = [each.code, *each.called()]
    except Exception:  # noqa: BLE001 - `of_function` records why
        return each
    kept = (tuple(c for c in code.co_consts if not isinstance(c, CodeType)) for code in codes)
    return each.name, repr([(code.co_code, code.co_names, c) for code, c in zip(codes, kept)])


def of_function(each: Rotary) -> Row:
    """The status of a rotary function, with its kind or the reason."""
    if [each.file, each.name] in each.library.bodies:
        return {"status": "left", "reason": BODY}
    try:
        member = each.found()
    except Exception as error:  # noqa: BLE001 - recorded as the reason
        return {"status": "not loaded", "reason": sentence(error)}
    kind = find(member.function(), "cpu", member.takes_self(), "")
    if kind is None:
        return {"status": "left", "reason": "it is of no known kind"}
    if not kind.same_bits:
        return {"kind": str(kind), "status": "left", "reason": "it rounds in another way"}
    close = {"status": "close", "reason": COMPLEX}
    return {"kind": str(kind), **(close if kind.is_complex else {"status": "equal"})}


def of_model(library: Library, name: str) -> Row:
    """The row of one model; errors become its reason."""
    file = library.models[name]
    out: Row = {"model": name, "status": "not built", "file": file}
    if frozen := library.small.get(name, {}).get("frozen"):
        out["frozen"] = frozen
    if library.base and not library.mentions(file):
        return {**out, "status": "does not rotate", "reason": "its file does not rotate"}
    try:
        of_transformers = library is TRANSFORMERS
        subject, before = (
            small.prepare(name) if of_transformers else building.prepare(library, name)
        )
    except Exception as error:  # noqa: BLE001 - recorded as the reason; the run continues
        return {**out, "reason": sentence(error)}
    calls = subject.counted(before)
    if not calls:
        if reason := why_none(library, subject.model):
            return {**out, "status": "does not rotate", "reason": reason}
        return {**out, "status": "not exercised", "reason": "no rotary function ran"}
    out["calls"] = sum(calls.values())
    try:
        return out | {k: v for k, v in subject.row(before).items() if v not in ("", [], {})}
    except Exception as error:  # noqa: BLE001 - an error of `patch` or of the patched model
        return {**out, "status": "different", "reason": sentence(error)}


def why_none(library: Library, model: Any) -> str:
    """The reason why a model in which no rotary function ran cannot rotate; empty if it might."""
    classes = _find.classes_of(model)
    homes = [sys.modules[name] for name in {cls.__module__ for cls in classes}]
    names = _find._names(classes, homes)
    if not any(re.search(library.rotary, name) for name in names):
        return "no method of its modules reaches a rotary function"
    if not names & {"cos", "polar"}:
        return "no method of its modules computes a cosine to rotate by"
    return ""


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    # Some messages have a title first and the cause in the last line.
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    return re.sub(r" \(/[^)]*\)", "", f"{type(error).__name__}: {text[:200]}")
