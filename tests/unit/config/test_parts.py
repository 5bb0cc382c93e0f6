"""A plain call reads the text part of a model with several parts; `section` reads another."""

from __future__ import annotations

from typing import Any

import pytest

from tightrope import Axes, RopeSpec
from tightrope.config import sections

TEXT = {"model_type": "qwen2", "hidden_size": 128, "num_attention_heads": 2, "rope_theta": 5e5}
OTHER = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 1e4}
SPEC, OTHERS = RopeSpec(64, base=5e5), RopeSpec(32)


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_the_text_part_is_what_a_plain_call_reads(name: str) -> None:
    config = {"model_type": "any_vl", "vision_config": OTHER, name: TEXT, "audio_config": OTHER}
    assert set(sections(config)) == {"vision_config", name, "audio_config"}
    assert RopeSpec.from_config(config) == SPEC
    assert RopeSpec.from_config(config, section="vision_config") == OTHERS


def test_an_omni_model_reads_the_text_of_its_thinker() -> None:
    config = {"talker_config": {"text_config": OTHER}, "thinker_config": {"text_config": TEXT}}
    assert RopeSpec.from_config(config) == SPEC


def test_keys_beside_the_text_part_are_still_checked() -> None:
    config = {"vision_config": OTHER, "text_config": TEXT, "rope_ratio": 2}
    with pytest.raises(ValueError, match=r"must be known but got rope_ratio"):
        RopeSpec.from_config(config)


@pytest.mark.parametrize("kind", ["relative", None, ["rotary"]])
def test_a_part_that_selects_no_rope_is_none_of_those_that_rotate(kind: object) -> None:
    speech = {**OTHER, "model_type": "wav2vec2-conformer", "position_embeddings_type": kind}
    config = {"encoder": speech, "decoder": TEXT}
    assert sections(config) == ("decoder",)
    assert RopeSpec.from_config(config) == SPEC
    speech["position_embeddings_type"] = "rotary"
    assert sections(config) == ("encoder", "decoder")


def test_a_model_with_two_rotations_names_the_way_to_each() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING["sam3_tracker_video"]().to_dict()
    with pytest.raises(ValueError, match="has two rotations") as error:
        RopeSpec.from_config(config)
    assert "section='vision_config.backbone_config'" in str(error.value)
    columns_first = [axis for axis, _, _ in Axes.blocks((16, 16)).pairs][::-1]
    images = RopeSpec.from_config(config, section="vision_config.backbone_config")
    assert (images.head_dim, [axis for axis, _, _ in images.axes.pairs]) == (64, columns_first)
    memory = RopeSpec.from_config({**config, "model_type": "sam2_video"})
    assert (memory.head_dim, memory.interleaved, memory.axes.count) == (256, True, 2)


def test_an_outer_level_without_a_spec_hides_no_text() -> None:
    times = {"rope_theta": 1200.0, "partial_rotary_factor": 0.2}
    config = {"model_type": "musicflamingo", "rope_parameters": times, "text_config": TEXT}
    assert sections(config) == ("text_config",)
    assert RopeSpec.from_config(config) == SPEC
    with pytest.raises(ValueError, match="rotates the features of sounds by their times"):
        RopeSpec.from_config(config, section="")
    assert sections({"model_type": "bert", "audio_config": OTHER}) == ("",)


@pytest.mark.parametrize(
    "config",
    [
        {"encoder_config": OTHER, "decoder_config": TEXT},
        {"encoder": OTHER, "decoder": TEXT},
        {"a_config": {"text_config": OTHER}, "b_config": {"text_config": TEXT}},
        {**OTHER, "text_config": TEXT},
    ],
)
def test_parts_of_which_none_is_the_text_are_a_question_that_names_a_call(config: Any) -> None:
    with pytest.raises(ValueError, match="section must name one part") as error:
        RopeSpec.from_config(config)
    call = str(error.value).rpartition("for example ")[2].rstrip(".")
    assert eval(call, {"RopeSpec": RopeSpec, "config": config}) in (SPEC, OTHERS)
