"""The mark on generated subclasses: the original class and the replacements in it.

torch derives classes for single modules too, to shard or parametrize them. Theirs stay outermost, as if the
module had been patched first: torch removes members from the class of a module, and takes its first base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

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
    """The original class of a generated subclass or of one that torch derived; any other class itself."""
    core = core_of(cls)
    graft = graft_of(core)
    return core if graft is None else graft.base


def core_of(cls: type) -> type:
    """The class that torch derived a class from; any other class itself."""
    if _is_of_torch(cls):
        for core in map(core_of, cls.__bases__):
            if issubclass(core, torch.nn.Module) and not _is_of_torch(core):
                return core
    return cls


def derived(cls: type, core: type, made: dict[tuple[type, type], type]) -> type:
    """A class like a given one, with another core.

    Args:
        cls: the class of a module.
        core: the class to take the place of its core.
        made: those made so far, so that modules of one class keep one class.
    """
    old = core_of(cls)
    if core is old or cls is old:
        return cls if core is old else core
    if (cls, core) not in made:
        bases = tuple(derived(b, core, made) if core_of(b) is old else b for b in cls.__bases__)
        members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        made[cls, core] = type(cls)(cls.__name__, bases, members)
    return made[cls, core]


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"
