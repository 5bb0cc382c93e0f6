"""The forms in which rotary functions take their angles, one value for each."""

from __future__ import annotations

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
        name: in words, for reports; forms are pickled by it.
        roles: of the arguments that bring the angles: what a parameter is called where its name says.
        build: where tables are given: an expression in ``cos`` and ``sin`` for each of these arguments.
        read: where tables are given: makes cosines and sines of these arguments again.
        gives_tables: whether the function returns (cos, sin), and rotates nothing.
        arrangements: layouts of x with shapes of cosines and sines that fit, likeliest first.
        widths: how these may hold the entry of each pair, likeliest first.
        narrow: whether tables may have 16 bits.
        unit: whether cosines and sines must be those of an angle, as nothing else can be passed.
        flat: whether heads are still flat in x, which only a method can tell apart.
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
    flat: bool = False

    @property
    def takes_tables(self) -> bool:
        """Whether the caller makes cosines and sines, in whatever shape they are passed."""
        return self.read is not None

    def built(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, ...]:
        """The arguments of cosines and sines, of which :attr:`read` makes these again."""
        space = {"torch": torch, "cos": cos, "sin": sin}
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


def _stacked(table: torch.Tensor) -> Tables:
    return table[0].transpose(0, 1), table[1].transpose(0, 1)


COS_SIN = Form("cosines and sines", ("cos", "sin"), ("cos", "sin"), lambda cos, sin: (cos, sin))
_COMPLEX = "torch.complex(cos, sin)"
_SINES_FIRST = "torch.cat((sin, cos), -1)"
_STACKED = "torch.stack((cos.transpose(0, 1), sin.transpose(0, 1)))"
_FLAT = (Arrangement("bshd", "1s1d"),)

#: Every form by its name, likeliest first where a signature leaves several.
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("positions", ("positions",)),
        Form("positions, for tables", ("positions",), gives_tables=True),
        COS_SIN,
        Form(
            *("complex tables", ("cis",), (_COMPLEX,), _complex_parts),
            widths=("half",),
            narrow=False,
        ),
        Form("sines and cosines in one table", ("sin_cos",), (_SINES_FIRST,), _sines_first),
        Form(
            *("cosines and sines stacked", ("stack",), (_STACKED,), _stacked),
            arrangements=_FLAT,
            flat=True,
        ),
        Form("an offset", ("offset",)),
        Form("no positions", ()),
    )
}
