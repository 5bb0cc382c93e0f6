"""Configurations of NeMo and ONNX Runtime, and vLLM's switch for the scaling of attention."""

from __future__ import annotations

from typing import Any

import pytest

from tightrope import RopeSpec
from tightrope.config import provenance
from tightrope.frequencies import Linear, YaRN

NEMO = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "kv_channels": None,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percentage": 0.5,
    "rotary_interleaved": False,
    "seq_len_interpolation_factor": None,
    "apply_rope_fusion": True,
}


def test_nemo_spells_two_arguments_of_megatron_in_its_own_way() -> None:
    assert RopeSpec.from_config(NEMO) == RopeSpec(64, rotary_dim=32)
    assert RopeSpec.from_config({**NEMO, "model_type": "gptj"}) == RopeSpec(64, rotary_dim=32)
    stretched = provenance({**NEMO, "seq_len_interpolation_factor": 4})
    assert stretched.spec == RopeSpec(64, rotary_dim=32, scaling=Linear(4.0))
    sources = {row.field: row.source for row in stretched.rows}
    assert sources["rotary_dim"].startswith("rotary_percentage")
    assert sources["scaling.factor"] == "seq_len_interpolation_factor"


def test_a_genai_config_names_the_file_to_pass() -> None:
    config = {"model": {"type": "phi3", "decoder": {"head_size": 96}}, "search": {}}
    with pytest.raises(ValueError, match=r"must come with the config\.json of the model"):
        RopeSpec.from_config(config)


# A family that has its code in its own repository: vLLM reads its rules.
INTERN = {
    "model_type": "internlm2",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "rope_theta": 1e4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, None),
        ({"apply_yarn_scaling": True}, None),
        ({"apply_yarn_scaling": False}, 1.0),
        ({"apply_yarn_scaling": False, "attn_factor": 1.5}, 1.5),
    ],
)
def test_vllm_can_switch_off_the_factor_of_yarn(change: Any, factor: float | None) -> None:
    spec = RopeSpec.from_config({**INTERN, "rope_scaling": {**YARN, **change}})
    assert spec.scaling == YaRN(4.0, 64, attention_factor=factor)


def test_a_factor_beside_the_switch_of_vllm_must_agree() -> None:
    scaling = {**YARN, "apply_yarn_scaling": False, "attention_factor": 1.2}
    with pytest.raises(ValueError, match="attention_factor must have one value"):
        RopeSpec.from_config({**INTERN, "rope_scaling": scaling})
