"""The forms of tables that commands share."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def titled(title: str) -> Table:
    """A table with a bold title and a line below its header."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names in bold, each with its text, which folds."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table
