"""Positions: every way to say where tokens are, and the one form that the operator takes.

The canonical form is ``(ids, offset, ramp)``. The position of token ``t`` of row ``r`` on an axis is::

    offset + (ids[axis, r, 0 if ramp else t], or 0 without ids) + (t if ramp else 0)

so that ``0..n-1``, an offset, one offset per row and explicit ids are the same thing to a kernel, and
none of the first three allocates anything.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ._errors import describe, sentence

DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where tokens are, in canonical form. Made by :func:`canonical`, :func:`per_row`,
    :func:`multi_axis`.

    Attributes:
        ids: int32, int64, float32 or float64 ``[axes, rows|1, tokens]``, or ``[axes, rows|1, 1]``
            when ``ramp``; None stands for zeros.
        offset: added to every position.
        ramp: whether the index of the token in its row is added.
    """

    ids: torch.Tensor | None = None
    offset: int = 0
    ramp: bool = True

    def __post_init__(self) -> None:
        if self.ids is None:
            return
        _check_dtype("Positions", self.ids)
        if self.ids.dim() != 3 or (self.ramp and self.ids.shape[2] != 1):
            shape = "(axes, rows, 1) with a ramp" if self.ramp else "(axes, rows, tokens)"
            raise ValueError(sentence("Positions", f"ids must have shape {shape}", ids=self.ids))


PositionsLike: TypeAlias = "Positions | torch.Tensor | int | None"


def canonical(positions: PositionsLike, operation: str = "positions") -> Positions:
    """Bring anything that says positions to :class:`Positions`.

    Args:
        positions: None for 0..n-1; an int for an offset; a tensor of ids of shape ``(tokens,)`` or
            ``(rows, tokens)``, int32, int64, float32 or float64; or a :class:`Positions`.
        operation: named in errors.

    Raises:
        TypeError: a type or dtype that cannot be a position (bool, 16-bit floats, ...).
        ValueError: ids of another rank.

    >>> canonical(7)
    Positions(ids=None, offset=7, ramp=True)
    >>> canonical(torch.tensor([3, 1, 4])).ids.shape
    torch.Size([1, 1, 3])
    """
    if positions is None:
        return ZERO
    if isinstance(positions, Positions):
        return positions
    if isinstance(positions, torch.Tensor):
        _check_dtype(operation, positions)
        if positions.dim() == 1:
            return Positions(positions[None, None], ramp=False)
        if positions.dim() == 2:
            return Positions(positions[None], ramp=False)
        hint = "; an int says one offset" if positions.dim() == 0 else "; see positions.multi_axis"
        raise ValueError(
            sentence(
                operation,
                f"positions must have shape (tokens,) or (rows, tokens){hint}",
                positions=positions,
            )
        )
    if isinstance(positions, bool):
        raise TypeError(sentence(operation, f"positions must not be a bool but got {positions}"))
    if isinstance(positions, (int, torch.SymInt)):
        offset = positions
    else:
        try:
            offset = operator.index(positions)
        except TypeError:
            raise TypeError(
                sentence(
                    operation,
                    "positions must be None, an int offset, a tensor of ids or a Positions but got "
                    f"{type(positions).__name__}",
                )
            ) from None
    # While compiling an offset is a symbol of 64 bits, and a comparison would guard on it.
    if not torch.compiler.is_compiling() and not -(2**63) <= offset < 2**63:
        raise ValueError(sentence(operation, f"an offset must fit in 64 bits but got {offset}"))
    return Positions(offset=offset)


def per_row(offsets: torch.Tensor) -> Positions:
    """One offset per batch row: token ``t`` of row ``r`` is at ``offsets[r] + t``.

    Args:
        offsets: int32, int64, float32 or float64, shape ``(rows,)``. On a device they are read by
            the kernel, without a synchronisation.

    >>> per_row(torch.tensor([0, 100])).ids.shape
    torch.Size([1, 2, 1])
    """
    _check_dtype("per_row", offsets)
    if offsets.dim() != 1:
        raise ValueError(sentence("per_row", "offsets must have shape (rows,)", offsets=offsets))
    return Positions(offsets[None, :, None], ramp=True)


def multi_axis(ids: torch.Tensor) -> Positions:
    """Several coordinates per token, whose angles add up.

    Args:
        ids: int32, int64, float32 or float64, shape ``(axes, tokens)`` or ``(axes, rows, tokens)``.

    >>> multi_axis(torch.zeros(2, 9, dtype=torch.int64)).ids.shape
    torch.Size([2, 1, 9])
    """
    _check_dtype("multi_axis", ids)
    if ids.dim() not in (2, 3):
        raise ValueError(
            sentence(
                "multi_axis", "ids must have shape (axes, tokens) or (axes, rows, tokens)", ids=ids
            )
        )
    return Positions(ids if ids.dim() == 3 else ids[:, None], ramp=False)


def _check_dtype(operation: str, ids: object) -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(sentence(operation, f"positions must be a tensor but got {describe(ids)}"))
    if ids.dtype not in DTYPES:
        # A 16-bit float cannot count past 256 or 2048, and a bool is a mask that went astray.
        raise TypeError(
            sentence(operation, "positions must be int32, int64, float32 or float64", positions=ids)
        )


ZERO = Positions()
