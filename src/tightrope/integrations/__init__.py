"""Replace the rotary functions of a model, of any library, with this library's operator.

See docs/models.md.
"""

from . import _small_model as _small_model
from ._graft import new_patched as new_patched
from ._patch import patch as patch, unpatch as unpatch
from ._recognise import Recognition as Recognition, recognise as recognise
from ._report import Calls as Calls, Entry as Entry, Report as Report

__all__ = [
    "Calls",
    "Entry",
    "Recognition",
    "Report",
    "new_patched",
    "patch",
    "recognise",
    "unpatch",
]
