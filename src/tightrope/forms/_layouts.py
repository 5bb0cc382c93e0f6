"""How x and its tables are laid out: their dimensions by letter, and how tables hold pairs.

b is for rows (the batch), h for heads, s for tokens (the sequence), d for channels; t is for tokens of
all rows packed into one; 1 is a dimension of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Layouts of x, likeliest first.
LAYOUTS = ("bhsd", "bshd", "bsd", "sbhd", "thd", "sd")

#: Shapes of tables, each as an index that makes it of one ``bsd``.
TABLE_SHAPES = {"bsd": "", "sd": "[0]", "b1sd": "[:, None]", "bs1d": "[:, :, None]"}

#: How tables hold the entry of each pair, each as an expression that makes such a ``table`` of one with
#: an entry per pair: all of them twice, one after the other; each twice; each once.
WIDTHS = {
    "cat": "torch.cat((table, table), -1)",
    "repeat": "table.repeat_interleave(2, -1)",
    "half": "table",
}
_WIDEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: eval(f"lambda table: {text}", {"torch": torch}) for name, text in WIDTHS.items()
}


def widen(table: torch.Tensor, width: str) -> torch.Tensor:
    """A table with an entry per pair, as one of another width, of WIDTHS."""
    return _WIDEN[width](table)


@dataclass(frozen=True)
class Arrangement:
    """A layout of x with a shape of tables that fits it.

    Attributes:
        x, table: the dimensions by letter.
        unsqueeze_dim: what the function is told, if it takes that: where its tables get a dimension.
        broadcasts: whether tables of three dimensions broadcast against x of four as they are.
            Where another rule for three dimensions is in question these could not tell it from that.
    """

    x: str
    table: str
    unsqueeze_dim: int | None = None
    broadcasts: bool = False

    @property
    def place(self) -> int | None:
        """Where the tables get a dimension, from the end; None where they broadcast as they are."""
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


#: What a function with given tables is called with, likeliest first.
ARRANGEMENTS = (
    *(Arrangement(x, "bsd") for x in ("bhsd", "bshd")),
    *(Arrangement(x, "sd") for x in ("bshd", "shd")),
    *(Arrangement("bhsd", table) for table in ("b1sd", "sd", "11sd")),
    *(Arrangement("bsd", table) for table in ("bsd", "sd")),
    *(Arrangement("hsd", table) for table in ("sd", "1sd")),
    *(Arrangement("bhsd", "1sd", None, True), Arrangement("bshd", "s1d", None, True)),
    *(Arrangement("bhsd", "bsd", dim) for dim in (1, -3)),
    *(Arrangement("bshd", "bsd", dim) for dim in (2, -2)),
    *(Arrangement("bhsd", "1sd", 1), Arrangement("bshd", "1sd", 2), Arrangement("shd", "sd", 1)),
    *(Arrangement("hsd", "sd", 0), Arrangement("bshd", "sd", 1), Arrangement("bhsd", "sd", 0)),
)
