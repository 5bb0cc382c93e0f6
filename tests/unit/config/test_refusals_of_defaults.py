"""Files that lack what a class of transformers adds by default are refused, never read as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightrope import RopeSpec
from tightrope.config.families import FAMILIES

HEADS = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 8, "head_dim": 64}
NESTED = [name for name, family in FAMILIES.items() if family.layers == "nested"]
SCALED = [name for name, family in FAMILIES.items() if family.scaled]
LATENT = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32}


def config_of(name: str, **more: Any) -> dict[str, Any]:
    latent = LATENT if FAMILIES[name].start == "nope" else {}
    heads = {key: value for key, value in HEADS.items() if not latent or key != "head_dim"}
    return {"model_type": name, **heads, **latent, "rope_theta": 1e4, **more}


@pytest.mark.parametrize("name", NESTED)
def test_one_base_is_not_taken_for_all_types_of_layers(name: str) -> None:
    with pytest.raises(ValueError, match="rope_parameters must have a section for each type"):
        RopeSpec.from_config(config_of(name))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("more", [{}, {"rope_scaling": None}, {"rope_parameters": {}}])
def test_a_missing_section_is_not_taken_for_no_scaling(name: str, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is scaled by default, so the config must have"):
        RopeSpec.from_config(config_of(name, **more))
    section = {"rope_type": "default", "rope_theta": 1e4}
    given = {"inv_freq": torch.ones(16)} if FAMILIES[name].learned else {}
    spec = RopeSpec.from_config(config_of(name, rope_parameters=section), **given)
    assert isinstance(spec, RopeSpec) or set(spec) <= {"rope", "no_rope"}


def test_a_type_without_a_section_does_not_rotate_even_if_no_layers_are_listed() -> None:
    section = {"rope_type": "default", "rope_theta": 1e4}
    both = {"sliding_attention": section, "full_attention": None}
    specs = RopeSpec.from_config(config_of("beam", rope_parameters=both))
    assert specs == {"sliding_attention": RopeSpec(64), "full_attention": None}


@pytest.mark.parametrize("name", ["cohere2", "flint"])
def test_layers_with_windows_need_a_window(name: str) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    with pytest.raises(ValueError, match="sliding_window must not be null"):
        RopeSpec.from_config(config_of(name, layer_types=kinds, sliding_window=None))


def test_a_null_list_of_bases_is_no_list() -> None:
    with pytest.raises(ValueError, match="must give layer_rope_theta"):
        RopeSpec.from_config(config_of("granite_swa", layer_rope_theta=None))


@pytest.mark.parametrize("text", ["nemotron_h", "unknown"])
def test_images_are_not_read_in_place_of_a_text_that_does_not_rotate(text: str) -> None:
    config = {
        "text_config": {"model_type": text, "hidden_size": 64},
        "vision_config": {"model_type": "qwen2_5_vl_vision", "hidden_size": 160, "num_heads": 2},
    }
    with pytest.raises(ValueError, match="section must be given, as the text part") as error:
        RopeSpec.from_config(config)
    assert "section='vision_config'" in str(error.value)
    assert RopeSpec.from_config(config, section="vision_config").head_dim == 80


@pytest.mark.parametrize("value", [0, "false"])
def test_a_switch_must_be_a_bool(value: object) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(TypeError, match="apply_yarn_scaling must be a bool"):
        RopeSpec.from_config(
            config_of("llama", rope_scaling={**scaling, "apply_yarn_scaling": value})
        )


@pytest.mark.parametrize(
    "name", ["ernie4_5", "minimax_m2", "ministral3", "jetmoe", "hrm_text", "pe_audio_encoder"]
)
def test_a_width_that_the_class_fixes_is_not_derived(name: str) -> None:
    section = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    config = config_of(name, rope_parameters=section)
    del config["head_dim"]
    with pytest.raises(ValueError, match="must give head_dim"):
        RopeSpec.from_config(config)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("olmo_hybrid", {"rope_theta": None}, "rope_theta is null"),
        ("olmo_hybrid", {"rope_theta": None, "rope_parameters": {"rope_theta": None}}, "is null"),
        ("zamba2", {"attention_head_dim": 64}, "use_mem_rope is not True"),
        ("zamba2", {"attention_head_dim": 64, "use_mem_rope": False}, "use_mem_rope is False"),
        ("wav2vec2-bert", {"position_embeddings_type": "relative_key"}, "is 'relative_key'"),
        ("a_new_conformer", {"position_embeddings_type": "relative"}, "is 'relative'"),
    ],
)
def test_no_rotation_is_said_to_be_none(name: str, more: dict[str, Any], why: str) -> None:
    config = {"model_type": name, **HEADS, "rope_theta": 1e4, **more}
    with pytest.raises(ValueError, match=f"the config has no RoPE: .*{why}"):
        RopeSpec.from_config(config)


def test_a_base_in_the_section_counts_beside_a_null_one() -> None:
    config = config_of("olmo_hybrid", rope_parameters={"rope_theta": 5e5})
    assert RopeSpec.from_config({**config, "rope_theta": None}) == RopeSpec(64, base=5e5)


@pytest.mark.parametrize("name", ["wav2vec2-bert", "wav2vec2-conformer"])
def test_a_conformer_rotates_if_its_file_says_so(name: str) -> None:
    config = {"model_type": name, **HEADS, "rotary_embedding_base": 500}
    for more in ({}, {"position_embedding_type": "rotary"}):  # a key that its class does not read
        with pytest.raises(ValueError, match="only if position_embeddings_type selects it"):
            RopeSpec.from_config({**config, **more})
    spec = RopeSpec.from_config({**config, "position_embeddings_type": "rotary"})
    assert spec == RopeSpec(64, base=500)


@pytest.mark.parametrize(
    ("more", "rotary_dim"),
    [
        ({}, 32),
        ({"partial_rotary_factor": 0.5}, 32),
        ({"partial_rotary_factor": 0.25}, None),  # its class puts 0.5 in its place
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, 16),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, None),
    ],
)
def test_bamba_rotates_half_whatever_the_outer_level_says(
    more: dict[str, Any], rotary_dim: int | None
) -> None:
    config = config_of("bamba", **more)
    if rotary_dim is None:
        with pytest.raises(ValueError, match="rotary_dim must have one value"):
            RopeSpec.from_config(config)
    else:
        assert RopeSpec.from_config(config) == RopeSpec(64, rotary_dim=rotary_dim)
