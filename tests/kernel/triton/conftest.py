"""A fixture for the tests of the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.triton.cases import HAS_GPU


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs programs sequentially, so use one program per tile."""
    from tightrope.backends.triton import blocks, rotation, slots

    if not HAS_GPU:
        monkeypatch.setattr(blocks, "PROGRAMS", 1)
    for module in (rotation, slots):
        module._plans.clear()
    yield
    for module in (rotation, slots):
        module._plans.clear()
