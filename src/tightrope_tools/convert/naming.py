"""Table of the names of query and key projections: family -> names and packing.

A name is ``<prefix><layer pattern><module>.<suffix>``, such as
``model.layers.0.self_attn.q_proj.weight``. Names and packings come from the modeling code of
transformers 5.23. `tests/tools/convert/test_families.py` checks most families against that code: a small model
gives the same hidden states once its weights are converted and its rotary function is switched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from .files import fail


@dataclass(frozen=True)
class Naming:
    """The names and packing of the projections of one kind of checkpoint.

    Attributes:
        layer: the name before a module, with ``*`` for a number; the first, if any, is the layer's.
        modules: name of a module, with ``*`` for a number -> its role: ``q``, ``k``, ``qkv``, ``q gate``
            (each head's query rows, then as many gate rows), ``kv a`` (latent attention: the rotated
            rows come last), ``q norm``, ``k norm``; ``index q``, ``index k``, ``index k norm`` of a
            sparse indexer, whose heads have a size of their own and rotate from their first channel.
        packing: the order of heads in ``qkv``, a key of :data:`PACKINGS`.
        several: whether layers under several prefixes (encoder and decoder) have the same geometry.
    """

    layer: str
    modules: Mapping[str, str]
    packing: str | None = None
    several: bool = False


# Name -> ``(heads, kv_heads) -> the heads of a fused projection in order``, as letters q, k and v.
PACKINGS: dict[str, Callable[[int, int], str]] = {
    "blocks": lambda heads, kv_heads: "q" * heads + "k" * kv_heads + "v" * kv_heads,
    # for each key head: its queries, the key, the value
    "grouped": lambda heads, kv_heads: ("q" * (heads // kv_heads) + "kv") * kv_heads,
    # four times: a quarter of the queries, values, keys
    "quarters": lambda heads, _: ("q" * (heads // 4) + "v" * (heads // 4) + "k" * (heads // 4)) * 4,
}
# The roles of modules; see `Naming`.
ROLES = "q", "k", "qkv", "q gate", "kv a", "q norm", "k norm", "index q", "index k", "index k norm"

_SELF = "layers.*.self_attn."
_NORMS = {"q_norm": "q norm", "k_norm": "k norm"}
_LAYERNORMS = {"q_layernorm": "q norm", "k_layernorm": "k norm"}
_Q_K = {"q_proj": "q", "k_proj": "k"}

_MLA_MODULES = {"q_proj": "q", "q_b_proj": "q", "kv_a_proj_with_mqa": "kv a"}
# Checkpoints of DeepSeek V3.2 have these names too, but its code always pairs the indexer's
# channels by halves: its naming omits them, and these rows stay.
_INDEXER = {
    "indexer.wq_b": "index q",
    "indexer.wk": "index k",
    "indexer.k_norm": "index k norm",
}

# The namings, each named after its best-known family. `--naming` also accepts the keys of FAMILY_NAMING.
NAMINGS: dict[str, Naming] = {
    "llama": Naming(_SELF, {**_Q_K, **_NORMS}),
    "meta": Naming("layers.*.attention.", {"wq": "q", "wk": "k"}),
    "phi": Naming(_SELF, {**_Q_K, **_LAYERNORMS}),
    "hunyuan": Naming(_SELF, {**_Q_K, "query_layernorm": "q norm", "key_layernorm": "k norm"}),
    "stablelm": Naming(
        _SELF,
        {**_Q_K, "q_layernorm.norms.*": "q norm", "k_layernorm.norms.*": "k norm"},
    ),
    "phi3": Naming(_SELF, {"qkv_proj": "qkv"}, "blocks"),
    "qwen3_next": Naming(_SELF, {"q_proj": "q gate", "k_proj": "k", **_NORMS}),
    "gpt_neox": Naming("layers.*.attention.", {"query_key_value": "qkv"}, "grouped"),
    "persimmon": Naming(_SELF, {"query_key_value": "qkv", **_LAYERNORMS}, "grouped"),
    "falcon": Naming("h.*.self_attention.", {"query_key_value": "qkv"}, "grouped"),
    "internlm2": Naming("layers.*.attention.", {"wqkv": "qkv"}, "grouped"),
    "megatron": Naming(
        "layers.*.self_attention.",
        {
            "linear_qkv": "qkv",
            "query_key_value": "qkv",
            **_LAYERNORMS,
        },
        "grouped",
    ),
    "chatglm": Naming("layers.*.self_attention.", {"query_key_value": "qkv"}, "blocks"),
    "gptj": Naming("h.*.attn.", _Q_K),
    "codegen": Naming("h.*.attn.", {"qkv_proj": "qkv"}, "quarters"),
    "dbrx": Naming("blocks.*.norm_attn_norm.attn.", {"Wqkv": "qkv"}, "blocks"),
    "modernbert": Naming("layers.*.attn.", {"Wqkv": "qkv"}, "blocks"),
    "deepseek": Naming(_SELF, _MLA_MODULES),
    "glm_moe_dsa": Naming(_SELF, {**_MLA_MODULES, **_INDEXER}),
    "longcat_flash": Naming("layers.*.self_attn.*.", _MLA_MODULES),
    "bert": Naming("layer.*.attention.self.", {"query": "q", "key": "k"}),
    "moonshine": Naming(_SELF, _Q_K, several=True),
}

# Naming -> families; that of all others is the family of that name.
_BY_NAMING: dict[str, str] = {
    "llama": """apertus arcee bamba bitnet cohere cohere2 cwm diffllama dots1 ernie4_5 ernie4_5_moe
        eurobert exaone4 falcon_h1 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss granite
        granitemoe granitemoeshared granitemoehybrid helium laguna llama llama4_text minicpm minimax_m2
        ministral ministral3 mistral mixtral mllama_text_model nemotron olmo olmo2 olmo3 olmoe phimoe
        qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3 qwen3_moe qwen3_vl_text
        qwen3_vl_moe_text seed_oss smollm3 solar starcoder2 glm4v_text""",
    "phi": "phi lfm2 lfm2_moe",
    "hunyuan": "hunyuan_v1_dense hunyuan_v1_moe",
    "qwen3_next": "qwen3_next qwen3_5_text qwen3_5_moe_text",
    "deepseek": "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 minicpm3 mistral4 youtu",
    "bert": "roformer esm",
    "chatglm": "",  # not in the library's table of families
}
# model_type, or "meta" or "megatron" for their formats -> the key of NAMINGS.
FAMILY_NAMING: dict[str, str] = {
    family: naming for naming in NAMINGS for family in _BY_NAMING.get(naming, naming).split()
}

# Families with fused projections whose code has as many key heads as query heads if the configuration does not state
# another number. The code of the others has a constant of its own.
KEY_HEADS_OPTIONAL = frozenset(
    "codegen gpt_neox internlm2 megatron modernbert persimmon phi3".split()
)

# Prefixes of side parts (multi-token prediction), whose layers have the geometry of the main layers.
SIDE_PARTS = ("mtp.",)


def own_naming(names: Mapping[str, str]) -> Naming:
    """Return the naming for a mapping of one's own: name of a module -> its role.

    A name is the end of those of the tensors, without ``.weight``, ``.bias``, ``_weight`` or ``_bias``, and has ``*``
    where they have the layer's number. All names must begin alike up to the modules.

    >>> own_naming({"layers.*.attn.q_k_v_proj": "qkv"}).modules
    {'q_k_v_proj': 'qkv'}
    """
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names):
        fail(f"naming must be a name or a mapping from names of modules to roles but got {names!r}")
    for name, role in names.items():
        if role not in ROLES:
            fail(
                f"naming must give {name!r} one of the roles {', '.join(ROLES)} but gives {role!r}"
            )
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    alike = takewhile(lambda parts: len({*parts}) == 1, columns)
    start = "".join(f"{part}." for part, *_ in alike)
    rest = {name.removeprefix(start): role for name, role in names.items()}
    if any("*" in name for name in rest):
        fail(
            f"the names of naming must begin alike up to the layer's number but are {', '.join(names)}"
        )
    return Naming(start, rest)
