"""`patch` in tests: its verification, which takes a fifth of a second, is shared, and what a test leaves is undone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from tightrope import unpatch
from tightrope.patching import _patch, _verify

_found: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def find(function: Any, *how: Any) -> Any:
    """The kind of a function, found once."""
    known = _found.setdefault(function, {})
    if how not in known:
        known[how] = _verify.find(function, *how)
    return known[how]


@contextmanager
def verified_once() -> Iterator[None]:
    """Let `patch` verify each function once."""
    with mock.patch.object(_patch, "find", find):
        yield


def undo_all() -> list[str]:
    """Undo all patches, also of models that are not at hand; return the names that these had replaced."""
    unpatch()
    unpatch(nn.Identity())  # of models that are gone
    left = [slot.member.name for slot in _patch._slots.values()]
    for slot in _patch._slots.values():
        slot.patches.clear()
    unpatch(nn.Identity())
    return left
