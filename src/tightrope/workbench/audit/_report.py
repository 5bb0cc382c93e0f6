"""What an audit says: findings, the checks behind them, and the facts that were measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SEVERITIES = ("error", "warning", "note")
"""From worst to mildest: wrong results; results to worry about; things to know."""


@dataclass(frozen=True)
class Finding:
    """One thing that an audit found.

    Attributes:
        code: a short name that scripts can rely on, such as ``"position-dtype"``.
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        sentence: what is wrong, in one sentence.
        evidence: the numbers that show it.
        snippet: a program that raises AssertionError as long as the finding is there; empty where
            there is nothing to run. It is complete unless it says that ``fn`` must be given.
    """

    code: str
    severity: str
    sentence: str
    evidence: str
    snippet: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that an audit looked at: ``"passed"``, ``"found"``, or why it was skipped."""

    name: str
    outcome: str


@dataclass(frozen=True)
class AngleError:
    """The error of a cosine or sine just below a position: absolute, against exact arithmetic.

    ``None`` where the function refused the position, or the type was not asked for.
    """

    position: int
    float32: float | None
    bfloat16: float | None
    float32_angle: float
    """What the product of a float32 frequency and a float32 position costs at most."""


@dataclass(frozen=True)
class Report:
    """The result of :func:`tightrope.workbench.audit.audit`.

    Attributes:
        target: what was audited, in words.
        facts: what the function is, as far as it could be measured; name -> value.
        findings: worst first.
        checks: everything that was looked at.
        angle_errors: how wrong the angles are, by position.
        preamble: what all programs of the findings have in common: ``fn`` and its adapter.
    """

    target: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    angle_errors: tuple[AngleError, ...] = ()
    preamble: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is nothing but notes."""
        return not any(finding.severity != "note" for finding in self.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the errors and warnings, worst first."""
        return tuple(each.code for each in self.findings if each.severity != "note")

    def to_dict(self) -> dict[str, Any]:
        """The report in types that JSON has, with the version of this form."""
        return {"version": 1, "ok": self.ok} | asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Report:
        """The inverse of :meth:`to_dict`."""
        return cls(
            target=saved["target"],
            facts=saved["facts"],
            findings=tuple(Finding(**each) for each in saved["findings"]),
            checks=tuple(Check(**each) for each in saved["checks"]),
            angle_errors=tuple(AngleError(**each) for each in saved["angle_errors"]),
            preamble=saved["preamble"],
        )

    def __str__(self) -> str:
        lines = [f"audit of {self.target}"]
        lines += [f"  {name:<18} {value}" for name, value in self.facts.items()]
        for finding in self.findings:
            lines += ["", f"{finding.severity.upper()} {finding.code}: {finding.sentence}"]
            lines.append(f"  {finding.evidence}")
            lines += ["    " + line for line in finding.snippet.splitlines()]
        lines += ["", verdict(self)]
        return "\n".join(lines)


def verdict(report: Report) -> str:
    """How many findings of each severity, and how many checks passed, in one sentence.

    >>> verdict(Report("f", checks=(Check("norm", "passed"),)))
    'No findings; 1 check passed.'
    """
    counts = {
        severity: sum(finding.severity == severity for finding in report.findings)
        for severity in SEVERITIES
    }
    found = ", ".join(
        f"{count} {severity}{'s' if count > 1 else ''}"
        for severity, count in counts.items()
        if count
    )
    passed = sum(check.outcome == "passed" for check in report.checks)
    return f"{found or 'No findings'}; {passed} check{'' if passed == 1 else 's'} passed."
