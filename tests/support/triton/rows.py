"""A kernel that stores the row of each token; compiled or interpreted, as set when a test imports it."""

from __future__ import annotations

import triton
import triton.language as tl

from tightrope.backends.triton.kernels.slots import rows_of


@triton.jit
def store_rows(starts, sizes, rows, tokens, BLOCK_T: tl.constexpr):
    """For each start and row length, store the row of each of BLOCK_T tokens and its index in the row."""
    case = tl.program_id(0)
    index = tl.arange(0, BLOCK_T)
    row, token = rows_of(tl.load(starts + case), index, tl.load(sizes + case), BLOCK_T)
    tl.store(rows + case * BLOCK_T + index, row)
    tl.store(tokens + case * BLOCK_T + index, token)
