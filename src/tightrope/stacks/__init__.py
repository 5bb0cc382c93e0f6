"""The arithmetic of other libraries: their frequencies, tables of cosines and sines, and roundings.

The angles of this library are exact, so the bits of a rotation differ from those of code that
computes frequencies and angles in float32. To compare with such code, or to extend a KV cache that
it wrote, use the arithmetic of that code: ``spec.at(positions, stack="vllm")``. :func:`names` lists
the stacks; :func:`get` returns a stack, with the files and the version that it follows.

Frequencies and tables are computed by the torch functions that the stack itself calls, in the same
order, so their bits are those of the stack on the same device. On another device ``pow``, ``cos`` and
``sin`` may differ in the last bit, and so may a division by a number, which CUDA replaces by a product
with its reciprocal.
"""

from __future__ import annotations

from . import _known as _known  # gives the known stacks their names
from ._formulas import Row as Row
from ._stack import (
    GIVEN_TABLES as GIVEN_TABLES,
    READ as READ,
    RUN as RUN,
    Stack as Stack,
    cos_sin as cos_sin,
    get as get,
    length_of as length_of,
    named as named,
    names as names,
)

__all__ = ["Stack", "get", "names"]
