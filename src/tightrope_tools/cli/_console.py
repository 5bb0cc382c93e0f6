"""The console, and progress as a bar on a terminal or as plain lines elsewhere."""

import os
import re
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer import rich_utils

_PLAIN_WIDTH = 110
_PLAIN_LINES = 10
# From 1 to 9999: rich prints nothing with 0 columns and runs out of memory with 10^9.
_SIZE = re.compile(r"0*[1-9][0-9]{0,3}")


def settle_terminal() -> None:
    """Unset `COLUMNS` and `LINES` if impossible; print help without colour if `NO_COLOR` is set."""
    for name in ("COLUMNS", "LINES"):
        if not _SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
    rich_utils.COLOR_SYSTEM = None if _is_plain() else "auto"


def make_console(*, stderr: bool = False) -> Console:
    """Return a console without automatic highlighting.

    Its width is 110 if the output is not a terminal and `COLUMNS` is not set.
    """
    plain = _is_plain()
    console = Console(
        stderr=stderr,
        highlight=False,
        color_system=None if plain else "auto",
        # Under NO_COLOR rich still prints bold text, and a progress bar moves the cursor.
        force_terminal=False if plain else None,
    )
    has_width = console.is_terminal or console.file.isatty() or "COLUMNS" in os.environ
    if not has_width:
        console.width = _PLAIN_WIDTH
    return console


def _is_plain() -> bool:
    return bool(os.environ.get("NO_COLOR"))


class Ticker:
    """Progress of one piece of work; `update` takes the fraction done and a short text."""

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
        """Show `fraction` (0 to 1) and `text`; without a terminal, print about ten lines in all."""
        fraction = min(fraction, 1.0)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=fraction, text=text)
        elif (tenth := int(fraction * _PLAIN_LINES)) > self._shown:
            self._shown = tenth
            line = f"{self._title} {fraction:4.0%}  {text}"
            self._console.print(line, markup=False, soft_wrap=True)
