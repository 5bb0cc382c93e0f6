"""No key that could be about the rotation passes unread, whatever its name begins with.

The names in config_names.txt were gathered from transformers, diffusers, vLLM, llama.cpp and real files, and sorted by
hand into those that could be about the rotation and the others. Each is added to a configuration that has no use for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import ROOT
from tests.support.model_configs import MODELS, Model
from tests.support.reading import gguf, llama, outcome, read
from tightrope import RopeSpec
from tightrope.config import keys
from tightrope.frequencies import Linear, YaRN

LLAMA = llama(layer_types=["full_attention"])
SPEC = RopeSpec(128, base=500000.0)
LINEAR = {"rope_type": "linear", "factor": 2.0}
NAMES = (ROOT / "tests/support/data/config_names.txt").read_text(encoding="utf-8")


def gathered(heading: str) -> list[str]:
    return NAMES.partition(f"[{heading}]\n")[2].partition("\n\n")[0].split()


ABOUT = gathered("could be about the rotation")
OTHER = gathered("are not, or do not affect it")
# Names that are read and have no effect on a model without scaling -> the values that are no error.
LENGTH, ANY = {3}, {3, 0.5, "x"}
WITHOUT_EFFECT: dict[str, set[Any]] = {
    # Where scaling begins.
    "initial_context_length": LENGTH,
    "max_trained_positions": LENGTH,
    "original_max_position_embeddings": LENGTH,
    "llama.rope.scaling.original_context_length": LENGTH,
    # Llama's code does not read these.
    "position_embedding_type": ANY,
    "position_embeddings_type": ANY,
    # Whether the model was trained with the scaling, and a part of YaRN.
    "llama.rope.scaling.finetuned": ANY,
    "llama.rope.scaling.yarn_log_multiplier": {3, 0.5},
}


def planted(name: str, value: Any, *others: str) -> Any:
    """Return the spec of a configuration with one more key, or with several, or the error."""
    config = gguf("llama") if name.startswith("llama.") else LLAMA
    return outcome({**config, **dict.fromkeys((name, *others), value)})


def assert_known(names: list[str], value: Any) -> None:
    """Assert that no name is an unknown key: all at once if they give a spec, else each half by itself."""
    made = planted(names[0], value, *names[1:])
    if not isinstance(made, RopeSpec) and len(names) > 1:
        half = len(names) // 2
        assert_known(names[:half], value)
        assert_known(names[half:], value)
    else:
        assert "must be known" not in str(made), names


@pytest.mark.parametrize("name", ABOUT)
def test_a_name_about_the_rotation_is_read_or_refused(name: str) -> None:
    in_gguf = name.startswith("llama.")
    unscaled = RopeSpec(128, base=1e6 if in_gguf else 5e5, interleaved=in_gguf)
    for value in ANY:
        without_effect = value in WITHOUT_EFFECT.get(name, ())
        assert (planted(name, value) == unscaled) == without_effect, value


def test_other_names_are_no_unknown_keys() -> None:
    assert len(ABOUT) > 150
    assert len(OTHER) > 4000
    assert not {*ABOUT} & {*OTHER}
    # One of them makes the mapping one of GGUF.
    names = {*OTHER, "properties", "use_propeller", "europe"} - {"general.architecture"}
    for in_gguf in (False, True):
        own = sorted(name for name in names if name.startswith("llama.") == in_gguf)
        for value in (3, {"x": 3}):
            assert_known(own, value)


# --- in real files --------------------------------------------------------------------------------

SPELLINGS = gathered("nobody has, about the rotation")
SECTIONS = (
    {"rope_theta": 1.0},
    {"a": [{"b": {"yarn_factor": 2}}]},
    {"type": "linear", "factor": 2},
    {"base": 1e4},
)
UNKNOWN = [*((key, 3) for key in SPELLINGS), *(("positions", section) for section in SECTIONS)]


def put(model: Model, key: str, value: object) -> dict[str, Any]:
    """Add a key to the section of a configuration that is read."""
    section = model.options.get("section")
    if not section:
        return {**model.config, key: value}
    return {**model.config, section: {**model.config[section], key: value}}


@pytest.mark.parametrize("key, value", UNKNOWN, ids=str)
def test_a_key_that_nobody_has_is_refused_in_every_real_file(key: str, value: object) -> None:
    for model in MODELS:
        if (key, model.form) != ("yarn", "meta"):  # Mistral's
            said = str(outcome(put(model, key, value), **model.options))
            assert re.search(rf"known but got .*{key}", said), model.name


@pytest.mark.parametrize("value", [{"type": "linear"}, {"type": "linear", "hidden_size": 64}])
def test_the_type_of_another_part_is_no_rope_section(value: object) -> None:
    for model in MODELS:
        assert read(put(model, "projector", value), **model.options) == model.wanted


# --- keys that strict=False does not silence, and those that it does ----------------------------------

OF_CHANNELS = gathered("nobody has, of widths, parts of the channels and pairings")


@pytest.mark.parametrize("name", OF_CHANNELS)
def test_a_width_or_a_pairing_is_never_ignored(name: str) -> None:
    for value in (32, 0.5, True, "half", {"rope_dim": 32}):
        places: dict[str, dict[str, Any]] = {name: {name: value}}
        if not isinstance(value, dict):  # in a rope section, it is the section of a type of layers
            places[f"rope_scaling.{name}"] = {"rope_scaling": {**LINEAR, name: value}}
        for path, more in places.items():
            for strict in (True, False):
                text = str(outcome({**LLAMA, **more}, strict=strict))
                assert f"that may give a width or the pairing must be known but got {path}" in text
                assert "strict=False" not in text


@pytest.mark.parametrize(
    "more, names, scaling",
    [
        ({"use_dynamic_ntk": True}, "use_dynamic_ntk", None),
        # A list of another rule, for each pair, says nothing about layers.
        (
            {"rope_scaling": {**LINEAR, "short_factor": [1.0] * 64}},
            "rope_scaling.short_factor",
            Linear(2),
        ),
        (
            {"rope_tehta": 1e6, "rope_scaling": {**LINEAR, "x": 1}},
            "rope_tehta (perhaps rope_theta), rope_scaling.x",
            Linear(2),
        ),
    ],
)
def test_other_unknown_keys_can_be_a_warning(
    more: dict[str, Any], names: str, scaling: Linear | None
) -> None:
    text = f"[from_config] every key about RoPE must be known but got {names}; strict=False "
    assert str(outcome({**LLAMA, **more})).startswith(text)
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        made = RopeSpec.from_config({**LLAMA, **more}, strict=False)
    assert made == RopeSpec(128, base=5e5, scaling=scaling)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


# --- keys without effect ----------------------------------------------------------------------------


def test_keys_of_the_table_have_no_effect_and_a_reason() -> None:
    tables = (keys.INERT, keys.INERT_OUTSIDE, keys.INERT_VALUES, keys.INERT_OUTSIDE_VALUES)
    assert all(why.strip() for table in tables for why in table.values())
    for key in keys.INERT:
        assert read({**LLAMA, "rope_scaling": {**LINEAR, key: 8192}}).scaling == Linear(2), key
    for key in keys.INERT_OUTSIDE:
        assert planted(key, True) == SPEC, key
    for key, value in keys.INERT_OUTSIDE_VALUES:
        assert planted(key, value) == SPEC, key
        assert "known but got" in str(planted(key, True)), key


@pytest.mark.parametrize("key, value", keys.INERT_VALUES)
def test_some_keys_of_a_section_pass_with_one_value_only(key: str, value: object) -> None:
    section: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
    wanted = RopeSpec(128, base=5e5, scaling=YaRN(4, 8192))
    if key == "factor":
        section, wanted = {"rope_type": "default"}, SPEC
    one, changed = (
        outcome({**LLAMA, "rope_scaling": {**section, key: each}}) for each in (value, 3)
    )
    assert one == wanted != changed
    if key != "attn_factor":
        assert f"known but got rope_scaling.{key}; " in str(changed)


@pytest.mark.parametrize("key, on", keys.SWITCHES.items())
def test_a_switch_is_a_bool(key: str, on: bool) -> None:
    assert on is ("alibi" not in key)
    assert planted(key, on) == SPEC
    assert str(planted(key, not on)) == f"[from_config] the config has no RoPE: {key} is {not on}."
    assert "known but got" in str(planted(key, {"base": 10000, "type": "dynamic"}))  # InternLM 1
