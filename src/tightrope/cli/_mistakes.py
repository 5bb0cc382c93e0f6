"""A user's mistake as one line and exit code 2, with no traceback."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import typer

from ._console import make_console
from ._words import printable

#: What exit codes mean, the same for every command.
FINDING, MISTAKE = 1, 2


def stop(text: str) -> NoReturn:
    """Print one line on the error stream and leave with exit code 2."""
    line = printable(" ".join(text.split()))
    make_console(stderr=True).print(f"Error: {line}", markup=False, soft_wrap=True)
    raise typer.Exit(MISTAKE)


@contextmanager
def as_mistakes(spelled: Mapping[str, str] | None = None) -> Iterator[None]:
    """Take errors that the library words for its users, and those of the file system, for theirs.

    Args:
        spelled: what an argument that a sentence names is called on the command line.
    """
    try:
        yield
    except OSError as error:
        about = f"{error.filename}: " if error.filename is not None else ""
        stop(f"{about}{error.strerror or error}.")
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        for argument, option in (spelled or {}).items():
            text = text.replace(argument, option)
        stop(text)
