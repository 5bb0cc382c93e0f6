"""Lengths of sequences: given by the caller, or derived from positions.

Rules that depend on the length use the length of each row. A length whose value can be read becomes an
int and gives exact phase words. A length on a GPU, or one that is traced, stays a tensor: nothing
here synchronises with a device or breaks a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeAlias

import torch

from .._errors import as_passed, bad_type, bad_value, check_local, public
from .._tracing import is_readable, is_tracing
from ..angles import is_lost
from ..frequencies import Rule, length
from ..positions import Positions

#: The type of ``seq_len=``: one length, or one for each row.
SeqLen: TypeAlias = "int | Sequence[int] | torch.Tensor | None"

# One int per row, or one for all rows; or a tensor ``(rows,)`` or ``(1,)`` that cannot be read.
Lengths: TypeAlias = "tuple[int, ...] | torch.Tensor"

_NO_ROWS = (str, bytes, bytearray, Mapping, Set)

# Lengths are clamped to this: no tensor has more tokens, and float64 holds the number exactly.
LONGEST = 2**62


def read(seq_len: int | Sequence[int] | torch.Tensor) -> Lengths:
    """Normalise ``seq_len`` to a tuple of ints, or to a tensor if its values cannot be read.

    Raises:
        ValueError, TypeError: an invalid length.

    >>> read(5), read(torch.tensor([3, 4]))
    ((5,), (3, 4))
    """
    # Dynamo replaces numpy arrays by wrappers of its own, and cannot evaluate hasattr() of its symbols.
    if torch.compiler.is_dynamo_compiling() and not isinstance(seq_len, (int, torch.SymInt)):
        seq_len = torch.as_tensor(seq_len) if hasattr(seq_len, "__array__") else seq_len
    if isinstance(seq_len, torch.Tensor):
        check_tensor(seq_len)
        lengths = seq_len.detach().reshape(-1)
        readable = is_readable(seq_len)
        if not readable or lengths.is_floating_point():
            lengths = lengths.to(torch.float64).nan_to_num(0.0, LONGEST, 0.0)
            lengths = lengths.clamp(0, LONGEST).ceil()
        return _known(lengths.to(torch.int64).tolist()) if readable else lengths
    return _known([*map(length, _each(seq_len))])


def _each(seq_len: object) -> Iterable[object]:
    """Return an iterable of lengths: one per row, or one for all rows."""
    # numpy scalars define __iter__ too. Strings and unordered collections are not lists of rows:
    # treated as one length, they raise the error for an invalid length.
    is_one = not isinstance(seq_len, Iterable) or getattr(seq_len, "shape", None) == ()
    return [seq_len] if is_one or isinstance(seq_len, _NO_ROWS) else seq_len  # type: ignore[return-value]


@public("seq_len")
def check_tensor(seq_len: torch.Tensor) -> None:
    check_local("lengths", seq_len)
    if seq_len.dtype not in (torch.int32, torch.int64, torch.float64):
        raise bad_type("lengths must be int32, int64 or float64", seq_len=seq_len)
    if seq_len.dim() > 1:
        raise bad_value("lengths must have shape (rows,)", seq_len=seq_len)


def refuse_longer(lengths: tuple[int, ...], where: Positions, tokens: int, name: str) -> None:
    """Raise an error for a row whose positions exceed its stated length.

    Args:
        lengths: the stated lengths: one per row, or one for all.
        where: positions whose ids, if any, can be read.
        tokens: number of tokens per row, which matters if the positions add the token index.
        name: name of the lengths in the error.
    """
    ids = where.ids
    if tokens == 0 or not lengths or (ids is not None and 0 in ids.shape):
        return
    if ids is None:
        needed = [where.offset + tokens]
    else:
        needed = _ends(ids, where.offset + (tokens if where.add_index else 1))
    rows = max(len(lengths), len(needed))
    if {len(lengths), len(needed)} - {1, rows}:
        return  # a mismatch of rows raises its own error elsewhere
    for row in range(rows):
        end, stated = needed[row % len(needed)], lengths[row % len(lengths)]
        if end > stated:
            of_row = f" of row {row}" if rows > 1 else ""
            raise bad_value(
                f"{name} must be at least {end}, the largest position{of_row} plus 1, but got {stated}; "
                "give the length of the whole sequence",
                **({} if ids is None else {"positions": as_passed(ids)}),
            )


def refuse_parts(where: Positions, tokens: int, rule: Rule) -> None:
    """Raise an error for several tokens of a row that begin after position 0: a part of a sequence, perhaps.

    A single token is the newest one of its row. Ids up to the original length are those of a short row, and ids that
    cannot be read are not checked.
    """
    ids, rows = where.ids, [(0, 0)]
    if tokens < 2 or where.packed or is_tracing() or not (ids is None or is_readable(ids)):
        return
    if ids is not None:
        rows = list(zip(*(of(_within(ids)).tolist() for of in (ids.amin, ids.amax)), strict=True))
    beyond = 0 if where.add_index else rule.original_max_position
    if any(first + where.offset >= 1 and last + where.offset >= beyond for first, last in rows):
        raise bad_value(
            "seq_len must be given with several tokens that begin after position 0, as the frequencies of "
            f"{type(rule).__name__} depend on the length of the whole sequence; pass this length with every part of it, "
            "and with the newest tokens their last position plus 1",
            **({} if ids is None else {"positions": as_passed(ids)}),
        )


def of_ids(
    where: Positions, ids: torch.Tensor, rule: Rule, with_rows: str | None
) -> Lengths | None:
    """Return the length of each row, its largest coordinate on any axis plus 1; None without tokens.

    Args:
        where: positions with an id per token.
        ids: the ids of ``where``, on the device of the rotated tensors.
        rule: the frequency rule; up to its original length all frequencies are the same.
        with_rows: see :meth:`PreparedRotation.for_tokens`.

    Raises:
        ValueError: no single length is right for a row: its positions start again, or it has no dimension
            for rows, and it is longer than the original length; or it is packed and its ids cannot be read.
    """
    if ids.shape[2] == 0:
        return None
    lengths = ends(ids, where.offset + 1)
    limit = rule.original_max_position
    if not isinstance(lengths, tuple):
        fits = not where.packed  # its rows may exceed the original length
    else:
        fits = max(lengths, default=0) <= limit
        if fits:
            return lengths
    if with_rows is not None and ids.shape[2] > 1 and where.packed is None:
        raise bad_value(
            f"seq_len must be given with ids of tokens without rows, as the frequencies of {type(rule).__name__} depend "
            "on it, and the tokens may be of several sequences; if they are, give each sequence a row: x.unsqueeze(1), "
            f"layout={with_rows!r} and ids (rows, 1) for one token each",
            **({} if is_tracing() else {"positions": as_passed(ids)}),
        )
    if not fits:
        refuse_parts(where, ids.shape[2], rule)
    if not fits and not where.packed:
        fits = ids.shape[2] == 1 or not any(
            back and end > limit for back, end in zip(_starts_again(ids), lengths, strict=True)
        )
    if fits:
        return lengths
    raise bad_value(
        "positions must not start again within a row (packed sequences?) because the frequencies of "
        f"{type(rule).__name__} depend on the length; pass one seq_len for all sequences, or rotate "
        "them separately",
        positions=as_passed(ids),
    )


def ends(ids: torch.Tensor, more: int) -> Lengths:
    """Return the largest position of each row plus ``more``; at least 0.

    Args:
        ids: see :class:`tightrope.positions.Positions`.
    """
    return _known(_ends(ids, more)) if is_readable(ids) else read(_last(ids) + more)


def _ends(ids: torch.Tensor, more: int) -> list[int]:
    """Do :func:`ends` for ids that can be read; results of integer ids may be negative."""
    # A row of one coordinate needs no reduction, which takes several times as long as the rest.
    last = (ids if ids.numel() == ids.shape[1] else ids.amax(_within(ids))).reshape(-1).tolist()
    if not ids.is_floating_point():
        return [end + more for end in last]
    if not all(end < LONGEST for end in last):
        last = _last(ids).tolist()  # ignores NaN, infinite and huge ids
    return [math.ceil(end + more) if end + more > 0 else 0 for end in last]


def _known(lengths: list[int]) -> tuple[int, ...]:
    """Clamp lengths to [0, LONGEST]; a row that ends before position 0 has length 0."""
    if lengths and (min(lengths) < 0 or max(lengths) > LONGEST):
        lengths = [min(max(length, 0), LONGEST) for length in lengths]
    return tuple(lengths)


def _last(ids: torch.Tensor) -> torch.Tensor:
    """Return the largest position of each row in float64, ignoring ids that :func:`is_lost` marks."""
    ids = _found(ids)
    if ids.is_floating_point():
        ids = ids.nan_to_num(-math.inf)
    # Convert before the caller adds to it: int32 would wrap, and float32 would round.
    return ids.amax(_within(ids)).to(torch.float64)


def _within(ids: torch.Tensor) -> list[int]:
    """Return all dimensions but that of rows."""
    return [0, *range(2, ids.dim())]


def _found(ids: torch.Tensor) -> torch.Tensor:
    """Replace ids that :func:`is_lost` marks by NaN, which compares as false with everything."""
    lost = is_lost(ids)
    return ids.detach() if lost is None else torch.where(lost, math.nan, ids.detach())


def _starts_again(ids: torch.Tensor) -> list[bool]:
    """Return for each row whether some token steps back.

    A token steps back if a coordinate is lower than that of the token before it, and none is
    higher. Within an image, one coordinate decreases only when another increases.
    """
    ids = _found(ids)
    before, after = ids[:, :, :-1], ids[:, :, 1:]
    behind = (after <= before).all(0) & (after < before).any(0)
    # Some code puts leading padding at position 1, and the row itself at 0, 1, 2, …
    padding = (ids == 1).all(0).cumprod(1)[:, :-1].bool()
    return (behind & ~padding).flatten(1).any(1).tolist()
