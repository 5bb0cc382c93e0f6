"""Test the scaling that a rope section states, and sections for each type of layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tests.support import oracle_frequencies as truth
from tests.support.reading import (
    JUNK,
    LATENT,
    llama,
    read,
    refused,
    try_everywhere,
    unknown,
)
from tightrope import RopeSpec
from tightrope.config import provenance
from tightrope.frequencies import (
    RULES,
    DynamicNTK,
    Frequencies,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
    default,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def scaling(section: dict[str, Any], **outer: Any) -> Rule | None:
    made: RopeSpec = read(llama(**outer, rope_scaling=section))
    return made.scaling


def sources(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of each field."""
    return {row.field: row.source for row in provenance(config).rows}


def test_yarn_and_dynamic_begin_at_the_length_of_the_context() -> None:
    assert scaling({"type": "dynamic", "factor": 2.0}) == DynamicNTK(2, 8192)
    assert scaling({"type": "yarn", "factor": 2.0}) == YaRN(2, 8192)
    found = sources(llama(rope_scaling={"type": "yarn", "factor": 2.0}))
    assert found["scaling.original_max_position"] == (
        "max_position_embeddings, as no key gives the original length"
    )


def test_a_null_factor_is_the_ratio_of_the_lengths() -> None:
    section = {"type": "yarn", "factor": None, "original_max_position_embeddings": 4096}
    assert scaling(section) == YaRN(2, 4096)
    del section["factor"]
    with pytest.raises(ValueError, match="must have factor but has only"):
        scaling(section)


def test_longrope_takes_its_factor_from_the_lengths() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    wanted = LongRoPE((1.0,) * 64, (2.0,) * 64, 4096, factor=2)
    length = {"original_max_position_embeddings": 4096}
    for name in ("longrope", "su"):
        assert scaling({"type": name, **lists, **length}) == wanted
        assert scaling({"type": name, **lists}, **length) == wanted


def test_attn_factor_multiplies_yarns_own_factor() -> None:
    own = YaRN(4, 8192).frequencies(128, 1e4).attention_scaling
    made = read(llama(model_type="internlm2", rope_scaling={**YARN, "attn_factor": 2.0})).scaling
    assert made is not None
    assert made.frequencies(128, 1e4).attention_scaling == pytest.approx(2 * own, rel=1e-15)


def test_a_new_rule_is_read_without_a_change_here() -> None:
    @dataclass(frozen=True)
    class Doubled(Rule):
        names = ("doubled",)
        keys: ClassVar[dict[str, tuple[str, ...]]] = {"times": ("how_often", "times")}
        times: int

        def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
            row = default(rotary_dim, base).exact
            return Frequencies(tuple(omega * 2**self.times for omega in row))

    try:
        assert scaling({"rope_type": "doubled", "how_often": 3}) == Doubled(3)
        with pytest.raises(ValueError, match="scaling by 'doubled' must have how_often/times but"):
            scaling({"rope_type": "doubled"})
        with pytest.raises(ValueError, match=r"known but got rope_scaling\.factor"):
            scaling({"rope_type": "doubled", "times": 3, "factor": 2})
    finally:
        del RULES["doubled"]


# --- Mistral's own file ---------------------------------------------------------------------------

MISTRAL: dict[str, Any] = {
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1e6,
}
SCALED: dict[str, Any] = {
    "factor": 16,
    "beta": 32,
    "alpha": 1,
    "original_max_position_embeddings": 16384,
    "apply_scale": False,
}


def mistral(**changes: Any) -> dict[str, Any]:
    """Return Mistral's configuration with YaRN, some of its keys changed."""
    return {**MISTRAL, "yarn": {**SCALED, **changes}}


@pytest.mark.parametrize("apply_scale", [False, True])
def test_yarn_of_mistrals_own_file(apply_scale: bool) -> None:
    made = read(mistral(apply_scale=apply_scale)).frequencies()
    wanted = truth.yarn(128, 1e6, 16, 16384, 32, 1)
    for got, omega in zip(made.exact, wanted, strict=True):
        assert float(got) == pytest.approx(float(omega), rel=1e-14)
    assert made.inv_freq[63].item() == pytest.approx(7.756e-8, rel=1e-4)
    scale = 0.1 * math.log(16) + 1 if apply_scale else 1.0
    assert made.attention_scaling == pytest.approx(scale, rel=1e-14)


def test_alpha_and_beta_of_mistrals_own_file() -> None:
    wanted = YaRN(16, 16384, beta_fast=4, beta_slow=2, attention_factor=1)
    assert read(mistral(beta=4, alpha=2)).scaling == wanted
    found = sources(mistral())
    assert found["scaling.beta_slow"] == "yarn.alpha"
    assert found["scaling.attention_factor"] == "yarn.apply_scale"


def test_other_keys_of_mistrals_own_file() -> None:
    other = {
        "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
        "sliding_window": [4096, None],
        "moe": {"num_experts": 8},
        "vision_encoder": {"rope_theta": 10000.0, "hidden_size": 1024},
        "model_type": None,
    }
    assert read({**MISTRAL, **other}) == read(MISTRAL) == RopeSpec(128, base=1e6, interleaved=True)
    assert read({**mistral(), **LATENT, "head_dim": None}).start == 96


@pytest.mark.parametrize(
    "config, kind, text",
    [
        (
            {**MISTRAL, "yarn": {"factor": 16, "original_max_position_embeddings": 16384}},
            ValueError,
            "yarn.apply_scale must be true or false but got None.",
        ),
        ({**MISTRAL, "yarn": 16}, TypeError, "yarn must be a mapping but got 16."),
        (mistral(beta_fast=32), ValueError, unknown("yarn.beta_fast")),
        (
            {**mistral(), "use_scaled_rope": True},
            ValueError,
            "only one kind of scaling can apply but got use_scaled_rope and yarn.",
        ),
        (
            {**mistral(apply_scale=True), **LATENT},
            ValueError,
            "yarn.apply_scale must be false with latent attention, where it could mean two factors.",
        ),
    ],
)
def test_yarn_that_is_not_mistrals(
    config: dict[str, Any], kind: type[Exception], text: str
) -> None:
    refused(config, text, kind)


def test_ntk_has_two_meanings() -> None:
    gte = {"head_size": 64, "rotary_dim": 64, "is_neox_style": True, "rope_theta": 160000}
    text = (
        "rope_parameters.rope_type must name one rule but 'ntk' names two: if it multiplies the base by factor ** "
        "(d / (d - 2)), with d = rotary_dim, make a RopeSpec with scaling=NTK(factor); if, as in vLLM, it divides "
        "frequency k by factor ** (2 * (k + 1) / d), one with scaling=Given(frequencies)."
    )
    refused({**gte, "rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, text)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_mistrals_own_file_is_refused_in_a_sentence(junk: object) -> None:
    try_everywhere(junk, mistral())
    try_everywhere(junk, mistral(), interleaved=True, rotary_dim=64, rope_layers="all")


@pytest.mark.parametrize("name", ["phi3", "llama", "phimoe"])
def test_mscales_of_longrope_are_read_where_the_class_reads_them(name: str) -> None:
    """vLLM reads them for all models; the classes of transformers do for Phi-3.5-MoE alone."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.2}
    section = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, **scales}
    config = llama(
        model_type=name,
        rope_scaling=section,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
    )
    if name == "phimoe":
        made = RopeSpec.from_config(config)
        assert (made.attention_scaling(9), made.attention_scaling(9999)) == (1.1, 1.2)
        return
    refused(
        config,
        f"short_mscale and long_mscale must not be given for model_type {name!r}: vLLM scales attention by 1.1 and 1.2, "
        "transformers ignores the keys and scales by 1.19024.",
    )


def test_the_proportional_rule_of_a_class_is_for_whole_heads() -> None:
    """The classes of transformers take its part of head_dim, whatever rotary_dim says."""
    section = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = {"model_type": "minimax_m2", "hidden_size": 256, "num_attention_heads": 2}
    config |= {"head_dim": 128, "rope_parameters": section}
    whole = RopeSpec(128, scaling=Proportional(0.5))
    assert RopeSpec.from_config(config) == whole
    assert RopeSpec.from_config({**config, "rotary_dim": 128}) == whole
    with pytest.raises(ValueError, match="rotary_dim = 64 and all of head_dim = 128"):
        RopeSpec.from_config({**config, "rotary_dim": 64})
