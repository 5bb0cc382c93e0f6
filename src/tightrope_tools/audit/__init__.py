"""Audit a rotary function as a black box: identify its rotation and find its faults.

The checks, the codes of findings and the limits of an audit are in docs/audit.md.
"""

from ._assert import assert_rope as assert_rope
from ._audit import audit as audit
from ._compare import compare as compare
from ._model import ModelReport as ModelReport, audit_model as audit_model
from ._report import (
    SEVERITIES as SEVERITIES,
    AngleError as AngleError,
    Check as Check,
    Comparison as Comparison,
    Difference as Difference,
    Finding as Finding,
    Report as Report,
    verdict as verdict,
)

__all__ = [
    "SEVERITIES",
    "AngleError",
    "Check",
    "Comparison",
    "Difference",
    "Finding",
    "ModelReport",
    "Report",
    "assert_rope",
    "audit",
    "audit_model",
    "compare",
    "verdict",
]
