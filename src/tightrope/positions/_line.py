"""Positions with one coordinate: offsets per row, positions per head, packed sequences, padding."""

from __future__ import annotations

import itertools

import torch

from .._errors import as_integer, bad_type, bad_value, check_local, check_tensor, describe, public
from .._tracing import is_readable
from ._canonical import (
    Positions,
    as_positions,
    check_dtype,
    count,
    widened,
)


@public("per_row")
def per_row(offsets: torch.Tensor) -> Positions:
    """Return positions with one offset per batch row: token ``t`` of row ``r`` is at ``offsets[r] + t``.

    Args:
        offsets: int32, int64, float32 or float64, shape ``(rows,)``; may be negative. Offsets on a
            GPU are read by the kernel, without a synchronisation.

    Raises:
        ValueError: offsets with another number of dimensions.
        TypeError: offsets of another dtype.

    >>> per_row(torch.tensor([0, 100])).ids.shape
    torch.Size([1, 2, 1])
    """
    check_dtype(offsets, "offsets", sharded=True)
    if offsets.dim() != 1:
        hint = "; one offset for all rows has shape (1,)" if offsets.dim() == 0 else ""
        raise bad_value(f"offsets must have shape (rows,){hint}", offsets=offsets)
    return Positions(offsets[None, :, None], add_index=True)


@public("per_head")
def per_head(ids: torch.Tensor) -> Positions:
    """Return positions of tokens that differ between heads, as in a cache from which each head dropped others.

    The entry ``t`` of head ``h`` is at ``ids[…, h, t]``. All tensors of a call must have these heads: rotate
    queries and keys one by one where they have not.

    Args:
        ids: int32, int64, float32 or float64, shape ``(heads, tokens)`` for all rows, or
            ``(rows, heads, tokens)``, in this order for every layout.

    Raises:
        ValueError: ids with another number of dimensions.
        TypeError: ids of another dtype.

    >>> per_head(torch.tensor([[0, 1, 5], [0, 3, 5]])).ids.shape
    torch.Size([1, 1, 3, 2])
    """
    check_dtype(ids, "ids", sharded=True)
    if ids.dim() not in (2, 3):
        raise bad_value("ids must have shape (heads, tokens) or (rows, heads, tokens)", ids=ids)
    rows = ids[None] if ids.dim() == 2 else ids
    return Positions(rows.transpose(1, 2)[None], add_index=False)


@public("packed")
def packed(
    cu_seqlens: torch.Tensor,
    offsets: torch.Tensor | int | None = None,
    total: int | None = None,
) -> Positions:
    """Return positions of sequences packed in one row (layout "thd"), restarting at each sequence.

    Args:
        cu_seqlens: int32 or int64 ``(sequences + 1,)``: the start of each sequence, and the end of
            the last, as in variable-length attention; sequences may be empty.
        offsets: position of the first token of each sequence: None for 0, one int for all, or a tensor
            ``(sequences,)`` on the device of ``cu_seqlens``, such as the cached lengths. Floating
            offsets are added in float64.
        total: number of tokens, the last entry of ``cu_seqlens``. Optional on the CPU outside of
            compiled code; elsewhere reading that entry would synchronise or break the graph, so a
            ``total`` above it is not detected: the extra tokens continue the last sequence.

    Returns:
        Positions of ``total`` tokens in one row, on the device of ``cu_seqlens``.

    Raises:
        ValueError: a wrong shape; no ``total`` where ``cu_seqlens`` cannot be read; where it can be
            read, also ``cu_seqlens`` that does not start with 0, decreases, or does not end with
            ``total``.
        TypeError: ``cu_seqlens`` or offsets of the wrong type.

    >>> packed(torch.tensor([0, 3, 5])).ids.flatten().tolist()
    [0, 1, 2, 0, 1]
    >>> packed(torch.tensor([0, 3, 5]), offsets=torch.tensor([7, 100])).ids.flatten().tolist()
    [7, 8, 9, 100, 101]
    """
    total = check_cu_seqlens(cu_seqlens, total)
    tokens, sequence = sequences(cu_seqlens, total)
    starts = cu_seqlens[:-1]
    several = starts.shape[0] > 1
    if not isinstance(offsets, torch.Tensor):
        if offsets is not None and as_integer(offsets) is None:
            hint = "; pass the tensor itself" if isinstance(offsets, Positions) else ""
            raise bad_type(
                "offsets must be None, an int or a tensor with one offset for each sequence but got a "
                f"{type(offsets).__name__}{hint}"
            )
        ids = tokens - starts.index_select(0, sequence)
        offset = as_positions(offsets).offset
        return Positions(ids[None, None], offset, add_index=False, packed=several)
    check_dtype(offsets, "offsets")
    if offsets.shape != starts.shape or offsets.device != cu_seqlens.device:
        raise bad_value(
            f"offsets must have shape ({starts.shape[0]},), one for each sequence, on the device "
            "of cu_seqlens",
            offsets=offsets,
            cu_seqlens=cu_seqlens,
        )
    # One shift per sequence maps the index in the row to the position.
    ids = tokens + (widened(offsets) - starts).index_select(0, sequence)
    return Positions(ids[None, None], add_index=False, packed=several)


@public("left_padded")
def left_padded(attention_mask: torch.Tensor) -> Positions:
    """Return positions of left-padded rows, which all end together.

    The first real token of each row is at 0. A mask may have padding anywhere: the position of a real token is
    the number of real tokens before it. Padding is at position 0, which does not matter, since attention must
    mask it. Where only the number of real tokens of each row is known, ``per_row(lengths - total)`` gives
    rows of ``total`` tokens the same positions, with padding at negative ones; it makes no tensor with one
    entry per token.

    Args:
        attention_mask: bool, or integers 0 and 1, ``(rows, tokens)``; true for real tokens. It must
            cover whole rows: from a part such as ``mask[:, 4:]``, positions would start at 0 again. For
            a chunk that starts at slot ``s``, pass ``per_row(s - padding)``, with the padding of each row.

    Raises:
        ValueError: a mask with the wrong number of dimensions; on the CPU also values other than 0 and 1.
        TypeError: a mask that is neither bool nor integers.

    Source: positions from a mask are those of ``generate`` in transformers: cumsum − 1, and 0 for padding.

    >>> left_padded(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).ids.tolist()
    [[[0, 0, 0, 1], [0, 1, 2, 3]]]
    """
    mask = attention_mask
    if not isinstance(mask, torch.Tensor) or mask.is_floating_point() or mask.is_complex():
        raise bad_type(f"attention_mask must be bool or integers but got {describe(mask)}")
    check_local("attention_mask", mask)
    if mask.dim() != 2:
        raise bad_value("attention_mask must have shape (rows, tokens)", attention_mask=mask)
    if mask.dtype != torch.bool and mask.numel() and is_readable(mask):
        low, high = (int(end) for end in torch.aminmax(mask))
        if low < 0 or high > 1:
            raise bad_value(
                f"attention_mask must hold only 0 and 1 but goes from {low} to {high}; if it "
                "numbers packed sequences, call positions.packed"
            )
    real = mask != 0
    ids = (real.to(torch.int64).cumsum(-1) - 1).masked_fill(~real, 0)
    return Positions(ids[None], add_index=False, packed=False)


def check_cu_seqlens(cu_seqlens: torch.Tensor, total: int | None) -> int:
    """Validate ``cu_seqlens`` and return the number of tokens."""
    check_tensor("cu_seqlens", cu_seqlens, "int32 or int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise bad_value(
            "cu_seqlens must have shape (sequences + 1,) with at least one sequence",
            cu_seqlens=cu_seqlens,
        )
    if total is not None:
        total = count("total", total)
    if not is_readable(cu_seqlens):
        if total is None:
            raise bad_value(
                "total must be given if reading cu_seqlens would wait for a device or break "
                "a graph",
                cu_seqlens=cu_seqlens,
            )
        return total
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        sums = "; of lengths pass torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        raise bad_value(f"cu_seqlens must start with 0 and never decrease but got {ends}{sums}")
    if total is not None and ends[-1] != total:
        raise bad_value(f"cu_seqlens must end with the number of tokens {total} but got {ends[-1]}")
    return int(ends[-1])


def sequences(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each token and the index of its sequence."""
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ends = cu_seqlens[1:].contiguous()
    sequence = torch.searchsorted(ends, tokens, right=True)
    return tokens, sequence.clamp(max=ends.shape[0] - 1)
