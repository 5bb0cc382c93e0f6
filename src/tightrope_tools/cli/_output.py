"""Shared by all commands: text that fits the terminal, progress, JSON, mistakes and exit codes."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TextIO, TypeAlias

#: Exit codes, the same for every command. CLOSED is a shell's code for a process that wrote to a closed
#: pipe (`| head -1`).
FINDING, MISTAKE, CLOSED = 1, 2, 141
#: Styles of text -> parameters of the terminal's escape code.
STYLES = {"bold": "1", "dim": "2", "error": "1;31", "warning": "33", "note": "36", "ok": "32"}

# Failures of the machine, not of the user's input.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EFBIG)
# What replaces a text of the library.
Spelling: TypeAlias = str | Callable[[re.Match[str]], str]
# Arguments of Python that state a slice -> options.
_SLICE = {
    r"\brotary_dim=": "--rotary-dim=",
    r"\bstart=": "--start=",
    r"with start if": "with --start if",
}
# A call that makes a spec by hand, which stays Python; calls in its arguments included.
_SPEC = re.compile(r"(RopeSpec\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")
# Least width at which a column of wrapped text is readable.
_READABLE = 20


class Mistake(Exception):
    """An error to report in one line, without a traceback, with its exit code."""

    def __init__(self, text: str, code: int = MISTAKE) -> None:
        super().__init__(_printable(" ".join(text.split())))
        self.code = code


@contextmanager
def as_mistakes(spelled: Mapping[str, Spelling] | None = None) -> Iterator[None]:
    """Turn the library's and the file system's errors into mistakes, with exit code 2.

    Failures of the machine, such as a full disk, exit with code 1.

    Args:
        spelled: regular expressions of texts to replace in the message, such as a Python argument by its command-line
            option.
    """
    try:
        yield
    except OSError as error:
        from tightrope.config.files import ELSEWHERE

        about = f"{error.filename}: " if error.filename is not None else ""
        text = str(error.strerror or error).removesuffix(ELSEWHERE)  # advice for Python callers
        code = FINDING if error.errno in _MACHINE else MISTAKE
        raise Mistake(f"{about}{text}.", code) from error
    except MemoryError as error:
        raise Mistake("there is not enough memory.", FINDING) from error
    except (ValueError, TypeError, NotImplementedError) as error:
        # The options are named before the Python call at the end of a sentence.
        text = re.sub(r"; for code like Llama's: RopeSpec\.from_config\(.*\)", "", str(error))
        parts = _SPEC.split(text)
        for argument, option in ({**spelled, **_SLICE} if spelled else {}).items():
            parts[::2] = [re.sub(argument, option, part) for part in parts[::2]]
        raise Mistake("".join(parts)) from error


def write_line(text: str, stream: TextIO) -> None:
    """Print one line that is not wrapped."""
    print(_printable(text), file=stream)


def show_json(document: object) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2, allow_nan=False))


def show(text: str = "", style: str = "", indent: int = 0) -> None:
    """Print a text, wrapped to the terminal's width."""
    for line in _wrapped(text, _width() - indent):
        print(" " * indent + _styled(line, style))


def show_table(
    rows: Sequence[Sequence[str]],
    header: Sequence[str] = (),
    *,
    left: int | None = None,
    style: str = "bold",
    indent: int = 0,
) -> None:
    """Print rows of cells in columns. On a terminal too narrow for them, print a line for each cell.

    Args:
        rows: cells, which may have several lines; long lines are wrapped.
        header: the headings of the columns.
        left: the number of columns, from the first on, that are aligned left; by default all.
        style: the style of the first column.
    """
    table = [header, *rows] if header else rows
    columns = [
        [line for cell in column for line in cell.split("\n")]
        for column in zip(*table, strict=True)
    ]
    widths = [max(map(len, column)) for column in columns]
    words = [max(map(len, " ".join(column).split()), default=0) for column in columns]
    least = [*words[:1], *(min(word, _READABLE) for word in words[1:])]
    room = _width() - indent - 2 * (len(columns) - 1)
    if sum(least) > room:
        _show_list(rows, header, indent)
        return
    while sum(widths) > room:
        _, widest = max((width, i) for i, width in enumerate(widths) if width > least[i])
        widths[widest] -= 1
    for row in table:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [
                part.ljust(width) if left is None or i < left else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            line = "  ".join(padded).rstrip()
            first, rest = line[: widths[0]], line[widths[0] :]
            print(" " * indent + _styled(first, "" if row is header else style) + rest)
        if row is header:
            print(" " * indent + "─" * (sum(widths) + 2 * (len(widths) - 1)))


def _show_list(rows: Sequence[Sequence[str]], header: Sequence[str], indent: int) -> None:
    for row in rows:
        for number, cell in enumerate(row):
            named = f"{header[number]}: {cell}" if header and header[number] else cell
            if cell:
                show(named, "" if number else "bold", indent + (2 if number else 0))


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """Yield a function that shows the fraction done, from 0 to 1, and a text on the error stream.

    It keeps one line of a terminal up to date, and prints about ten lines elsewhere.
    """
    shown = -1
    terminal = sys.stderr.isatty()

    def update(fraction: float, text: str) -> None:
        nonlocal shown
        line = f"{title} {min(fraction, 1.0):4.0%}  {_printable(text)}"
        if terminal:
            width = _width() - 1
            print("\r" + line[:width].ljust(width), end="", file=sys.stderr, flush=True)
        elif (tenth := int(min(fraction, 1.0) * 10)) > shown:
            shown = tenth
            print(line, file=sys.stderr)

    try:
        yield update
    finally:
        if terminal:
            print("\r" + " " * (_width() - 1), end="\r", file=sys.stderr, flush=True)


def _width() -> int:
    """Return the terminal's width, or that which `COLUMNS` states; 110 for a file or a pipe."""
    return shutil.get_terminal_size((110, 24)).columns


def _wrapped(text: str, width: int) -> list[str]:
    """Split a text into lines that fit. The rest of a long line is indented like its beginning."""
    lines = []
    for line in map(_printable, text.split("\n")):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(
            line, max(width, 1), subsequent_indent=indent, break_on_hyphens=False
        ) or [""]
    return lines


def _printable(text: str) -> str:
    """Replace unprintable characters in text from foreign files; some would control the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _styled(text: str, style: str) -> str:
    if not style or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def add_pairing(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options `--interleaved` and `--half`; with neither, the value is None."""
    add = parser.add_argument
    add("--interleaved", action="store_true", default=None, help=f"{text}: interleaved")
    add("--half", action="store_false", default=None, dest="interleaved", help=f"{text}: half")
