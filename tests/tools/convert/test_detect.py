"""The pairing of a checkpoint: what its weights show, what files and the user state, and contradictions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import (
    DEEPSEEK,
    TRAINED,
    latent_tensors,
    llama_tensors,
    trained,
    write,
)
from tightrope_tools.convert import Stated, convert, detect

NAMES = "half", "interleaved"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_both_pairings_of_the_same_weights_are_detected(
    tmp_path: Path, interleaved: bool, width: int
) -> None:
    """Where they contradict the family's pairing, only the user can say so, and is warned where they do not."""
    name, other = NAMES[interleaved], NAMES[not interleaved]
    config = {**TRAINED, "head_dim": width}
    source = write(tmp_path / "a", trained(interleaved, width=width), config)
    found = detect(source)
    assert (found.pairing, found.stated) == (name, "half")
    assert found.confidence > 0.9999
    assert found.contradicts == interleaved
    if interleaved:
        text = "is half .assumed from model_type 'llama'. but its weights show interleaved"
        with pytest.raises(ValueError, match=text):
            convert(source, tmp_path / "b", to="interleaved")
    given = Stated(source=name) if interleaved else None
    done = convert(source, tmp_path / "b", to=other, stated=given)
    assert (done.assumed, done.warnings) == (not interleaved, ())
    assert convert(tmp_path / "b", tmp_path / "c", to=name).warnings == ()
    converted = detect(tmp_path / "b")
    assert (converted.pairing, converted.stated) == (other, other)
    assert not converted.contradicts
    wrong = convert(source, tmp_path / "d", to=name, stated=Stated(source=other))
    text = rf"the weights show {name}, not {other} \(by chance at most once in \S+ cases\)"
    (warning,) = wrong.warnings
    assert re.fullmatch(text, warning)
    assert not wrong.assumed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strength", [0.0, 0.03, 0.1, 0.3])
def test_never_a_wrong_answer(tmp_path: Path, strength: float, seed: int) -> None:
    weights = trained(seed % 2 == 0, strength=strength, seed=seed)
    found = detect(write(tmp_path / "a", weights, TRAINED))
    if strength == 0.0:
        assert (found.pairing, found.confidence) == (None, 0.0)
    else:
        assert found.pairing in (None, NAMES[seed % 2 == 0])
    assert strength < 0.3 or found.pairing is not None


def test_random_weights_and_few_heads_tell_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    found = detect(source)
    assert found.pairing is None
    assert {each.kind for each in found.evidence} == {"products", "queries"}
    for stated, whence in (
        (None, "assumed from model_type 'llama'"),
        (Stated(source="half"), "stated by the user (--from)"),
    ):
        done = convert(source, tmp_path / "b", to="interleaved", stated=stated, dry_run=True)
        text = f"the weights do not show their pairing: half is only {whence}"
        assert done.warnings == (text,)
    few = {name: w for name, w in trained(True).items() if ".0." in name or "embed" in name}
    assert detect(write(tmp_path / "c", few, TRAINED)).pairing is None


def test_kinds_of_evidence_that_contradict_each_other_tell_nothing(tmp_path: Path) -> None:
    """Queries of half pairing, and keys of the other, which differ more."""
    weights = trained(True, strength=1.5)
    weights |= {name: w for name, w in trained(False).items() if "q_proj" in name}
    found = detect(write(tmp_path / "a", weights, TRAINED))
    assert {each.favours for each in found.evidence} == {*NAMES}
    assert max(each.chance for each in found.evidence) < 1e-2
    assert found.pairing is None


def test_chance_is_a_bound(tmp_path: Path) -> None:
    """Weights without structure give a small chance at most as often as it says."""
    chances = []
    for seed in range(40):
        weights = trained(True, strength=0.0, seed=seed, layers=2)
        found = detect(write(tmp_path / str(seed), weights, {**TRAINED, "num_hidden_layers": 2}))
        chances += [each.chance for each in found.evidence]
    assert len(chances) == 80
    for bound in (0.3, 0.1):
        assert sum(chance < bound for chance in chances) <= bound * len(chances)


@pytest.mark.parametrize("key", [None, "rope_interleave"])
def test_a_pairing_is_stated_by_a_key_or_assumed(tmp_path: Path, key: str | None) -> None:
    stated = {} if key is None else {key: True}
    found = detect(write(tmp_path / "a", latent_tensors(), DEEPSEEK | stated))
    who = "model_type 'deepseek_v3'" if key is None else "the key rope_interleave"
    assert (found.stated, found.assumed, found.who) == ("interleaved", key is None, who)


def test_fused_projections_are_read(tmp_path: Path) -> None:
    separate = trained(True)
    fused = {}
    for layer in range(12):
        q, k = (separate[f"model.layers.{layer}.self_attn.{n}_proj.weight"] for n in "qk")
        groups = [(q[64 * n :][:64], k[32 * n :][:32], torch.randn(32, 64)) for n in range(4)]
        fused[f"layers.{layer}.attention.query_key_value.weight"] = torch.cat(sum(groups, ()))
    stated = Stated(head_dim=32, heads=8, kv_heads=4, naming="gpt_neox")
    found = detect(write(tmp_path / "a", fused, None), stated=stated)
    assert (found.pairing, found.stated) == ("interleaved", None)
