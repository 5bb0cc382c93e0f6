"""Verification takes a fifth of a second, so code that is not about it shares its outcome."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
