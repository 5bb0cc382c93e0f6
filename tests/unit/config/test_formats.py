"""Test files of other programs: Megatron's arguments with their defaults, Llama 4's own file, and Nomic's.

Also the advice for families that rotate all channels, which must not lose a fact that only their code has.
"""

from typing import Any

import pytest

from tests.support.advice import calls_in, made_by
from tests.support.reading import read, refused, two, without
from tightrope import RopeSpec
from tightrope.config import families, keys
from tightrope.frequencies import Llama3, YaRN

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
    assert read({**DENSE, "rope_type": kind}) == RopeSpec(128, base=5e5)
    narrow = {**DENSE, "rope_type": kind, "kv_channels": 64}  # not the default of qk_head_dim
    assert read(narrow) == RopeSpec(64, base=5e5)


def test_latent_attention_of_megatron_is_what_its_switch_says() -> None:
    assert read(LATENT) == RopeSpec(192, base=5e5, rotary_dim=64, start=128, interleaved=True)
    yarn = {
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096,
    }
    scaling = YaRN(40, 4096, mscale=1, mscale_all_dim=0)
    assert read({**LATENT, **yarn}) == RopeSpec(
        192, base=5e5, rotary_dim=64, start=128, interleaved=True, scaling=scaling
    )


@pytest.mark.parametrize("key", ["qk_pos_emb_head_dim", "kv_lora_rank"])
def test_without_its_switch_megatron_is_asked(key: str) -> None:
    unused = ("multi_latent_attention", "qk_pos_emb_head_dim", "kv_lora_rank", "qk_head_dim")
    config = without(DENSE, *unused)
    assert read(config) == read({**config, key: None}) == RopeSpec(128, base=5e5)
    text = (
        f"Megatron's arguments must come with multi_latent_attention, true or false, as they have {key}, which both "
        f"kinds of attention may have."
    )
    for switch in ({}, {"multi_latent_attention": None}):
        refused({**config, **switch, key: 64}, text)
    wrong = "multi_latent_attention must be a bool but got 'x'."
    refused({**DENSE, "multi_latent_attention": "x"}, wrong, TypeError)


# --- Llama 4 and Nomic ------------------------------------------------------------------------------


def test_llama4s_own_file() -> None:
    params = {
        "dim": 5120,
        "n_heads": 40,
        "n_kv_heads": 8,
        "n_layers": 48,
        "nope_layer_interval": 4,
        "moe_args": {},
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
    }
    rotated = RopeSpec(128, base=5e5, interleaved=True, scaling=Llama3(16, 1, 1, 8192))
    made = read(params)
    assert made == {"rope": rotated, "no_rope": None}
    assert made.layers is not None
    assert made.layers[:4] == ("rope", "rope", "rope", "no_rope")


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
    assert read(nomic) == RopeSpec(64, base=1000)
    with pytest.raises(ValueError, match="known but got rotary_scaling_factor; "):
        read({**nomic, "rotary_scaling_factor": 2})
    dynamic = {**nomic, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert read(dynamic).scaling.original_max_position == 2048
    length = {"original_max_position_embeddings": 4096}
    one, other = "original_max_position_embeddings = 4096", "max_trained_positions = 2048"
    refused({**dynamic, **length}, two("original_max_position", one, other))


# --- families that rotate all channels ----------------------------------------------------------------

WHOLE = [
    name
    for name, family in families.FAMILIES.items()
    if family.fraction == "none" and family.start == "first" and not family.refused
]
# Facts of the code of these, by reading it: layers without RoPE or with a base of their own, several coordinates,
# coordinates in turns, heads of another width, or a base that no key gives.
WITH_FACTS = set(
    """afmoe cohere2 cohere2_moe cohere_compass_text cosmos3_edge_text diffusion_gemma_text dinov3_vit
    embedding_gemma2_text eomt_dinov3 ernie4_5_vl_moe_text esm exaone4 exaone_moe flint gemma3_text gemma3n_text
    gemma4_text gemma4_unified_text granite_swa granitemoe_swa kolibri1 llama4_text modernbert molmo2_text
    muse_glimmer_text muse_spark_text olmo3 paddleocr_vl_text pixtral qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl
    qwen2_5_vl_text qwen2_vl qwen2_vl_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text roformer smollm3
    llama4_vision_model mlcd mlcd_vision_model qwen2_5_omni_vision_encoder qwen3_omni_moe_vision_encoder
    dots3_note_vision_encoder sapiens2 sam3_vit_model sam2_video edgetam_video seamless_m4t zamba2""".split()
) | {
    name for name in WHOLE if name.endswith("_vision") or families.FAMILIES[name].layers == "nested"
}
BY_HAND = "make a RopeSpec by hand"


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
        "position_embeddings_type": "rotary",
        "global_rope_theta": 1e4,
        "local_rope_theta": 1e4,
        "layer_rope_theta": [1e4, 0],
        "partial_rotary_factor": 0.5,
        "embed_dim": 4096,
        "num_heads": 32,
        "speech_encoder_attention_heads": 32,
        "memory_attention_hidden_size": 4096,
        "memory_attention_downsample_rate": 2,
        "memory_attention_num_attention_heads": 16,
        "attention_head_dim": 128,
        "use_mem_rope": True,
    }
    if name == "cosmos3_edge_text":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    if name == "olmo3":
        config["rope_theta"] = 5e5
    for key in families.FAMILIES[name].bases or ():
        config[key] = config.get(key, 1e4)
    rule = families.FAMILIES[name].layers or ""
    others = {key for each, own in keys.READ_BY_LAYERS.items() if each != rule for key in own}
    config = {key: value for key, value in config.items() if key not in others}
    if rule == "sliding or dense":
        config |= {"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["sparse"] * 2}
    if rule in ("wide where full", "nested"):
        section = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        config["rope_parameters"] = {"sliding_attention": section, "full_attention": section}
    with pytest.raises(
        ValueError, match=f"the code of model_type '{name}' rotates all channels"
    ) as caught:
        read(config)
    text, _, call = str(caught.value).removesuffix(".").partition("; by hand")
    assert text.endswith(BY_HAND) == (name in WITH_FACTS)
    found = [made_by(each, config) for each in calls_in(call)]
    assert {spec.rotary_dim for spec in found} <= {64}
    if name not in WITH_FACTS:  # the advice works
        interleaved = families.FAMILIES[name].interleaved
        stated: dict[str, Any] = {"interleaved": interleaved, "rope_layers": "all"}
        advice = f"without its model_type, with interleaved={interleaved} and rope_layers='all'"
        assert text.endswith(advice)
        made = read(without(config, "model_type"), **stated)
        assert made == RopeSpec(128, base=1e4, rotary_dim=64, interleaved=interleaved)
        assert found == [made]
