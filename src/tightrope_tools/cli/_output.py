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
STYLES = {"bold": "1", "error": "1;31", "warning": "33", "note": "36"}

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
# Least width at which a column of wrapped text is readable; all columns of a line but the last.
_READABLE = 20
_COLUMNS = re.compile(r".*  (?=\S)|\s*")


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


def show(text: str = "", style: str = "") -> None:
    """Print a text, wrapped to the terminal's width; the rest of a long line is indented like its last column."""
    width = shutil.get_terminal_size((110, 24)).columns  # 110 for a file or a pipe
    for line in map(_printable, text.split("\n")):
        columns = _COLUMNS.match(line)
        at = columns.end() if columns and columns.end() <= width - _READABLE else 0
        start, rest = line[:at], " " * at
        wrapped = textwrap.wrap(
            line[at:],
            max(width, 1),
            initial_indent=start,
            subsequent_indent=rest,
            break_on_hyphens=False,
        )
        print("\n".join(_styled(each, style) for each in wrapped))


def show_table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, align: str = "<", indent: int = 0
) -> None:
    """Print rows of cells in columns; what the terminal has no room for continues in the last column.

    Args:
        rows: cells, which may have several lines.
        header: the headings of the columns.
        align: "<" or ">", as in a format.
    """
    lines = [
        line
        for row in ([header, *rows] if header else rows)
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        cells = [f"{cell:{align}{width}}" for cell, width in zip(line, widths)]
        show(" " * indent + "  ".join(cells).rstrip())
        if header and not number:
            show(" " * indent + "─" * min(sum(widths) + 2 * (len(widths) - 1), 80))


def progress(title: str) -> Callable[[float, str], None]:
    """Return a function that takes the fraction done, from 0 to 1, and a text; it prints a line for each tenth.

    The lines go to the error stream.
    """
    shown = -1

    def update(fraction: float, text: str) -> None:
        nonlocal shown
        if (tenth := int(min(fraction, 1.0) * 10)) > shown:
            shown = tenth
            write_line(f"{title} {min(fraction, 1.0):4.0%}  {text}", sys.stderr)

    return update


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
