"""Test formats of other programs: every architecture of GGUF.

Also the advice for families that rotate all channels, which must not lose a fact that only their code has.
"""

import re
from typing import Any

import pytest

from tightrope import RopeSpec
from tightrope.config import families


def read(config: object, **stated: Any) -> Any:
    return RopeSpec.from_config(config, **stated)


def refused(config: object, text: str, kind: type[Exception] = ValueError, **stated: Any) -> None:
    with pytest.raises(kind, match=f"^{re.escape('[from_config] ' + text)}$"):
        RopeSpec.from_config(config, **stated)


# --- GGUF -------------------------------------------------------------------------------------------

ARCHITECTURES = sorted(
    families.GGUF_NEIGHBOURS
    | families.GGUF_HALVES
    | families.GGUF_SECTIONS
    | families.GGUF_INTERLEAVED_SECTIONS
)
# Keys that are read, after the architecture; those that begin with rope are all about the rotation.
READ = {
    "context_length", "embedding_length", "block_count", "attention.head_count", "attention.sliding_window",
}  # fmt: skip
ABOUT = re.compile(r"rope\.|attention\.key_length|attention\.(compress|max_alibi|rope)")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_of_any_architecture_are_read_without_its_name(arch: str) -> None:
    """The name of an architecture, such as gptneox, is in each of its keys, and says nothing about them."""
    constants = pytest.importorskip("gguf.constants")
    names = {
        name
        for group in vars(constants.Keys).values() if isinstance(group, type)
        for name in vars(group).values() if isinstance(name, str) and name.startswith("{arch}.")
    }  # fmt: skip
    assert len(names) > 100
    others = {name for name in names if name[7:] not in READ and not ABOUT.match(name[7:])}
    assert len(others) > 80
    known: dict[str, Any] = {
        "embedding_length": 2048, "attention.head_count": 16, "block_count": 32, "attention.key_length": 128,
        "attention.sliding_window": 64, "rope.freq_base": 1e6, "rope.dimension_count": 64, "context_length": 4096,
    }  # fmt: skip
    if arch in families.GGUF_SECTIONS | families.GGUF_INTERLEAVED_SECTIONS:
        known["rope.dimension_sections"] = [11, 11, 10, 0]
    config = {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in known.items()},
    }
    wanted = read(config)
    more = {name.replace("{arch}", arch): 3 for name in others}
    assert read({**config, **more}) == wanted
    for key in (f"{arch}.swa_rope_theta", f"{arch}.rope.tehta", f"{arch}.attention.key_length_swa"):
        with pytest.raises(ValueError, match=f"must be known but got {re.escape(key)}"):
            RopeSpec.from_config({**config, **more, key: 3})


@pytest.mark.parametrize("factor", [0.0, 1.0, 1])
def test_no_scaling_may_have_a_factor_of_one(factor: float) -> None:
    """The converter writes it for Hunyuan, whose alpha is in the base."""
    config = {
        "general.architecture": "hunyuan-dense", "hunyuan-dense.embedding_length": 4096,
        "hunyuan-dense.attention.head_count": 32, "hunyuan-dense.rope.freq_base": 11158840.0,
        "hunyuan-dense.rope.scaling.type": "none", "hunyuan-dense.rope.scaling.factor": factor,
        "hunyuan-dense.rope.scaling.original_context_length": 262144,
    }  # fmt: skip
    assert read(config) == RopeSpec(128, 11158840.0)
    with pytest.raises(ValueError, match=r"known but got hunyuan-dense\.rope\.scaling\.factor; "):
        RopeSpec.from_config({**config, "hunyuan-dense.rope.scaling.factor": 2.0})


# --- Hunyuan and Nomic ------------------------------------------------------------------------------


def test_the_trained_length_of_nomic_is_where_its_scaling_begins() -> None:
    nomic = {
        "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "rotary_emb_base": 1000, "rotary_scaling_factor": None,
        "max_trained_positions": 2048, "n_positions": 8192,
    }  # fmt: skip
    assert read(nomic) == RopeSpec(64, 1000)
    with pytest.raises(ValueError, match="known but got rotary_scaling_factor; "):
        RopeSpec.from_config({**nomic, "rotary_scaling_factor": 2})
    dynamic = {**nomic, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert read(dynamic).scaling.original_max_position == 2048
    text = (
        "original_max_position must have one value but got original_max_position_embeddings = 4096 and "
        "max_trained_positions = 2048."
    )
    refused({**dynamic, "original_max_position_embeddings": 4096}, text)


# --- families that rotate all channels ----------------------------------------------------------------

WHOLE = [
    name
    for name, family in families.FAMILIES.items()
    if family.fraction == "none" and family.start == "first" and not family.refused
]
# Facts of the code of these, by reading it: layers without RoPE or with a base of their own, several coordinates,
# coordinates in turns, or a base that no key gives.
WITH_FACTS = set(
    """afmoe cohere2 dinov3_vit embedding_gemma2_text eomt_dinov3 ernie4_5_vl_moe_text esm exaone4 exaone_moe
    gemma3_text gemma3n_text gemma4_text glm4v_vision llama4_text llama4_vision_model modernbert muse_glimmer_text
    olmo3 pixtral qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_5_vl_vision qwen2_vl qwen2_vl_text
    qwen2_vl_vision qwen3_5_vision qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision roformer
    smollm3""".split()
)
BY_HAND = "make a RopeSpec by hand."


@pytest.mark.parametrize("name", WHOLE)
def test_the_advice_for_a_part_keeps_what_only_the_code_states(name: str) -> None:
    config: dict[str, Any] = {
        "model_type": name, "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 1e4,
        "num_hidden_layers": 2, "sliding_window": 8, "rope_local_base_freq": 1e4, "global_head_dim": 128,
        "position_embedding_type": "rope", "global_rope_theta": 1e4, "local_rope_theta": 1e4,
        "layer_rope_theta": [1e4, 0], "partial_rotary_factor": 0.5, "embed_dim": 4096,
    }  # fmt: skip
    read_by = {
        "rope_local_base_freq": "gemma3", "global_head_dim": "gemma4", "layer_rope_theta": "muse",
        "global_rope_theta": "modern", "local_rope_theta": "modern",
    }  # fmt: skip
    config = {key: value for key, value in config.items() if read_by.get(key, "") in name}
    if name in ("gemma4_text", "embedding_gemma2_text"):
        config["global_head_dim"] = 128
        section = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        config["rope_parameters"] = {"sliding_attention": section, "full_attention": section}
    with pytest.raises(
        ValueError, match=f"the code of model_type '{name}' rotates all channels"
    ) as caught:
        RopeSpec.from_config(config)
    text = str(caught.value)
    assert text.endswith(BY_HAND) == (name in WITH_FACTS)
    if name not in WITH_FACTS:  # the advice works
        advice = re.search(
            r"without its model_type, with interleaved=(True|False) and rope_layers='all'\.$", text
        )
        assert advice is not None
        del config["model_type"]
        stated = {"interleaved": advice[1] == "True", "rope_layers": "all"}
        made = read(config, **stated)
        assert made == RopeSpec(128, 1e4, 64, interleaved=families.FAMILIES[name].interleaved)
