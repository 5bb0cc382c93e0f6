"""The keys that configurations use for each fact about RoPE, and keys that do not affect the rotation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..frequencies import RULES

# --- the spellings of each fact at the outer level of a configuration ---

USUAL_BASE = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base")
BASE = (*USUAL_BASE, "rotary_embedding_base", "memory_attention_rope_theta")
SECTION = ("rope_scaling", "rope_parameters")
HEAD_DIM = ("head_dim", "kv_channels", "head_size")
# The same in other programs: read for an unknown family; for the others they must agree with the width.
HEAD_DIM_ELSEWHERE = tuple(
    """attention_head_dim attention_head_size attn_head_dim attn_head_size d_head d_k d_kv d_qk decoder_attention_head_dim
    decoder_head_dim dim_head dim_heads dim_per_head encoder_attention_head_dim encoder_head_dim head_channels
    head_size_qk head_width hidden_per_head hidden_size_per_attention_head hidden_size_per_head key_channels
    key_head_dim qk_channels qk_head_dim qk_head_size query_head_dim size_per_head""".split()
)
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
# Nomic's and gpt-oss's names, and that of transformers.
ORIGINAL_MAX_POSITION = (
    "original_max_position_embeddings",
    "max_trained_positions",
    "initial_context_length",
)
# Spelling -> the value that means interleaved.
PAIRING = dict.fromkeys(
    """rope_interleaved rope_interleave rotary_interleaved rotary_emb_interleaved rope_traditional""".split(),
    True,
) | dict.fromkeys("is_neox_style rope_is_neox_style use_neox_rotary_style".split(), False)
LAYER_TYPES = ("layer_types", "layers_block_type")
LAYER_COUNT = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
# Sections that describe the part of a model that reads and writes text.
TEXT = ("text_config", "language_config", "llm_config")
# The part of an omni model whose text section a plain call reads: what it says is spoken by another part.
THINKER = "thinker_config."
# Sections whose names do not end with _config.
BARE_SECTIONS = ("encoder", "decoder")
# Keys that show that a configuration describes a model, with layers, and not only a rotation.
LAYERS = (*LAYER_TYPES, *LAYER_COUNT, "model_type")
POSITION_TYPE = ("position_embedding_type", "position_embedding", "position_embeddings_type")
POSITION_TYPES_WITH_ROPE = frozenset({"rope", "rope_gptj", "rotary", "mrope", "yarn"})

# --- keys of a rope section that belong to no scaling rule ---

TYPE = ("rope_type", "type")
# Widths of the heads of one layer type, in sections that are made for other formats.
OWN_HEAD_DIM, OWN_ROTARY_DIM = "head_dim of the type", "rotary_dim of the type"
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
# Keys by which code multiplies queries by a factor that grows with their position; the last is that of GGUF.
TEMPERATURE = (
    "llama_4_scaling_beta",
    "llama_4_scaling",
    "attn_temperature_tuning",
    "attention.temperature_scale",
)
# Keys that do not affect the rotation if they have this value: (key, value) -> why.
INERT_VALUES: dict[tuple[str, object], str] = {
    ("extrapolation_factor", 1): "weight of YaRN's ramp; 1 is the paper's",
    ("factor", 1): "the ratio of the lengths; 1 is no scaling",
    ("attn_factor", 1): "multiplies the factor on the rotated channels",
}

# --- keys of the outer level that could be about the rotation ---

# The words that make a name one that could be about the rotation, whatever it begins with: parts of words, then
# whole words, then pairs of words. A test runs this over the names of all configurations of transformers, diffusers,
# vLLM, llama.cpp and Megatron (tests/support/data/config_names.txt).
_ABOUT = re.compile(
    r"""
    (?<!p)(?<!eu)rope(?!r) | rota[rt] | theta | yarn | ntk | mscale | neox | seqlen | extrapolat | alibi
    | wavelength | timescale | (?<![a-z])freq
    | (?<![a-z])(?:rot|logn|nope|nopos|no_pos|pe|fope|xpos|orig|original|trained|partial|compress|interleaved?)(?![a-z])
    | (?<![a-z])(?:sections?|axes|long_context)(?![a-z])
    | scaling_(?:factor|type)$ | (?:context|dynamic|len|length|linear)_scal | interpolation_factor
    | (?<![a-z])pos(?:ition(?:al)?)?_(?:[a-z]+_)?(?:2d|base|interpolation|kind|layers?|scal[a-z]*|temperature|type)(?![a-z])
    | ^position(?:al)?_(?:embedding|encoding)$
    | (?<![a-z])(?:swa|local|global|sliding|window(?:ed)?|full|pos)_(?:base$|[a-z_]*head_(?:dim|size))
    | head_(?:dim|size)s?_per_layer | key_length[a-z_]*_swa
    """,
    re.VERBOSE,
)
# Names of rope sections that no word above gives away; at another place they are misplaced.
_ALONE = frozenset({"alpha", "base", "factor"})
# Keys of rope sections that hold a parameter of a rule.
_OF_RULES = frozenset(
    key for rule in RULES.values() for spelled in rule.spellings().values() for key in spelled
)
#: The keys that a misspelt one may mean.
NAMES = sorted({*_OF_RULES, *BASE, *FRACTION, *ROTARY_DIM, *SECTIONS})
# Words of other parts: experts, losses, and the indexer of sparse attention, which has a rotation of its own.
_ELSEWHERE = re.compile(
    r"(?:^|\.|dsa_)index(?:er)?[_.] | (?<![a-z])(?:moe|experts?|loss|routed|router)(?![a-z])",
    re.VERBOSE,
)
# Words of keys that may say which layers rotate.
_LAYERS = re.compile(
    r"(?<![a-z])(?:every|interval|layers?|no_pe|no_pos|no_rope|nope|nopos|pattern|skip)(?![a-z])"
)

# Words of keys that give a base, of all layers or of some.
_BASES = re.compile(r"theta|(?<![a-z])base(?![a-z])")
# Words of keys that give a width, a part of the channels, or the pairing.
_CHANNELS = re.compile(
    r"""
    interleav | neox | gpt_?j | tradition | pair | permut | neighbo | adjacent
    | (?<![a-z])(?:n?dims?|sizes?|widths?|channels?|heads?|pct|perc(?:ent(?:age)?)?|partial|fraction|ratio|start)(?![a-z])
    | (?<![a-z])(?:style|layout|mode|format|order|half|halves|complex|real)(?![a-z])
    """,
    re.VERBOSE,
)


def about_rotation(name: object) -> bool:
    """Return True if a key, or a key of one format in another, could be about the rotation.

    >>> [about_rotation(name) for name in ("ntk_alpha", "swa_rope_theta", "properties", "moe_layer_freq")]
    [True, True, False, False]
    """
    key = str(name).lower()
    named = _ABOUT.search(key) is not None and _ELSEWHERE.search(key) is None
    return key in _OF_RULES or key in _ALONE or named


def _inside(name: object, value: object) -> Iterator[tuple[object, object]]:
    """The keys about the rotation in a mapping, with their values: all of one whose name is about it."""
    inner = value.items() if isinstance(value, Mapping) else ()
    return ((key, one) for key, one in inner if about_rotation(name) or about_rotation(key))


def about_layers(name: object, value: object) -> bool:
    """Return True if a key about the rotation, or one inside it, may say which layers rotate: by its words or as a list."""
    listed = isinstance(value, list | tuple) and name not in _OF_RULES
    inside = any(about_layers(key, one) for key, one in _inside(name, value))
    return listed or inside or _LAYERS.search(str(name).lower()) is not None


def gives_base(name: object, value: object) -> bool:
    """Return True if a key about the rotation, or one inside it, has a number and a word of a base."""
    inside = any(gives_base(key, one) for key, one in _inside(name, value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return inside or (number and _BASES.search(str(name).lower()) is not None)


def about_channels(name: object, value: object) -> bool:
    """Return True if a key about the rotation, or one inside it, has a word of a width or of the pairing."""
    inside = any(about_channels(key, one) for key, one in _inside(name, value))
    return inside or _CHANNELS.search(str(name).lower()) is not None


def holds_rotation(value: object) -> bool:
    """Return True if a value holds, at any depth, a key that could be about the rotation."""
    if isinstance(value, list | tuple):
        return any(holds_rotation(one) for one in value if isinstance(one, Mapping))
    if not isinstance(value, Mapping):
        return False
    return any(about_rotation(key) or holds_rotation(inner) for key, inner in value.items())


# Keys that do not affect the rotation -> why. Any other key that could be about it and is not read is an error:
# if misspelt keys were ignored, defaults would apply silently.
INERT_OUTSIDE: dict[str, str] = {
    name: why
    for why, names in {
        "which kernel runs": "apply_rope_fusion attention_rope_fusion fused_rope fused_single_qkv_rope use_flashinfer_fused_rope",
        "the grid of positions": "memory_attention_rope_feat_sizes memory_attention_rope_k_sizes",
        "how Megatron trains": "inference_batch_times_seqlen_threshold max_seqlen_per_dp_cp_rank "
        "num_microbatches_with_partial_activation_checkpoints rl_partial_rollouts",
        "the length of the tables": "axes_lens",
        "the width of convolutions": "compress",
        "the number of tokens of a compressed entry": "compress_rate_csa compress_rate_hca compress_rates",
        "which layers have cross-attention": "cross_attention_frequency",
        "which layers have linear attention": "linear_attention_freq",
        "which layers have windows": "window_attn_skip_freq",
        "the positions of distant tokens, not their frequencies": "dual_chunk_attention_config",
        "the width of the embedding of the time step": "freq_dim",
        "the names of the classes of a classifier": "label2id",
        "a temperature of the attention, by position, which scales rotated queries": "llama_4_scaling",
        "a probability of dropout": "memory_attention_rope_dropout",
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
    **dict.fromkeys((("use_dynamic_ntk", False), ("use_logn_attn", False)), "the scaling is off"),
    ("use_long_context", False): "the scaling is off",
    ("use_mrope", False): "positions have one coordinate",
}
# Outer keys -> their value in a model that has RoPE.
SWITCHES = {
    **dict.fromkeys(
        "rotary use_mem_rope use_rope use_rotary_embedding use_rotary_pos_emb".split(), True
    ),
    **dict.fromkeys(("alibi", "use_alibi"), False),
}
# Outer keys that only some rules for layers read, by the name of the rule (`Family.layers`).
READ_BY_LAYERS: dict[str, frozenset[str]] = {
    "layer_rope_theta": frozenset({"layer_rope_theta"}),
    "lists": frozenset({"partial_rotary_factors", "use_rope_layers", "yarn_only_types"}),
    "local base": frozenset({"rope_local_base_freq"}),
    "global and local base": frozenset({"global_rope_theta", "local_rope_theta"}),
    "main and compress": frozenset({"compress_rope_theta", "compress_ratios"}),
    "no_rope_layers": frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    "scaled layers": frozenset({"rope_scaling_layers"}),
    "wide where full": frozenset({"global_head_dim"}),
}
# Outer keys that are always read, or known not to affect the rotation.
READ_OUTSIDE = frozenset(
    (
        *BASE,
        *SECTION,
        *FRACTION,
        *ROTARY_DIM,
        *PAIRING,
        *ROPE_DIM,
        *NOPE_DIM,
        *SECTIONS,
        *SECTIONS_INTERLEAVED,
        *ORIGINAL_MAX_POSITION,
        *POSITION_TYPE,
        *HEAD_DIM_ELSEWHERE,
        *INERT_OUTSIDE,
    )
)
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
