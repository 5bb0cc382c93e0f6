"""Copies, hashes and fields that cannot be set, of specs, frequency rules and axes."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import (
    NTK,
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from tightrope.functional import rotate

VALUES: list[Any] = [
    *(
        Linear(4.0),
        NTK(8.0),
        DynamicNTK(2.0, 4096),
        YaRN(32.0, 4096, beta_fast=16.0, truncate=False),
    ),
    *(LongRoPE((1.0, 1.5), (1.0, 32.1), 4096, factor=32.0), Llama3(8.0, 1.0, 4.0, 8192)),
    *(Proportional(0.25, 8.0), Given(((1.0, 0.1), (-2.0, 1 / 3)))),
    *(Axes.sections((16, 24, 24)), Axes.strided(2, pairs=32), Axes(2, ((1, 0, 4), (0, 0, 4)))),
    RopeSpec(
        20,
        base=5e5,
        rotary_dim=12,
        start=3,
        interleaved=True,
        scaling=YaRN(4.0, 4096),
        axes=Axes.sections((2, 4)),
    ),
    RopeSpec(20, base=5e5, rotary_dim=12, start=3, interleaved=True, scaling=YaRN(4.0, 4096)),
]
COPIES: list[Callable[[Any], Any]] = [
    *(copy.copy, copy.deepcopy, dataclasses.replace),
    *(lambda value, n=n: pickle.loads(pickle.dumps(value, n)) for n in range(2, 6)),
]
every_value = pytest.mark.parametrize("value", VALUES, ids=repr)


@pytest.mark.parametrize("make", COPIES)
@every_value
def test_copies_are_equal(value: Any, make: Callable[[Any], Any]) -> None:
    hash(value)
    other = make(value)
    assert other == value
    assert type(other) is type(value)
    assert repr(other) == repr(value)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(value)))
    assert hash(other) == hash(value)
    if isinstance(value, RopeSpec) and value.axes is None:
        x = torch.randn(7, 20)
        assert torch.equal(rotate(x, other, 99, layout="sd"), rotate(x, value, 99, layout="sd"))


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
