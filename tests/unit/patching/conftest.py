"""Fixtures of the tests of `patch`: nothing is patched after a test, and a function is verified once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from tests.support.verified import verified_once
from tightrope import unpatch
from tightrope.patching import _patch


@pytest.fixture(autouse=True)
def _verified_once() -> Iterator[None]:
    with verified_once():
        yield


@pytest.fixture(autouse=True)
def _nothing_stays(_verified_once: None) -> Iterator[None]:
    """Undo all patches after a test, also those that a failed one left."""
    yield
    unpatch()
    for slot in _patch._slots.values():
        slot.patches.clear()
    unpatch(nn.Identity())
