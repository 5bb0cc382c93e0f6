"""Test somebody's rotary function as a black box: what it is, and what is wrong with it.

What is asked, what the codes of the findings mean, and what an audit cannot see: docs/audit.md.
"""

from ._audit import audit as audit
from ._report import (
    SEVERITIES as SEVERITIES,
    AngleError as AngleError,
    Check as Check,
    Finding as Finding,
    Report as Report,
    verdict as verdict,
)
