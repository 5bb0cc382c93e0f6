"""A configuration in one format, over the defaults of its class: its keys, the user's names for them, and its family."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from .._errors import bad_type, bad_value
from ..frequencies import Given
from . import keys
from .families import Family

OPERATION = "from_config"
# Far above the head width of any model: a larger one is an error before anything of its size is made.
WIDEST = 65536
_MOST_LAYERS = 65536


class Found(NamedTuple):
    """A value and where it is from.

    Attributes:
        value: any value.
        source: the path of its key, or the class or argument that gave it.
        given: whether the file or the caller gave it; False for what a class fills in.
    """

    value: Any
    source: str
    given: bool = True


# A rope section: key -> value and path.
Section = dict[str, Found]


class Question(NamedTuple):
    """A fact that neither a file nor the table of families gives.

    Attributes:
        fact: what is missing.
        advice: the argument that answers, and its values.
        likely: the answer for code like Llama's.
    """

    fact: str
    advice: str
    likely: Any


def fail(message: str) -> NoReturn:
    """Raise a ValueError whose message has the form of all errors of this library."""
    raise bad_value(message)


@dataclass(frozen=True)
class Stated:
    """The arguments of :meth:`tightrope.RopeSpec.from_config`; None for what the caller leaves to the file."""

    layer_type: str | None = None
    section: str | None = None
    strict: bool = True
    base: float | None = None
    interleaved: bool | None = None
    rotary_dim: int | None = None
    start: int | None = None
    rope_layers: str | Collection[str] | None = None
    inv_freq: Given | None = None

    def __post_init__(self) -> None:
        given = self.rope_layers
        named = False
        if isinstance(given, Collection) and not isinstance(given, str):
            named = len(given) > 0 and all(isinstance(name, str) for name in given)
        if not (given is None or named or (isinstance(given, str) and given == "all")):
            raise bad_type(
                f"rope_layers must be 'all', a collection of layer types that is not empty, or None but got {given!r}"
            )

    def argument(self, name: str) -> list[Found]:
        """An argument as if it were a key; empty for None."""
        value = getattr(self, name)
        return [] if value is None else [Found(value, f"the argument {name}")]


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
        model: the model, if the configuration is that of one.
        version: the version of transformers that wrote the file, as its keys state it.
        stated: the arguments of the caller.
        asked: argument -> the question that it answers, as far as the configuration was read.
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
    model: torch.nn.Module | None = None
    version: str | None = None
    stated: Stated = field(default_factory=Stated)
    asked: dict[str, Question] = field(default_factory=dict)

    @property
    def facts(self) -> Family:
        """The facts of the family; empty ones if it is unknown."""
        return self.family or _UNKNOWN

    def ask(self, argument: str, fact: str, advice: str, likely: Any) -> None:
        """Ask a question that an argument of from_config answers; see :class:`Question`."""
        self.asked[argument] = Question(fact, advice, likely)

    def shown(self, path: str) -> str:
        """The name of a path in the user's file."""
        return self.spelled.get(path, self.prefix + path)

    def given(self, *names: str) -> list[Found]:
        """The values that the file has under these keys, or by the class's other names for them; null counts as absent."""
        every = dict.fromkeys(each for name in names for each in self._named(name))
        return [
            Found(self.values[key], self.shown(key))
            for key in every
            if self.values.get(key) is not None
        ]

    def _named(self, name: str) -> list[str]:
        """A key, and the class's other names for it."""
        also = self.facts.also
        return [name, *filter(None, [also.get(name)]), *(key for key in also if also[key] == name)]

    def get(self, *names: str, default: bool = True) -> Found | None:
        """The file's value, which all these keys share, or the class's default; null is not the default."""
        found = agreed(names[0], self.given(*names))
        if found is not None or not default or any(name in self.values for name in names):
            return found
        defaults, also = self.facts.keys, self.facts.also
        own = [key for name in names for key in (name, also.get(name, name)) if key in defaults]
        return Found(defaults[own[0]], self.facts.owner, given=False) if own else None

    def width(self, *names: str) -> Found | None:
        """A width: of a part of a composite, perhaps the class's default; in an outer level a key must give it."""
        found = self.get(*names, default=bool(self.prefix))
        return None if found is None else whole([found], WIDEST)[0]

    def layer_count(self) -> int | None:
        """The number of layers; of an outer level only if a key gives it."""
        found = self.get(*keys.LAYER_COUNT, default=bool(self.prefix))
        return None if found is None else int(whole([found], _MOST_LAYERS)[0].value)

    def listed(self, key: str, predicting: bool = False) -> list[Any]:
        """The entry of a list for each layer: the file's, or as its class fills them in; [] without one.

        Args:
            predicting: whether the list may have more entries, for layers that only predict.
        """
        found, count = self.get(key, default=False), self.layer_count()
        if found is not None:
            own = count if self.given(*keys.LAYER_COUNT) else None
            has, least = len(entries(found)), own or 0
            lengths = {0, own or has}
            for more in self.given("num_nextn_predict_layers"):
                lengths.add(least + (more.value if isinstance(more.value, int) else 0))
            if has not in lengths and not (predicting and has > least):
                fail(f"{found.source} must have an entry for each of {own} layers but has {has}")
            if has:
                return list(found.value[:own])
        rule = self.facts.lists.get(key)
        if rule is None or count is None:
            return []
        if any(
            self.values.get(other, value) != value for other, value in rule.get("only", {}).items()
        ):
            return []
        if "windows" in rule and self.get("sliding_window") is None:
            return []
        body = list(rule["repeat"])
        every = whole(self.given(*rule.get("every", "").split()), _MOST_LAYERS)
        if every and len({*body}) == 2:
            odd, other = sorted(dict.fromkeys(body), key=body.count)
            rest = [other] * (every[0].value - 1)
            body = [odd, *rest] if body[0] == odd else [*rest, odd]
        made = [body[layer % len(body)] for layer in range(count)]
        return [*made[:-1], rule["last"]] if "last" in rule else made


_UNKNOWN = Family()


def agreed(what: str, found: list[Found]) -> Found | None:
    """The first of several values, which must be equal; None without one."""
    for other in found[1:]:
        if other.value != found[0].value:
            both = [f"{each.source} = {each.value!r}" for each in (found[0], other)]
            fail(f"{what} must have one value but got {both[0]} and {both[1]}")
    return found[0] if found else None


def entries(found: Found) -> list[Any]:
    """The entries of a list."""
    if not isinstance(found.value, list | tuple):
        raise bad_type(f"{found.source} must be a list but got {found.value!r}")
    return list(found.value)


def integers(found: Found, most: int | None = None, least: int = 1) -> list[int]:
    """The entries of a list of ints from ``least`` to ``most``."""
    numbers = entries(found)
    whole([found._replace(value=number) for number in numbers], most, least)
    return numbers


def items(found: Found) -> Mapping[Any, Any]:
    """The keys of a mapping; none of None."""
    if not isinstance(found.value, Mapping | None):
        raise bad_type(f"{found.source} must be a mapping but got {found.value!r}")
    return found.value or {}


def boolean(found: Found) -> bool:
    """True or False."""
    if not isinstance(found.value, bool):
        raise bad_type(f"{found.source} must be a bool but got {found.value!r}")
    return found.value


def whole(found: list[Found], most: int | None = None, least: int = 1) -> list[Found]:
    """Return ``found`` unchanged; an error if a value is not an int from ``least`` to ``most``."""
    for value, source, _ in found:
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_type(f"{source} must be an int but got {value!r}")
        if value < least:
            fail(f"{source} must be at least {least} but got {value}")
        if most is not None and value > most:
            fail(f"{source} must be at most {most} but got {value}")
    return found
