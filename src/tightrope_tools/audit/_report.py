"""The report of an audit: findings, checks, and measured facts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

SEVERITIES = ("error", "warning", "note")
"""From worst to mildest: wrong results; doubtful results; things to know."""


@dataclass(frozen=True)
class Finding:
    """One finding of an audit.

    Attributes:
        code: a stable short name, such as ``"position-dtype"``.
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        sentence: the fault in one sentence.
        evidence: the numbers behind it.
        mend: what to call or to change.
    """

    code: str
    severity: str
    sentence: str
    evidence: str
    mend: str = ""


@dataclass(frozen=True)
class Check:
    """One check of an audit; its outcome is ``"passed"``, ``"found"`` or ``"skipped: REASON"``."""

    name: str
    outcome: str


@dataclass(frozen=True)
class AngleError:
    """The absolute error of cosines and sines just below a position, against exact arithmetic.

    An error is None if the function refused the call or the dtype was not tested.
    """

    position: int
    float32: float | None
    bfloat16: float | None
    float32_angle: float
    """Upper bound of the error of angles computed as float32 frequency times float32 position."""


@dataclass(frozen=True)
class Difference:
    """One step in which two functions differ.

    Attributes:
        code: a stable short name, such as ``"frequencies"``.
        sentence: the difference in one sentence.
        evidence: the numbers behind it.
    """

    code: str
    sentence: str
    evidence: str


class _Document:
    """The base of a report and of a comparison."""

    codes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if there are no :attr:`codes`."""
        return not self.codes

    def to_dict(self) -> dict[str, Any]:
        """Return the document in JSON types, with a format version."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {"version": 2, "ok": self.ok} | values

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Restore a document from :meth:`to_dict`."""
        return cls(**{name: _restored(name, saved[name]) for name in cls.__annotations__})


def _restored(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
    return tuple(_PARTS[name](**each) for each in value) if name in _PARTS else value


_PARTS: dict[str, Any] = {
    "findings": Finding,
    "checks": Check,
    "angle_errors": AngleError,
    "differences": Difference,
}


@dataclass(frozen=True)
class Report(_Document):
    """The result of :func:`tightrope_tools.audit.audit`; ``ok`` if there are no errors and no warnings.

    Attributes:
        target: name of the audited function.
        facts: measured properties of the function; name -> value.
        findings: the findings, worst first.
        checks: all checks.
        angle_errors: errors of cosines and sines at large positions.
    """

    target: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    angle_errors: tuple[AngleError, ...] = ()

    @property
    def codes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The codes of the errors and warnings, worst first."""
        return tuple(each.code for each in self.findings if each.severity != "note")

    def __str__(self) -> str:
        lines = [f"audit of {self.target}"]
        lines += [f"  {name:<18} {value}" for name, value in self.facts.items()]
        for finding in self.findings:
            lines += ["", f"{finding.severity.upper()} {finding.code}: {finding.sentence}"]
            lines += [f"  {text}" for text in (finding.evidence, finding.mend) if text]
        lines += ["", verdict(self)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison(_Document):
    """The result of :func:`tightrope_tools.audit.compare`; ``ok`` if the functions agree to the bit.

    Attributes:
        first, second: names of the functions.
        facts: measured properties; name -> (of the first, of the second).
        differences: the steps that differ, in the order in which a rotation is computed.
        shares: dtype -> shares of the results and of the gradients that differ in a bit; None for
            gradients that a function does not have.
    """

    first: str
    second: str
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    shares: dict[str, tuple[float, float | None]] = field(default_factory=dict)

    @property
    def codes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The codes of the differences; the first one is where the functions part."""
        return tuple(each.code for each in self.differences)


def verdict(report: Report) -> str:
    """Return one sentence with the numbers of findings by severity and of passed checks.

    >>> verdict(Report("f", checks=(Check("norm", "passed"),)))
    'No findings; 1 check passed.'
    """
    severities = [finding.severity for finding in report.findings]
    counts = {severity: severities.count(severity) for severity in SEVERITIES}
    found = ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts.items() if n)
    passed = sum(check.outcome == "passed" for check in report.checks)
    return f"{found or 'No findings'}; {passed} check{'' if passed == 1 else 's'} passed."
