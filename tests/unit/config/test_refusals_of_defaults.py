"""Files that lack what a class of transformers adds by default are refused, never read as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest

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
    spec = RopeSpec.from_config(config_of(name, rope_parameters=section))
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
