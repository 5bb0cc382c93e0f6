"""Positions of tokens: ways to specify them, and the canonical form that the operator takes.

The canonical form is ``(ids, offset, add_index)``. The position of token ``t`` of row ``r`` on an axis is::

    offset + (ids[axis, r, 0 if add_index else t], or 0 without ids) + (t if add_index else 0)

where each head ``h`` may have ids of its own, ``ids[axis, r, t, h]``,
so kernels treat ``0..n-1``, an offset, one offset per row and explicit ids alike, and the first three
allocate nothing per token.

Nothing here synchronises with a device: values are used on the device where they are, and checked only
on the CPU.
"""

from __future__ import annotations

from ._batch import MRope as MRope, mrope_batch as mrope_batch
from ._canonical import (
    DTYPES as DTYPES,
    ZERO as ZERO,
    Positions as Positions,
    PositionsLike as PositionsLike,
    as_positions as as_positions,
    check_axes as check_axes,
)
from ._check import Finding as Finding, Report as Report, check as check
from ._line import (
    left_padded as left_padded,
    packed as packed,
    per_head as per_head,
    per_row as per_row,
)
from ._rewrite import (
    concatenate as concatenate,
    explicit as explicit,
    shard as shard,
    written_out as written_out,
)
from ._space import (
    Segment as Segment,
    grid as grid,
    mrope as mrope,
    mrope_next as mrope_next,
    multi_axis as multi_axis,
    text as text,
)

__all__ = [
    "Finding",
    "MRope",
    "Positions",
    "PositionsLike",
    "Report",
    "check",
    "concatenate",
    "explicit",
    "grid",
    "left_padded",
    "mrope",
    "mrope_batch",
    "mrope_next",
    "multi_axis",
    "packed",
    "per_head",
    "per_row",
    "shard",
    "text",
]
