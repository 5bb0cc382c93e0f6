"""How conversion says no: one sentence, as everywhere in the library."""

from __future__ import annotations

from typing import NoReturn

from ..._errors import bad_value


def fail(message: str) -> NoReturn:
    """Raise a ValueError about the user's input."""
    raise bad_value(message)


def shown(names: list[str], most: int = 3) -> str:
    """A list of names of which a sentence holds the first few."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def pairing_name(interleaved: bool) -> str:
    """What the command line calls a pairing."""
    return "interleaved" if interleaved else "half"
