"""Replace the rotary functions of a model, of any library, with this library's operator.

See docs/models.md.
"""

from ._patch import patch as patch, unpatch as unpatch
from ._recognise import Recognition as Recognition, recognise as recognise
from ._summary import Entry as Entry, Report as Report

__all__ = ["Entry", "Recognition", "Report", "patch", "recognise", "unpatch"]
