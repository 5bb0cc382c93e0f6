"""The state of a running audit: the subject, the intended spec, and the findings so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tightrope.spec import RopeSpec

from ._guard import CallFailed
from ._identify import Identity
from ._impulse import Line, Shape
from ._report import SEVERITIES, AngleError, Check, Finding, Report
from ._subject import Subject


@dataclass
class Log:
    """The state of one audit.

    Attributes:
        subject: the function; each check works on a fresh copy if possible.
        spec: the intended rotation; None if not declared.
        dtypes: the dtypes of x to test.
        longest: the largest position to test.
        shape, lines, identity, amplitude, shift: measurements so far; with a shift, the function
            rotates position p as position p + shift should be rotated.
        doing: the current check.
    """

    target: str
    subject: Subject
    spec: RopeSpec | None
    dtypes: tuple[torch.dtype, ...]
    longest: int
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    angle_errors: list[AngleError] = field(default_factory=list)
    shape: Shape | None = None
    lines: tuple[Line, ...] = ()
    identity: Identity | None = None
    amplitude: float = 1.0
    shift: int | None = None
    doing: str = ""
    progress: Callable[[str], None] | None = None

    def add(
        self,
        code: str,
        severity: str,
        sentence: str,
        evidence: str,
        body: str | None = None,
        subject: Subject | None = None,
    ) -> None:
        """Add a finding, once per code, with the body of its snippet if there is one.

        Args:
            subject: the subject of the snippet, if it is another one.
        """
        if any(finding.code == code for finding in self.findings):
            return
        text = "" if body is None else snippet(subject or self.subject, body)
        self.findings.append(Finding(code, severity, sentence, evidence, text))

    def found(self, *codes: str) -> bool:
        """True if there is a finding with one of these codes; without codes, if there is any error."""
        return any(
            finding.code in codes if codes else finding.severity == "error"
            for finding in self.findings
        )

    @contextmanager
    def check(self, name: str) -> Iterator[Subject]:
        """Run a check on a fresh subject; record the outcome. Notes alone count as passed."""
        before = len(self.findings)
        self.doing = name
        if self.progress is not None:
            self.progress(name)
        try:
            yield self.subject.fresh()
        except CallFailed as error:
            self.checks.append(Check(name, f"skipped: {error}"))
            return
        found = self.findings[before:]
        worst = any(finding.severity != "note" for finding in found)
        self.checks.append(Check(name, "found" if worst else "passed"))

    def skip(self, name: str, why: str) -> None:
        """Record a check that does not apply."""
        self.checks.append(Check(name, f"skipped: {why}"))

    def report(self) -> Report:
        """Return the report, worst findings first."""
        worst_first = sorted(self.findings, key=lambda each: SEVERITIES.index(each.severity))
        return Report(
            self.target,
            self.facts,
            tuple(worst_first),
            tuple(self.checks),
            tuple(self.angle_errors),
            preamble(self.subject),
        )


def snippet(subject: Subject, body: str) -> str:
    """Return a program: imports, the preamble, and the lines that show the fault."""
    names = [name for name in ("copy", "math") if f"{name}." in body]
    imports = "".join(f"import {name}\n" for name in names) + ("\n" if names else "")
    return f"{imports}{preamble(subject)}\n\n\n{body.strip()}\n"


def preamble(subject: Subject) -> str:
    """Return the lines that define ``fn`` and its adapter."""
    header = subject.header or "import torch\n\n# fn is the audited function"
    return f"{header}\n\n\n{subject.source}"
