"""Fixtures of the tests of `patch`: nothing is patched after a test, and a function is verified once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.verified import undo_all, verified_once


@pytest.fixture(autouse=True)
def _verified_once() -> Iterator[None]:
    with verified_once():
        yield


@pytest.fixture(autouse=True)
def _nothing_stays(_verified_once: None) -> Iterator[None]:
    """Undo all patches after a test, also those that a failed one left."""
    yield
    undo_all()
