"""Which classes were made here, and of which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARK = "_tightrope_graft"


@dataclass(frozen=True)
class Graft:
    """What a class made here remembers.

    Attributes:
        base: the class as its authors wrote it.
        recipe: what is replaced in it, as plain data.
    """

    base: type
    recipe: Any


def graft_of(cls: type) -> Graft | None:
    """What a class was made of, or None for a class of others."""
    return vars(cls).get(MARK)


def base_of(cls: type) -> type:
    """The class as its authors wrote it."""
    graft = graft_of(cls)
    return cls if graft is None else graft.base
