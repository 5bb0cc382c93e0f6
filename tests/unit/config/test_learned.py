"""Frequencies that the weights of a model hold: refused without their values, made with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.learned import LARGE, SMALL, large, model_of
from tests.support.reading import outcome, read, refused
from tightrope import RopeSpec
from tightrope.config import LayerSpecs, provenance
from tightrope.config.families import FAMILIES
from tightrope.frequencies import Given, YaRN

SPEECH = {**SMALL, "conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,)}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
# Model types whose weights hold a copy of the frequencies -> settings of a small one.
COPIES: dict[str, dict[str, Any]] = {
    "esm": {**SMALL, "position_embedding_type": "rotary", "pad_token_id": 1},
    "wav2vec2-conformer": {**SPEECH, "position_embeddings_type": "rotary"},
    "roformer": SMALL,
}


def frequencies(spec: Any) -> Any:
    return spec.frequencies().inv_freq


@pytest.fixture(name="large")
def large_() -> Any:
    return large()


def test_a_configuration_without_its_weights_is_refused(large: Any, tmp_path: Path) -> None:
    large.config.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = model_of("mistral_large4_text", **LARGE)
    text = (
        "the frequencies of model_type 'mistral_large4_text' depend on its tensor alpha, which only its weights hold; "
        "pass the model in place of its configuration, or inv_freq"
    )
    for config in (large.config, large.config.to_dict(), tmp_path, empty):
        refused(config, text)
        refused(config, text, strict=False)


def test_a_model_has_the_values(large: Any) -> None:
    rotary = large.rotary_emb
    wanted = (rotary.inv_freq * rotary.alpha.exp()).double()
    specs = read(large)
    assert isinstance(specs, LayerSpecs)
    assert specs["no_rope"] is None
    assert torch.allclose(frequencies(specs["rope"]), wanted, rtol=1e-6)
    assert read(large, layer_type="rope").interleaved
    assert "alpha of the model" in str(provenance(large))
    rotary.alpha.zero_()  # as in a model without weights
    assert isinstance(read(large)["rope"].scaling, YaRN)


def test_the_caller_may_give_the_values(large: Any) -> None:
    inv_freq = frequencies(read(large)["rope"])
    for config in (large.config, large.config.to_dict()):
        assert read(config, inv_freq=inv_freq) == read(large)
    refused(large.config, "must have one number per pair, 32, but got 3", inv_freq=inv_freq[:3])
    section = {**large.config.rope_parameters, "attention_factor": 1.5}
    factor = {**large.config.to_dict(), "rope_parameters": section}
    text = "must come with one set of frequencies for all lengths, and no factor"
    refused(factor, text, inv_freq=torch.ones(32))


def test_the_caller_may_give_them_for_an_unknown_family_and_for_no_other() -> None:
    config = {"model_type": "zebra", "head_dim": 64, "rope_theta": 1e4, "num_hidden_layers": 2}
    given: dict[str, Any] = {"interleaved": False, "rotary_dim": 64, "inv_freq": torch.ones(32)}
    made = read(config, **given, rope_layers="all")
    assert made == RopeSpec(64, scaling=Given.of(torch.ones(32)))
    assert "rope_layers='all', inv_freq=inv_freq)" in str(outcome(config, **given))
    text = "inv_freq must be None for model_type 'llama', whose code computes the frequencies from its configuration"
    refused({**config, "model_type": "llama"}, text, inv_freq=torch.ones(32))


@pytest.mark.parametrize("model_type", COPIES)
def test_a_copy_of_the_frequencies_counts_where_it_differs(model_type: str) -> None:
    model = model_of(model_type, **COPIES[model_type])
    plain = read(model.config)
    assert read(model) == plain == read(model.config.to_dict())
    assert read(model.bfloat16()) == plain  # rounded, as checkpoints are
    model.float()
    name, other = FAMILIES[model_type].learned, RopeSpec(32, base=100.0)
    copies = [tensor for key, tensor in model.state_dict().items() if key.endswith(f".{name}")]
    for tensor in copies:
        if model_type == "roformer":
            cos, sin = other.cos_sin(seq_len=len(tensor), tables="half")
            tensor.copy_(torch.cat((sin[0], cos[0]), -1))
        else:
            tensor.copy_(frequencies(other))
    assert torch.allclose(frequencies(read(model)), frequencies(other), rtol=1e-6)
    if len(copies) > 1:
        copies[0].mul_(2)
        assert f"{name} must be the same in all layers" in str(outcome(model))
