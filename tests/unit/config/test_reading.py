"""Test `from_config`: real configurations give the expected spec, and wrong ones an error.

No wrong or missing key silently gives a default.
"""

import argparse
import copy
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.model_configs import MODELS, QWEN2_VL, REFUSED, Model, Refused
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.config import LayerSpecs, Provenance, families, keys, provenance
from tightrope.frequencies import (
    RULES,
    DynamicNTK,
    Frequencies,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Rule,
    YaRN,
    default,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}


def read(config: object, **options: Any) -> Any:
    return RopeSpec.from_config(config, **options)


# --- real configurations --------------------------------------------------------------------------


def by_name(model: Model | Refused) -> str:
    return model.name if isinstance(model, Model) else model.origin


def test_there_are_enough_of_them() -> None:
    assert len({model.origin for model in MODELS}) >= 100
    assert len({model.name for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_each_model_gives_the_expected_spec(model: Model) -> None:
    before = copy.deepcopy(model.config)
    got = read(model.config, **model.options)
    assert got == model.wanted
    assert isinstance(got, RopeSpec | LayerSpecs)
    assert model.config == before, "the caller's configuration changed"


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_a_file_reads_as_its_keys(model: Model, tmp_path: Path) -> None:
    name = "params.json" if model.form == "meta" else "config.json"
    (tmp_path / name).write_text(json.dumps(model.config), encoding="utf-8")
    assert read(tmp_path, **model.options) == model.wanted
    assert read(str(tmp_path / name), **model.options) == model.wanted


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_every_field_has_a_source(model: Model) -> None:
    sourced = provenance(model.config, **model.options)
    assert sourced.spec == model.wanted
    for row in sourced.rows:
        assert row.source, row
    text = str(sourced)
    lines = text.splitlines()
    fields = [row.field for row in sourced.rows]
    assert sum(line.startswith("interleaved ") for line in lines) == fields.count("interleaved") > 0
    for row in sourced.rows:
        assert row.source in text


@pytest.mark.parametrize("model", REFUSED, ids=by_name)
def test_incomplete_configurations_are_refused(model: Refused) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(model.why)}$"):
        read(model.config)


FLAT = [
    model
    for model in MODELS
    if model.form == "v4"
    and not model.options
    and isinstance(model.wanted, RopeSpec)
    and "rope_theta" in model.config
]


@pytest.mark.parametrize("model", FLAT, ids=by_name)
def test_both_forms_of_transformers_read_alike(model: Model) -> None:
    config = dict(model.config)
    rope = dict(config.pop("rope_scaling", None) or {"rope_type": "default"})
    rope["rope_theta"] = config.pop("rope_theta")
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    assert read({**config, "rope_parameters": rope}) == model.wanted


# --- no silent default ----------------------------------------------------------------------------

# The last part of a key's path -> the default if the key is absent. A file without one of these
# keys describes another valid model.
ABSENCE: dict[str, str] = {
    "rope_scaling": "no scaling: nothing tells an unscaled model from one whose section was lost",
    "rope_parameters": "as for rope_scaling, if the base is outside the section",
    "head_dim": "hidden size / heads, as in the first Llama; families with another default require it",
    "kv_channels": "as for head_dim, in Megatron's arguments",
    "llama.attention.key_length": "as for head_dim, in GGUF",
    "head_size": "as for head_dim, in vLLM",
    "layer_types": "the same specs, without the list of layers",
    "use_scaled_rope": "no scaling: Meta wrote it from Llama 3.1 on",
    "use_rope_scaling": "no scaling",
    "rotary_seq_len_interpolation_factor": "no scaling",
    "rotary_percent": "all channels",
    "rotary_dim": "all channels, for families that rotate them all",
    "partial_rotary_factor": "all channels, in Phi-3; families with another default require it",
    "beta_fast": "the paper's 32",
    "beta_slow": "the paper's 1",
    "truncate": "the paper's true",
    "attention_factor": "the paper's, computed from factor",
    "mscale": "1, as in DeepSeek's code",
    "mscale_all_dim": "0, as in DeepSeek's code",
    "alpha": "dynamic NTK, which has no alpha",
    "original_max_position_embeddings": "max_position_embeddings, for yarn and dynamic",
    "max_position_embeddings": "LongRoPE with mscales then has no factor; rules that need the length require it",
    "rope_type": "no scaling, if the section has only a base",
    "general.architecture": "inferred from the prefix of the other keys",
}


def paths(config: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, Mapping):
            yield from paths(value, (*prefix, key))


def changed(config: Mapping[str, Any], path: tuple[str, ...], name: str | None) -> dict[str, Any]:
    """Copy a configuration with one key removed, or renamed to `name`."""
    made = copy.deepcopy(dict(config))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    value = inner.pop(path[-1])
    if name is not None:
        inner[name] = value
    return made


def tolerated(model: Model, path: tuple[str, ...]) -> bool:
    key = path[-1]
    if key in ABSENCE:
        return True
    # GGUF has one key per parameter of scaling; only these may be dropped.
    if ".rope.scaling." in key:
        return key.endswith(
            (".type", ".factor", ".original_context_length", ".yarn_log_multiplier")
        )
    return key.endswith((".rope.dimension_sections", ".attention.key_length_mla"))


SUFFIXES = ["x", "_", "s", "_old", "2"]


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_no_key_turns_into_a_default(data: st.DataObject) -> None:
    """Dropping or renaming a key gives an error, the same spec, or a documented default."""
    model = data.draw(st.sampled_from(MODELS))
    path = data.draw(st.sampled_from(sorted(paths(model.config))))
    name = data.draw(
        st.none()
        | st.sampled_from([path[-1] + suffix for suffix in SUFFIXES] + ["x_" + path[-1], "zzz"])
    )
    check_a_change(model, path, name)


def check_a_change(model: Model, path: tuple[str, ...], name: str | None) -> None:
    try:
        got = read(changed(model.config, path, name), **model.options)
    except (ValueError, TypeError) as error:
        if not str(error).startswith("["):
            raise  # not one of the library's errors
        return
    if got == model.wanted:
        return
    if name is not None:
        # A renamed key must not count as a missing key, where the two can be distinguished.
        assert not any(part in keys.SECTION for part in path[:-1]), f"{path} -> {name} gave {got}"
        assert not re.search("rope|rotary|theta", name), f"{path} -> {name} gave {got}"
    assert tolerated(model, path), f"{path} -> {name} gave {got}, not {model.wanted}"


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_no_dropped_key_turns_into_a_default(model: Model) -> None:
    for path in paths(model.config):
        check_a_change(model, path, None)


JUNK = ["x", "", [], [1], {}, {"a": 1}, -1, 0, 1.5, True, float("nan"), float("inf")]


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_junk_is_refused_in_a_sentence(data: st.DataObject) -> None:
    """Junk in place of any value gives a spec or one of the library's errors."""
    model = data.draw(st.sampled_from(MODELS))
    path = data.draw(st.sampled_from(sorted(paths(model.config))))
    config = copy.deepcopy(model.config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(st.sampled_from(JUNK))
    try:
        read(config, **model.options)
    except (ValueError, TypeError) as error:
        if not str(error).startswith("["):
            raise


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_frequencies_are_never_made_up(model: Model) -> None:
    """Configurations without a base are read only for families whose code has a constant base."""
    config = json.loads(json.dumps(model.config))
    section = model.options.get("section")
    inner = config[section] if section else config

    def strip(values: dict[str, Any]) -> None:
        for key in list(values):
            if key in keys.BASE or key.endswith(("rope_theta", "base_freq", ".freq_base")):
                del values[key]
            elif isinstance(values[key], dict):
                strip(values[key])

    strip(inner)
    constant = {"gptj", "codegen", "roformer", "esm"}
    vision = section == "vision_config" and model.config["model_type"].startswith(("qwen", "glm"))
    if inner.get("model_type") in constant or vision:
        assert read(config, **model.options) == model.wanted
        return
    with pytest.raises(ValueError, match=r"must give the base|must give .*(rope_theta|base_freq)"):
        read(config, **model.options)


@pytest.mark.parametrize("key", keys.BASE)
def test_a_base_may_stand_anywhere_but_must_agree(key: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    if key != "rotary_base":  # Megatron's files have no model_type but give the pairing
        assert read({**config, key: 7.0}) == RopeSpec(128, 7.0)
        assert read({**config, "rope_parameters": {key: 7.0}}) == RopeSpec(128, 7.0)
        assert read({**LLAMA, key: 500000}) == RopeSpec(128, 5e5)


# --- wrong and missing keys -----------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
VLLM = {"head_size": 64, "rotary_dim": 64, "rope_theta": 1e4, "is_neox_style": True}
GGUF = {
    "general.architecture": "qwen2",
    "qwen2.embedding_length": 3584,
    "qwen2.attention.head_count": 28,
    "qwen2.rope.freq_base": 1e6,
    "qwen2.context_length": 32768,
}
MEGATRON = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
}

WRONG: dict[str, tuple[object, dict[str, Any], type[Exception], str]] = {
    "two bases": (
        {**LLAMA, "rope_parameters": {"rope_theta": 10000.0}},
        {},
        ValueError,
        "[from_config] base must have one value but got rope_parameters.rope_theta = 10000.0 and "
        "rope_theta = 500000.0.",
    ),
    "two fractions": (
        {**LLAMA, "partial_rotary_factor": 0.5, "rotary_pct": 0.25},
        {},
        ValueError,
        "[from_config] rotary_dim must have one value but got partial_rotary_factor = 0.5 of 128 = 64 "
        "and rotary_pct = 0.25 of 128 = 32.",
    ),
    "a fraction and a width": (
        {**LLAMA, "partial_rotary_factor": 0.5, "rotary_dim": 32},
        {},
        ValueError,
        "[from_config] rotary_dim must have one value but got rotary_dim = 32 and "
        "partial_rotary_factor = 0.5 of 128 = 64.",
    ),
    "two widths": (
        {**LLAMA, "head_dim": 128, "head_size": 64},
        {},
        ValueError,
        "[from_config] head_dim must have one value but got head_dim = 128 and head_size = 64.",
    ),
    "two kinds of scaling": (
        {**LLAMA, "rope_scaling": {**YARN, "type": "linear"}},
        {},
        ValueError,
        "[from_config] the kind of scaling must have one value but got rope_scaling.rope_type = 'yarn' "
        "and rope_scaling.type = 'linear'.",
    ),
    "two sections": (
        {**LLAMA, "rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}},
        {},
        ValueError,
        "[from_config] factor must have one value but got rope_scaling.factor = 4.0 and "
        "rope_parameters.factor = 8.0.",
    ),
    "two original lengths": (
        {**LLAMA, "rope_scaling": YARN, "original_max_position_embeddings": 4096},
        {},
        ValueError,
        "[from_config] original_max_position must have one value but got "
        "rope_scaling.original_max_position_embeddings = 8192 and original_max_position_embeddings = "
        "4096.",
    ),
    "two factors on the channels": (
        {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.5, "attn_factor": 2}},
        {},
        ValueError,
        "[from_config] attention_factor must have one value but got attention_factor = 1.5 and "
        "rope_scaling.attn_factor = 2.",
    ),
    "a key that is not the rule's": (
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
        {},
        ValueError,
        "[from_config] every key about RoPE must be known but got rope_scaling.beta_fast; "
        "strict=False ignores them with a warning.",
    ),
    "a factor without a rule": (
        {**LLAMA, "rope_scaling": {"rope_type": "default", "factor": 2.0}},
        {},
        ValueError,
        "[from_config] every key about RoPE must be known but got rope_scaling.factor; "
        "strict=False ignores them with a warning.",
    ),
    "misspelt keys": (
        {**LLAMA, "rope_tehta": 1e6, "rotary_fraction": 0.5},
        {},
        ValueError,
        "[from_config] every key about RoPE must be known but got rope_tehta, rotary_fraction; "
        "strict=False ignores them with a warning.",
    ),
    "a section under another name": (
        {**LLAMA, "positions": dict(YARN)},
        {},
        ValueError,
        "[from_config] every key about RoPE must be known but got positions; "
        "strict=False ignores them with a warning.",
    ),
    "another family's key": (
        {**LLAMA, "rope_local_base_freq": 10000.0},
        {},
        ValueError,
        "[from_config] every key about RoPE must be known but got rope_local_base_freq; "
        "strict=False ignores them with a warning.",
    ),
    "layers without RoPE in a family that has none": (
        {**LLAMA, "no_rope_layers": [1, 1, 0]},
        {},
        ValueError,
        "[from_config] every key that may say which layers rotate must be known but got no_rope_layers; "
        "pass a config without it only if it has no effect.",
    ),
    "a section without a type": (
        {**LLAMA, "rope_scaling": {"factor": 2.0}},
        {},
        ValueError,
        "[from_config] a rope section must name its rope_type but has only rope_scaling.factor.",
    ),
    "an unknown type": (
        {**LLAMA, "rope_scaling": {"rope_type": "magic"}},
        {},
        ValueError,
        "[from_config] rope_scaling.rope_type must be one of axial, deepseek_yarn, default, dynamic, "
        "given, linear, llama3, longrope, mrope, none, proportional, su, yarn but got 'magic'.",
    ),
    "a rule without its parameters": (
        {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {},
        ValueError,
        "[from_config] scaling by 'llama3' must have low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings but has only factor, rope_type.",
    ),
    "no factor": (
        {**LLAMA, "rope_scaling": {"rope_type": "linear"}},
        {},
        ValueError,
        "[from_config] scaling by 'linear' must have factor but has only rope_type.",
    ),
    "a section that is a number": (
        {**LLAMA, "rope_scaling": 4.0},
        {},
        TypeError,
        "[from_config] rope_scaling must be a mapping but got 4.0.",
    ),
    "a fraction above 1": (
        {**LLAMA, "partial_rotary_factor": 2},
        {},
        ValueError,
        "[from_config] partial_rotary_factor must be above 0 and at most 1 but got 2.",
    ),
    "a fraction that is text": (
        {**LLAMA, "partial_rotary_factor": "half"},
        {},
        ValueError,
        "[from_config] partial_rotary_factor must be above 0 and at most 1 but got 'half'.",
    ),
    "a fraction of nothing": (
        {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.01},
        {},
        ValueError,
        "[from_config] partial_rotary_factor must give at least 2 of 128 channels but got 0.01.",
    ),
    "a fraction of latent attention that is text": (
        {
            **LLAMA,
            "model_type": "deepseek_v3",
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "partial_rotary_factor": "half",
        },
        {},
        ValueError,
        "[from_config] partial_rotary_factor must be above 0 and at most 1 but got 'half'.",
    ),
    "a fraction that the family's code does not read": (
        {**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {},
        ValueError,
        "[from_config] rotary_dim must be 128, as the code of model_type 'llama' rotates all channels of a "
        "head, but got 64 from rope_parameters.partial_rotary_factor = 0.5 of 128; for other code, which "
        "rotates a part, pass a config without its model_type, with interleaved=False and "
        "rope_layers='all'.",
    ),
    "a width that the family's code does not read": (
        {**LLAMA, "model_type": "cohere", "rotary_dim": 32, "head_dim": 128},
        {},
        ValueError,
        "[from_config] rotary_dim must be 128, as the code of model_type 'cohere' rotates all channels of a "
        "head, but got 32 from rotary_dim; for other code, which rotates a part, pass a config without "
        "its model_type, with interleaved=True and rope_layers='all'.",
    ),
    "a fraction that no code of the hub reads": (
        {**LLAMA, "model_type": "internlm2", "partial_rotary_factor": 0.5},
        {},
        ValueError,
        "[from_config] rotary_dim must be 128, as the code of model_type 'internlm2' rotates all channels of "
        "a head, but got 64 from partial_rotary_factor = 0.5 of 128; for other code, which rotates a part, "
        "pass a config without its model_type, with interleaved=False and rope_layers='all'.",
    ),
    "a width that no code of the hub reads": (
        {**LLAMA, "model_type": "minicpm", "rotary_dim": 32, "head_dim": 128},
        {},
        ValueError,
        "[from_config] rotary_dim must be 128, as the code of model_type 'minicpm' rotates all channels of a "
        "head, but got 32 from rotary_dim; for other code, which rotates a part, pass a config without "
        "its model_type, with interleaved=False and rope_layers='all'.",
    ),
    "a missing fraction": (
        {**LLAMA, "model_type": "phi"},
        {},
        ValueError,
        "[from_config] model_type 'phi' rotates a part of each head, so the config must give one of "
        "partial_rotary_factor, rotary_pct, rope_pct, rotary_percent, rotary_emb_fraction, "
        "rotary_dim.",
    ),
    "a missing head width": (
        {**LLAMA, "model_type": "gemma"},
        {},
        ValueError,
        "[from_config] model_type 'gemma' has a head_dim other than hidden size / heads, so the "
        "config must give head_dim.",
    ),
    "no width": (
        {"model_type": "llama", "rope_theta": 1e4, "hidden_size": 64},
        {},
        ValueError,
        "[from_config] the config must give the width of a head, by one of head_dim, kv_channels, "
        "head_size, or by hidden_size and num_attention_heads, but its keys are hidden_size, "
        "model_type, rope_theta.",
    ),
    "a width that does not divide": (
        {**LLAMA, "num_attention_heads": 33},
        {},
        ValueError,
        "[from_config] hidden_size must be a multiple of num_attention_heads but got 4096 and 33.",
    ),
    "an unknown family": (
        {**LLAMA, "model_type": "zebra"},
        {},
        ValueError,
        "[from_config] the config must give the pairing of channels, the channels that rotate and the layers "
        "that rotate, as the table of families does not contain model_type 'zebra'; pass interleaved=False if "
        "channel i is paired with i + rotary_dim / 2, as in Llama, or interleaved=True if adjacent channels are "
        "paired, as in GPT-J; rotary_dim=128 if all 128 channels of a head rotate, or the number that do, with "
        "start if they are not the first; rope_layers='all' if all layers with attention rotate (to name some of "
        "them, add layer_types to the config); for code like Llama's: RopeSpec.from_config(config, "
        "interleaved=False, rotary_dim=128, rope_layers='all').",
    ),
    "no family": (
        {k: v for k, v in LLAMA.items() if k != "model_type"},
        {},
        ValueError,
        "[from_config] the config must give the pairing of channels and the channels that rotate, as the table "
        "of families does not contain a config without model_type; pass interleaved=False if channel i is "
        "paired with i + rotary_dim / 2, as in Llama, or interleaved=True if adjacent channels are paired, as in "
        "GPT-J; rotary_dim=128 if all 128 channels of a head rotate, or the number that do, with start if they "
        "are not the first; for code like Llama's: RopeSpec.from_config(config, interleaved=False, "
        "rotary_dim=128).",
    ),
    "a pairing that is not the family's": (
        {**LLAMA, "rope_interleaved": True},
        {},
        ValueError,
        "[from_config] interleaved must have one value but got True from rope_interleaved and False from "
        "model_type 'llama'; pass interleaved=True if the key is right.",
    ),
    "two pairings": (
        {**VLLM, "rope_interleaved": True},
        {},
        ValueError,
        "[from_config] interleaved must have one value but got rope_interleaved = True and "
        "is_neox_style = False.",
    ),
    "a pairing that is no bool": (
        {**VLLM, "is_neox_style": "yes"},
        {},
        TypeError,
        "[from_config] is_neox_style must be a bool but got 'yes'.",
    ),
    "an argument that is no bool": (
        LLAMA,
        {"interleaved": 1},
        TypeError,
        "[from_config] interleaved must be a bool or None but got 1.",
    ),
    "latent attention, one key missing": (
        {**LLAMA, "model_type": "deepseek_v3", "qk_rope_head_dim": 64},
        {},
        ValueError,
        "[from_config] latent attention must have qk_nope_head_dim and qk_rope_head_dim but the config "
        "has qk_rope_head_dim.",
    ),
    "latent attention, both keys missing": (
        {**LLAMA, "model_type": "deepseek_v2"},
        {},
        ValueError,
        "[from_config] latent attention must have qk_nope_head_dim and qk_rope_head_dim but the config "
        "has neither.",
    ),
    "latent attention of another width": (
        {**LLAMA, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "head_dim": 100},
        {},
        ValueError,
        "[from_config] head_dim must have one value but got head_dim = 100 and qk_nope_head_dim + "
        "qk_rope_head_dim = 192.",
    ),
    "no sections": (
        {
            "general.architecture": "qwen2vl",
            "qwen2vl.embedding_length": 1536,
            "qwen2vl.attention.head_count": 12,
            "qwen2vl.rope.freq_base": 1000000.0,
        },
        {},
        ValueError,
        "[from_config] GGUF architecture 'qwen2vl' has positions of three coordinates, so the config "
        "must give mrope_section.",
    ),
    "sections that the family weaves otherwise": (
        {**QWEN2_VL, "mrope_interleaved": True},
        {},
        ValueError,
        "[from_config] mrope_interleaved must be False for model_type 'qwen2_vl' but got True.",
    ),
    "sections in a family without": (
        {**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {},
        ValueError,
        "[from_config] rope_scaling.mrope_section must come with mrope_interleaved, as model_type "
        "'llama' is not known to have several axes.",
    ),
    "axial in a family without": (
        {**LLAMA, "rope_scaling": {"type": "axial"}},
        {},
        ValueError,
        "[from_config] rope_scaling.type is 'axial', but model_type 'llama' is not known to have several axes.",
    ),
    "sections of another sum": (
        {**QWEN2_VL, "rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}},
        {},
        ValueError,
        "[RopeSpec] axes must have one entry for each of the 64 pairs that rotate but got 24; rotary_dim=48 would fit.",
    ),
    "keys beside layer types": (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}, "rope_theta": 2.0}},
        {},
        ValueError,
        "[from_config] a rope section must hold keys or layer types but got both: "
        "rope_parameters.rope_theta and full_attention.",
    ),
    "a layer type without a section": (
        {
            **LLAMA,
            "layer_types": ["a", "b", "conv"],
            "rope_parameters": {"a": {"rope_type": "default"}},
        },
        {},
        ValueError,
        "[from_config] each layer type must have a rope section but the config has none for b.",
    ),
    "a layer type with a line break and a code for a terminal": (
        {
            **LLAMA,
            "layer_types": ["a", "b\n\x1b[1m"],
            "rope_parameters": {"a": {"rope_type": "default"}},
        },
        {},
        ValueError,
        r"[from_config] each layer type must have a rope section but the config has none for b\n\x1b[1m.",
    ),
    "a section of the config that is not there": (
        QWEN2_VL,
        {"section": "audio_config"},
        ValueError,
        "[from_config] section must be one of the config's sections but got 'audio_config'; the "
        "config has vision_config.",
    ),
    "a section of metadata": (
        GGUF,
        {"section": "text_config"},
        ValueError,
        "[from_config] section must be None for GGUF architecture 'qwen2', which has no sections, "
        "but got 'text_config'.",
    ),
    "a layer type that is not there": (
        {**LLAMA, "layer_types": ["full_attention"]},
        {"layer_type": "sliding"},
        ValueError,
        "[from_config] layer_type must be one of the config's layer types but got 'sliding'; the "
        "config has full_attention.",
    ),
    "a layer type where there is one": (
        LLAMA,
        {"layer_type": "sliding"},
        ValueError,
        "[from_config] layer_type must be one of the config's layer types but got 'sliding'; the "
        "config has one type only, without a name.",
    ),
    "no rotary embedding": (
        {"model_type": "zamba", "use_mem_rope": False, **VLLM},
        {},
        ValueError,
        "[from_config] the config has no RoPE: use_mem_rope is False.",
    ),
    "something else": (
        5,
        {},
        TypeError,
        "[from_config] config must be a mapping, a config object, a model or a path but got 5.",
    ),
    "GGUF without frequencies": (
        {k: v for k, v in GGUF.items() if not k.endswith("freq_base")},
        {},
        ValueError,
        "[from_config] the config must give the base of the frequencies: add one of rope_theta, "
        "rotary_emb_base, rotary_base, rope_base to its keys, which are general.architecture, "
        "qwen2.attention.head_count, qwen2.context_length, qwen2.embedding_length.",
    ),
    "no base among many keys": (
        {"model_type": "llama", "hidden_size": 64, **dict.fromkeys("abcdefghij")},
        {},
        ValueError,
        "[from_config] the config must give the base of the frequencies: add one of rope_theta, "
        "rotary_emb_base, rotary_base, rope_base to its keys, which are a, b, c, d, e, f, g, h and 4 more.",
    ),
    "GGUF of an unknown architecture": (
        {
            k.replace("qwen2", "zebra"): v.replace("qwen2", "zebra") if isinstance(v, str) else v
            for k, v in GGUF.items()
        },
        {},
        ValueError,
        "[from_config] the config must give the pairing of channels, the channels that rotate and the layers "
        "that rotate, as the table of families does not contain GGUF architecture 'zebra'; pass "
        "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or interleaved=True if "
        "adjacent channels are paired, as in GPT-J; rotary_dim=128 if all 128 channels of a head rotate, or the "
        "number that do, with start if they are not the first; rope_layers='all' if all layers with attention "
        "rotate (to name some of them, add layer_types to the config); for code like Llama's: "
        "RopeSpec.from_config(config, interleaved=False, rotary_dim=128, rope_layers='all').",
    ),
    "GGUF with an unknown key": (
        {**GGUF, "qwen2.rope.magic": 1},
        {},
        ValueError,
        "[from_config] every key about RoPE must be known but got qwen2.rope.magic; "
        "strict=False ignores them with a warning.",
    ),
    "GGUF that says the factor twice": (
        {**GGUF, "qwen2.rope.scaling.factor": 2.0, "qwen2.rope.scale_linear": 4.0},
        {},
        ValueError,
        "[from_config] factor must have one value but got qwen2.rope.scaling.factor = 2.0 and "
        "qwen2.rope.scale_linear = 4.0.",
    ),
    "Megatron without a pairing": (
        {k: v for k, v in MEGATRON.items() if k != "rotary_interleaved"},
        {},
        ValueError,
        "[from_config] the config must give the pairing of channels, as the table of families does not "
        "contain Megatron's arguments; pass interleaved=False if channel i is paired with i + rotary_dim / 2, "
        "as in Llama, or interleaved=True if adjacent channels are paired, as in GPT-J; for code like Llama's: "
        "RopeSpec.from_config(config, interleaved=False).",
    ),
    "Megatron with two scalings": (
        {
            **MEGATRON,
            "use_rope_scaling": True,
            "rope_scaling_factor": 8.0,
            "rotary_seq_len_interpolation_factor": 4,
        },
        {},
        ValueError,
        "[from_config] only one kind of scaling can apply but got use_rope_scaling and "
        "rotary_seq_len_interpolation_factor.",
    ),
    "Megatron with learned positions": (
        {**MEGATRON, "position_embedding_type": "learned_absolute"},
        {},
        ValueError,
        "[from_config] the config has no RoPE: position_embedding_type is 'learned_absolute'.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configurations_are_refused(case: str) -> None:
    config, options, kind, text = WRONG[case]
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        read(config, **options)


def test_a_folder_must_have_one_file(tmp_path: Path) -> None:
    for has, files in {
        "neither": (),
        "config.json and params.json": ("config.json", "params.json"),
    }.items():
        for name in files:
            (tmp_path / name).write_text("{}", encoding="utf-8")
        names = "config.json and params.json"
        text = f"[from_config] a folder must have exactly one of {names} but {tmp_path} has {has}."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            read(tmp_path)


def test_a_file_must_hold_an_object(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[1]", encoding="utf-8")
    text = f"[from_config] {file} must hold a JSON object but holds list."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read(file)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.json")


def test_a_key_of_a_file_must_have_one_value(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    text = json.dumps(LLAMA)[:-1] + ', "rope_theta": 1e4, "vocab_size": 9, "vocab_size": 9}'
    file.write_text(text, encoding="utf-8")
    sentence = f"[from_config] in {file} each key must have one value but rope_theta is 500000.0 and 10000.0."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        read(file)
    text = text.replace("1e4", "500000.0")[:-1] + ', "x": NaN, "x": NaN}'
    file.write_text(text, encoding="utf-8")
    assert read(file) == read(LLAMA)


# --- keys that are accepted or ignored --------------------------------------------------------------------------


def test_unknown_keys_can_be_a_warning() -> None:
    config = {**LLAMA, "rope_tehta": 1e6, "rope_scaling": {"type": "linear", "factor": 2, "x": 1}}
    text = (
        "[from_config] every key about RoPE must be known but got rope_tehta, rope_scaling.x; "
        "strict=False ignores them with a warning."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as caught:
        assert read(config, strict=False) == RopeSpec(128, 5e5, scaling=Linear(2))
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


@pytest.mark.parametrize("key", keys.INERT)
def test_inert_keys_of_a_section_pass_with_a_reason(key: str) -> None:
    assert keys.INERT[key].strip()
    section = {"rope_type": "linear", "factor": 2.0, key: 8192}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read({**LLAMA, "rope_scaling": section}) == RopeSpec(128, 5e5, scaling=Linear(2))


@pytest.mark.parametrize("key", keys.INERT_OUTSIDE)
def test_inert_keys_outside_pass_with_a_reason(key: str) -> None:
    assert keys.INERT_OUTSIDE[key].strip()
    assert read({**LLAMA, key: True}) == RopeSpec(128, 5e5)


@pytest.mark.parametrize("key, value", keys.INERT_VALUES)
def test_some_keys_pass_with_one_value_only(key: str, value: object) -> None:
    assert keys.INERT_VALUES[key, value].strip()
    section: dict[str, Any] = {"rope_type": "default"} if key == "factor" else YARN
    wanted = RopeSpec(128, 5e5, scaling=None if key == "factor" else YaRN(4, 8192))
    assert read({**LLAMA, "rope_scaling": {**section, key: value}}) == wanted
    other = {
        **LLAMA,
        "rope_scaling": {**section, key: 3 if value == 1 and value is not True else False},
    }
    if key == "attn_factor":
        assert read(other) != wanted
        return
    with pytest.raises(ValueError, match=f"known but got rope_scaling.{key}; "):
        read(other)


def test_words_that_only_contain_rope_are_no_keys_about_it() -> None:
    assert read({**LLAMA, "properties": 1, "use_propeller": 2, "europe": 3}) == RopeSpec(128, 5e5)


def test_the_argument_overrules_family_and_key() -> None:
    assert read(LLAMA, interleaved=True) == RopeSpec(128, 5e5, interleaved=True)
    stated: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}
    assert read({**LLAMA, "model_type": "zebra"}, **stated) == RopeSpec(128, 5e5)
    assert read({**LLAMA, "rope_interleaved": True}, interleaved=True).interleaved


def test_a_part_of_the_channels_without_a_family_that_rotates_all() -> None:
    config = {**LLAMA, "partial_rotary_factor": 0.5}
    del config["model_type"]
    assert read(config, interleaved=False).rotary_dim == 64
    assert read({**LLAMA, "partial_rotary_factor": 1.0}).rotary_dim == 128


def test_a_key_decides_where_the_family_lets_it() -> None:
    config = {
        "model_type": "deepseek_v3",
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 1e4,
    }
    assert read(config).interleaved
    assert not read({**config, "rope_interleave": False}).interleaved


# --- scaling --------------------------------------------------------------------------------------


def scaling(section: dict[str, Any], **outer: Any) -> Rule | None:
    made: RopeSpec = read({**LLAMA, **outer, "rope_scaling": section})
    return made.scaling


def test_yarn_and_dynamic_begin_at_the_length_of_the_context() -> None:
    assert scaling({"type": "dynamic", "factor": 2.0}) == DynamicNTK(2, 8192)
    assert scaling({"type": "yarn", "factor": 2.0}) == YaRN(2, 8192)
    rows = provenance({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}}).rows
    sources = {row.field: row.source for row in rows}
    assert sources["scaling.original_max_position"] == (
        "max_position_embeddings, as no key gives the original length"
    )


def test_a_null_factor_is_the_ratio_of_the_lengths() -> None:
    section = {"type": "yarn", "factor": None, "original_max_position_embeddings": 4096}
    assert scaling(section) == YaRN(2, 4096)
    del section["factor"]
    with pytest.raises(ValueError, match="must have factor but has only"):
        scaling(section)


def test_longrope_takes_its_factor_from_the_lengths() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    wanted = LongRoPE((1.0,) * 64, (2.0,) * 64, 4096, factor=2)
    for name in ("longrope", "su"):
        inside = {"type": name, **lists, "original_max_position_embeddings": 4096}
        assert scaling(inside) == wanted
        assert scaling({"type": name, **lists}, original_max_position_embeddings=4096) == wanted


def test_attn_factor_multiplies_yarns_own_factor() -> None:
    own = YaRN(4, 8192).frequencies(128, 1e4).attention_scaling
    made = scaling({**YARN, "attn_factor": 2.0})
    assert made is not None
    assert made.frequencies(128, 1e4).attention_scaling == pytest.approx(2 * own, rel=1e-15)


def test_layers_of_rope_parameters_without_rope() -> None:
    config = {
        **LLAMA,
        "layer_types": ["a", "b", "a"],
        "rope_parameters": {"a": {"rope_type": "default"}, "b": None},
    }
    specs = read(config)
    assert specs == {"a": RopeSpec(128, 5e5), "b": None}
    assert specs.layers == ("a", "b", "a")
    assert [specs.of(n) for n in range(3)] == [RopeSpec(128, 5e5), None, RopeSpec(128, 5e5)]
    assert read(config, layer_type="a") == RopeSpec(128, 5e5)
    assert read(config, layer_type="b") is None


def test_equal_layers_are_one_spec() -> None:
    same = {"rope_type": "default", "rope_theta": 7.0}
    config = {
        **LLAMA,
        "layer_types": ["a", "b"],
        "rope_parameters": {"a": same, "b": dict(same)},
    }
    del config["rope_theta"]
    assert read(config) == RopeSpec(128, 7.0)
    assert read(config, layer_type="b") == RopeSpec(128, 7.0)


def test_layer_specs_are_a_mapping_that_a_person_can_read() -> None:
    specs = LayerSpecs({"a": RopeSpec(64), "b": None}, ("a", "a", "b", "a", "b", "a"))
    assert dict(specs) == {"a": RopeSpec(64), "b": None}
    assert repr(specs) == (
        "LayerSpecs({'a': RopeSpec(head_dim=64), 'b': None}, layers=<2 × a, 1 × b, 1 × a, 1 × b, …>)"
    )
    with pytest.raises(
        ValueError, match=r"^\[LayerSpecs.of\] layer must lie in \[0, 6\) but got 6\.$"
    ):
        specs.of(6)
    with pytest.raises(ValueError, match="must list the type of each layer but does not"):
        LayerSpecs({"a": None}).of(0)


def test_a_new_rule_is_read_without_a_change_here() -> None:
    @dataclass(frozen=True)
    class Doubled(Rule):
        names = ("doubled",)
        keys: ClassVar[dict[str, tuple[str, ...]]] = {"times": ("how_often", "times")}
        times: int

        def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
            row = default(rotary_dim, base).exact
            return Frequencies(tuple(omega * 2**self.times for omega in row))

    try:
        assert scaling({"rope_type": "doubled", "how_often": 3}) == Doubled(3)
        with pytest.raises(ValueError, match="scaling by 'doubled' must have how_often/times but"):
            scaling({"rope_type": "doubled"})
        with pytest.raises(ValueError, match=r"known but got rope_scaling\.factor"):
            scaling({"rope_type": "doubled", "times": 3, "factor": 2})
    finally:
        del RULES["doubled"]


# --- objects and other formats --------------------------------------------------------------------


def test_objects_with_attributes() -> None:
    class Saved:
        def to_dict(self) -> dict[str, Any]:
            return dict(LLAMA)

    assert read(Saved()) == RopeSpec(128, 5e5)
    assert read(argparse.Namespace(**MEGATRON)) == RopeSpec(128)


def test_gguf_tensors_of_factors() -> None:
    factors = [1.0] * 32 + [8.0] * 32
    made = read({**GGUF, "rope_freqs.weight": factors})
    assert isinstance(made.scaling, Given)
    row = default(128, 1e6).exact
    for got, omega, factor in zip(made.frequencies().exact, row, factors, strict=True):
        assert float(got) == pytest.approx(float(omega) / factor, rel=1e-15)
    with pytest.raises(
        ValueError, match=r"must not come with rope\.scaling but the metadata has both"
    ):
        read({**GGUF, "rope_freqs.weight": factors, "qwen2.rope.scaling.type": "yarn"})


def test_gguf_longrope() -> None:
    phi = {
        "general.architecture": "phi3",
        "phi3.embedding_length": 3072,
        "phi3.attention.head_count": 32,
        "phi3.rope.dimension_count": 96,
        "phi3.rope.freq_base": 10000.0,
        "phi3.rope.scaling.original_context_length": 4096,
        "phi3.rope.scaling.attn_factor": 1.19,
        "phi3.rope.scaling.type": "longrope",
    }
    with pytest.raises(ValueError, match="'longrope' must have short_factor, long_factor but"):
        read(phi)
    tensors = {
        "rope_factors_short.weight": (1.0,) * 48,
        "rope_factors_long.weight": (2.0,) * 48,
    }
    wanted = LongRoPE((1.0,) * 48, (2.0,) * 48, 4096, attention_factor=1.19)
    assert read({**phi, **tensors}) == RopeSpec(96, scaling=wanted)


def test_gguf_linear_by_the_absence_of_a_type() -> None:
    for key in ("scaling.factor", "scale_linear"):
        made = read({**GGUF, f"qwen2.rope.{key}": 4.0})
        assert made == RopeSpec(128, 1e6, scaling=Linear(4))
    assert read({**GGUF, "qwen2.rope.scaling.factor": 0.0}) == RopeSpec(128, 1e6)


def test_gguf_without_its_architecture() -> None:
    config = {key: value for key, value in GGUF.items() if key != "general.architecture"}
    assert read(config) == RopeSpec(128, 1e6)
    assert read({**config, "general.architecture": "qwen2"}) == RopeSpec(128, 1e6)


def test_gguf_local_layers() -> None:
    gemma = {
        "general.architecture": "gemma3",
        "gemma3.attention.key_length": 256,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    full = RopeSpec(256, 1e6, scaling=Linear(8))
    assert read(gemma) == {"full_attention": full, "sliding_attention": RopeSpec(256)}
    made = read({**gemma, "gemma3.rope.freq_base_swa": 500.0})
    assert made == {"full_attention": full, "sliding_attention": RopeSpec(256, 500.0)}


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
    rotated = RopeSpec(128, 5e5, interleaved=True, scaling=Llama3(16, 1, 1, 8192))
    made = read(params)
    assert made == {"rope": rotated, "no_rope": None}
    assert made.layers is not None
    assert made.layers[:4] == ("rope", "rope", "rope", "no_rope")


def test_provenance_names_the_users_own_keys() -> None:
    sourced = provenance(
        {**GGUF, "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    )
    assert isinstance(sourced, Provenance)
    assert str(sourced).splitlines() == [
        "head_dim                       128        qwen2.embedding_length / "
        "qwen2.attention.head_count = 3584 / 28",
        "base                           1000000.0  qwen2.rope.freq_base",
        "rotary_dim                     128        all of head_dim",
        "start                          0          from the first channel",
        "interleaved                    False      GGUF architecture 'qwen2' "
        "(llama.cpp: llama_model_rope_type)",
        "scaling                        'YaRN'     qwen2.rope.scaling.type = 'yarn'",
        "scaling.factor                 4.0        qwen2.rope.scaling.factor",
        "scaling.original_max_position  32768      qwen2.context_length, as no key gives the "
        "original length",
        "axes                           None       one coordinate per position",
    ]


def test_families_are_complete() -> None:
    for name, family in families.FAMILIES.items():
        assert family.source.strip() or family.refused, name
        assert family.fraction in ("none", "optional", "required")
        assert family.head_dim in ("derived", "required")
        assert family.start in ("first", "nope", "last")
    assert not families.GGUF_NEIGHBOURS & families.GGUF_HALVES
    for name in families.SECTIONS.values():
        assert name in families.FAMILIES


def test_import_of_the_package_leaves_the_reader_alone() -> None:
    code = "import sys, tightrope; sys.exit('tightrope.config' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_axes_are_those_of_the_positions() -> None:
    assert read(QWEN2_VL).axes == Axes.sections((16, 24, 24))
    assert read(QWEN2_VL, section="").axes == Axes.sections((16, 24, 24))


def converted(folder: Path, config: dict[str, Any], record: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tightrope_convert.json").write_text(record, encoding="utf-8")
    return folder


def test_a_converted_folder_has_the_pairing_of_its_record(tmp_path: Path) -> None:
    """Otherwise a converted checkpoint would be rotated with the pairing that it had before."""
    from transformers import AutoConfig

    folder = converted(tmp_path / "a", LLAMA, '{"pairing": "interleaved"}')
    for config in (folder, str(folder), folder / "config.json", AutoConfig.from_pretrained(folder)):
        assert RopeSpec.from_config(config).interleaved
        assert not RopeSpec.from_config(config, interleaved=False).interleaved
    row = next(row for row in provenance(folder).rows if row.field == "interleaved")
    assert row.source == "the conversion record tightrope_convert.json"
    (folder / "other.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert not RopeSpec.from_config(folder / "other.json").interleaved
    assert not RopeSpec.from_config(LLAMA).interleaved


def test_a_record_of_several_sections_or_no_pairing_is_an_error(tmp_path: Path) -> None:
    parts = {"text_config": {"hidden_size": 32, "num_attention_heads": 4, "rope_theta": 1e4}}
    parts["vision_config"] = {"hidden_size": 32, "num_heads": 4}
    sections = {"model_type": "qwen2_5_vl", **parts}
    folder = converted(tmp_path / "a", sections, '{"pairing": "interleaved"}')
    sentence = (
        "[from_config] interleaved must be given, as tightrope_convert.json states the pairing of the weights "
        "but not which of text_config, vision_config it means."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        RopeSpec.from_config(folder, section="text_config")
    folder = converted(tmp_path / "b", LLAMA, '{"pairing": "sideways"}')
    sentence = "tightrope_convert.json must state 'half' or 'interleaved' but states 'sideways'"
    with pytest.raises(ValueError, match=sentence):
        RopeSpec.from_config(folder)
