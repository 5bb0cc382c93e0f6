"""Test formats of other programs: Megatron's arguments with their defaults, and every architecture of GGUF.

Also the advice for families that rotate all channels, which must not lose a fact that only their code has.
"""

import re
from typing import Any

import pytest

from tightrope import RopeSpec
from tightrope.config import families
from tightrope.frequencies import YaRN


def read(config: object, **stated: Any) -> Any:
    return RopeSpec.from_config(config, **stated)


def refused(config: object, text: str, kind: type[Exception] = ValueError, **stated: Any) -> None:
    with pytest.raises(kind, match=f"^{re.escape('[from_config] ' + text)}$"):
        RopeSpec.from_config(config, **stated)


# --- Megatron ---------------------------------------------------------------------------------------

# Arguments that Megatron-LM's parser sets in every run, with their defaults, and those of a dense model of 4096.
DENSE: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "num_query_groups": 8,
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "rotary_base": 500000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "no_rope_freq": None,
    "rope_type": None,
    "apply_rope_fusion": True,
    "fused_single_qkv_rope": False,
    "use_flashinfer_fused_rope": False,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_head_dim": None,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_rotate_activation": True,
    "linear_attention_freq": None,
    "linear_key_head_dim": 128,
    "window_attn_skip_freq": None,
    "moe_layer_freq": 1,
    "mamba_head_dim": 64,
    "moe_router_topk_scaling_factor": None,
    "inference_batch_times_seqlen_threshold": -1,
    "rl_partial_rollouts": False,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "multi_latent_attention": True,
    "group_query_attention": False,
    "num_query_groups": None,
    "rope_type": "rope",
    "kv_lora_rank": 512,
}


@pytest.mark.parametrize("kind", [None, "rope", "yarn"])
def test_a_dense_dump_of_megatron_has_the_widths_of_latent_attention_too(kind: object) -> None:
    assert read({**DENSE, "rope_type": kind}) == RopeSpec(128, 5e5)
    narrow = {**DENSE, "rope_type": kind, "kv_channels": 64}  # not the default of qk_head_dim
    assert read(narrow) == RopeSpec(64, 5e5)


def test_latent_attention_of_megatron_is_what_its_switch_says() -> None:
    assert read(LATENT) == RopeSpec(192, 5e5, 64, 128, interleaved=True)
    yarn = {
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096,
    }
    scaling = YaRN(40, 4096, mscale=1, mscale_all_dim=0)
    assert read({**LATENT, **yarn}) == RopeSpec(
        192, 5e5, 64, 128, interleaved=True, scaling=scaling
    )


@pytest.mark.parametrize("key", ["qk_pos_emb_head_dim", "kv_lora_rank"])
def test_without_its_switch_megatron_is_asked(key: str) -> None:
    unused = ("multi_latent_attention", "qk_pos_emb_head_dim", "kv_lora_rank", "qk_head_dim")
    config = {name: value for name, value in DENSE.items() if name not in unused}
    assert read(config) == read({**config, key: None}) == RopeSpec(128, 5e5)
    text = (
        f"Megatron's arguments must come with multi_latent_attention, true or false, as they have {key}, which both "
        f"kinds of attention may have."
    )
    for switch in ({}, {"multi_latent_attention": None}):
        refused({**config, **switch, key: 64}, text)
    refused(
        {**DENSE, "multi_latent_attention": "x"},
        "multi_latent_attention must be a bool but got 'x'.",
        TypeError,
    )


# --- GGUF -------------------------------------------------------------------------------------------

ARCHITECTURES = sorted(
    families.GGUF_NEIGHBOURS
    | families.GGUF_HALVES
    | families.GGUF_SECTIONS
    | families.GGUF_INTERLEAVED_SECTIONS
)
# Keys that are read, after the architecture; those that begin with rope are all about the rotation.
READ = {
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.sliding_window",
}
ABOUT = re.compile(r"rope\.|attention\.key_length|attention\.(compress|max_alibi|rope)")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_of_any_architecture_are_read_without_its_name(arch: str) -> None:
    """The name of an architecture, such as gptneox, is in each of its keys, and says nothing about them."""
    constants = pytest.importorskip("gguf.constants")
    names = {
        name
        for group in vars(constants.Keys).values()
        if isinstance(group, type)
        for name in vars(group).values()
        if isinstance(name, str) and name.startswith("{arch}.")
    }
    assert len(names) > 100
    others = {name for name in names if name[7:] not in READ and not ABOUT.match(name[7:])}
    assert len(others) > 80
    known: dict[str, Any] = {
        "embedding_length": 2048,
        "attention.head_count": 16,
        "block_count": 32,
        "attention.key_length": 128,
        "attention.sliding_window": 64,
        "rope.freq_base": 1e6,
        "rope.dimension_count": 64,
        "context_length": 4096,
    }
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
        "general.architecture": "hunyuan-dense",
        "hunyuan-dense.embedding_length": 4096,
        "hunyuan-dense.attention.head_count": 32,
        "hunyuan-dense.rope.freq_base": 11158840.0,
        "hunyuan-dense.rope.scaling.type": "none",
        "hunyuan-dense.rope.scaling.factor": factor,
        "hunyuan-dense.rope.scaling.original_context_length": 262144,
    }
    assert read(config) == RopeSpec(128, 11158840.0)
    with pytest.raises(ValueError, match=r"known but got hunyuan-dense\.rope\.scaling\.factor; "):
        RopeSpec.from_config({**config, "hunyuan-dense.rope.scaling.factor": 2.0})


# --- Hunyuan and Nomic ------------------------------------------------------------------------------


def test_the_trained_length_of_nomic_is_where_its_scaling_begins() -> None:
    nomic = {
        "model_type": "nomic_bert",
        "n_embd": 768,
        "n_head": 12,
        "rotary_emb_base": 1000,
        "rotary_scaling_factor": None,
        "max_trained_positions": 2048,
        "n_positions": 8192,
    }
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
        "model_type": name,
        "head_dim": 128,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "rope_theta": 1e4,
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "rope_local_base_freq": 1e4,
        "global_head_dim": 128,
        "position_embedding_type": "rope",
        "global_rope_theta": 1e4,
        "local_rope_theta": 1e4,
        "layer_rope_theta": [1e4, 0],
        "partial_rotary_factor": 0.5,
        "embed_dim": 4096,
    }
    read_by = {
        "rope_local_base_freq": "gemma3",
        "global_head_dim": "gemma4",
        "layer_rope_theta": "muse",
        "global_rope_theta": "modern",
        "local_rope_theta": "modern",
    }
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
