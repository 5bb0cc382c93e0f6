"""The comparison of the spec of a configuration with what a small model does, and the sizes of small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coverage.configs import Call, compared, differs
from tightrope import Axes, RopeSpec
from tightrope.config import LayerSpecs

pytest.importorskip("transformers")

GIVEN: dict[str, Any] = {"head_dim": 16, "base": 100.0, "rotary_dim": 8, "start": 4}
SPEC, BLOCKS = RopeSpec(**GIVEN), RopeSpec(8, axes=Axes.blocks((2, 2)))


def call(layer: int = 0, **changes: Any) -> Call:
    """The call of a rotation by SPEC."""
    angles = torch.arange(9.0)[:, None] * SPEC.frequencies().inv_freq
    found = torch.atan2(angles.sin(), angles.cos()).tolist()
    return Call(f"layers.{layer}.attn", 16, 4, False, found)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, ""),
        ({"interleaved": True}, "the pairing"),
        ({"start": 2}, "the channels"),
        ({"rotary_dim": 6}, "the channels"),
        ({"head_dim": 32}, "the channels"),
        ({"base": 101.0}, "the angles of token 1"),
    ],
    ids=str,
)
def test_a_call_is_compared_in_pairing_channels_and_angles(
    changes: dict[str, Any], what: str
) -> None:
    found = differs(call(), RopeSpec(**{**GIVEN, **changes}))
    assert found.startswith(what)
    assert bool(found) == bool(what)


def test_channels_may_be_cut_out_first_and_the_direction_counts() -> None:
    assert differs(call(width=8, start=0), SPEC) == ""
    negated = [[-angle for angle in token] for token in call().angles]
    assert differs(call(angles=negated), SPEC) == "the direction of layers.#.attn"


def test_each_coordinate_has_a_value_of_its_own_and_the_last_changes_along_a_row() -> None:
    def seen(angles: list[list[float]]) -> str:
        return differs(Call("", 8, 0, False, angles), BLOCKS)

    assert seen([[1.0, 0.01, 2.0, 0.02]] * 3) == ""
    assert seen([[1.0, 0.02, 2.0, 0.02]] * 3)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]  # by rows, in squares of four
    right = [[row, row * 0.01, column, column * 0.01] for row, column in places]
    assert seen(right) == ""
    assert seen([token[2:] + token[:2] for token in right]) == "the order of the coordinates of "


def test_layers_are_compared_with_their_specs() -> None:
    specs = LayerSpecs({"on": SPEC, "off": None}, ("on", "off", "on"))
    assert compared(specs, [call(0), call(2)]) == ""
    assert compared(specs, [call(0)]) == "layer 2 does not rotate"
    assert compared(specs, list(map(call, range(3)))) == "layer 1 of layers.#.attn rotates"
