"""After each test of `patch`, nothing is patched any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from tightrope import unpatch
from tightrope.patching import _patch


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Also what a failed test left."""
    yield
    unpatch()
    for slot in _patch._slots.values():
        slot.patches.clear()
    unpatch(nn.Identity())
