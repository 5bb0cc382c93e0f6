"""Rows for the tests of the audit: a function, and what a report must say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.planted_faults import named

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
