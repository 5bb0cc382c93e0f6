"""The calls at the end of refusals of `from_config`: whole sentences, and that no advice hides another rotation."""

import warnings
from typing import Any

import pytest

from tests.support.advice import calls_in, made_by
from tests.support.reading import LATENT, LLAMA, llama, outcome, refused, without
from tightrope import RopeSpec
from tightrope.config import _small_model

YARN = {"rope_type": "yarn", "factor": 0.25, "original_max_position_embeddings": 4096}
BASES = "every key that may give a base must be known but got"
BY_HAND = "make a spec by hand for each kind of layers"


@pytest.mark.parametrize(
    "config, end",
    [
        (
            llama(rope_parameters={"rope_theta": 1e4}),
            "; if rope_parameters.rope_theta = 10000.0 is right: RopeSpec(head_dim=128); if rope_theta = 500000.0 is "
            "right: RopeSpec(head_dim=128, base=500000.0).",
        ),
        (
            llama(model_type="zebra", head_dim=128, d_head=64),
            "; if head_dim = 128 is right, for code like Llama's: RopeSpec(head_dim=128, base=500000.0); if d_head = "
            "64 is right, for code like Llama's: RopeSpec(head_dim=64, base=500000.0).",
        ),
        (
            without(LLAMA, "rope_theta"),
            "; if the base is 10000, as in the paper: RopeSpec(head_dim=128).",
        ),
        (
            llama(model_type="phi"),
            "; for example, if it is half: RopeSpec.from_config(config, rotary_dim=64).",
        ),
        (
            llama(model_type="stablelm", partial_rotary_factor=0.04),
            "rotary_dim must be even but got 5 from partial_rotary_factor = 0.04 of 128; for code that then rotates 6, "
            "by base ** (-2 * k / 5): RopeSpec(head_dim=128, base=500000.0, rotary_dim=6, scaling=Given(inv_freq=(1.0, "
            "0.005253055608807534, 2.7594593229224296e-05))).",
        ),
        (
            llama(rope_scaling=YARN),
            "; if it is the ratio of the old to the new: RopeSpec(head_dim=128, base=500000.0, "
            "scaling=YaRN(factor=4.0, original_max_position=4096)).",
        ),
        (
            llama(rope_tehta=1.0),
            "strict=False ignores them with a warning: RopeSpec.from_config(config, strict=False).",
        ),
        (
            llama(model_type="zebra", rope_tehta=1.0),
            "; strict=False ignores them with a warning; for code like Llama's: RopeSpec.from_config(config, "
            "strict=False, interleaved=False, rotary_dim=128, rope_layers='all').",
        ),
        (
            {"rope_theta": 1e4, "vision_config": {**LLAMA, "model_type": "gte"}},
            "; for a part of it: RopeSpec.from_config(config, section='vision_config').",
        ),
    ],
)
def test_a_refusal_ends_with_the_call_that_works(config: dict[str, Any], end: str) -> None:
    error = outcome(config)
    assert str(error).endswith(end)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strict=False
        assert all(made_by(call, config) for call in calls_in(str(error)))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("key", ["swa_rope_theta", "global_rope_theta", "sliding_freq_base"])
def test_a_key_that_gives_a_base_is_never_ignored(key: str, strict: bool) -> None:
    config = llama(**{key: 1e4})
    refused(config, f"{BASES} {key}; {BY_HAND}.", strict=strict)
    own, others = (made_by(call, config) for call in calls_in(str(outcome(config, strict=strict))))
    assert (own, others) == (RopeSpec(128), RopeSpec(128, base=5e5))


def test_a_base_in_a_section_of_an_unknown_name_is_never_ignored() -> None:
    config = llama(positions={"rope_theta": 1e4})
    refused(config, f"{BASES} positions; {BY_HAND}.", strict=False)
    (call,) = calls_in(str(outcome(config)))  # which layers have that base is not known
    assert made_by(call, config) == RopeSpec(128, base=5e5)


def test_values_that_advice_cannot_choose_are_refused_without() -> None:
    latent = llama(model_type="deepseek_v3", qk_head_dim=64, **LATENT)
    assert calls_in(str(outcome(latent))) == []


def test_the_advice_for_an_object_runs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(_small_model, "find", lambda *_: pytest.fail("a model was run"))
    config = transformers.AutoConfig.for_model("gpt_oss", rope_tehta=1.0)
    (call,) = calls_in(str(outcome(config)))
    assert call == "RopeSpec.from_config(config, strict=False)"
    zebra = transformers.AutoConfig.for_model("llama", head_dim=64, d_head=32)
    zebra.model_type = "zebra"
    one, other = calls_in(str(outcome(zebra)))
    assert (made_by(one, config), made_by(other, config)) == (RopeSpec(64), RopeSpec(32))
