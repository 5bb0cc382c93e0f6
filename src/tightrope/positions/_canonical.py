"""The canonical form of positions, conversion to it, and checks that all constructors share."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from .._errors import (
    KINDS,
    as_integer,
    bad_type,
    bad_value,
    check_flag,
    check_local,
    check_tensor,
    integer,
    public,
)

DTYPES = KINDS["int32, int64, float32 or float64"]


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of tokens in canonical form. Made by the functions of :mod:`tightrope.positions`.

    Attributes:
        ids: int32, int64, float32 or float64 ``[axes, rows|1, tokens]``, or ``[axes, rows|1, 1]``
            with ``add_index``; None means zeros on one axis. Positions of each head have a last
            dimension for them, ``[axes, rows|1, tokens, heads]``.
        offset: added to every position.
        add_index: whether to add the token index to every position.
        packed: whether a row holds several sequences, each with its own length; None if that is not known.
        part: for the tokens of one process, made by :func:`tightrope.positions.shard`: its rank, the
            number of ranks, and the number of tokens of the whole; None for whole rows.
    """

    ids: torch.Tensor | None = None
    offset: int = 0
    add_index: bool = True
    packed: bool | None = field(default=None, repr=False)
    part: tuple[int, int, int] | None = field(default=None, repr=False)

    @public("Positions")
    def __post_init__(self) -> None:
        offset = self.offset
        if type(offset) is not int:
            offset = integer("offset", offset, "; give fractions and tensors as ids")
        check_fits("offset", offset)
        check_flag("add_index", self.add_index)
        if self.ids is None:
            return
        # FSDP2 casts floating tensors in dataclasses that are inputs of a module.
        hint = "; a wrapper of the model, such as one for mixed precision, may have cast them"
        check_dtype(self.ids, "ids", sharded=True, hint=hint)
        dims = (3,) if self.add_index else (3, 4)
        if self.ids.dim() not in dims or (self.add_index and self.ids.shape[2] != 1):
            raise bad_value(
                "ids must have shape (axes, rows, tokens) or (axes, rows, tokens, heads), or (axes, rows, 1) "
                "with add_index=True",
                ids=self.ids,
            )

    @property
    def axes(self) -> int:
        """Number of coordinates of each token."""
        return 1 if self.ids is None else self.ids.shape[0]

    @property
    def heads(self) -> int | None:
        """Number of heads that have positions of their own; None if all heads share them."""
        return None if self.ids is None or self.ids.dim() == 3 else self.ids.shape[3]


#: The type of ``positions=``: an int is an offset, a tensor holds ids, None is 0..n-1.
PositionsLike: TypeAlias = "Positions | torch.Tensor | int | None"


def as_positions(positions: PositionsLike, sharded: bool = False) -> Positions:
    """Convert any description of positions to :class:`Positions`; errors name the function that the user called.

    Args:
        positions: None for 0..n-1; an int for an offset; a tensor of ids of shape ``(tokens,)`` or
            ``(rows, tokens)``, int32, int64, float32 or float64; or a :class:`Positions`.
        sharded: whether ids may be a DTensor.

    Raises:
        TypeError: a type or dtype that cannot be a position (bool, 16-bit floats, ...).
        ValueError: ids of another shape, or an offset that does not fit in 64 bits.

    >>> as_positions(7)
    Positions(ids=None, offset=7, add_index=True)
    >>> as_positions(torch.tensor([3, 1, 4])).ids.shape
    torch.Size([1, 1, 3])
    """
    if positions is None:
        return ZERO
    if isinstance(positions, Positions):
        if not sharded:
            check_local("positions", positions.ids)
        return positions
    if isinstance(positions, torch.Tensor):
        check_dtype(positions, sharded=sharded)
        if positions.dim() == 1:
            return Positions(positions[None, None], add_index=False)
        if positions.dim() == 2:
            return Positions(positions[None], add_index=False)
        hint = (
            "; pass one offset as an int, or a tensor x of one as positions.per_row(x[None])"
            if positions.dim() == 0
            else "; coordinates on several axes are positions.multi_axis(ids)"
        )
        if positions.dim() == 3 and len(positions) == 4:
            hint += f"{_FOUR}(ids[1:])"
        raise bad_value(
            f"positions must have shape (tokens,) or (rows, tokens){hint}", positions=positions
        )
    if isinstance(positions, bool):
        raise bad_type(f"positions must not be a bool but got {positions}")
    offset = as_integer(positions)
    if offset is None:
        way = (
            f"torch.tensor([{positions}]), for one token"
            if isinstance(positions, numbers.Real)
            else "torch.as_tensor(positions), if they are numbers"
        )
        raise bad_type(
            "positions must be None, an int offset, a tensor of ids or a Positions but got "
            f"{type(positions).__name__}; pass {way}"
        )
    check_fits("an offset", offset)
    return Positions(offset=offset)


# Models of transformers with three coordinates may pass four rows.
_FOUR = "; if row 0 of ids (4, rows, tokens) holds the text's, drop it: positions.multi_axis"


def check_axes(where: Positions, axes: int, name: str = "positions") -> None:
    """Raise an error unless positions have one coordinate for each axis of a spec.

    It does not guess: ids ``(rows, tokens)`` are not taken for coordinates even if there are as many
    rows as axes, and one coordinate is not broadcast to all axes.

    Args:
        where: canonical positions.
        axes: number of coordinates that the spec needs.
        name: name of the positions in the error.

    Raises:
        ValueError: another number of axes; the message shows the call that works.

    >>> check_axes(ZERO, 1)
    """
    if where.axes == axes:
        return
    rule = f"{name} must have {axes} {'axis' if axes == 1 else 'axes'} for this spec but got "
    hint = f"; pass axes= to RopeSpec, such as Axes.blocks(…) for {where.axes} coordinates"
    ids = where.ids
    given = where.offset if ids is None and where is not ZERO else ids
    one = "…" if ids is not None else given
    if where.axes > 3 and ids is not None and ids.shape[2] == axes > 1 == ids.shape[1]:
        hint = "; ids (tokens, axes) must be transposed: positions.multi_axis(ids.T)"
    elif axes > 1:
        hint = (
            f"; call positions.multi_axis with ids ({axes}, tokens) or ({axes}, rows, tokens), or "
            f"positions.text({one}, axes={axes}) if all coordinates of a token are equal"
        )
    if where.axes == 4 and axes == 3:
        hint += f"{_FOUR}(ids[1:])"
    found = ids[0] if ids is not None and where.axes == 1 else given
    raise bad_value(f"{rule}{where.axes}{hint}", **{name: found})


def check_dtype(
    ids: object, name: str = "positions", sharded: bool = False, hint: str = ""
) -> None:
    if isinstance(ids, torch.Tensor):
        hint = hint or _way(name, ids.dtype)
    check_tensor(name, ids, "int32, int64, float32 or float64", sharded=sharded, hint=hint)


def _way(name: str, dtype: torch.dtype) -> str:
    """The advice for ids of a dtype that is refused."""
    if dtype == torch.bool:
        padded = "; positions.left_padded(mask) makes them from an attention mask"
        return padded * (name == "positions")
    if dtype.is_floating_point:
        return "; make them in int64, as narrow floats do not hold all integers above 256 or 2048"
    return "" if dtype.is_complex else f"; pass {name}.long()"


def count(name: str, value: object, hint: str = "", least: int = 0) -> int:
    number = integer(name, value, hint)
    if number < least:
        rule = f"be at least {least}" if least else "not be negative"
        raise bad_value(f"{name} must {rule} but got {number}")
    return number


def check_fits(name: str, value: int) -> None:
    # While compiling, the value is a 64-bit symbol, and a comparison would add a guard.
    if not torch.compiler.is_compiling() and not -(2**63) <= value < 2**63:
        raise bad_value(f"{name} must fit in 64 bits but got {value}")


def number(name: str, value: object) -> int | float:
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    found = integer(name, value, kind="an int or a float")
    check_fits(name, found)
    return found


def widened(ids: torch.Tensor) -> torch.Tensor:
    """Convert ids to 64 bits, so that adding to them does not overflow or lose digits."""
    return ids.to(torch.float64 if ids.is_floating_point() else torch.int64)


ZERO = Positions()
