"""Fixtures of the tests of `patch`: nothing is patched after a test, and a function is verified once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from tightrope import unpatch
from tightrope.patching import _patch, _verify

_found: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _find(function: Any, *how: Any) -> Any:
    known = _found.setdefault(function, {})
    if how not in known:
        known[how] = _verify.find(function, *how)
    return known[how]


@pytest.fixture(autouse=True)
def _verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification takes a fifth of a second, so tests that are not about it share its outcome."""
    monkeypatch.setattr(_patch, "find", _find)


@pytest.fixture(autouse=True)
def _nothing_stays(_verified_once: None) -> Iterator[None]:
    """Undo all patches after a test, also those that a failed one left."""
    yield
    unpatch()
    for slot in _patch._slots.values():
        slot.patches.clear()
    unpatch(nn.Identity())
