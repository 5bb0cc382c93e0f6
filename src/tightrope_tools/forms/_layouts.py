"""Layouts of x and its tables, one letter per dimension, and the ways in which tables hold pairs.

b is batch, h heads, s sequence, d channels, t the tokens of all sequences packed into one dimension,
and 1 a dimension of size one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightrope.patching import WIDTHS as WIDTHS


def widen(table: torch.Tensor, width: str) -> torch.Tensor:
    """Convert a table with one entry per pair to a width of WIDTHS."""
    return WIDTHS[width](table)


@dataclass(frozen=True)
class Arrangement:
    """A layout of x with a fitting shape of tables.

    Attributes:
        x, table: the dimensions by letter.
        unsqueeze_dim: the dimension at which the function unsqueezes tables, if that is an argument.
        broadcasts: whether tables with an axis of size 1 in another place than usual broadcast against
            x of rank four without unsqueezing. A call with such tables does not show whether the
            function can unsqueeze other tables.
    """

    x: str
    table: str
    unsqueeze_dim: int | None = None
    broadcasts: bool = False

    @property
    def place(self) -> int | None:
        """The dimension at which tables are unsqueezed, from the end; None if they broadcast as they are."""
        past = len(self.table) + 1
        if self.unsqueeze_dim is not None:
            return self.unsqueeze_dim - (past if self.unsqueeze_dim >= 0 else 0)
        if _fits(self.table, self.x):
            return None
        placed = {n: f"{self.table[:n]}1{self.table[n:]}" for n in range(past)}
        return next(n - past for n, table in placed.items() if _fits(table, self.x))


def _fits(table: str, x: str) -> bool:
    pairs = zip(reversed(table), reversed(x))
    return len(table) <= len(x) and all(one in ("1", other) for one, other in pairs)


#: The layouts to try with a function that takes tables, likeliest first.
ARRANGEMENTS = (
    *(Arrangement(x, "bsd") for x in ("bhsd", "bshd")),
    *(Arrangement(x, "sd") for x in ("bshd", "shd")),
    *(Arrangement("bhsd", table) for table in ("b1sd", "sd", "11sd", "bhsd")),
    *(Arrangement("bshd", table) for table in ("bs1d", "1s1d", "bshd")),
    *(Arrangement("bsd", table) for table in ("bsd", "sd")),
    *(Arrangement("hsd", table) for table in ("sd", "1sd")),
    *(Arrangement("bhsd", "1sd", None, True), Arrangement("bshd", "s1d", None, True)),
    *(Arrangement("bshd", "shd", None, True), Arrangement("sbhd", "s11d", None, True)),
    *(Arrangement("bhsd", "bsd", dim) for dim in (1, -3)),
    *(Arrangement("bshd", "bsd", dim) for dim in (2, -2)),
    *(Arrangement("bhsd", "1sd", 1), Arrangement("bshd", "1sd", 2), Arrangement("shd", "sd", 1)),
    *(Arrangement("hsd", "sd", 0), Arrangement("bshd", "sd", 1), Arrangement("bhsd", "sd", 0)),
)
