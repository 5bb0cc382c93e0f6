"""The keys that configurations use for each fact about RoPE, and keys that do not affect the rotation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..frequencies import RULES

# --- the spellings of each fact at the outer level of a configuration ---

BASE = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base")
SECTION = ("rope_scaling", "rope_parameters")
HEAD_DIM = ("head_dim", "kv_channels", "head_size")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = tuple(
    """num_attention_heads n_head n_heads num_heads encoder_num_attention_heads
    decoder_num_attention_heads""".split()
)
ROTARY_DIM = ("rotary_dim",)
FRACTION = tuple(
    """partial_rotary_factor rotary_pct rope_pct rotary_percent rotary_emb_fraction""".split()
)
NOPE_DIM = ("qk_nope_head_dim",)
ROPE_DIM = ("qk_rope_head_dim",)
MAX_POSITION = tuple(
    """max_position_embeddings n_positions max_position seq_length n_ctx max_sequence_length
    max_seq_len""".split()
)
ORIGINAL_MAX_POSITION = ("original_max_position_embeddings",)
# Spelling -> the value that means interleaved.
PAIRING = dict.fromkeys(
    """rope_interleaved rope_interleave rotary_interleaved rotary_emb_interleaved rope_traditional""".split(),
    True,
) | dict.fromkeys("is_neox_style rope_is_neox_style use_neox_rotary_style".split(), False)
LAYER_TYPES = ("layer_types", "layers_block_type")
# Keys that show that a configuration describes a model, with layers, and not only a rotation.
LAYERS = (
    *LAYER_TYPES,
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "depth",
    "model_type",
)
POSITION_TYPE = ("position_embedding_type", "position_embedding")
POSITION_TYPES_WITH_ROPE = frozenset({"rope", "rope_gptj", "rotary", "mrope", "yarn"})

# --- keys of a rope section that belong to no scaling rule ---

TYPE = ("rope_type", "type")
# Types without scaling; "mrope" and "axial" only mean that positions have several coordinates.
TYPES_WITHOUT_RULE = frozenset({"default", "mrope", "axial", "none"})
SECTIONS = ("mrope_section",)
SECTIONS_INTERLEAVED = ("mrope_interleaved",)

# Keys of a rope section that do not affect the rotation -> why.
INERT: dict[str, str] = {
    "original_max_position_embeddings": "the length at which scaling begins; only some rules use it",
    "max_position_embeddings": "the context length; the rules take it from the outer level",
    "llama_4_scaling_beta": "a temperature of the attention, by position, for rotated queries",
    "finetuned": "whether the model was trained with the scaling",
}
# Keys that do not affect the rotation if they have this value: (key, value) -> why.
INERT_VALUES: dict[tuple[str, object], str] = {
    ("extrapolation_factor", 1): "weight of YaRN's ramp; 1 is the paper's",
    ("attn_factor", 1): "multiplies the factor on the rotated channels",
    ("apply_yarn_scaling", True): "vLLM's switch for the factor on the channels; True is on",
}

# --- keys of the outer level that could be about the rotation ---

# The words that make a name one that could be about the rotation, whatever the name begins with. A test runs this
# over the names of all configurations of transformers, vLLM, llama.cpp and diffusers
# (tests/data/config_names.txt).
_ABOUT = re.compile(
    r"""
    (?<!p)(?<!eu)rope(?!r) | rotar | (?<![a-z])rot(?![a-z]) | rotat | theta | yarn | ntk | mscale | (?<![a-z])freq
    | (?<![a-z])(?:logn|nope|fope|xpos|original|trained|partial|compress|interleaved?|sections?|axes)(?![a-z])
    | neox | seqlen | extrapolat | scaling_(?:factor|type)$ | pos[a-z]*_?(?:emb|enc)[a-z]*_type$
    | (?<![a-z])(?:swa|local|global|sliding|full)_[a-z_]*head_(?:dim|size) | key_length[a-z_]*_swa
    """,
    re.VERBOSE,
)
# Names of rope sections that no word above gives away; at another place they are misplaced.
_ALONE = frozenset({"alpha", "base", "factor"})


def about_rotation(name: object) -> bool:
    """Return True if a key, or a key of one format in another, could be about the rotation.

    >>> [about_rotation(name) for name in ("ntk_alpha", "swa_rope_theta", "properties", "hidden_size")]
    [True, True, False, False]
    """
    key = str(name).lower()
    owned = any(key in spelled for rule in RULES.values() for spelled in rule.keys.values())
    return owned or key in _ALONE or _ABOUT.search(key) is not None


def holds_rotation(value: object) -> bool:
    """Return True if a value holds, at any depth, a key that could be about the rotation."""
    if isinstance(value, list | tuple):
        return any(holds_rotation(one) for one in value if isinstance(one, Mapping))
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    if isinstance(kind, str) and kind in RULES:
        return True
    return any(about_rotation(key) or holds_rotation(inner) for key, inner in value.items())


# Keys that do not affect the rotation -> why. Any other key that could be about it and is not read is an error:
# if misspelt keys were ignored, defaults would apply silently.
INERT_OUTSIDE: dict[str, str] = {
    name: why
    for why, names in {
        "which kernel runs": "apply_rope_fusion attention_rope_fusion fused_rope fused_single_qkv_rope",
        "the length of the tables": "axes_lens",
        "the width of convolutions": "compress",
        "the number of tokens of a compressed entry": "compress_rate_csa compress_rate_hca compress_rates",
        "which layers have cross-attention": "cross_attention_frequency",
        "the positions of distant tokens, not their frequencies": "dual_chunk_attention_config",
        "the width of the embedding of the time step": "freq_dim",
        "pairing inside an indexer, which is a separate attention": "index_rope_interleave indexer_rope_interleave",
        "which layers choose keys anew": "index_topk_freq",
        "the number of tokens of an entry of the indexer": "indexer_compress_ratio",
        "which layers have experts": "interleave_moe_layer_step moe_layer_freq",
        "the names of the classes of a classifier": "label2id",
        "a temperature of the attention, by position, which scales rotated queries": "llama_4_scaling",
        "the weight of experts": "moe_routed_scaling_factor moe_router_scaling_factor routed_scaling_factor router_scaling_factor",
        "the weight of a loss": "mtp_loss_scaling_factor",
        "whether values rotate too, by the same angles": "rotary_value",
        "a bias of the attention": "use_rope_bias",
        "an older spelling of position_embedding_type": "use_rotary_position_embeddings",
        "whether the model was trained with the scaling": "rope_finetuned",
    }.items()
    for name in names.split()
}
# The same for keys that do not affect the rotation if they have this value.
INERT_OUTSIDE_VALUES: dict[tuple[str, object], str] = {
    (
        "order_of_interleaved_layers",
        "local_attn_first",
    ): "which layers have windows: as layer_types",
    ("use_dynamic_ntk", False): "the scaling is off",
    ("use_logn_attn", False): "the scaling is off",
    ("use_mrope", False): "positions have one coordinate",
}
# Outer keys whose value False means that the model has no RoPE.
SWITCHES = ("rotary", "use_rope", "use_rotary_embedding", "use_mem_rope")
# Outer keys that only some families read, by their `Family.layers`.
READ_BY_LAYERS: dict[str, frozenset[str]] = {
    "layer_rope_theta": frozenset({"layer_rope_theta"}),
    "local base": frozenset({"rope_local_base_freq"}),
    "global and local base": frozenset({"global_rope_theta", "local_rope_theta"}),
    "main and compress": frozenset({"compress_rope_theta", "compress_ratios"}),
    "no_rope_layers": frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    "wide where full": frozenset({"global_head_dim"}),
}
# Rules that begin to scale at the context length by default, as in transformers. For all others the
# configuration must give the length, since the context length is often the one after scaling.
SCALED_FROM_MAX_POSITION = frozenset({"dynamic", "yarn"})
# Rules whose factor is the ratio of the new to the old length. Some programs write its inverse.
ONLY_LONGER = frozenset({"linear", "ntk", "yarn", "llama3"})
# HunYuan writes YaRN's parameters next to the alpha of its static NTK scaling but does not read them.
INERT_BESIDE_ALPHA = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
# Layer types without attention, which have no rope section.
LAYERS_WITHOUT_ATTENTION = frozenset(
    """conv identity linear_attention mamba mamba2 mlp moe no_op none recurrent""".split()
)
