"""How long sequences are: what a caller says, or what their positions tell.

A rule that depends on the length has one of its own for every row. A length that can be read is an
int, and gives the exact words. One that cannot, since it is on a device or being traced, stays a
tensor: nothing here waits for a device or breaks a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch

from .._errors import bad_type, bad_value, check_local, public
from .._tracing import is_readable, is_tracing
from ..angles import is_lost
from ..frequencies import Rule, length
from ..positions import Positions

SeqLen: TypeAlias = "int | Sequence[int] | torch.Tensor | None"

# One int per row, or one for all rows; or a tensor ``(rows,)`` or ``(1,)`` that nothing may read.
Lengths: TypeAlias = "tuple[int, ...] | torch.Tensor"

_NO_ROWS = (str, bytes, bytearray, Mapping, Set)

# No tensor has more tokens, and as a float64 it is exact.
_LONGEST = 2**62


def read(seq_len: int | Sequence[int] | torch.Tensor) -> Lengths:
    """What a caller says of lengths, in one of two forms.

    Raises:
        ValueError, TypeError: what is no length.

    >>> read(5), read(torch.tensor([3, 4]))
    ((5,), (3, 4))
    """
    seq_len = _traced(seq_len)
    if isinstance(seq_len, torch.Tensor):
        _check_tensor(seq_len)
        lengths = seq_len.detach().reshape(-1)
        readable = is_readable(seq_len)
        if not readable or lengths.is_floating_point():
            lengths = lengths.to(torch.float64).nan_to_num(0.0).clamp(0, _LONGEST).ceil()
        return _known(lengths.to(torch.int64).tolist()) if readable else lengths
    return tuple(map(length, _each(seq_len)))


def check(seq_len: SeqLen) -> None:
    """Refuse what :func:`read` would, where nothing depends on it; no tensor is read.

    Raises:
        ValueError, TypeError: what is no length.

    >>> check(5)
    """
    seq_len = _traced(seq_len)
    if isinstance(seq_len, torch.Tensor):
        _check_tensor(seq_len)
    elif seq_len is not None and not (torch.compiler.is_compiling() and type(seq_len) is int):
        # What a number is would be a guard of the graph.
        for value in _each(seq_len):
            length(value)


def _traced(seq_len: Any) -> Any:
    """Arrays of numpy as tensors, where a compiler has put its own in their place."""
    # Asked in this order, as no compiler tells what its symbols have.
    if not torch.compiler.is_dynamo_compiling() or isinstance(seq_len, (int, torch.SymInt)):
        return seq_len
    return torch.as_tensor(seq_len) if hasattr(seq_len, "__array__") else seq_len


def _each(seq_len: object) -> Iterable[object]:
    """The lengths of the rows, or the one of all."""
    # Numbers of numpy have a method for iterating, too; what has no order says nothing of rows.
    is_one = not isinstance(seq_len, Iterable) or getattr(seq_len, "shape", None) == ()
    return [seq_len] if is_one or isinstance(seq_len, _NO_ROWS) else seq_len  # type: ignore[return-value]


@public("seq_len")
def _check_tensor(seq_len: torch.Tensor) -> None:
    check_local("lengths", seq_len)
    if seq_len.dtype not in (torch.int32, torch.int64, torch.float64):
        raise bad_type("lengths must be int32, int64 or float64", seq_len=seq_len)
    if seq_len.dim() > 1:
        raise bad_value("lengths must have shape (rows,)", seq_len=seq_len)


class Limit(NamedTuple):
    """Lengths that the caller stated, which no position may pass.

    Attributes:
        lengths: one for each row, or one for all.
        ids: positions that can be read, as of :class:`tightrope.positions.Positions`.
    """

    lengths: tuple[int, ...]
    ids: torch.Tensor | None


def limit(lengths: Lengths | None, where: Positions) -> Limit | None:
    """What can be checked of lengths without waiting for a device: None where that is nothing."""
    if not isinstance(lengths, tuple) or not lengths or is_tracing():
        return None
    ids = where.ids
    if ids is not None and not (
        type(ids) in (torch.Tensor, torch.nn.Parameter) and is_readable(ids)
    ):
        return None
    return Limit(lengths, ids)


def passed(
    limits: Limit, offset: int, ramp: bool, tokens: int
) -> tuple[int | None, int, int] | None:
    """The first row that passes the length that was said of it.

    Args:
        limits: what was said.
        offset, ramp: as of :class:`tightrope.positions.Positions`.
        tokens: how many each row has, which matters for a ramp.

    Returns:
        Its index (None where all have one length and one row of positions), its last position + 1,
        and what was said; None where no row does.
    """
    lengths, ids = limits
    if tokens == 0 or (ids is not None and 0 in ids.shape):
        return None
    if ids is None:
        needed = [offset + tokens]
    else:
        needed = _ends(ids, offset + (tokens if ramp else 1))
    rows = max(len(lengths), len(needed))
    if {len(lengths), len(needed)} - {1, rows}:
        return None  # rows that do not fit each other have a sentence of their own
    for row in range(rows):
        end, told = needed[row % len(needed)], lengths[row % len(lengths)]
        if end > told:
            return (row if rows > 1 else None), end, told
    return None


def of_ids(where: Positions, ids: torch.Tensor, rule: Rule) -> Lengths | None:
    """The length of each row: its last position + 1, on whichever axis that is.

    Args:
        where: positions with an id for each token.
        ids: theirs, on the device of what rotates.
        rule: what gives sequences up to its original length the same frequencies.

    Raises:
        ValueError: rows beyond that length in which positions start again: no one length fits them.
    """
    if ids.shape[2] == 0:
        return None
    lengths = ends(ids, where.offset + 1)
    if isinstance(lengths, tuple):
        limit = rule.original_max_position
        fits = max(lengths, default=0) <= limit
        if not fits and not where.packed:
            fits = ids.shape[2] == 1 or not any(
                back and end > limit for back, end in zip(_starts_again(ids), lengths, strict=True)
            )
    else:
        # Any length may be in there. Of a pack it is known that no one fits.
        fits = not where.packed
    if fits:
        return lengths
    raise bad_value(
        "positions must not start again within a row (packed sequences?) where "
        f"{type(rule).__name__} gives each length its own frequencies; say seq_len for all of "
        "them, or rotate them apart",
        positions=ids,
    )


def ends(ids: torch.Tensor, more: int) -> Lengths:
    """The last position of each row, and so many more; at least 0.

    Args:
        ids: as of :class:`tightrope.positions.Positions`.
    """
    return _known(_ends(ids, more)) if is_readable(ids) else read(_last(ids) + more)


def _ends(ids: torch.Tensor, more: int) -> list[int]:
    """As :func:`ends`, of ids that can be read; those of integers may be negative."""
    last = ids.detach().amax((0, 2)).tolist()
    if not ids.is_floating_point():
        return [end + more for end in last]
    if not all(end < _LONGEST for end in last):
        last = _last(ids).tolist()  # without those that are lost
    return [math.ceil(end + more) if end + more > 0 else 0 for end in last]


def _known(lengths: list[int]) -> tuple[int, ...]:
    """Lengths out of a tensor. Rows before position 0 are short, too."""
    if lengths and (min(lengths) < 0 or max(lengths) > _LONGEST):
        lengths = [min(max(length, 0), _LONGEST) for length in lengths]
    return tuple(lengths)


def _last(ids: torch.Tensor) -> torch.Tensor:
    """The last position of each row, float64; those that are lost left out."""
    ids = _found(ids)
    if ids.is_floating_point():
        ids = ids.nan_to_num(-math.inf)
    # In 64 bits before anything is added: int32 would wrap, and float32 drop what is added.
    return ids.amax((0, 2)).to(torch.float64)


def _found(ids: torch.Tensor) -> torch.Tensor:
    """Ids with NaN for all that are lost, which is behind nothing and ahead of nothing."""
    lost = is_lost(ids)
    return ids.detach() if lost is None else torch.where(lost, math.nan, ids.detach())


def _starts_again(ids: torch.Tensor) -> list[bool]:
    """For each row, whether a token is behind the one before it: on no axis ahead, on some behind.

    Within an image one coordinate goes back only as another goes on.
    """
    ids = _found(ids)
    before, after = ids[..., :-1], ids[..., 1:]
    behind = (after <= before).all(0) & (after < before).any(0)
    # Some code puts padding in front of a row at 1, and the row itself at 0, 1, 2, …
    padding = (ids == 1).all(0).cumprod(1)[:, :-1].bool()
    return (behind & ~padding).any(1).tolist()
