"""The registry of forms: one entry for each way in which rotary functions take their angles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._layouts import ARRANGEMENTS, WIDTHS, Arrangement

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """One way in which rotary functions take their angles.

    Attributes:
        name: the name in reports; forms are pickled by it.
        roles: the roles of the arguments that hold the angles, also their usual parameter names.
        build: if the angles are tables, an expression in ``cos`` and ``sin`` for each argument.
        read: if the angles are tables, the inverse of ``build``: arguments -> (cos, sin).
        gives_tables: whether the function returns (cos, sin) and rotates nothing.
        arrangements: layouts of x with fitting shapes of cos/sin, likeliest first.
        widths: how cos/sin may hold the entry of each pair, likeliest first.
        narrow: whether tables may have a 16-bit dtype.
        unit: whether cos² + sin² must be 1, because the form cannot express other values.
        is_complex: whether the function multiplies complex numbers. torch rounds these products differently at
            the end of a vector.
        flat: whether x is (batch, seq, heads * dim); only a method knows how to split it.
        grids: whether the tables of tokens are put together from those of the axes of a grid, so that
            ``build`` can express only such tables. It takes the nearest in three rows or more.
    """

    name: str
    roles: tuple[str, ...]
    build: tuple[str, ...] = ()
    read: Callable[..., Tables] | None = None
    gives_tables: bool = False
    arrangements: tuple[Arrangement, ...] = ARRANGEMENTS
    widths: tuple[str, ...] = tuple(WIDTHS)
    narrow: bool = True
    unit: bool = False
    is_complex: bool = False
    flat: bool = False
    grids: bool = False

    @property
    def takes_tables(self) -> bool:
        """True if the caller passes cosines and sines, in any format."""
        return self.read is not None

    @property
    def packed(self) -> bool:
        """True if rows are packed into one, and the caller passes where each begins."""
        return self.roles == ("cu_seqlens",)

    def built(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, ...]:
        """The arguments that hold given cosines and sines; :attr:`read` is the inverse."""
        space = {"torch": torch, "cos": cos, "sin": sin, "of_grids": _of_grids}
        return tuple(eval(text, dict(space)) for text in self.build)

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)


def _named(name: str) -> Form:
    return FORMS[name]


def _complex_parts(table: torch.Tensor) -> Tables:
    parts = torch.view_as_real(table)
    return parts[..., 0], parts[..., 1]


def _sines_first(table: torch.Tensor) -> Tables:
    sin, cos = table.chunk(2, dim=-1)
    return cos, sin


def _cosines_first(table: torch.Tensor) -> Tables:
    cos, sin = table.chunk(2, dim=-1)
    return cos, sin


def _stacked(table: torch.Tensor) -> Tables:
    return table[0].transpose(0, 1), table[1].transpose(0, 1)


def _pair(pair: Any) -> Tables:
    if not isinstance(pair, (tuple, list)):
        raise TypeError("a tuple (cos, sin) is needed")
    cos, sin = pair
    return cos, sin


def _reversed_pair(pair: Any) -> Tables:
    sin, cos = _pair(pair)
    return cos, sin


def _matrix(table: torch.Tensor) -> Tables:
    """Rows (a, b) and (c, d) of any 2 x 2 matrix: u·a + v·b and u·c + v·d are full tables."""
    if table.shape[-2:] != (2, 2):
        raise ValueError("2 x 2 matrices are needed")
    (a, b), (c, d) = (row.unbind(-1) for row in table.unbind(-2))
    return torch.stack((a, d), -1).flatten(-2), torch.stack((-b, c), -1).flatten(-2)


def _angles(angles: torch.Tensor) -> Tables:
    if not angles.is_floating_point():
        raise TypeError("angles must be floating-point numbers")
    return angles.cos(), angles.sin()


def _on_grids(table: torch.Tensor, grids: torch.Tensor) -> Tables:
    """Tables of tokens on grids (batch, 3) from one complex table, whose columns three axes share.

    A token at (t, h, w) has the entries of row t in the columns of the first axis, and so on.
    """
    sizes = [tuple(each) for each in grids.tolist()]
    if len({t * h * w for t, h, w in sizes}) > 1:
        raise ValueError("grids of different numbers of tokens")
    parts = table.split(_columns(table.shape[-1]), dim=1)
    made = {}
    for size in dict.fromkeys(sizes):
        views = [[n if i == axis else 1 for i in range(3)] for axis, n in enumerate(size)]
        rows = [
            part[:n].reshape(*view, part.shape[-1]).expand(*size, -1)
            for part, n, view in zip(parts, size, views)
        ]
        made[size] = torch.view_as_real(torch.cat(rows, -1).flatten(0, 2))
    if len(made) == 1:
        every = made[sizes[0]].expand(len(sizes), *made[sizes[0]].shape)
    else:
        every = torch.stack([made[size] for size in sizes])
    cos, sin = every[:, :, None].unbind(-1)
    return cos, sin


def _of_grids(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`_on_grids`, from tables (batch, tokens, 1, pairs).

    Grids of 6 n tokens are (n, 2, 3). Others are lines, along the first axis in the first row, along the
    second in the second, and so on.
    """
    batch, tokens, _, pairs = cos.shape
    lines = [[tokens if i == row % 3 else 1 for i in range(3)] for row in range(batch)]
    sizes = [[tokens // 6, 2, 3]] * batch if tokens and tokens % 6 == 0 else lines
    table = torch.complex(cos, sin)[:, :, 0]
    parts = []
    for axis, part in enumerate(table.split(_columns(pairs), dim=-1)):
        row = max(range(min(batch, 3)), key=lambda row: sizes[row][axis])
        step = max(1, math.prod(sizes[row][axis + 1 :]))
        rows = part[row, ::step][: sizes[row][axis]]
        parts.append(torch.nn.functional.pad(rows, (0, 0, 0, max(1, tokens) - len(rows))))
    return torch.cat(parts, -1), torch.tensor(sizes)


def _columns(pairs: int) -> list[int]:
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


COS_SIN = Form("cosines and sines", ("cos", "sin"), ("cos", "sin"), lambda cos, sin: (cos, sin))
_COMPLEX = "torch.complex(cos, sin)"
_SINES_FIRST = "torch.cat((sin, cos), -1)"
_COSINES_FIRST = "torch.cat((cos, sin), -1)"
_ENTRIES = "cos[..., ::2], -sin[..., ::2], sin[..., 1::2], cos[..., 1::2]"
_MATRIX = f"torch.stack(({_ENTRIES}), -1).unflatten(-1, (2, 2))"
_STACKED = "torch.stack((cos.transpose(0, 1), sin.transpose(0, 1)))"
_FLAT = (Arrangement("bshd", "1s1d"),)

#: Every form by its name; if a signature fits several, the likeliest first.
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("positions", ("positions",)),
        Form("positions, for tables", ("positions",), gives_tables=True),
        COS_SIN,
        Form(
            *("one complex table", ("cis",), (_COMPLEX,), _complex_parts),
            widths=("half",),
            narrow=False,
            is_complex=True,
        ),
        Form("a tuple of cosines and sines", ("pair",), ("(cos, sin)",), _pair),
        Form("a tuple of sines and cosines", ("reversed_pair",), ("(sin, cos)",), _reversed_pair),
        Form("sin and cos in one table", ("sin_cos",), (_SINES_FIRST,), _sines_first),
        Form("cos and sin in one table", ("cos_sin",), (_COSINES_FIRST,), _cosines_first),
        Form(
            *("a 2 x 2 matrix per pair", ("matrix",), (_MATRIX,), _matrix),
            widths=("repeat",),
        ),
        Form(
            *("angles", ("angles",), ("torch.atan2(sin, cos)",), _angles),
            unit=True,
            narrow=False,
        ),
        Form(
            *("cos and sin stacked", ("stack",), (_STACKED,), _stacked),
            arrangements=_FLAT,
            flat=True,
        ),
        Form(
            *("one complex table for grids", ("axes", "grids")),
            *(("of_grids(cos, sin)[0]", "of_grids(cos, sin)[1]"), _on_grids),
            arrangements=(Arrangement("bshd", "bs1d"),),
            widths=("half",),
            narrow=False,
            grids=True,
        ),
        Form("packed rows", ("cu_seqlens",)),
        Form("an offset", ("offset",)),
        Form("no positions", ()),
    )
}
