"""No wrong, misspelt or missing key of a configuration silently gives a default, and junk is refused in a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.model_configs import MODELS, Model
from tests.support.reading import JUNK, outcome, read
from tightrope import RopeSpec
from tightrope.config import keys, provenance

ROWS = Path(__file__).with_name("rows")
BASES: dict[str, dict[str, Any]] = json.loads((ROWS / "bases.json").read_text("utf-8"))
ANSWERS: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}

# The last part of a key's path, or the end of a key of GGUF -> what the file means without it, which no class gives: a
# file without one of these keys describes another valid model.
ABSENCE: dict[str, str] = json.loads((ROWS / "absence.json").read_text("utf-8"))
SPELLINGS = ["{}x", "{}_", "{}s", "{}_old", "{}2", "x_{}", "zzz"]


def paths(config: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, Mapping):
            yield from paths(value, (*prefix, key))


def changed(config: Mapping[str, Any], path: tuple[str, ...], /, **put: Any) -> dict[str, Any]:
    """Copy a configuration, with these keys in place of one; "=" is its value."""
    made = copy.deepcopy(dict(config))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    value = inner.pop(path[-1])
    inner.update({key: value if each == "=" else each for key, each in put.items()})
    return made


def tolerated(key: str) -> bool:
    return key in ABSENCE or key.endswith(tuple(end for end in ABSENCE if end.startswith(".")))


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


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_no_dropped_key_turns_into_a_default_without_a_word(model: Model) -> None:
    for path in paths(model.config):
        assert is_harmless(model, changed(model.config, path)) or tolerated(path[-1]), path


def a_path(data: st.DataObject) -> tuple[Model, tuple[str, ...]]:
    model = data.draw(st.sampled_from(MODELS))
    return model, data.draw(st.sampled_from(sorted(paths(model.config))))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_no_renamed_key_turns_into_a_default(data: st.DataObject) -> None:
    """A renamed key must not count as a missing key, where the two can be distinguished."""
    model, path = a_path(data)
    name = data.draw(st.sampled_from(SPELLINGS)).format(path[-1])
    if not is_harmless(model, changed(model.config, path, **{name: "="})):
        assert not any(part in keys.SECTION for part in path[:-1]), f"{path} -> {name}"
        assert not any(word in name for word in ("rope", "rotary", "theta")), f"{path} -> {name}"
        assert tolerated(path[-1]), f"{path} -> {name}"


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_junk_is_refused_in_a_sentence(data: st.DataObject) -> None:
    """Junk in place of any value gives a spec or one of the library's errors."""
    model, path = a_path(data)
    put = {path[-1]: data.draw(st.sampled_from(JUNK))}
    outcome(changed(model.config, path, **put), **model.options)


@pytest.mark.parametrize("name", BASES)
def test_junk_anywhere_in_these_is_refused_in_a_sentence(name: str) -> None:
    config = BASES[name]
    for path in paths(config):
        for junk in (*JUNK, None, 10**401):
            for answers in ({}, ANSWERS):
                outcome(changed(config, path, **{path[-1]: junk}), **answers)


@pytest.mark.parametrize("name", ["interleaved", "rotary_dim", "start", "rope_layers", "base"])
def test_junk_in_an_argument_is_refused_in_a_sentence(name: str) -> None:
    for config in BASES.values():
        for junk in JUNK:
            outcome(config, **ANSWERS | {name: junk})


FLAT = [
    model
    for model in MODELS
    if model.form == "v4" and not model.options and isinstance(model.wanted, RopeSpec)
]


@pytest.mark.parametrize("model", FLAT, ids=lambda model: model.name)
def test_both_forms_of_transformers_read_alike(model: Model) -> None:
    config = dict(model.config)
    if "rope_theta" not in config:
        return
    rope = dict(config.pop("rope_scaling", None) or {"rope_type": "default"})
    moved = ("rope_theta", "partial_rotary_factor")
    rope |= {key: config.pop(key) for key in moved if key in config}
    assert read({**config, "rope_parameters": rope}) == model.wanted
