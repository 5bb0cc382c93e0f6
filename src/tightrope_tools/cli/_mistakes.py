"""User errors as one line without a traceback, and exit codes that scripts can use."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import typer

from ..text import printable
from ._console import make_console

#: Exit codes, the same for every command. CLOSED is a shell's code for a process that wrote to a closed
#: pipe (`| head -1`).
FINDING, MISTAKE, CLOSED = 1, 2, 141

# Failures of the machine, not of the user's input.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EFBIG)


def stop(text: str, code: int = MISTAKE) -> NoReturn:
    """Print one line on the error stream and exit with `code`."""
    line = printable(" ".join(text.split()))
    make_console(stderr=True).print(f"Error: {line}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def as_mistakes(spelled: Mapping[str, str] | None = None) -> Iterator[None]:
    """Report the library's and the file system's errors as one line, with exit code 2.

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
        code = FINDING if error.errno in _MACHINE else MISTAKE
        text = str(error.strerror or error).removesuffix(ELSEWHERE)  # advice for Python callers
        stop(f"{about}{text}.", code)
    except MemoryError:
        stop("there is not enough memory.", FINDING)
    except (ValueError, TypeError, NotImplementedError) as error:
        # The options are named before the Python call at the end of a sentence.
        text = re.sub(r"; for code like Llama's: RopeSpec\.from_config\(.*\)", "", str(error))
        for argument, option in (spelled or {}).items():
            text = re.sub(argument, option, text)
        stop(text)
