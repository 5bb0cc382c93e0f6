"""The Triton kernels. This package imports Triton, so it is itself imported only on the first call.

The kernels use only Triton's builtins, so the same source runs compiled and under Triton's interpreter,
in either order within a process.
"""

from __future__ import annotations

from . import rotate as rotate
from .phases import add_tokens as add_tokens
from .slots import copy_values as copy_values
from .sums import add_angles as add_angles, add_gates as add_gates
