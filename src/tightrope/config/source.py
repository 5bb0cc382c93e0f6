"""A configuration in one format: its keys, the user's names for them, and its model family."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from .._errors import bad_type, bad_value
from ..frequencies import Given
from . import keys
from .families import Family

OPERATION = "from_config"

# The path of a key, and its value.
Found = tuple[str, Any]
# A rope section: key -> (path, value).
Entries = dict[str, Found]


# A way to settle what a file leaves open: when it is right, and the value that then holds, or the arguments of
# from_config that state it.
Way = tuple[str, Any]
# Refusal -> the value that its advice tries, in questions.py; and BASE -> a base.
TRIED: ContextVar[Mapping[str, Any] | None] = ContextVar("tried", default=None)
BASE = "base"


class Arguments(dict[str, Any]):
    """Arguments of from_config that settle what a file leaves open."""


class Base(float):
    """The base of all layers, in place of what the file gives."""


def fail(message: str) -> NoReturn:
    """Raise a ValueError whose message has the form of all errors of this library."""
    raise bad_value(message)


def settle(message: str, *ways: Way) -> Any:
    """Raise a ValueError that ends with the call for each way that works; return a value that is tried."""
    error, tried = bad_value(message), TRIED.get() or {}
    if error.args[0] in tried:
        return tried[error.args[0]]
    error.ways = ways
    raise error


@dataclass(frozen=True)
class Stated:
    """The arguments of :meth:`tightrope.RopeSpec.from_config`; None for what the caller leaves to the file."""

    layer_type: str | None = None
    section: str | None = None
    strict: bool = True
    interleaved: bool | None = None
    rotary_dim: int | None = None
    start: int | None = None
    rope_layers: str | Collection[str] | None = None
    inv_freq: Given | None = None
    found: tuple[tuple[str, str], ...] = ()  # (argument that the caller did not give, its source)

    def origin(self, name: str) -> str:
        """The source of an argument."""
        return dict(self.found).get(name, f"the argument {name}")

    def __post_init__(self) -> None:
        given = self.rope_layers
        named = False
        if isinstance(given, Collection) and not isinstance(given, str):
            named = len(given) > 0 and all(isinstance(name, str) for name in given)
        if not (given is None or named or (isinstance(given, str) and given == "all")):
            raise bad_type(
                f"rope_layers must be 'all', a collection of layer types that is not empty, or None but got {given!r}"
            )


@dataclass(frozen=True)
class Source:
    """A configuration of any format, with its keys renamed as in transformers.

    Attributes:
        values: key -> value.
        family: the facts of its model family; None if the family is unknown.
        name: the name of the configuration in error sentences: ``model_type 'llama'``.
        spelled: path in ``values`` -> the name in the user's file, if it differs.
        prefix: the prefix of every path: ``text_config.`` for a nested section.
        seen: the keys of the user's file.
        unread: the keys of the user's file that were not translated, and their values, for a format
            in which every key of ``values`` was.
        knows: what the format determines even if the family is unknown: ``"slice"``, all channels
            without a key for a part; ``"start"``, the first channel; ``"layers"``, all of them.
        recorded: the conversion record beside the file that states the pairing, if there is one.
        config: the configuration object, if its class is one of transformers' own.
        model: the model, if the configuration is that of one.
    """

    values: Mapping[str, Any]
    family: Family | None
    name: str
    spelled: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    seen: tuple[str, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    knows: frozenset[str] = frozenset()
    recorded: Any = None  # a files.Record, which imports this module
    config: object = None
    model: torch.nn.Module | None = None

    def shown(self, path: str) -> str:
        """The name of a path in the user's file."""
        return self.spelled.get(path, self.prefix + path)

    def outer(self, spellings: Iterable[str]) -> list[Found]:
        """(Path, value) for each of these spellings at the outer level; null counts as absent."""
        return [
            (self.shown(key), self.values[key])
            for key in spellings
            if self.values.get(key) is not None
        ]


@dataclass(frozen=True)
class Part:
    """One layer type and its keys.

    Attributes:
        name: the layer type; None if the layers do not differ.
        entries: the keys of its rope section.
        base: the keys outside the rope section that may give its base.
        head_dim: its head width, if layers differ in it.
        rope: whether these layers have RoPE.
        why: the source of that, if it is not the family.
    """

    name: str | None
    entries: Entries
    base: tuple[str, ...] = keys.BASE
    head_dim: Found | None = None
    rope: bool = True
    why: str = ""

    def inner(self, spellings: Iterable[str]) -> list[Found]:
        """(Path, value) for each of these spellings in the rope section; null counts as absent."""
        found = (self.entries[key] for key in spellings if key in self.entries)
        return [(path, value) for path, value in found if value is not None]

    def value(self, key: str) -> Any:
        """The value of a key of the rope section; None if it is missing."""
        return self.entries[key][1] if key in self.entries else None


def agreed(what: str, found: list[Found], *, choose: bool = True) -> Found | None:
    """The first key and the value that all keys share; None without keys, an error if values differ.

    Args:
        choose: whether advice may choose one of the values; the caller must then use the result.
    """
    for one, other in ((found[0], other) for other in found[1:]):
        if one[1] != other[1]:
            both = [f"{path} = {value!r}" for path, value in (one, other)]
            ways = (f"if {both[0]} is right", one), (f"if {both[1]} is right", other)
            chosen: Found = settle(
                f"{what} must have one value but got {' and '.join(both)}",
                *(ways if choose else ()),
            )
            return chosen
    return found[0] if found else None


def ignored(source: Source, what: str, own: str, found: Found) -> Found:
    """Raise an error for a key that the code of a family ignores; return the key if it is tried."""
    got: Found = settle(
        f"{what} must be {own}, as the code of {source.name} reads no key for it, but got {found[1]!r} from "
        f"{found[0]}",
        ("for other code, which reads it", found),
    )
    return got


def whole(found: list[Found], most: int | None = None, least: int = 1) -> list[Found]:
    """Return ``found`` unchanged; an error if a value is not an int from ``least`` to ``most``."""
    for path, value in found:
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_type(f"{path} must be an int but got {value!r}")
        if value < least:
            fail(f"{path} must be at least {least} but got {value}")
        if most is not None and value > most:
            fail(f"{path} must be at most {most} but got {value}")
    return found
