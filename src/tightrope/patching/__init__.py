"""Replace the rotary functions of models, of any library, with this library's operator.

See docs/models.md.
"""

from ._kinds import WIDTHS as WIDTHS
from ._patch import patch as patch, replaced as replaced, unpatch as unpatch
from ._report import Calls as Calls, Entry as Entry, Report as Report

__all__ = ["WIDTHS", "Calls", "Entry", "Report", "patch", "replaced", "unpatch"]
