"""A user's mistake as one line, and an exit code that scripts can use."""

import contextlib
import errno
import re
from collections.abc import Iterator

import typer

from ._console import make_console

# Nothing that the user wrote is wrong; the machine could not do it.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EFBIG)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Errors of a command as one line: exit code 2 for the user's mistakes, 1 for the machine's."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or error}"
        raise _exit(text, 1 if error.errno in _MACHINE else 2) from None
    except MemoryError:
        raise _exit("there is not enough memory", 1) from None
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _exit(str(error), 2) from None


def _exit(text: str, code: int) -> typer.Exit:
    text = re.sub(r"^\[\w+\] ", "", " ".join(text.split()))
    # Names of tensors and files come from files that others made.
    text = "".join(character if character.isprintable() else "\ufffd" for character in text)
    make_console(stderr=True).print(f"Error: {text}", markup=False, soft_wrap=True)
    return typer.Exit(code)
