"""Configurations that state facts for each layer by lists."""

from __future__ import annotations

from typing import Any

import pytest

from tightrope import RopeSpec
from tightrope.frequencies import Linear, Llama3

HEADS = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 128,
}
STEP = {
    "model_type": "step3p5",
    **HEADS,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "layer_types": [*KINDS, "sliding_attention"],
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": LLAMA3,
    "yarn_only_types": ["full_attention"],
    "use_rope_layers": [],
}
WIDE = RopeSpec(64, base=5e6, rotary_dim=32, scaling=Llama3(2.0, 1.0, 32.0, 128))


def test_step_has_a_base_and_a_part_for_each_layer() -> None:
    specs = RopeSpec.from_config(STEP)
    assert [specs.of(layer) for layer in range(4)] == [WIDE, RopeSpec(64), RopeSpec(64), WIDE]


def test_step_is_read_like_the_object_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = {key: value for key, value in STEP.items() if key != "model_type"}
    assert RopeSpec.from_config(transformers.CONFIG_MAPPING["step3p5"](**config)) == (
        RopeSpec.from_config(STEP)
    )


def test_a_base_in_the_section_of_step_is_for_scaled_layers() -> None:
    config = {**STEP, "rope_scaling": {**LLAMA3, "rope_theta": 5e6}}
    assert RopeSpec.from_config(config) == RopeSpec.from_config(STEP)
    config = {key: value for key, value in config.items() if key != "rope_theta"}
    assert [RopeSpec.from_config(config).of(layer) for layer in (0, 1)] == [WIDE, RopeSpec(64)]


def test_one_base_and_all_channels_for_all_layers_of_step() -> None:
    config = {**STEP, "rope_theta": 1e4}
    del config["partial_rotary_factors"], config["rope_scaling"]
    assert RopeSpec.from_config(config) == RopeSpec(64)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rope_theta": [5e6, 1e4, 1e4, 1e4]}, r"rope_theta of full_attention must have one value"),
        (
            {"rope_theta": [5e6, 1e4]},
            r"rope_theta must have an entry for each of 4 layers but has 2",
        ),
        ({"use_rope_layers": [1]}, r"use_rope_layers must be empty"),
        ({"layer_types": None, "num_hidden_layers": None}, r"must give layer_types"),
        (
            {"rope_scaling": {**LLAMA3, "rope_theta": 1e5}},
            r"but got rope_theta\[0\] = 5000000.0 and rope_scaling.rope_theta = 100000.0",
        ),
        (
            {"rope_scaling": {**LLAMA3, "partial_rotary_factor": 1.0}},
            r"partial_rotary_factor of full_attention must have one value",
        ),
    ],
)
def test_lists_of_step_that_no_layer_type_can_hold_are_refused(
    change: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        RopeSpec.from_config({**STEP, **change})


COMMAND = {
    "model_type": "cohere2_moe",
    **HEADS,
    "rope_theta": 1e4,
    "layer_types": KINDS,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "prefix_dense_sliding_window_pattern": 1,
}


@pytest.mark.parametrize(
    ("change", "rotate"),
    [
        ({}, [True, True, True, False]),
        ({"prefix_dense_sliding_window_pattern": 4}, [False, True, True, False]),
        ({"mlp_layer_types": ["sparse"] * 4}, [False, True, True, False]),
        ({"mlp_layer_types": ["dense"] * 4}, [True] * 4),
    ],
)
def test_layers_without_experts_rotate_without_a_window(
    change: dict[str, Any], rotate: list[bool]
) -> None:
    specs = RopeSpec.from_config({**COMMAND, **change})
    spec = RopeSpec(64, interleaved=True)
    assert [specs.of(layer) for layer in range(4)] == [spec if each else None for each in rotate]


def test_layers_without_experts_must_be_listed_or_counted() -> None:
    config = {key: value for key, value in COMMAND.items() if key != "mlp_layer_types"}
    with pytest.raises(ValueError, match="must give mlp_layer_types"):
        RopeSpec.from_config(config)
    assert (
        RopeSpec.from_config({**config, "num_hidden_layers": 4}).layers is not None
    )  # as its class


MOLMO = {
    "model_type": "molmo2_text",
    **HEADS,
    "num_hidden_layers": 3,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
SCALED, PLAIN = RopeSpec(64, scaling=Linear(8.0)), RopeSpec(64)


def test_scaling_of_the_listed_layers_alone() -> None:
    specs = RopeSpec.from_config({**MOLMO, "rope_scaling_layers": [0, 2]})
    assert [specs.of(layer) for layer in range(3)] == [SCALED, PLAIN, SCALED]
    assert RopeSpec.from_config({**MOLMO, "rope_scaling_layers": []}) == PLAIN


def test_scaled_layers_need_the_number_of_layers() -> None:
    config = {key: value for key, value in MOLMO.items() if key != "num_hidden_layers"}
    assert RopeSpec.from_config(config) == SCALED
    with pytest.raises(ValueError, match="must give num_hidden_layers"):
        RopeSpec.from_config({**config, "rope_scaling_layers": [0]})


@pytest.mark.parametrize("change", [{}, {"rope_scaling_layers": [2, 1, 0]}])
def test_scaling_of_all_layers(change: dict[str, Any]) -> None:
    assert RopeSpec.from_config({**MOLMO, **change}) == SCALED


@pytest.mark.parametrize(
    ("listed", "kind"), [([3], ValueError), ("all", TypeError), ([0.5], TypeError)]
)
def test_a_list_of_scaled_layers_must_hold_numbers_of_layers(
    listed: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="rope_scaling_layers"):
        RopeSpec.from_config({**MOLMO, "rope_scaling_layers": listed})
