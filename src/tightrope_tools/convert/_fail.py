"""Helpers for the error sentences of conversion."""

from __future__ import annotations

from typing import NoReturn

from tightrope._errors import bad_value


def fail(message: str) -> NoReturn:
    """Raise a ValueError with this sentence."""
    raise bad_value(message)


def shown(names: list[str], most: int = 3) -> str:
    """Join the first `most` names and count the rest: ``a, b, c and 2 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def basis(who: str, assumed: bool) -> str:
    """Return where a pairing comes from: stated by a key, a record or the user, or assumed from the family."""
    return f"{'assumed from' if assumed else 'stated by'} {who}"


def pairing_name(interleaved: bool) -> str:
    """Return the name of a pairing on the command line."""
    return "interleaved" if interleaved else "half"
