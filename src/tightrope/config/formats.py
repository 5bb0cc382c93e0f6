"""Translate other configuration formats to the key names of transformers.

Each function takes the keys of a file and returns a :class:`tightrope.config.source.Source`. A source also
keeps the file's own key names, so that errors and provenance show the keys of the user's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._errors import bad_type
from .families import Family
from .source import Source, fail

# --- Meta's params.json ---------------------------------------------------------------------------

_META = "llama-models: models/llama3/model.py, apply_rotary_emb and apply_scaling"
# The scaling of `use_scaled_rope`: constants of Meta's code that no file contains.
_META_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_META_SCALING_4 = {**_META_SCALING, "factor": 16.0, "high_freq_factor": 1.0}
# Keys that are translated or, like the last two of Mistral's, describe other parts of the model.
_META_OWN = frozenset(
    """use_scaled_rope rope_scaling_factor rope_high_freq_factor yarn vision_encoder multimodal""".split()
)
# Mistral's `yarn`: its key -> the name in transformers (vLLM: transformers_utils/configs/mistral.py).
_MISTRAL_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
# (dim, n_layers) of Llama 3.2 1B and 3B: Meta's code scales them by 8, their hub configurations by 32.
_META_AMBIGUOUS = ((2048, 16), (3072, 28))


def is_meta(values: Mapping[str, Any]) -> bool:
    """Return True for Meta's ``params.json`` (Mistral's has the same names and pairing)."""
    return values.get("model_type") is None and "dim" in values and "n_heads" in values


def meta(values: Mapping[str, Any]) -> Source:
    """Read Meta's ``params.json``: pairs are interleaved; ``use_scaled_rope`` replaces a rope section."""
    fourth = "moe_args" in values or "nope_layer_interval" in values
    family = Family(True, _META, layers="no_rope_layers" if fourth else None)
    outer = {key: value for key, value in values.items() if key not in _META_OWN}
    spelled = {"no_rope_layer_interval": "nope_layer_interval", "num_hidden_layers": "n_layers"}
    if fourth and values.get("nope_layer_interval") is not None:
        outer["no_rope_layer_interval"] = outer.pop("nope_layer_interval")
        outer["num_hidden_layers"] = values.get("n_layers")
        outer["no_rope_layers"] = []
    scaled = values.get("use_scaled_rope")
    if scaled is not None and not isinstance(scaled, bool):
        fail(f"use_scaled_rope must be true or false but got {scaled!r}")
    yarn = values.get("yarn")
    if yarn:
        if scaled:
            fail("only one kind of scaling can apply but got use_scaled_rope and yarn")
        outer["rope_scaling"] = _mistral_yarn(yarn, spelled, latent="qk_nope_head_dim" in values)
    if scaled:
        outer["rope_scaling"] = section = dict[str, Any](rope_type="llama3")
        section |= _META_SCALING_4 if fourth else _META_SCALING
        origin = "the constant of Meta's code for use_scaled_rope"
        spelled |= {f"rope_scaling.{key}": origin for key in section}
        spelled["rope_scaling.rope_type"] = "use_scaled_rope"
        given = {"rope_scaling_factor": "factor", "rope_high_freq_factor": "high_freq_factor"}
        for key, name in given.items():
            if values.get(key) is not None:
                section[name] = values[key]
                spelled[f"rope_scaling.{name}"] = key
        if values.get("rope_scaling_factor") is None and (
            (values.get("dim"), values.get("n_layers")) in _META_AMBIGUOUS
        ):
            fail(
                "use_scaled_rope must come with rope_scaling_factor for Llama 3.2 1B and 3B: Meta's "
                "code scales them by 8, their hub configurations by 32"
            )
    return Source(outer, family, "Meta's params.json", spelled, seen=tuple(values))


def _mistral_yarn(yarn: Any, spelled: dict[str, str], latent: bool) -> dict[str, Any]:
    """Read ``yarn`` of Mistral's ``params.json``."""
    if not isinstance(yarn, Mapping):
        raise bad_type(f"yarn must be a mapping but got {yarn!r}")
    section: dict[str, Any] = {"rope_type": "yarn"}
    spelled["rope_scaling.rope_type"] = "yarn"
    for key, value in yarn.items():
        name = _MISTRAL_YARN.get(key, f"yarn.{key}")  # a key of another name is reported as unknown
        section[name], spelled[f"rope_scaling.{name}"] = value, f"yarn.{key}"
    scale = section.pop("yarn.apply_scale", None)
    if not isinstance(scale, bool):
        fail(f"yarn.apply_scale must be true or false but got {scale!r}")
    if scale and latent:
        fail(
            "yarn.apply_scale must be false with latent attention, where it could mean two factors"
        )
    if not scale:
        section["attention_factor"] = 1.0
        spelled["rope_scaling.attention_factor"] = "yarn.apply_scale"
    return section


# --- ONNX Runtime's genai_config.json -----------------------------------------------------------------------


def is_genai(values: Mapping[str, Any]) -> bool:
    """Return True for the ``genai_config.json`` of ONNX Runtime."""
    model = values.get("model")
    return isinstance(model, Mapping) and isinstance(model.get("decoder"), Mapping)


def genai(values: Mapping[str, Any]) -> Source:
    """Refuse the file: the rotation is inside the ONNX model."""
    del values
    fail(
        "genai_config.json must come with the config.json of the model, as it does not describe the rotation; pass that"
    )


# --- Megatron's arguments -------------------------------------------------------------------------

_MEGATRON = frozenset({"rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling"})
# NeMo's spellings of Megatron's arguments.
_NEMO = {
    "rotary_percentage": "rotary_percent",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
_MEGATRON_CODE = "megatron/core/models/common/embeddings/rope_utils.py"
# `use_rope_scaling`: the rest of Llama 3.1's rule is in the code (`RotaryEmbedding._apply_scaling`).
_MEGATRON_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MEGATRON_LATENT = {
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
}
_MEGATRON_YARN = {
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_MEGATRON_YARN_DENSE = {
    **{f"yarn_{key}": name for key, name in _MEGATRON_YARN.items()},
    "yarn_correction_range_round_to_int": "truncate",
}


def is_megatron(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping has the names of Megatron's arguments, or NeMo's."""
    nemo = not _NEMO.keys().isdisjoint(values) and "position_embedding_type" in values
    return nemo or not _MEGATRON.isdisjoint(values)


def megatron(values: Mapping[str, Any]) -> Source:
    """Read Megatron's arguments: ``rotary_*``, ``kv_channels`` and its three kinds of scaling."""
    name = "Megatron's arguments"
    outer = {_NEMO.get(key, key): value for key, value in values.items()}
    outer.pop("model_type", None)  # not the model_type of transformers
    spelled = {name: key for key, name in _NEMO.items() if key in values}
    section: dict[str, Any] = {}

    def move(names: Mapping[str, str], into: dict[str, Any], prefix: str) -> None:
        for key, name in names.items():
            value = outer.pop(key, None)
            if value is not None:
                into[name] = value
                spelled[f"{prefix}{name}"] = key

    latent = values.get("multi_latent_attention")
    either = [key for key in ("qk_pos_emb_head_dim", "kv_lora_rank") if values.get(key) is not None]
    if latent is None and either:
        fail(
            f"{name} must come with multi_latent_attention, true or false, as they have {either[0]}, which both "
            f"kinds of attention may have"
        )
    if not isinstance(latent, bool | None):
        raise bad_type(f"multi_latent_attention must be a bool but got {latent!r}")
    family = None
    kinds = []
    scaled = [key for key in ("use_rope_scaling", "rope_scaling") if outer.pop(key, None) is True]
    rope_type = outer.pop("rope_type", None)
    position = values.get("position_embedding_type")
    if latent:
        # Megatron's code uses the interleaved pairing for latent attention (`multi_latent_attention`).
        if outer.pop("rotary_interleaved", False):
            fail(
                "rotary_interleaved must be False with latent attention, which is always interleaved"
            )
        family = Family(True, _MEGATRON_CODE, start="nope", scales_softmax=True)
        move(_MEGATRON_LATENT, outer, "")
        outer.pop("kv_channels", None)
        outer.pop("rotary_percent", None)
        if rope_type == "yarn":
            kinds.append("rope_type")
            move(_MEGATRON_YARN, section, "rope_scaling.")
            section["rope_type"], spelled["rope_scaling.rope_type"] = "yarn", "rope_type"
        elif rope_type != "rope":
            fail(f"rope_type must be 'rope' or 'yarn' with latent attention but got {rope_type!r}")
        for key in _MEGATRON_YARN:
            outer.pop(key, None)
    elif position == "yarn":
        kinds.append("position_embedding_type")
        move(_MEGATRON_YARN_DENSE, section, "rope_scaling.")
        section["rope_type"], spelled["rope_scaling.rope_type"] = "yarn", "position_embedding_type"
    if scaled:
        kinds.append(scaled[0])
        section |= {"rope_type": "llama3", **_MEGATRON_SCALING}
        origin = f"the constant of Megatron's code for {scaled[0]}"
        spelled |= {f"rope_scaling.{key}": origin for key in _MEGATRON_SCALING}
        spelled["rope_scaling.rope_type"] = scaled[0]
        move(
            {"rotary_scaling_factor": "factor", "rope_scaling_factor": "factor"},
            section,
            "rope_scaling.",
        )
    unused = {*_MEGATRON_LATENT, *_MEGATRON_YARN, *_MEGATRON_YARN_DENSE, "rope_scaling_factor"}
    for key in unused:
        outer.pop(key, None)  # always present; they do nothing if their switch is off
    ratio = outer.pop("rotary_seq_len_interpolation_factor", None)
    if ratio is not None:
        kinds.append("rotary_seq_len_interpolation_factor")
        section |= {"rope_type": "linear", "factor": ratio}
        key = spelled.get(
            "rotary_seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor"
        )
        spelled["rope_scaling.rope_type"] = spelled["rope_scaling.factor"] = key
    if len(kinds) > 1:
        fail(f"only one kind of scaling can apply but got {' and '.join(kinds)}")
    if section:
        outer["rope_scaling"] = section
    # Layers without RoPE need no_rope_freq, which is an unknown key here; rotary_percent is 1 by default.
    knows = frozenset({"layers", "slice", "start"})
    return Source(outer, family, name, spelled, seen=tuple(values), knows=knows)
