"""A configuration as the reader sees it: its keys, what they are called, and what its family decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .._errors import bad_type, bad_value
from . import keys
from .families import Family

OPERATION = "from_config"

# The path of a key, and its value.
Found = tuple[str, Any]
# A rope section: key -> what it says.
Entries = dict[str, Found]


def fail(message: str) -> NoReturn:
    """Raise a ValueError in the form of the library."""
    raise bad_value(message)


@dataclass(frozen=True)
class Source:
    """A configuration in the names of transformers, whatever format it came in.

    Attributes:
        values: its keys.
        family: what its family's code decides; None for an unknown one.
        name: who says so, for sentences: ``model_type 'llama'``.
        spelled: path in ``values`` -> what the user's file calls it, where they differ.
        prefix: what stands before every path: ``text_config.`` for a nested section.
        seen: the keys of the user's file.
    """

    values: Mapping[str, Any]
    family: Family | None
    name: str
    spelled: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    seen: tuple[str, ...] = ()

    def shown(self, path: str) -> str:
        """A path as the user knows it."""
        return self.spelled.get(path, self.prefix + path)

    def outer(self, spellings: Iterable[str]) -> list[Found]:
        """What the outer level says under any of some spellings; null says nothing."""
        return [
            (self.shown(key), self.values[key])
            for key in spellings
            if self.values.get(key) is not None
        ]


@dataclass(frozen=True)
class Part:
    """One layer type: which keys speak of it."""

    name: str | None
    entries: Entries
    base: tuple[str, ...] = keys.BASE
    head_dim: Found | None = None
    rope: bool = True

    def said(self, spellings: Iterable[str]) -> list[Found]:
        """What the rope section says under any of some spellings; null says nothing."""
        found = (self.entries[key] for key in spellings if key in self.entries)
        return [(path, value) for path, value in found if value is not None]

    def value(self, key: str) -> Any:
        """One key of the rope section; None if it is not there."""
        return self.entries[key][1] if key in self.entries else None


def agreed(what: str, found: list[Found]) -> Found | None:
    """The one value that several keys give; an error if they give several."""
    if not found:
        return None
    first = found[0]
    for path, value in found[1:]:
        if value != first[1]:
            fail(
                f"{what} must be said once but got {first[0]} = {first[1]!r} and {path} = {value!r}"
            )
    return first


def whole(found: list[Found], most: int | None = None) -> list[Found]:
    """The same, once every value is known to be an int that can be a size, of at most ``most``."""
    for path, value in found:
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_type(f"{path} must be an int but got {value!r}")
        if value < 1:
            fail(f"{path} must be at least 1 but got {value}")
        if most is not None and value > most:
            fail(f"{path} must be at most {most} but got {value}")
    return found
