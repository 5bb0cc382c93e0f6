"""Translate other configuration formats to the key names of transformers.

Each function takes the keys of a file and returns a :class:`tightrope.config.source.Source`. A source also
keeps the file's own key names, so that errors and provenance show the keys of the user's file. formats.json has
the names, key -> name in transformers, and the constants of each program's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .families import LAST_OF_EACH, Family
from .keys import table
from .source import Found, Source, boolean, fail, items

_TABLES = table("formats")
_META, _MEGATRON, _NEMO = _TABLES["meta"], _TABLES["megatron"], _TABLES["megatron"]["NeMo"]
_MISTRAL_YARN = _TABLES["mistral"]["yarn"]


def _llama3(table: Mapping[str, Any], switch: str, program: str, spelled: dict[str, str]) -> Any:
    """The scaling of Llama 3.1 that a switch turns on; its parameters are constants of a program's code."""
    origin = f"the constant of {program}'s code for {switch}"
    spelled |= {f"rope_scaling.{key}": origin for key in table}
    spelled["rope_scaling.rope_type"] = switch
    return {"rope_type": "llama3", **table}


def _move(
    names: Mapping[str, str],
    outer: dict[str, Any],
    into: dict[str, Any],
    spelled: dict[str, str],
    prefix: str = "rope_scaling.",
) -> None:
    """Take these keys out of the outer level, and put those that are given under their names elsewhere."""
    for key, name in names.items():
        value = outer.pop(key, None)
        if value is not None:
            into[name], spelled[f"{prefix}{name}"] = value, key


# --- Meta's params.json ---------------------------------------------------------------------------


def is_meta(values: Mapping[str, Any]) -> bool:
    """Return True for Meta's ``params.json`` (Mistral's has the same names and pairing)."""
    return values.get("model_type") is None and "dim" in values and "n_heads" in values


def meta(values: Mapping[str, Any]) -> Source:
    """Read Meta's ``params.json``: pairs are interleaved; ``use_scaled_rope`` replaces a rope section."""
    fourth = "moe_args" in values or "nope_layer_interval" in values
    flags = "no_rope_layers" if fourth else None
    family = Family(True, _META["source"], flags=flags, lists=LAST_OF_EACH)
    own = {*_META["translated"], *_META["of other parts"]}
    outer = {key: value for key, value in values.items() if key not in own}
    spelled = {"no_rope_layer_interval": "nope_layer_interval", "num_hidden_layers": "n_layers"}
    if fourth and values.get("nope_layer_interval") is not None:
        outer["no_rope_layer_interval"] = outer.pop("nope_layer_interval")
        outer["num_hidden_layers"] = values.get("n_layers")
        outer["no_rope_layers"] = []
    scaled, yarn = values.get("use_scaled_rope"), values.get("yarn")
    if not isinstance(scaled, bool | None):
        fail(f"use_scaled_rope must be true or false but got {scaled!r}")
    if scaled and yarn:
        fail("only one kind of scaling can apply but got use_scaled_rope and yarn")
    if yarn:
        outer["rope_scaling"] = _mistral_yarn(yarn, spelled, latent="qk_nope_head_dim" in values)
    if scaled:
        constants = _META["constants of Llama 4" if fourth else "constants"]
        outer["rope_scaling"] = _llama3(constants, "use_scaled_rope", "Meta", spelled)
        _move(_META["scaling"], {**values}, outer["rope_scaling"], spelled)
        sizes = {key: values.get(key) for key in ("dim", "n_layers")}
        if values.get("rope_scaling_factor") is None and sizes in _META["scaled by 8 or 32"]:
            fail(
                "use_scaled_rope must come with rope_scaling_factor for Llama 3.2 1B and 3B: Meta's "
                "code scales them by 8, their hub configurations by 32"
            )
    return Source(outer, family, "Meta's params.json", spelled, seen=tuple(values))


def _mistral_yarn(yarn: Any, spelled: dict[str, str], latent: bool) -> dict[str, Any]:
    """Read ``yarn`` of Mistral's ``params.json``."""
    section: dict[str, Any] = {"rope_type": "yarn"}
    spelled["rope_scaling.rope_type"] = "yarn"
    for key, value in items(Found(yarn, "yarn")).items():
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

_OF_MEGATRON = frozenset(
    {"rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling"}
)
_RATIO = "rotary_seq_len_interpolation_factor"
_YARN, _LATENT_YARN = _MEGATRON["yarn"], _MEGATRON["yarn of latent attention"]


def is_megatron(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping has the names of Megatron's arguments, or NeMo's."""
    nemo = not _NEMO.keys().isdisjoint(values) and "position_embedding_type" in values
    return nemo or not _OF_MEGATRON.isdisjoint(values)


def megatron(values: Mapping[str, Any]) -> Source:
    """Read Megatron's arguments: ``rotary_*``, ``kv_channels`` and its three kinds of scaling."""
    name, family = "Megatron's arguments", None
    outer = {_NEMO.get(key, key): value for key, value in values.items()}
    outer.pop("model_type", None)  # not the model_type of transformers
    spelled = {name: key for key, name in _NEMO.items() if key in values}
    switches = {key: outer.pop(key, None) for key in ("use_rope_scaling", "rope_scaling")}
    scaled = [key for key, on in switches.items() if on is not None and boolean(Found(on, key))]
    rope_type, switch, of_yarn = outer.pop("rope_type", None), "position_embedding_type", _YARN
    if _is_latent(values, name):
        # Megatron's code uses the interleaved pairing for latent attention (`multi_latent_attention`).
        if outer.pop("rotary_interleaved", False):
            fail(
                "rotary_interleaved must be False with latent attention, which is always interleaved"
            )
        if rope_type not in ("rope", "yarn"):
            fail(f"rope_type must be 'rope' or 'yarn' with latent attention but got {rope_type!r}")
        family = Family(True, _MEGATRON["source"], start="nope", scales_softmax=True)
        _move(_MEGATRON["latent attention"], outer, outer, spelled, "")
        outer.pop("kv_channels", None)
        outer.pop("rotary_percent", None)
        switch, of_yarn = "rope_type", _LATENT_YARN
    # The key that turns a kind of scaling on -> the rope section.
    kinds: dict[str, dict[str, Any]] = {}
    if values.get(switch) == "yarn":
        kinds[switch] = {"rope_type": "yarn"}
        spelled["rope_scaling.rope_type"] = switch
        _move(of_yarn, outer, kinds[switch], spelled)
    outer = {key: value for key, value in outer.items() if key not in of_yarn}
    if scaled:
        constants = _MEGATRON["constants"]
        kinds[scaled[0]] = _llama3(constants, scaled[0], "Megatron", spelled)
        _move(_MEGATRON["factor"], outer, kinds[scaled[0]], spelled)
    ratio = outer.pop(_RATIO, None)
    if ratio is not None:
        kinds[_RATIO] = {"rope_type": "linear", "factor": ratio}
        key = spelled.get(_RATIO, _RATIO)
        spelled["rope_scaling.rope_type"] = spelled["rope_scaling.factor"] = key
    if len(kinds) > 1:
        fail(f"only one kind of scaling can apply but got {' and '.join(kinds)}")
    # Always present; they do nothing if their switch is off.
    idle = {*_MEGATRON["latent attention"], *_LATENT_YARN, *_YARN, "rope_scaling_factor"}
    outer = {key: value for key, value in outer.items() if key not in idle}
    if kinds:
        (outer["rope_scaling"],) = kinds.values()
    # Layers without RoPE need no_rope_freq, which is an unknown key here; rotary_percent is 1 by default.
    knows = frozenset({"layers", "slice", "start"})
    return Source(outer, family, name, spelled, seen=tuple(values), knows=knows)


def _is_latent(values: Mapping[str, Any], name: str) -> bool:
    """Return True for latent attention; an error if the arguments do not say."""
    latent = values.get("multi_latent_attention")
    either = [key for key in ("qk_pos_emb_head_dim", "kv_lora_rank") if values.get(key) is not None]
    if latent is None and either:
        fail(
            f"{name} must come with multi_latent_attention, true or false, as they have {either[0]}, which both "
            f"kinds of attention may have"
        )
    return latent is not None and boolean(Found(latent, "multi_latent_attention"))
