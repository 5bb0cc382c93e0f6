"""The keys that configurations use for each fact about RoPE, and keys that do not affect the rotation."""

from __future__ import annotations

# --- the spellings of each fact at the outer level of a configuration ---

BASE = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base")
SECTION = ("rope_scaling", "rope_parameters")
HEAD_DIM = ("head_dim", "kv_channels", "head_size")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_num_attention_heads",
    "decoder_num_attention_heads",
)
ROTARY_DIM = ("rotary_dim",)
FRACTION = (
    "partial_rotary_factor",
    "rotary_pct",
    "rope_pct",
    "rotary_percent",
    "rotary_emb_fraction",
)
NOPE_DIM = ("qk_nope_head_dim",)
ROPE_DIM = ("qk_rope_head_dim",)
MAX_POSITION = (
    "max_position_embeddings",
    "n_positions",
    "max_position",
    "seq_length",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
)
ORIGINAL_MAX_POSITION = ("original_max_position_embeddings",)
# Spelling -> the value that means interleaved.
PAIRING = {
    "rope_interleaved": True,
    "rope_interleave": True,
    "rotary_interleaved": True,
    "rotary_emb_interleaved": True,
    "rope_traditional": True,
    "is_neox_style": False,
    "rope_is_neox_style": False,
    "use_neox_rotary_style": False,
}
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
    "llama_4_scaling_beta": "a temperature of the attention, by position; it scales queries after they "
    "are rotated",
    "finetuned": "whether the model was trained with the scaling",
}
# Keys that do not affect the rotation if they have this value: (key, value) -> why.
INERT_VALUES: dict[tuple[str, object], str] = {
    ("extrapolation_factor", 1): "weight of YaRN's ramp; 1 is the paper's",
    ("attn_factor", 1): "multiplies the factor on the rotated channels",
    (
        "apply_yarn_scaling",
        True,
    ): "vLLM's switch for the factor on the rotated channels; True is on",
}

# --- keys of the outer level that look like keys about RoPE ---

# Keys that do not affect the rotation -> why. Any other unknown key is an error if one of its words begins
# with rope, mrope or rotary, or is theta: if misspelt keys were ignored, defaults would apply silently.
INERT_OUTSIDE: dict[str, str] = {
    "apply_rope_fusion": "which kernel runs",
    "attention_rope_fusion": "which kernel runs",
    "fused_rope": "which kernel runs",
    "fused_single_qkv_rope": "which kernel runs",
    "index_rope_interleave": "pairing inside an indexer, which is a separate attention",
    "indexer_rope_interleave": "pairing inside an indexer, which is a separate attention",
    "rotary_value": "whether values rotate too, by the same angles",
    "use_rope_bias": "a bias of the attention",
    "use_rotary_position_embeddings": "an older spelling of position_embedding_type",
    "rope_finetuned": "whether the model was trained with the scaling",
}
# Outer keys whose value False means that the model has no RoPE.
SWITCHES = ("rotary", "use_rotary_embedding", "use_mem_rope")
# Outer keys that only some families read, by their `Family.layers` ("last": by their `Family.start`).
READ_BY_LAYERS: dict[str, frozenset[str]] = {
    "local base": frozenset({"rope_local_base_freq"}),
    "global and local base": frozenset({"global_rope_theta", "local_rope_theta"}),
    "no_rope_layers": frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    # DeepSeek V4 repeats these per layer type, inside its rope section.
    "last": frozenset({"compress_rope_theta"}),
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
    {"conv", "identity", "linear_attention", "mamba", "mlp", "no_op", "none", "recurrent"}
)
