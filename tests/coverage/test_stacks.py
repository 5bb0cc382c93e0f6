"""The stored comparisons with other stacks, and the table of docs/stacks.md."""

from __future__ import annotations

import json

from tests.coverage.stacks import PAGE, RESULTS, table
from tightrope import stacks


def test_stacks_that_claim_to_have_run_did() -> None:
    """The stacks marked as run are those of tests/unit/stacks and of the stored comparisons.

    In the stored comparisons no result and no gradient differs.
    """
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    here = {"transformers", "diffusers", "diffusers-float64"}  # tests/unit/stacks
    ran = {name for name in stacks.names() if stacks.get(name).verified == stacks.RUN}
    assert ran == here | stored.keys()
    for name, entry in stored.items():
        assert entry.pop("source") == stacks.get(name).source
        assert entry.pop("torch")
        assert entry
        for numbers, results_differ, gradients_differ in entry.values():
            assert numbers > 0
            assert results_differ == gradients_differ == 0


def test_the_page_lists_all_stacks() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
