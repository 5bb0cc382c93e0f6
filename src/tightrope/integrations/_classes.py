"""The mark on generated subclasses: the original class and the replacements in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARK = "_tightrope_graft"


@dataclass(frozen=True)
class Graft:
    """The origin of a generated subclass.

    Attributes:
        base: the original class.
        recipe: the replacements in it, as plain data.
    """

    base: type
    recipe: Any


def graft_of(cls: type) -> Graft | None:
    """The origin of a generated subclass, or None for any other class."""
    return vars(cls).get(MARK)


def base_of(cls: type) -> type:
    """The original class of a generated subclass; any other class itself."""
    graft = graft_of(cls)
    return cls if graft is None else graft.base
