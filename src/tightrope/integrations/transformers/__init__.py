"""Replace the rotary functions of transformers models with this library's operator.

See docs/transformers.md.
"""

from .._recognise import Recognition as Recognition, recognise as recognise
from .._report import Entry as Entry, Report as Report
from ._kernels import mapping as mapping, register as register
from ._patch import patch as patch, unpatch as unpatch

__all__ = ["Entry", "Recognition", "Report", "mapping", "patch", "recognise", "register", "unpatch"]
