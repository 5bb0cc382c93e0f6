"""Test that no key that could be about the rotation passes unread, whatever its name begins with.

The names were gathered from transformers, diffusers, vLLM, llama.cpp and real files, and sorted by hand into those
that could be about the rotation and the others. Each is added to a configuration that has no use for it.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import ROOT
from tests.support.model_configs import MODELS, Model
from tests.support.reading import gguf, llama, outcome, read, unknown
from tightrope import RopeSpec
from tightrope.config import keys
from tightrope.frequencies import Linear, YaRN

LLAMA = llama(layer_types=["full_attention"])
GGUF = gguf("llama")
SPEC = RopeSpec(128, base=500000.0)


def gathered(heading: str) -> list[str]:
    text = (ROOT / "tests/support/data/config_names.txt").read_text(encoding="utf-8")
    return text.partition(f"[{heading}]\n")[2].partition("\n\n")[0].split()


ABOUT = gathered("could be about the rotation")
OTHER = gathered("are not, or do not affect it")
# Names that are read and have no effect on a model without scaling -> why, and the values that are no error.
LENGTH, ANY = {3}, {3, 0.5, "x"}
WITHOUT_EFFECT: dict[str, tuple[str, set[Any]]] = {
    "initial_context_length": ("where scaling begins", LENGTH),
    "max_trained_positions": ("where scaling begins", LENGTH),
    "original_max_position_embeddings": ("where scaling begins", LENGTH),
    "llama.rope.scaling.original_context_length": ("where scaling begins", LENGTH),
    "position_embedding_type": ("Llama's code does not read it", ANY),
    "position_embeddings_type": ("Llama's code does not read it", ANY),
    "llama.rope.scaling.finetuned": ("whether the model was trained with the scaling", ANY),
    "llama.rope.scaling.yarn_log_multiplier": ("a part of YaRN", {3, 0.5}),
}


def planted(name: str, value: Any) -> object:
    """Return the spec of a configuration with one more key, or the error."""
    plain, base = (GGUF, "llama.") if name.startswith("llama.") else (LLAMA, "")
    assert name.startswith(base)
    return outcome({**plain, name: value})


def test_there_are_enough_names() -> None:
    assert len(ABOUT) > 150
    assert len(OTHER) > 4000
    assert not set(ABOUT) & set(OTHER)


@pytest.mark.parametrize("value", [3, 0.5, "x"])
@pytest.mark.parametrize("name", ABOUT)
def test_a_name_about_the_rotation_is_read_or_refused(name: str, value: object) -> None:
    in_gguf = name.startswith("llama.")
    unscaled = RopeSpec(128, base=1e6 if in_gguf else 5e5, interleaved=in_gguf)
    without_effect = value in WITHOUT_EFFECT.get(name, ("", set()))[1]
    assert (planted(name, value) == unscaled) == without_effect


def test_other_names_are_no_unknown_keys() -> None:
    for name in {*OTHER} - {"general.architecture"}:  # which makes the mapping one of GGUF
        for value in (3, {"x": 3}):
            assert "must be known" not in str(planted(name, value)), name


SPELLINGS = """
    yarn yarn_factor ntk_alpha use_dynamic_ntk longrope_scaling_factor swa_rope_theta freq_base
    inv_freq logn nope_layers original_seq_len compress_theta my_theta rope_tehta useRopeScaling
    partial_rotary_facter xpos_base swa_head_dim scaling_factor neox interleaved no_rope_freq
    window_head_dim head_dim_per_layer trained_seqlen use_alibi position_encoding_2d
    max_wavelength position_embedding_base interpolation_factor position_interpolation
    pos_emb_base local_base use_long_context linear_scaling context_scale no_pe_layers
    positional_embedding
""".split()


def put(model: Model, key: str, value: object) -> dict[str, Any]:
    """Add a key to the section of a configuration that is read."""
    section = model.options.get("section")
    if not section:
        return {**model.config, key: value}
    return {**model.config, section: {**model.config[section], key: value}}


@pytest.mark.parametrize("key", SPELLINGS)
def test_a_key_that_nobody_has_is_refused_in_every_real_file(key: str) -> None:
    for model in MODELS:
        if key == "yarn" and model.form == "meta":
            continue  # Mistral's
        with pytest.raises((ValueError, TypeError), match=rf"known but got .*{key}"):
            read(put(model, key, 3), **model.options)


@pytest.mark.parametrize(
    "value",
    [
        {"rope_theta": 1.0},
        {"a": [{"b": {"yarn_factor": 2}}]},
        {"type": "linear", "factor": 2},
        {"base": 1e4},
    ],
)
def test_a_section_of_an_unknown_name_is_refused_in_every_real_file(value: object) -> None:
    for model in MODELS:
        with pytest.raises(ValueError, match=r"known but got .*positions"):
            read(put(model, "positions", value), **model.options)


@pytest.mark.parametrize("value", [{"type": "linear"}, {"type": "linear", "hidden_size": 64}])
def test_the_type_of_another_part_is_no_rope_section(value: object) -> None:
    for model in MODELS:
        assert read(put(model, "projector", value), **model.options) == model.wanted


@pytest.mark.parametrize(
    "key", ["yarn_factor", "theta", "truncate", "interleaved", "sliding_window"]
)
def test_an_unknown_key_of_a_rope_section_is_refused(key: str) -> None:
    for inside in ({}, {"rope_type": "linear", "factor": 2.0}):
        with pytest.raises(ValueError, match=rf"(known but got|has only) rope_scaling\.{key}"):
            read({**LLAMA, "rope_scaling": {**inside, key: 3}})


# --- keys that are accepted or ignored --------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "more, names, scaling",
    [
        ({"use_dynamic_ntk": True}, ["use_dynamic_ntk"], None),
        # A list of another rule, for each pair, says nothing about layers.
        (
            {"rope_scaling": {**LINEAR, "short_factor": [1.0] * 64}},
            ["rope_scaling.short_factor"],
            Linear(2),
        ),
        (
            {"rope_tehta": 1e6, "rope_scaling": {**LINEAR, "x": 1}},
            ["rope_tehta (perhaps rope_theta)", "rope_scaling.x"],
            Linear(2),
        ),
    ],
)
def test_unknown_keys_can_be_a_warning(
    more: dict[str, Any], names: list[str], scaling: Linear | None
) -> None:
    text = re.escape(f"[from_config] {unknown(*names)}")
    with pytest.warns(UserWarning, match=f"^{text}$") as caught:
        made = RopeSpec.from_config({**LLAMA, **more}, strict=False)
    assert made == RopeSpec(128, base=5e5, scaling=scaling)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


# Names of widths, parts of the channels and pairings that no code here reads.
OF_CHANNELS = """
    rope_head_dim rope_dim rotary_ndims rotary_emb_dim rope_size rotary_width rope_channels rotary_percentage
    rope_partial rotary_fraction rope_ratio swa_head_dim rope_start
    rope_style rope_interleaving rope_is_neox neox gptj_rope rope_gpt_j rope_traditionally rope_pairing rope_pairs
    permuted_rope rope_layout rotary_mode rope_format rope_half rope_halves rope_complex
""".split()


@pytest.mark.parametrize("value", [32, 0.5, True, "half", {"rope_dim": 32}], ids=repr)
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_a_width_or_a_pairing_is_never_ignored(name: str, value: object) -> None:
    places = {
        name: {name: value},
        f"rope_scaling.{name}": {"rope_scaling": {**LINEAR, name: value}},
    }
    for path, more in places.items():
        if value == {"rope_dim": 32} and path != name:
            continue  # in a rope section, it is the section of a type of layers
        for strict in (True, False):
            text = outcome({**LLAMA, **more}, strict=strict)
            assert f"that may give a width or the pairing must be known but got {path}" in str(text)
            assert "strict=False" not in str(text)


@pytest.mark.parametrize(
    "inner, what",
    [
        ({"dim": 32}, "a width or the pairing"),
        ({"start_channel": 8}, "a width or the pairing"),
        ({"traditional": True}, "a width or the pairing"),
        ({"local_base": 1e4}, "a base"),
        ({"every": [0, 1]}, "say which layers rotate"),
    ],
    ids=str,
)
def test_all_keys_in_a_mapping_about_rope_count(inner: dict[str, object], what: str) -> None:
    for strict in (True, False):
        text = str(outcome({**LLAMA, "rope": inner}, strict=strict))
        assert what in text
        assert "must be known but got rope;" in text
        assert "strict=False" not in text


@pytest.mark.parametrize("key", keys.INERT)
def test_inert_keys_of_a_section_pass_with_a_reason(key: str) -> None:
    assert keys.INERT[key].strip()
    assert read({**LLAMA, "rope_scaling": {**LINEAR, key: 8192}}).scaling == Linear(2)


@pytest.mark.parametrize("key", keys.INERT_OUTSIDE)
def test_inert_keys_outside_pass_with_a_reason(key: str) -> None:
    assert keys.INERT_OUTSIDE[key].strip()
    assert planted(key, True) == SPEC


@pytest.mark.parametrize("key, value", keys.INERT_VALUES)
def test_some_keys_pass_with_one_value_only(key: str, value: object) -> None:
    assert keys.INERT_VALUES[key, value].strip()
    section: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
    wanted = RopeSpec(128, base=5e5, scaling=YaRN(4, 8192))
    if key == "factor":
        section, wanted = {"rope_type": "default"}, SPEC
    other = 3 if value == 1 and value is not True else False
    one, changed = (
        outcome({**LLAMA, "rope_scaling": {**section, key: each}}) for each in (value, other)
    )
    assert one == wanted != changed
    if key != "attn_factor":
        assert f"known but got rope_scaling.{key}; " in str(changed)


def test_words_that_only_contain_rope_are_no_keys_about_it() -> None:
    assert read({**LLAMA, "properties": 1, "use_propeller": 2, "europe": 3}) == SPEC


@pytest.mark.parametrize("key, value", keys.INERT_OUTSIDE_VALUES)
def test_some_outer_keys_pass_with_one_value_only(key: str, value: object) -> None:
    assert keys.INERT_OUTSIDE_VALUES[key, value].strip()
    assert planted(key, value) == SPEC
    assert "known but got" in str(planted(key, True))


@pytest.mark.parametrize("key, on", keys.SWITCHES.items())
def test_a_switch_is_a_bool(key: str, on: bool) -> None:
    assert on is ("alibi" not in key)
    assert planted(key, on) == SPEC
    assert str(planted(key, not on)) == f"[from_config] the config has no RoPE: {key} is {not on}."
    assert "known but got" in str(planted(key, {"base": 10000, "type": "dynamic"}))  # InternLM 1


def test_keys_of_experts_are_not_about_the_rotation() -> None:
    for key in ("moe_layer_frequency", "expert_interleave_freq", "routed_scaling_factor"):
        assert planted(key, 2) == SPEC
