"""Test `from_config`: real configurations give the expected spec, in every form that they have.

No wrong or missing key silently gives a default.
"""

import argparse
import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.model_configs import MODELS, REFUSED, Model, Refused
from tests.support.reading import JUNK, LLAMA, llama, outcome, read, refused, without
from tightrope import RopeSpec
from tightrope.config import LayerSpecs, keys, provenance

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
    refused(model.config, model.why.removeprefix("[from_config] "))


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

# The last part of a key's path -> the default if the key is absent, which no class gives. A file without one of
# these keys describes another valid model.
ABSENCE: dict[str, str] = {
    "rope_scaling": "no scaling: nothing tells an unscaled model from one whose section was lost",
    "rope_parameters": "as for rope_scaling, if the base is outside the section",
    "head_dim": "hidden size / heads, as in the first Llama; families with another default ask for it",
    "kv_channels": "as for head_dim, in Megatron's arguments",
    "llama.attention.key_length": "as for head_dim, in GGUF",
    "head_size": "as for head_dim, in vLLM",
    "layer_types": "the same specs, without the list of layers",
    "use_scaled_rope": "no scaling: Meta wrote it from Llama 3.1 on",
    "use_rope_scaling": "no scaling",
    "rotary_seq_len_interpolation_factor": "no scaling",
    "rotary_percent": "all channels",
    "rotary_dim": "all channels, for families that rotate them all",
    "partial_rotary_factor": "all channels, in Phi-3",
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


def changed(config: Mapping[str, Any], path: tuple[str, ...], /, **put: Any) -> dict[str, Any]:
    """Copy a configuration, with these keys in place of one."""
    made = copy.deepcopy(dict(config))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    inner.update(put)
    return made


def tolerated(key: str) -> bool:
    if key in ABSENCE:
        return True
    # GGUF has one key per parameter of scaling; only these may be dropped.
    if ".rope.scaling." in key:
        return key.endswith(
            (".type", ".factor", ".original_context_length", ".yarn_log_multiplier")
        )
    return key.endswith((".rope.dimension_sections", ".attention.key_length_mla"))


def is_harmless(model: Model, config: dict[str, Any]) -> bool:
    """Return True if a changed configuration gives an error, the same spec, or defaults that provenance names."""
    got = outcome(config, **model.options)
    if isinstance(got, Exception) or got == model.wanted:
        return True
    before = provenance(model.config, **model.options).rows
    rows = [row for row in provenance(config, **model.options).rows if row not in before]
    named = [row for row in rows if "default of" in row.source]
    values = [row[1:3] for row in before]
    # The part and the axes follow from the width.
    rest = [row for row in rows if row not in named and row[1:3] not in values]
    return bool(named) and {row.field for row in rest} <= {"rotary_dim", "start", "axes"}


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_no_dropped_key_turns_into_a_default_without_a_word(model: Model) -> None:
    for path in paths(model.config):
        assert is_harmless(model, changed(model.config, path)) or tolerated(path[-1]), path


def draw_a_path(data: st.DataObject) -> tuple[Model, tuple[str, ...]]:
    model = data.draw(st.sampled_from(MODELS))
    return model, data.draw(st.sampled_from(sorted(paths(model.config))))


SPELLINGS = ["{}x", "{}_", "{}s", "{}_old", "{}2", "x_{}", "zzz"]


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_no_renamed_key_turns_into_a_default(data: st.DataObject) -> None:
    """A renamed key must not count as a missing key, where the two can be distinguished."""
    model, path = draw_a_path(data)
    name = data.draw(st.sampled_from(SPELLINGS)).format(path[-1])
    inner: Any = model.config
    for key in path:
        inner = inner[key]
    if not is_harmless(model, changed(model.config, path, **{name: inner})):
        assert not any(part in keys.SECTION for part in path[:-1]), f"{path} -> {name}"
        assert not re.search("rope|rotary|theta", name), f"{path} -> {name}"
        assert tolerated(path[-1]), f"{path} -> {name}"


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_junk_is_refused_in_a_sentence(data: st.DataObject) -> None:
    """Junk in place of any value gives a spec or one of the library's errors."""
    model, path = draw_a_path(data)
    put = {path[-1]: data.draw(st.sampled_from(JUNK))}
    outcome(changed(model.config, path, **put), **model.options)


# --- keys that decide -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key in keys.BASE if key != "rotary_base"])
def test_a_base_has_the_key_that_the_code_reads(key: str) -> None:
    """Megatron's files, which have rotary_base, have no model_type but give the pairing."""
    inside = {"rope_parameters": {key: 7.0}}
    for config in ({**LLAMA, key: 500000}, {**LLAMA, "rope_parameters": {key: 500000}}):
        assert read(config) == RopeSpec(128, base=5e5)
    bare, stated = without(LLAMA, "rope_theta", "model_type"), {"interleaved": False}
    for more in ({key: 7.0}, inside):
        assert read(bare | more, **stated, rotary_dim=128, rope_layers="all") == RopeSpec(
            128, base=7.0
        )
        if key == "rope_theta":
            assert read(without(LLAMA, key) | more) == RopeSpec(128, base=7.0)
            continue
        path = key if key in more else f"rope_parameters.{key}"
        refused(
            without(LLAMA, "rope_theta") | more,
            f"that may give a base must be known but got {path}",
        )


def test_the_argument_overrules_family_and_key() -> None:
    assert read(LLAMA, interleaved=True) == RopeSpec(128, base=5e5, interleaved=True)
    stated: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}
    assert read(llama(model_type="zebra"), **stated) == RopeSpec(128, base=5e5)
    assert read(llama(rope_interleaved=True), interleaved=True).interleaved


def test_a_part_of_the_channels_without_a_family_that_rotates_all() -> None:
    config = without(llama(partial_rotary_factor=0.5), "model_type")
    assert read(config, interleaved=False).rotary_dim == 64
    assert read(llama(partial_rotary_factor=1.0)).rotary_dim == 128


def test_a_key_decides_where_the_family_lets_it() -> None:
    config = llama(model_type="deepseek_v3", qk_nope_head_dim=128, qk_rope_head_dim=64)
    assert read(config).interleaved
    assert not read({**config, "rope_interleave": False}).interleaved


# --- other forms ----------------------------------------------------------------------------------


def test_objects_with_attributes() -> None:
    class Saved:
        def to_dict(self) -> dict[str, Any]:
            return dict(LLAMA)

    assert read(Saved()) == read(argparse.Namespace(**LLAMA)) == RopeSpec(128, base=5e5)


def test_import_of_the_package_leaves_the_reader_alone() -> None:
    code = "import sys, tightrope; sys.exit('tightrope.config' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
