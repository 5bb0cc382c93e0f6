"""The canonical form, what brings things to it, and the checks that all kinds share."""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from .. import _tracing
from .._errors import check_dense, check_local, describe, integer, sentence

DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where tokens are, in canonical form. Made by the functions of this module.

    Attributes:
        ids: int32, int64, float32 or float64 ``[axes, rows|1, tokens]``, or ``[axes, rows|1, 1]``
            when ``ramp``; None stands for zeros on one axis.
        offset: added to every position.
        ramp: whether the index of the token in its row is added.
        packed: whether a row is known to hold several sequences, which have lengths of their own.
    """

    ids: torch.Tensor | None = None
    offset: int = 0
    ramp: bool = True
    packed: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.ids is None:
            return
        check_dtype("Positions", self.ids)
        if self.ids.dim() != 3 or (self.ramp and self.ids.shape[2] != 1):
            shape = "(axes, rows, 1) with a ramp" if self.ramp else "(axes, rows, tokens)"
            raise ValueError(sentence("Positions", f"ids must have shape {shape}", ids=self.ids))

    @property
    def axes(self) -> int:
        """How many coordinates each token has."""
        return 1 if self.ids is None else self.ids.shape[0]


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
        check_dtype(operation, positions)
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


def check_axes(operation: str, where: Positions, axes: int) -> None:
    """Refuse positions that do not have one coordinate for each axis of a spec.

    Never a guess: ids ``(rows, tokens)`` are not taken for coordinates where there happen to be as
    many rows as axes, nor is one coordinate taken for all.

    Args:
        operation: named in the error.
        where: canonical positions.
        axes: how many coordinates the spec needs.

    Raises:
        ValueError: another number of axes, with the call that works.

    >>> check_axes("rotate", ZERO, 1)
    """
    if where.axes == axes:
        return
    rule = f"positions must have {axes} {'axis' if axes == 1 else 'axes'} for this spec but got "
    hint = ""
    if axes > 1:
        hint = (
            f"; call positions.multi_axis with ids ({axes}, tokens) or ({axes}, rows, tokens), or "
            f"positions.text(…, axes={axes}) where all coordinates of a token are equal"
        )
    found = where.ids[0] if where.ids is not None and where.axes == 1 else where.ids
    raise ValueError(sentence(operation, f"{rule}{where.axes}{hint}", positions=found))


ZERO = Positions()


def check_dtype(operation: str, ids: object) -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(sentence(operation, f"positions must be a tensor but got {describe(ids)}"))
    if ids.dtype not in DTYPES:
        # A 16-bit float cannot count past 256 or 2048, and a bool is a mask that went astray.
        raise TypeError(
            sentence(operation, "positions must be int32, int64, float32 or float64", positions=ids)
        )
    check_dense(operation, "positions", ids)
    check_local(operation, "positions", ids)


def check_integers(operation: str, name: str, values: object) -> None:
    if not isinstance(values, torch.Tensor) or values.dtype not in _INTEGERS:
        raise TypeError(
            sentence(operation, f"{name} must be int32 or int64 but got {describe(values)}")
        )
    check_local(operation, name, values)


def count(operation: str, name: str, value: object) -> int:
    number = integer(operation, name, value)
    if number < 0:
        raise ValueError(sentence(operation, f"{name} must not be negative but got {number}"))
    return number


def number(operation: str, name: str, value: object) -> int | float:
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    try:
        return integer(operation, name, value)
    except TypeError:
        raise TypeError(
            sentence(operation, f"{name} must be int or float but got {describe(value)}")
        ) from None


def is_readable(values: torch.Tensor) -> bool:
    """Whether a look at values costs no synchronisation and breaks no graph; not at those of a subclass."""
    return type(values) in (torch.Tensor, torch.nn.Parameter) and _tracing.is_readable(values)


def widened(ids: torch.Tensor) -> torch.Tensor:
    """In 64 bits, so that adding to it loses nothing that matters."""
    return ids.to(torch.float64 if ids.is_floating_point() else torch.int64)
