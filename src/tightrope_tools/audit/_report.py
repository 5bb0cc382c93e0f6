"""The report of an audit: findings, checks, and measured facts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ._faults import FAULTS

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


@dataclass(frozen=True)
class Report:
    """The result of :func:`tightrope_tools.audit.audit`.

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
    def ok(self) -> bool:
        """True if there are no errors and no warnings."""
        return not self.codes

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the errors and warnings, worst first."""
        return tuple(each.code for each in self.findings if each.severity != "note")

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types, with a format version."""
        return {"version": 2, "ok": self.ok} | asdict(self)

    def __str__(self) -> str:
        lines = [f"audit of {self.target}", verdict(self)]
        lines += [f"  {name:<11}  {value}" for name, value in self.facts.items()]
        if self.angle_errors:
            lines += ["", "  error of cos and sin below  float32 x  bfloat16 x  float32 bound"]
        for at in self.angle_errors:
            one, other = ("-" if e is None else f"{e:.1e}" for e in (at.float32, at.bfloat16))
            lines.append(f"  {at.position:>26,}  {one:>9}  {other:>10}  {at.float32_angle:>13.1e}")
        for each in self.findings:
            lines += _part(f"{each.severity} {each.code}", each.sentence, each.evidence, each.mend)
        skipped = [check for check in self.checks if check.outcome.startswith("skipped: ")]
        lines += [""] * bool(skipped)
        lines += [f"  not checked: {each.name} ({each.outcome[9:]})" for each in skipped]
        return "\n".join(lines)


def _part(title: str, *texts: str) -> list[str]:
    """Return the lines of one finding or difference, after an empty one."""
    return ["", title, *(f"  {text}" for text in texts if text)]


def unseen(target: str, kind: str, why: str, **facts: str) -> Report:
    """Return the report on a function that could not be called, with the finding of a kind."""
    fault = FAULTS[kind]
    only = Finding(kind, fault.severity, fault.sentence, why, fault.mend)
    return Report(target, facts, (only,))


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`tightrope_tools.audit.compare`.

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
    def ok(self) -> bool:
        """True if the functions agree to the bit."""
        return not self.differences

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the differences; the first one is where the functions part."""
        return tuple(each.code for each in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON types, with a format version."""
        return {"version": 2, "ok": self.ok} | asdict(self)

    def __str__(self) -> str:
        partly = any("not compared" in values for values in self.facts.values())
        found = f"They agree to the bit{', as far as they were compared' * partly}."
        if not self.ok:
            found = f"They part first at: {self.codes[0]}."
        lines = [f"{self.first} against {self.second}", found]
        for fact, values in {"": ("first", "second"), **self.facts}.items():
            one, other = values[0], "the same" if values[0] == values[1] else values[1]
            lines.append(f"  {fact:<31}  {one:<24}  {other}")
        for each in self.differences:
            lines += _part(each.code, each.sentence, each.evidence)
        lines += [""] * bool(self.shares)
        for dtype, (results, gradients) in self.shares.items():
            both = "" if gradients is None else f" and {100 * gradients:.3g} % of gradients"
            lines.append(f"  {dtype:<9} {100 * results:.3g} % of results{both} differ")
        return "\n".join(lines)


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
