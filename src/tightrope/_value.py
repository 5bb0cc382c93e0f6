"""The base class of values that users make, compare and save: specs, axes and frequency rules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from ._errors import bad_type, bad_value, describe, public

T = TypeVar("T")


class Value:
    """A frozen dataclass. Its hash is computed once, and its ``repr`` leaves out default values."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Set here, so that the dataclass decorator does not add its own.
        cls.__hash__ = cls.__hash__  # type: ignore[method-assign]
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __hash__(self) -> int:
        # Some values hold thousands of numbers, and caches hash them often. The hash is computed on first use:
        # torch 2.11 cannot trace hash() in a constructor.
        made: int | None = self.__dict__.get("_hash")
        if made is None:
            made = hash((type(self).__name__, *self._values()))
            object.__setattr__(self, "_hash", made)
        return made

    def __repr__(self) -> str:
        shown = [
            f"{name}={_short(value)}"
            for (name, default), value in zip(self._defaults().items(), self._values(), strict=True)
            if value != default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy computes everything else anew: string hashes, for example, differ between processes.
        fields = dict(zip(field_names(type(self)), self._values(), strict=True))
        return functools.partial(type(self), **fields), ()

    def _defaults(self) -> dict[str, Any]:
        """Return the names of the fields and their default values."""
        return {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def _values(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return tuple(getattr(self, field.name) for field in fields)

    def _set(self, **values: object) -> None:
        """Store checked fields, converted to their normal types; for ``__post_init__``."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def checked_calls(kind: type[T]) -> type[T]:
    """Decorate a dataclass: arguments that its constructor does not have raise an error of this library."""
    kind.__init__ = public()(kind.__init__)  # type: ignore[method-assign]
    return kind


def field_names(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(kind)]


def dictionary(name: str, values: object) -> dict[str, Any]:
    """Return a copy of a mapping, or raise a TypeError that names it."""
    if not isinstance(values, Mapping):
        raise bad_type(f"{name} must be a dictionary but got {describe(values)}")
    return dict(values)


def from_fields(name: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass from a dictionary of its fields.

    Args:
        name: what the dictionary describes, for errors.
        kind: the dataclass.
        values: its fields; those with a default may be missing.

    Raises:
        ValueError: an unknown or a missing field.
    """
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [field.name for field in fields]
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    unknown, missing = values.keys() - {*known}, needed - values.keys()
    if unknown:
        raise bad_value(
            f"{name} must have only the keys {', '.join(known)} but got "
            f"{', '.join(sorted(map(str, unknown)))}"
        )
    if missing:
        raise bad_value(
            f"{name} must have all required keys but lacks {', '.join(sorted(missing))}"
        )
    return kind(**values)


def _short(value: Any) -> str:
    """Return the ``repr``, without the middle of a long tuple."""
    if not isinstance(value, tuple):
        return repr(value)
    if len(value) > 6:
        shown = [*map(_short, value[:2]), f"… {len(value) - 3} more …", _short(value[-1])]
    else:
        shown = [*map(_short, value)]
    return f"({', '.join(shown)}{',' if len(value) == 1 else ''})"
