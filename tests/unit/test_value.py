"""Specs, frequency rules and axes are values: copies, reprs, dictionaries, and fields that cannot be set."""

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.written_calls import rows_of
from tightrope import RopeSpec, frequencies, nn, stacks
from tightrope.axes import Axes
from tightrope.frequencies import RULES, DynamicNTK, Given, Linear, LongRoPE, Rule, YaRN

ROWS = rows_of(Path(__file__).with_name("spec") / "specs.jsonl")
SPECS = [RopeSpec.from_dict(row["spec"]) for row in ROWS]
OF_RULES = [*dict.fromkeys(spec.scaling for spec in SPECS if spec.scaling)]
YARN = YaRN(32.0, 4096)
# A value for each field that differs from that of YARN.
FIELDS = {"factor": 33.0, "original_max_position": 4097, "beta_fast": 31.0, "beta_slow": 2.0}
FIELDS |= {"truncate": False, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
# The same for the first spec.
OF_SPEC = {"head_dim": 14, "base": 4.0, "rotary_dim": 6, "start": 1, "interleaved": False}
VALUES: list[Any] = [
    *(*SPECS, *OF_RULES, *dict.fromkeys(spec.axes for spec in SPECS if spec.axes), YARN),
    *(dataclasses.replace(YARN, **{name: value}) for name, value in FIELDS.items()),  # type: ignore[arg-type]
    *(dataclasses.replace(SPECS[0], **{name: value}) for name, value in OF_SPEC.items()),  # type: ignore[arg-type]
    dataclasses.replace(SPECS[0], scaling=Linear(1.0)),  # rotates alike
    dataclasses.replace(SPECS[0], axes=Axes.blocks((4,))),
]
NAMES = {**vars(frequencies), **vars(nn), "Axes": Axes, "RopeSpec": RopeSpec}
NAMES |= {"get": stacks.get, "torch": torch}
COPIES: list[Callable[[Any], Any]] = [
    *(copy.copy, copy.deepcopy, dataclasses.replace),
    *(lambda value, n=n: pickle.loads(pickle.dumps(value, n)) for n in range(2, 6)),
    lambda value: eval(repr(value), dict(NAMES)),
]
every_value = pytest.mark.parametrize("value", VALUES, ids=repr)


@every_value
def test_copies_are_equal(value: Any) -> None:
    hash(value)
    assert sum(value == other for other in VALUES) == 1
    makers = COPIES
    if not isinstance(value, Axes):
        makers = [
            *COPIES,
            lambda value: type(value).from_dict(json.loads(json.dumps(value.to_dict()))),
        ]
    for make in makers:
        other = make(value)
        assert other == value
        assert type(other) is type(value)
        assert repr(other) == repr(value)
        assert hash(other) == hash(value)
        if isinstance(value, RopeSpec):
            assert torch.equal(other.words_for(5000)[0], value.words_for(5000)[0])
    assert len(set(VALUES)) == len(VALUES)


@every_value
def test_fields_are_frozen_and_the_hash_is_computed_once(value: Any) -> None:
    value = copy.copy(value)
    before = hash(value)
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, 1)
        # A hash computed again would use this value.
        object.__setattr__(value, field.name, 5.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.other = 1
    assert hash(value) == before
    # Hashes of strings differ between processes.
    assert "_hash" not in vars(pickle.loads(pickle.dumps(YARN)))


@pytest.mark.parametrize("rule", OF_RULES, ids=repr)
def test_names_dictionaries_and_old_pickles_of_rules(rule: Rule) -> None:
    kind = type(rule)
    assert kind.names
    assert all(RULES[name] is kind for name in kind.names)
    assert kind.keys.keys() <= kind.spellings().keys()
    assert rule.to_dict()["rule"] == rule.names[0]
    assert rule.by_length == isinstance(rule, (DynamicNTK, LongRoPE))
    assert rule.softmax_scaling == 1.0 or isinstance(rule, YaRN)
    # Before the rules were in several files.
    name = f"{kind.__name__}\n"
    old = f"c{kind.__module__}\n{name}".encode(), f"ctightrope.frequencies\n{name}".encode()
    saved = pickle.dumps(rule, 0).replace(*old)
    assert old[1] in saved
    assert pickle.loads(saved) == rule


def test_every_rule_of_transformers_has_a_name() -> None:
    """tests/unit/stacks compares their numbers."""
    assert set(ROPE_INIT_FUNCTIONS) <= RULES.keys()
    assert {type(rule) for rule in OF_RULES} == {*RULES.values()}
    assert (RULES["deepseek_yarn"], RULES["su"]) == (YaRN, LongRoPE)


@pytest.mark.parametrize("row", rows_of(Path(__file__).with_name("reprs.jsonl")))
def test_a_repr_is_a_short_call(row: dict[str, str]) -> None:
    """Of specs and axes it is the call itself; of the others, `python` is a call that makes the value."""
    made = eval(row.get("python", row["repr"]), dict(NAMES))
    assert repr(made) == row["repr"]


def test_a_repr_of_many_numbers_is_short() -> None:
    assert len(repr(Given.of(torch.ones(2, 12, 64)))) < 400
