"""The kernels. Importing this package imports Triton; nothing but `launch` does, and not before a call.

Everything is written with Triton's builtins alone, so that one source runs compiled and under
Triton's interpreter, whichever of the two was asked for first in a process.
"""

from __future__ import annotations

from .rotate import rotate as rotate
from .sums import add_angles as add_angles, add_gates as add_gates
