"""The examples run, and say what their documentation says."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import state_tracking
import train_bytes
from benchmarks import state_tracking as picture
from tests.support.helpers import noise
from tests.support.tolerances import assert_same_bits
from train_bytes import ByteTransformer, Size


def test_the_example_runs_and_its_results_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    state_tracking.main(["--quick", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "token by token" in printed
    found = json.loads(out.read_text())
    assert found["exact"]["drift"]["turns"] == 0
    assert found["float32"]["drift"]["turns"] > 0
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
        ends.append(state_tracking.decode(model, tokens, chunk)[1].phases)
    for one, other in itertools.pairwise(ends):
        assert_same_bits(one, other)


@pytest.mark.parametrize("channels", [1, 64, 300, 4096])
def test_products_have_the_same_bits_for_any_number_of_tokens(channels: int) -> None:
    x, weight = noise(67, channels, dtype=torch.float32), noise(33, channels, seed=1)
    x[0], x[1, 0] = 1e-3, 1e30
    weights = state_tracking.rounded(weight).mT
    every = state_tracking.rounded(x) @ weights
    for sizes in ([1] * 67, [5, 60, 2]):
        parts = [state_tracking.rounded(part) @ weights for part in x.split(sizes)]
        assert_same_bits(torch.cat(parts), every)
    size = x.double().norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
    assert ((every - x.double() @ weight.T).abs() <= 2.0**-20 * size).all()


def test_text_is_split_by_file(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"file_{index}.py").write_bytes(bytes([index]) * 6000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_bytes(b"\xff" * 6000)
    corpus = train_bytes.load_text(tmp_path)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert corpus.files == 40
    assert (len(train), len(validation)) == (36, 4)
    assert train.isdisjoint(validation)
    assert corpus.sha256 == train_bytes.load_text(tmp_path).sha256


def test_the_example_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Size(layers=1, heads=2, head_dim=8, context=16, batch=2)
    monkeypatch.setattr(train_bytes, "Size", lambda: small)
    train_bytes.main(["--steps", "21", "--seed", "1"])
    output = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", output))
    assert last < first
    assert "validation" in output
    assert "\ndef " in output


def test_the_example_decodes_as_it_reads() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(Size(layers=2, heads=2, head_dim=8))
    found = list(train_bytes.write(model, "abc", 5))
    tokens = torch.tensor([[*b"abc", *(token for token, _ in found)]])
    want = model(tokens)[0, 2:-1]
    torch.testing.assert_close(torch.stack([logits for _, logits in found]), want)
