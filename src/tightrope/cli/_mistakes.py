"""A user's mistake as one line, with no traceback, and an exit code that scripts can use."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import typer

from ..workbench.text import printable
from ._console import make_console

#: What exit codes mean, the same for every command. CLOSED is what a shell says of a process that wrote to
#: a closed pipe (`| head -1`).
FINDING, MISTAKE, CLOSED = 1, 2, 141

# Nothing that the user wrote is wrong; the machine could not do it.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EFBIG)


def stop(text: str, code: int = MISTAKE) -> NoReturn:
    """Print one line on the error stream and leave."""
    line = printable(" ".join(text.split()))
    make_console(stderr=True).print(f"Error: {line}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def as_mistakes(spelled: Mapping[str, str] | None = None) -> Iterator[None]:
    """Take errors that the library words for its users, and those of the file system, for theirs; those
    of the machine end with exit code 1.

    Args:
        spelled: what an argument that a sentence names is called on the command line.
    """
    try:
        yield
    except OSError as error:
        about = f"{error.filename}: " if error.filename is not None else ""
        code = FINDING if error.errno in _MACHINE else MISTAKE
        stop(f"{about}{error.strerror or error}.", code)
    except MemoryError:
        stop("there is not enough memory.", FINDING)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        for argument, option in (spelled or {}).items():
            text = text.replace(argument, option)
        stop(text)
