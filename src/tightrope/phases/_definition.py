"""The definition of phases from data in plain torch; every kernel computes the same bits."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .. import angles

# Mark a phase that is NaN, because an angle was NaN, infinite or too large.
_MARKER = -(2**63)
_NARROW_MARKER = -(2**31)


def rows_of(x: torch.Tensor, *others: torch.Tensor | None) -> int:
    """Return the common number of rows of tensors that have 1 row or that number."""
    rows = x.shape[0]
    for other in others:
        if other is not None and rows == 1:
            rows = other.shape[0]
    return rows


def empty_as(x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return new memory with the strides of x, or contiguous if x has another number of rows."""
    if x.shape[0] == rows:
        return torch.empty_like(x, dtype=dtype)
    return x.new_empty((rows, *x.shape[1:]), dtype=dtype)


def value_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype of arithmetic with tensors: float64 if one of them is, otherwise float32."""
    double = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if double else torch.float32


def running_sum(
    values: torch.Tensor, start: torch.Tensor | None, reset: torch.Tensor | None
) -> torch.Tensor:
    """Add up values over tokens, each token included in its own sum; differentiable.

    Args:
        values: ``[rows|1, heads, tokens, pairs]``; integers wrap.
        start: the sum before the first token, ``[rows|1, heads, pairs]``; None for 0.
        reset: bool ``[rows|1, tokens]``, true where a new sum starts; None for nowhere.
    """
    before = 0 if start is None else start[:, :, None]
    if reset is None:
        return values.cumsum(2) + before
    # In each step a sum takes in as many earlier tokens as it holds, unless a reset is among its own.
    # Differences of two sums would lose what is small beside an earlier sequence.
    sums = values.expand(rows_of(values, start, reset), -1, -1, -1)
    closed, held = reset[:, None, :, None], 1
    while held < values.shape[2]:
        shift = (0, 0, held, 0)
        earlier = pad(sums[:, :, :-held], shift)
        sums = sums + torch.where(closed, 0, earlier)
        closed = closed | pad(closed[:, :, :-held], shift)
        held *= 2
    return torch.where(closed, sums, sums + before)


def last_of(sums: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """Return the sum after the last token; without tokens, the sum before the first."""
    if sums.shape[2]:
        return sums[:, :, -1]
    before = sums.sum(2)
    return before if start is None else before + start


def phase_words(
    increments: torch.Tensor,
    state: torch.Tensor | None,
    reset: torch.Tensor | None,
    running: bool,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``phase_words`` of :mod:`tightrope.ops.schema`, apart from the strides."""
    words, turns = angles.words_from(increments)
    lost = turns == angles.NO_TURNS
    if not running:
        return marked(words, lost, wide), words.new_empty((0, words.shape[1], words.shape[3]))
    # As integers: torch has no running sum of bools.
    losses, before = lost.to(torch.int64), None if state is None else (state == _MARKER).long()
    sums, lost = running_sum(words, state, reset), running_sum(losses, before, reset) != 0
    last = marked(last_of(sums, state), last_of(lost, before) != 0, True)
    return marked(sums, lost, wide), last


def marked(words: torch.Tensor, lost: torch.Tensor, wide: bool) -> torch.Tensor:
    """Mark lost phases, and round the others to their upper 32 bits unless ``wide``.

    The phase that equals the marker, half a turn, moves up by one unit.
    """
    if not wide:
        words = (words + 2**31) >> 32
    marker = _MARKER if wide else _NARROW_MARKER
    words = torch.where(lost, marker, words + (words == marker))
    return words if wide else words.to(torch.int32)


def phase_sums(
    grad: torch.Tensor, grad_last: torch.Tensor | None, reset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``phase_sums`` of :mod:`tightrope.ops.schema`, apart from the strides; differentiable."""
    dtype, wide = value_dtype(grad), _wide(grad)
    last = None if grad_last is None else grad_last.to(wide)
    # In reverse order a sum starts after the token that a reset begins with.
    starts = None
    if reset is not None:
        starts = torch.cat((torch.zeros_like(reset[:, :1]), reset.flip(1)[:, :-1]), 1)
    sums = running_sum(grad.to(wide).flip(2), last, starts)
    by_state = last_of(sums, last)
    if reset is not None and reset.shape[1]:
        by_state = by_state.masked_fill(reset[:, :1, None], 0.0)
    return sums.flip(2).to(dtype), by_state.to(dtype)


def phase_drift(
    increments: torch.Tensor,
    state: torch.Tensor | None,
    reset: torch.Tensor | None,
    running: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the zeros of ``phase_drift`` of :mod:`tightrope.ops.schema`, which take no memory."""
    rows, (_, heads, tokens, pairs) = rows_of(increments, state, reset), increments.shape
    dtype = value_dtype(increments)
    drift, last = (increments.new_zeros((), dtype=dtype) for _ in range(2))
    return drift.expand(rows, heads, tokens, pairs), last.expand(
        rows if running else 0, heads, pairs
    )


def differentiable_drift(
    increments: torch.Tensor,
    state: torch.Tensor | None,
    reset: torch.Tensor | None,
    running: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the zeros of :func:`phase_drift` such that every mode of differentiation works."""
    dtype, wide = value_dtype(increments), _wide(increments)
    # An infinite or NaN angle minus itself is NaN.
    zero = (increments - increments.detach()).nan_to_num(0.0, 0.0, 0.0).to(wide)
    if not running:
        return zero.to(dtype), zero.new_empty((0, *zero.shape[1::2]), dtype=dtype)
    before = None if state is None else state.to(wide)
    sums = running_sum(zero, before, reset)
    return sums.to(dtype), last_of(sums, before).to(dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64
