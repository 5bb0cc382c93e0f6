"""The pairing of a checkpoint: what its weights show, what files and the user state, and contradictions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import (
    DEEPSEEK,
    LLAMA,
    TRAINED,
    latent_tensors,
    llama_tensors,
    trained,
    write,
)
from tightrope_tools.convert import Stated, convert, detect

# --- what is stated, and by whom ------------------------------------------------------------------


def test_weights_that_contradict_their_configuration(tmp_path: Path) -> None:
    source = write(tmp_path / "a", trained(interleaved=True), TRAINED)
    with pytest.raises(
        ValueError,
        match=r"is half .assumed from model_type 'llama'. but its weights show interleaved",
    ):
        convert(source, tmp_path / "b", to="interleaved")
    done = convert(source, tmp_path / "b", to="interleaved", stated=Stated(source="half"))
    assert not done.assumed
    (warning,) = done.warnings
    assert re.fullmatch(
        r"the weights show interleaved, not half \(by chance at most once in \S+ cases\)", warning
    )


def test_weights_that_show_their_pairing_or_do_not(tmp_path: Path) -> None:
    source = write(tmp_path / "a", trained(interleaved=False), TRAINED)
    done = convert(source, tmp_path / "b", to="interleaved")
    assert (done.assumed, done.source_from) == (True, "model_type 'llama'")
    assert done.warnings == ()
    back = convert(tmp_path / "b", tmp_path / "c", to="half")
    assert (back.assumed, back.warnings) == (False, ())
    source = write(tmp_path / "d", llama_tensors())
    assert convert(source, tmp_path / "e", to="interleaved", dry_run=True).warnings == (
        "the weights do not show their pairing: half is only assumed from model_type 'llama'",
    )
    given = Stated(source="half")
    assert convert(source, tmp_path / "e", to="interleaved", stated=given).warnings == (
        "the weights do not show their pairing: half is only stated by the user (--from)",
    )


@pytest.mark.parametrize("key", [None, "rope_interleave"])
def test_a_pairing_is_stated_by_a_key_or_assumed(tmp_path: Path, key: str | None) -> None:
    stated = {} if key is None else {key: True}
    found = detect(write(tmp_path / "a", latent_tensors(), DEEPSEEK | stated))
    who = "model_type 'deepseek_v3'" if key is None else "the key rope_interleave"
    assert (found.stated, found.assumed, found.who) == ("interleaved", key is None, who)


# --- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_both_pairings_of_the_same_weights_are_detected(
    tmp_path: Path, interleaved: bool, width: int
) -> None:
    weights = trained(interleaved, width=width)
    source = write(tmp_path / "a", weights, {**TRAINED, "head_dim": width})
    with pytest.raises(ValueError, match=r"^\[detect\] the checkpoint must exist"):
        detect(tmp_path / "gone")
    found = detect(source)
    name, other = ("interleaved", "half") if interleaved else ("half", "interleaved")
    assert (found.pairing, found.stated) == (name, "half")
    assert found.confidence > 0.9999
    assert found.contradicts == interleaved
    convert(source, tmp_path / "b", to=other, stated=Stated(source=name))
    converted = detect(tmp_path / "b")
    assert (converted.pairing, converted.stated) == (other, other)
    assert not converted.contradicts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strength", [0.0, 0.03, 0.1, 0.3])
def test_never_a_wrong_answer(tmp_path: Path, strength: float, seed: int) -> None:
    interleaved = seed % 2 == 0
    weights = trained(interleaved, strength=strength, seed=seed)
    found = detect(write(tmp_path / "a", weights, TRAINED))
    if strength == 0.0:
        assert found.pairing is None
        assert found.confidence == 0.0
    else:
        assert found.pairing in (None, "interleaved" if interleaved else "half")
    if strength == 0.3:
        assert found.pairing is not None


def test_random_weights_and_few_heads_tell_nothing(tmp_path: Path) -> None:
    found = detect(write(tmp_path / "a", llama_tensors()))
    assert found.pairing is None
    assert {each.kind for each in found.evidence} == {"products", "queries", "norms"}
    few = {name: w for name, w in trained(True).items() if ".0." in name or "embed" in name}
    assert detect(write(tmp_path / "b", few, TRAINED)).pairing is None


def test_chance_is_a_bound(tmp_path: Path) -> None:
    from tightrope_tools.convert._detect import _weigh

    generator = torch.Generator().manual_seed(0)
    for heads, width in ((16, 8), (96, 32)):
        chances = []
        for _ in range(300):
            # Heads and channels with unequal noise.
            noise = torch.randn(heads, width, generator=generator, dtype=torch.float64)
            scale = torch.rand(heads, 1, generator=generator) * torch.rand(
                width, generator=generator
            )
            found = _weigh(noise * scale)
            assert found is not None
            chances.append(found[1])
        below = sum(chance < 0.1 for chance in chances)
        assert below <= 0.1 * len(chances)


def test_norms_are_evidence_too(tmp_path: Path) -> None:
    layers = 60
    weights = {"model.embed_tokens.weight": torch.randn(7, 32)}
    generator = torch.Generator().manual_seed(0)
    profile = torch.linspace(1.0, -1.0, 4).repeat_interleave(2)
    for layer in range(layers):
        place_ = f"model.layers.{layer}.self_attn"
        weights[f"{place_}.q_proj.weight"] = torch.randn(32, 32, generator=generator)
        weights[f"{place_}.k_proj.weight"] = torch.randn(16, 32, generator=generator)
        for name in ("q_norm", "k_norm"):
            noise = 0.1 * torch.randn(8, generator=generator)
            weights[f"{place_}.{name}.weight"] = (profile + noise).exp()
    config = {**LLAMA, "num_hidden_layers": layers}
    found = detect(write(tmp_path / "a", weights, config))
    assert found.pairing == "interleaved"
    assert min(found.evidence, key=lambda each: each.chance).kind == "norms"


def test_fused_projections_are_read(tmp_path: Path) -> None:
    separate = trained(True)
    fused = {"layers.x": torch.zeros(1)}
    for layer in range(12):
        q, k = (separate[f"model.layers.{layer}.self_attn.{n}_proj.weight"] for n in "qk")
        parts = []
        for n in range(4):
            parts += [q[64 * n : 64 * n + 64], k[32 * n : 32 * n + 32], torch.randn(32, 64)]
        fused[f"layers.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    save_file(fused, tmp_path / "a.safetensors")
    stated = Stated(head_dim=32, heads=8, kv_heads=4, naming="gpt_neox")
    found = detect(tmp_path / "a.safetensors", stated=stated)
    assert (found.pairing, found.stated) == ("interleaved", None)
