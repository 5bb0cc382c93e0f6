"""The examples run, and say what their documentation says."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks import state_tracking as picture
from tests.support.tolerances import assert_same_bits
from tightrope.examples import state_tracking


def test_the_example_runs_and_its_results_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    state_tracking.main(["--quick", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "token by token" in printed
    found = json.loads(out.read_text())
    assert found["kinds"]["exact"]["drift"]["turns"] == 0
    assert found["kinds"]["float32"]["drift"]["turns"] > 0
    assert all(error < 1e-12 for error in found["sums"]["exact"].values())
    picture.main([str(out), "--png", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_float32_sums_one_by_one_are_those_of_decoding() -> None:
    model = state_tracking.Tracker("float32")
    own = model.attention.rotary
    assert isinstance(own, state_tracking.FloatSums)
    tokens, sums = state_tracking.sequences(2, 40, torch.Generator().manual_seed(0))
    assert sums[0, -1] == tokens[0, 1:].sum() % 5
    own.one_by_one = True
    ends = []
    for chunk in (1, 7, 41):
        _, cache = state_tracking.decode(model, tokens, chunk)
        assert cache.rotary is not None
        ends.append(cache.rotary.phases.drift)
    for one, other in itertools.pairwise(ends):
        assert_same_bits(one, other)
