"""Scenarios on two processes equal one process: see processes/.

On four: `python -m tests.torch_modes.processes --processes 4`.
"""

from __future__ import annotations

import pytest

from tests.torch_modes.processes import harness


@pytest.mark.slow
def test_two_processes_equal_one(subtests: pytest.Subtests) -> None:
    outcomes = harness.run(2)
    assert len(outcomes) >= 5
    for name, error in outcomes.items():
        with subtests.test(name):
            assert error is None, error
