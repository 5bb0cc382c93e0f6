"""The keys that configurations use for each fact about RoPE, and keys that do not affect the rotation.

keys.json has the names: the spellings of each fact, those of the pairing with the value that means interleaved,
switches with their value in a model that has RoPE, and keys that do not affect the rotation, each with the reason.
Any other key that could be about it and is not read is an error: if misspelt keys were ignored, defaults would apply
silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..frequencies import RULES


def table(name: str) -> Any:
    """One of the tables beside this module."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


_TABLE = table("keys")
_SPELLED = {fact: tuple(names) for fact, names in _TABLE["spellings"].items()}

# --- the spellings of each fact at the outer level of a configuration ---

USUAL_BASE = _SPELLED["usual_base"]
BASE = (*USUAL_BASE, *_SPELLED["other_base"])
SECTION = _SPELLED["section"]
HEAD_DIM = _SPELLED["head_dim"]
# The same in other programs: read for an unknown family; for the others they must agree with the width.
HEAD_DIM_ELSEWHERE = _SPELLED["head_dim_elsewhere"]
HIDDEN, HEADS = _SPELLED["hidden"], _SPELLED["heads"]
ROTARY_DIM = _SPELLED["rotary_dim"]
FRACTION = _SPELLED["fraction"]
NOPE_DIM, ROPE_DIM = _SPELLED["nope_dim"], _SPELLED["rope_dim"]
MAX_POSITION = _SPELLED["max_position"]
# Nomic's and gpt-oss's names, and that of transformers.
ORIGINAL_MAX_POSITION = _SPELLED["original_max_position"]
# Spelling -> the value that means interleaved.
PAIRING: dict[str, bool] = _TABLE["pairing"]
LAYER_TYPES, LAYER_COUNT = _SPELLED["layer_types"], _SPELLED["layer_count"]
# Sections that describe the part of a model that reads and writes text.
TEXT = _SPELLED["text"]
# The part of an omni model whose text section a plain call reads: what it says is spoken by another part.
THINKER = "thinker_config."
# Sections whose names do not end with _config.
BARE_SECTIONS = ("encoder", "decoder")
# Keys that show that a configuration describes a model, with layers, and not only a rotation.
LAYERS = (*LAYER_TYPES, *LAYER_COUNT, "model_type")
POSITION_TYPE = _SPELLED["position_type"]
POSITION_TYPES_WITH_ROPE = frozenset({"rope", "rope_gptj", "rotary", "mrope", "yarn"})

# --- keys of a rope section that belong to no scaling rule ---

TYPE = ("rope_type", "type")
# Widths of the heads of one layer type, in sections that are made for other formats.
OWN_HEAD_DIM, OWN_ROTARY_DIM = "head_dim of the type", "rotary_dim of the type"
# Types without scaling; "mrope" and "axial" only mean that positions have several coordinates.
TYPES_WITHOUT_RULE = frozenset({"default", "mrope", "axial", "none"})
SECTIONS = ("mrope_section",)
SECTIONS_INTERLEAVED = ("mrope_interleaved",)
# Keys by which code multiplies queries by a factor that grows with their position; the last is that of GGUF.
TEMPERATURE = _SPELLED["temperature"]

# --- keys that do not affect the rotation, at all or if they have one value, and the reason ---

# In a rope section.
INERT: dict[str, str] = _TABLE["inert"]
INERT_VALUES = {(key, value): why for key, value, why in _TABLE["inert with a value"]}
# At the outer level.
INERT_OUTSIDE: dict[str, str] = _TABLE["inert outside"]
INERT_OUTSIDE_VALUES = {
    (key, value): why for key, value, why in _TABLE["inert outside with a value"]
}
# Outer keys -> their value in a model that has RoPE.
SWITCHES: dict[str, bool] = _TABLE["switches"]
# Layer types without attention, which have no rope section.
LAYERS_WITHOUT_ATTENTION = frozenset(_TABLE["types without attention"])

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


def effect(name: object, value: object) -> str:
    """The effect that a key about the rotation, or one inside it, may have: "layers", "base", "channels", or "" by no word of it.

    A list may say which layers rotate, whatever its name. All keys of a mapping whose name is about the rotation count.
    """
    word = str(name).lower()
    inner = value.items() if isinstance(value, Mapping) else ()
    found = [effect(*item) for item in inner if about_rotation(name) or about_rotation(item[0])]
    if _LAYERS.search(word) or (isinstance(value, list | tuple) and name not in _OF_RULES):
        found.append("layers")
    if isinstance(value, int | float) and not isinstance(value, bool) and _BASES.search(word):
        found.append("base")
    if _CHANNELS.search(word):
        found.append("channels")
    return next((one for one in ("layers", "base", "channels") if one in found), "")


def holds_rotation(value: object) -> bool:
    """Return True if a value holds, at any depth, a key that could be about the rotation."""
    if isinstance(value, list | tuple):
        return any(holds_rotation(one) for one in value if isinstance(one, Mapping))
    if not isinstance(value, Mapping):
        return False
    return any(about_rotation(key) or holds_rotation(inner) for key, inner in value.items())


# Outer keys that are always read, or known not to affect the rotation.
READ_OUTSIDE = frozenset(
    {*BASE, *SECTION, *FRACTION, *ROTARY_DIM, *PAIRING, *ROPE_DIM, *NOPE_DIM, *SECTIONS}
    | {*SECTIONS_INTERLEAVED, *ORIGINAL_MAX_POSITION, *POSITION_TYPE, *HEAD_DIM_ELSEWHERE}
    | INERT_OUTSIDE.keys()
)
# Rules that begin to scale at the context length by default, as in transformers. For all others the
# configuration must give the length, since the context length is often the one after scaling.
SCALED_FROM_MAX_POSITION = frozenset({"dynamic", "yarn"})
# Rules whose factor is the ratio of the new to the old length. Some programs write its inverse.
ONLY_LONGER = frozenset({"linear", "ntk", "yarn", "llama3"})
# HunYuan writes YaRN's parameters next to the alpha of its static NTK scaling but does not read them.
INERT_BESIDE_ALPHA = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
