"""The comparison of the spec of a configuration with what a small model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coverage.configs import Call, compared, differs, fitted
from tightrope import Axes, RopeSpec
from tightrope.config import LayerSpecs

pytest.importorskip("transformers")

SPEC = RopeSpec(16, base=100.0, rotary_dim=8, start=4)


def call(spec: RopeSpec, layer: int = 0, **changes: Any) -> Call:
    """Return the call of a rotation by a spec of one coordinate."""
    angles = torch.arange(9.0)[:, None] * spec.frequencies().inv_freq
    angles = torch.atan2(angles.sin(), angles.cos()).tolist()
    made = Call(f"layers.{layer}.attn", spec.head_dim, spec.start, spec.interleaved, angles)
    return made._replace(**changes)


def test_a_call_is_compared_in_pairing_channels_and_angles() -> None:
    assert differs(call(SPEC), SPEC) == ""
    assert differs(call(SPEC, width=8, start=0), SPEC) == ""  # the channels were cut out first
    for other, what in (
        (RopeSpec(16, base=100.0, rotary_dim=8, start=4, interleaved=True), "the pairing"),
        (RopeSpec(16, base=100.0, rotary_dim=8, start=2), "the channels"),
        (RopeSpec(16, base=100.0, rotary_dim=6, start=4), "the channels"),
        (RopeSpec(32, base=100.0, rotary_dim=8, start=4), "the channels"),
        (RopeSpec(16, base=101.0, rotary_dim=8, start=4), "the angles of token 1"),
    ):
        assert differs(call(SPEC), other).startswith(what)
    negated = [[-angle for angle in token] for token in call(SPEC).angles]
    assert differs(call(SPEC, angles=negated), SPEC) == "the direction of layers.#.attn"


def test_each_coordinate_has_a_value_of_its_own() -> None:
    spec = RopeSpec(8, axes=Axes.blocks((2, 2)))
    angles = [[1.0, 0.01, 2.0, 0.02]] * 3
    assert differs(Call("", 8, 0, False, angles), spec) == ""
    assert differs(Call("", 8, 0, False, [[1.0, 0.02, 2.0, 0.02]] * 3), spec)


def test_the_last_coordinate_is_the_one_that_changes_along_a_row() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]  # by rows, in squares of four

    def seen(axes: Axes) -> str:
        angles = [
            [place[axis] * 1e4 ** (-2 * k / n) for axis, k, n in axes.pairs] for place in places
        ]
        return differs(Call("", 8, 0, False, angles), RopeSpec(8, axes=Axes.blocks((2, 2))))

    assert seen(Axes.blocks((2, 2))) == ""
    assert (
        seen(Axes(2, ((1, 0, 4), (1, 1, 4), (0, 0, 4), (0, 1, 4))))
        == "the order of the coordinates of "
    )


def test_layers_are_compared_with_their_specs() -> None:
    specs = LayerSpecs({"on": SPEC, "off": None}, ("on", "off", "on"))
    assert compared(specs, [call(SPEC, 0), call(SPEC, 2)]) == ""
    assert compared(specs, [call(SPEC, 0)]) == "layer 2 does not rotate"
    every = [call(SPEC, layer) for layer in range(3)]
    assert compared(specs, every) == "layer 1 of layers.#.attn rotates"


def test_sections_are_cut_as_models_cut_them() -> None:
    config = {
        "model_type": "qwen3_vl_text",
        "head_dim": 16,
        "rope_parameters": {"mrope_section": [2, 3, 3]},
    }
    assert fitted(config)["rope_parameters"]["mrope_section"] == [3, 3, 2]
    assert fitted({**config, "model_type": "qwen2_vl_text"}) == {
        **config,
        "model_type": "qwen2_vl_text",
    }
