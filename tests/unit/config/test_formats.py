"""Test files of other programs: Megatron's arguments with their defaults, Llama 4's own file, and Nomic's."""

from typing import Any

import pytest

from tests.support.reading import llama, read, refused, two, whole_head, without
from tightrope import RopeSpec
from tightrope.config import families
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


def test_a_rope_section_is_no_switch_of_megatron() -> None:
    arguments = {"rotary_base": 10000, "rotary_interleaved": False, "rope_scaling": {"factor": 2.0}}
    with pytest.raises(TypeError, match="rope_scaling must be a bool but got"):
        read(arguments)


# --- families that rotate all channels ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "gptj", "cohere", "granite_swa", "phimoe"])
def test_a_part_is_refused_where_the_code_rotates_all_channels(name: str) -> None:
    section = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = llama(model_type=name, num_hidden_layers=2, rope_parameters=section)
    del config["rope_theta"]
    whole = families.FAMILIES[name].part == "none"
    assert whole == (name != "gptj")
    if whole:
        refused(
            config, whole_head(name, "64 from rope_parameters.partial_rotary_factor = 0.5 of 128")
        )
