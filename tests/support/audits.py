"""Rows for the tests of the audit: a function, and what a report must say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.planted_faults import made, named
from tests.support.rows import read_rows
from tightrope import RopeSpec
from tightrope.frequencies import DynamicNTK, Linear, Proportional

ONLY_FLOAT32: dict[str, Any] = {"dtypes": [torch.float32]}
QUICK: dict[str, Any] = {**ONLY_FLOAT32, "longest": 2**14}
Case = tuple[Callable[..., Any], str, tuple[str, ...], dict[str, Any]]


def case(function: Callable[..., Any], codes: str = "", *words: str, **options: Any) -> Case:
    """Return a row.

    Args:
        function: what to audit.
        codes: the codes of all errors and warnings, in order; "…" at the end stands for any others.
        words: parts of the first finding: of its sentence, evidence or mend.
        options: of the audit, beside float32 and 16,384 positions; also `facts`, parts of facts of the report by their
            names, `notes`, a part of the sentence of each, and `severity` of the first finding.
    """
    return function, codes, words, options


def declared(fields: dict[str, Any] | None) -> RopeSpec | None:
    """Return the spec of a row; one field may stand for a rule and its number."""
    if fields is None:
        return None
    rules: dict[str, Any] = {
        "linear": Linear,
        "proportional": Proportional,
        "dynamic": lambda original: DynamicNTK(2.0, original),
    }
    scaling = [rules[key](value) for key, value in fields.items() if key in rules]
    rest = {key: value for key, value in fields.items() if key not in rules}
    return RopeSpec(**rest, scaling=scaling[0] if scaling else None)


def cases_of(path: Path) -> dict[str, Case]:
    """Return the rows of a file: `bad` makes the function, as in planted faults, and `words` are of the first finding."""
    return {
        name: case(
            made(row["bad"]),
            row.get("code", ""),
            *row.get("words", ()),
            spec=declared(row.get("spec")),
            dtypes=[getattr(torch, dtype) for dtype in row.get("dtypes", ["float32"])],
            **{key: row.get(key) for key in ("facts", "notes", "severity")},
            **row.get("options", {}),
        )
        for name, row in read_rows(path).items()
    }


def holds(audit: Callable[..., Any], row: Case) -> Any:
    """Audit the function of a row, and check that the report says what it must say; return the report."""
    function, codes, words, options = row
    facts, notes, severity = (options.get(key) for key in ("facts", "notes", "severity"))
    given = {k: v for k, v in options.items() if k not in ("facts", "notes", "severity")}
    report = audit(function, **QUICK | given)
    if codes.endswith("…"):
        start = tuple(codes[:-1].split())
        assert report.codes[: len(start)] == start, str(report)
    else:
        named(report, *codes.split())
    if words or severity:
        first = report.findings[0]
        said = " ".join((first.sentence, first.evidence, first.mend))
        assert [each for each in words if each not in said] == [], said
        assert first.severity == (severity or first.severity)
    for name, part in (facts or {}).items():
        assert part in report.facts[name]
    noted = {each.code: each for each in report.findings}
    for code, part in (notes or {}).items():
        assert noted[code].severity == "note"
        assert part in noted[code].sentence + " " + noted[code].evidence
    return report
