"""Tables that several commands print."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

# Least width at which a column of wrapped text is readable.
_READABLE = 20


class StackedTable(Table):
    """A table that is printed as a list if the terminal is too narrow for its columns.

    In the list, each cell that is not empty has a line: ``heading: cell``, or the cell alone if its
    column has no heading. A row's first line has the column's style or is bold; others are
    indented.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        between = self.padding[1] + self.padding[3] + (1 if self.box else 0)
        widths = [_least_width(console, options, column) for column in self.columns]
        if sum(widths) + between * (len(widths) - 1) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), style=self.title_style or "")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            for index, (column, cell) in enumerate(zip(self.columns, row, strict=True)):
                line = _as_text(console, cell)
                if not line:
                    continue
                if column.header:
                    line = Text.assemble(_as_text(console, column.header), ": ", line)
                if index == 0:
                    line.stylize(column.style or "bold")
                yield line if index == 0 else Padding(line, (0, 0, 0, 2))


def _least_width(console: Console, options: ConsoleOptions, column: Column) -> int:
    """Return the least width at which a column is readable: numbers and names whole, text wrapped."""
    cells = [Measurement.get(console, options, cell) for cell in column.cells]
    longest = max((cell.maximum for cell in cells), default=0)
    if column.overflow == "fold":
        return min(longest, _READABLE)
    header = Measurement.get(console, options, column.header)
    if column.no_wrap:
        return max(longest, header.maximum)
    return max([header.minimum, *(cell.minimum for cell in cells)])


def _as_text(console: Console, cell: RenderableType) -> Text:
    return cell.copy() if isinstance(cell, Text) else console.render_str(str(cell))


def titled(title: str) -> Table:
    """Return an empty table with a bold title and a line below its header."""
    return StackedTable(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )


def facts(rows: Iterable[tuple[str, str]], style: str = "bold") -> Table:
    """Return a two-column table: names in `style`, and their texts, which wrap."""
    table = StackedTable(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table
