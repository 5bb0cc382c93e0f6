"""Specs, frequency rules and axes are values: copies, reprs, dictionaries, and fields that cannot be set."""

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import (
    NTK,
    RULES,
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
)
from tightrope.functional import rotate

YARN = YaRN(32.0, 4096)
ONE_OF_EACH: list[Rule] = [
    *(Linear(4.0), NTK(8.0), DynamicNTK(2.0, 4096), Llama3(8.0, 1.0, 4.0, 8192)),
    YaRN(32.0, 4096, beta_fast=16.0, truncate=False, attention_factor=1.25, mscale_all_dim=0.5),
    LongRoPE((1.0, 1.5), (1.0, 32.1), 4096, factor=32.0),
    *(Proportional(0.25, 8.0), Given(((1.0, 0.1), (-2.0, 1 / 3)))),
]
CHANNELS: Any = {"base": 5e5, "rotary_dim": 12, "start": 3, "interleaved": True}
VALUES: list[Any] = [
    *ONE_OF_EACH,
    *(NTK(4.0), YARN, YaRN(33.0, 4096), YaRN(32.0, 4097)),
    *(dataclasses.replace(YARN, beta_fast=31.0), dataclasses.replace(YARN, beta_slow=2.0)),
    *(dataclasses.replace(YARN, truncate=False), dataclasses.replace(YARN, attention_factor=1.0)),
    *(dataclasses.replace(YARN, mscale=1.0), dataclasses.replace(YARN, mscale_all_dim=1.0)),
    *(Axes.sections((16, 24, 24)), Axes.sections((24, 20, 20), interleaved=True)),
    *(Axes.blocks((22, 21, 21)), Axes.strided(2, pairs=32), Axes(2, ((1, 0, 4), (0, 0, 4)))),
    RopeSpec(20, **CHANNELS, scaling=YaRN(4.0, 4096), axes=Axes.sections((2, 4))),
    RopeSpec(20, **CHANNELS, scaling=YaRN(4.0, 4096)),
]
COPIES: list[Callable[[Any], Any]] = [
    *(copy.copy, copy.deepcopy, dataclasses.replace),
    *(lambda value, n=n: pickle.loads(pickle.dumps(value, n)) for n in range(2, 6)),
    lambda value: eval(repr(value)),
]
every_value = pytest.mark.parametrize("value", VALUES, ids=repr)


@every_value
def test_copies_are_equal(value: Any) -> None:
    hash(value)
    assert sum(value == other for other in VALUES) == 1
    for make in COPIES:
        other = make(value)
        assert other == value
        assert type(other) is type(value)
        assert repr(other) == repr(value)
        assert hash(other) == hash(value)
        if isinstance(value, RopeSpec) and value.axes is None:
            x = torch.randn(7, 20)
            assert torch.equal(rotate(x, other, 99, layout="sd"), rotate(x, value, 99, layout="sd"))
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
    assert "_hash" not in vars(pickle.loads(pickle.dumps(VALUES[0])))


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=repr)
def test_dictionaries_and_old_pickles_bring_a_rule_back(rule: Rule) -> None:
    made = rule.to_dict()
    assert made["rule"] == rule.names[0]
    # Before the rules were in several files.
    name = f"{type(rule).__name__}\n"
    old = f"c{type(rule).__module__}\n{name}".encode(), f"ctightrope.frequencies\n{name}".encode()
    saved = pickle.dumps(rule, 0).replace(*old)
    assert old[1] in saved
    for again in (Rule.from_dict(json.loads(json.dumps(made))), pickle.loads(saved)):
        assert again == rule
        assert type(again) is type(rule)
        assert again.frequencies(4, 1e4, 5000) == rule.frequencies(4, 1e4, 5000)


def test_the_names_of_rules() -> None:
    for rule in ONE_OF_EACH:
        kind = type(rule)
        assert kind.names
        assert all(RULES[name] is kind for name in kind.names)
        assert kind.keys.keys() <= kind.spellings().keys()
        assert rule.by_length == isinstance(rule, (DynamicNTK, LongRoPE))
        assert rule.softmax_scaling == 1.0 or isinstance(rule, YaRN)
    assert RULES["deepseek_yarn"] is YaRN
    assert RULES["su"] is LongRoPE
    # tests/unit/stacks compares their numbers.
    assert set(ROPE_INIT_FUNCTIONS) <= RULES.keys()


def test_a_repr_is_short() -> None:
    long = tuple(float(k) for k in range(1, 49))
    assert repr(LongRoPE((1.0,) * 48, long, 4096, factor=2.0)) == (
        "LongRoPE(short_factor=(1.0, 1.0, … 45 more …, 1.0), "
        "long_factor=(1.0, 2.0, … 45 more …, 48.0), original_max_position=4096, factor=2.0)"
    )
    assert repr(YaRN(4, 4096)) == "YaRN(factor=4.0, original_max_position=4096)"
    assert repr(Given((0.5,))) == "Given(inv_freq=(0.5,))"
    assert len(repr(Given.of(torch.ones(2, 12, 64)))) < 400
