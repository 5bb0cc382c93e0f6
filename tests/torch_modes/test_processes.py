"""Scenarios on four processes equal one process: see processes/.

`harness.run(2, ["dtensors"])` is one scenario on two processes.
"""

from __future__ import annotations

import pytest

from tests.torch_modes.processes import harness


@pytest.mark.slow
def test_four_processes_equal_one(subtests: pytest.Subtests) -> None:
    outcomes = harness.run(4)
    assert len(outcomes) >= 5
    for name, error in outcomes.items():
        with subtests.test(name):
            assert error is None, error
