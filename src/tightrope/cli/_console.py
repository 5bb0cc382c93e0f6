"""The console, and progress that is a bar on a terminal and plain lines elsewhere."""

import os
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_WIDTH = 110
_PLAIN_LINES = 10


def make_console(*, stderr: bool = False) -> Console:
    """A console without automatic highlighting; of a fixed width where nothing gives one."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PLAIN_WIDTH
    return console


class Ticker:
    """Shows how far a piece of work is; `update` takes the fraction done and a short text."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._shown = -1
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=1.0, text="")

    def __enter__(self) -> "Ticker":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, fraction: float, text: str) -> None:
        """Show `fraction` (0 to 1) and `text`; off a terminal, about ten lines in all."""
        fraction = min(fraction, 1.0)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=fraction, text=text)
        elif (tenth := int(fraction * _PLAIN_LINES)) > self._shown:
            self._shown = tenth
            line = f"{self._title} {fraction:4.0%}  {text}"
            self._console.print(line, markup=False, soft_wrap=True)
