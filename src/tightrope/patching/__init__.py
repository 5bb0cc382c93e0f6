"""Replace the rotary functions of models, of any library, with this library's operator.

See docs/models.md.
"""

from ..ops.schema import LAYOUTS as LAYOUTS
from ._kinds import (
    COS_SIN_NAMES as COS_SIN_NAMES,
    FORMS as FORMS,
    ROLES as ROLES,
    TABLE_NAMES as TABLE_NAMES,
    TABLE_SHAPES as TABLE_SHAPES,
    WIDTHS as WIDTHS,
    Form as Form,
    role_of as role_of,
)
from ._patch import patch as patch, replaced as replaced, unpatch as unpatch
from ._report import Calls as Calls, Entry as Entry, Report as Report

__all__ = [
    "COS_SIN_NAMES",
    "FORMS",
    "LAYOUTS",
    "ROLES",
    "TABLE_NAMES",
    "TABLE_SHAPES",
    "WIDTHS",
    "Calls",
    "Entry",
    "Form",
    "Report",
    "patch",
    "replaced",
    "role_of",
    "unpatch",
]
