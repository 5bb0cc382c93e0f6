"""Replace the rotary functions of models, of any library, with this library's operator.

See docs/models.md.
"""

from ._kinds import (
    COS_SIN_NAMES as COS_SIN_NAMES,
    FORMS as FORMS,
    TABLE_NAMES as TABLE_NAMES,
    WIDTHS as WIDTHS,
    Form as Form,
)
from ._patch import patch as patch, replaced as replaced, unpatch as unpatch
from ._report import Calls as Calls, Entry as Entry, Report as Report

__all__ = [
    "COS_SIN_NAMES",
    "FORMS",
    "TABLE_NAMES",
    "WIDTHS",
    "Calls",
    "Entry",
    "Form",
    "Report",
    "patch",
    "replaced",
    "unpatch",
]
