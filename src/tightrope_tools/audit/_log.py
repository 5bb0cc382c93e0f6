"""The state of a running audit: the subject, the intended spec, and the findings so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tightrope.spec import RopeSpec

from ._call import CallFailed, Subject
from ._faults import FAULTS
from ._identify import Identity
from ._profile import Near, Profile
from ._report import SEVERITIES, AngleError, Check, Finding, Report


@dataclass
class Log:
    """The state of one audit.

    Attributes:
        subject: the function; each check works on a fresh copy if possible.
        spec: the intended rotation; None if not declared.
        dtypes: the dtypes of x to test.
        longest: the largest position to test.
        near: the matrices at positions 0 to 15, from which the results of other calls are predicted.
        limit: the longest call that is known to rotate nearby tokens alike, if a longer one does not.
        profile: the measured rotation, from which the findings about it are read.
        identity: the frequency rule that explains the measured frequencies.
        recorded: whether the conversion record beside a config states "interleaved"; None if there is none.
        along_heads: whether the function takes the heads for tokens.
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
    limit: int | None = None
    profile: Profile | None = None
    identity: Identity | None = None
    along_heads: bool = False
    recorded: bool | None = None
    near: Near = field(init=False)

    def add(
        self,
        kind: str,
        evidence: str = "",
        severity: str | None = None,
        *,
        spec: RopeSpec | None = None,
        **words: Any,
    ) -> None:
        """Add a finding, once per code.

        Args:
            kind: its kind in :mod:`._faults`.
            evidence: by default that of the kind.
            severity: by default that of the kind.
            spec: the rotation that its mend calls; by default the declared or the identified one.
            words: what sentence and evidence are filled in with.
        """
        code, fault = kind.partition("/")[0].format(**words), FAULTS[kind]
        if self.found(code):
            return
        spec = spec or self.spec or (None if self.identity is None else self.identity.spec)
        text = "spec" if spec is None else repr(spec)
        mend = fault.mended(text, self.subject.way.layout, words)
        sentence = fault.sentence.format(**words)
        evidence = evidence or fault.evidence.format(**words)
        self.findings.append(Finding(code, severity or fault.severity, sentence, evidence, mend))

    def add_length(self, length: int, size: float) -> None:
        """Add the finding that the frequencies depend on the length of the call; a note if that is declared."""
        self.facts["depends on length"] = f"yes, first seen in calls of {length:,} positions"
        declared = self.spec is not None and self.spec.by_length
        self.add("length", severity="note" if declared else "warning", last=length - 1, size=size)

    @contextmanager
    def refusal(self, kind: str, severity: str | None = None, **words: Any) -> Iterator[None]:
        """Add a finding if a call in the block is refused; none if its kind is ""."""
        try:
            yield
        except CallFailed as error:
            if kind:
                self.add(kind, str(error), severity, **words)

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
        try:
            yield self.subject.fresh()
        except CallFailed as error:
            self.skip(name, str(error))
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
        )
