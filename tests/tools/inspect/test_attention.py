"""Factors of the attention that `inspect` reports, which keys of RoPE state and no rotation has."""

import json
from typing import Any

import pytest

from tightrope.frequencies import YaRN
from tightrope_tools.inspect import compare, inspect
from tightrope_tools.inspect.report import PartReport

YARN_OF = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 2}


def of_family(name: str, **section: object) -> dict[str, Any]:
    latent = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64} if name == "mistral4" else {}
    return {"model_type": name, **SHAPE, **latent, "rope_parameters": {**YARN_OF, **section}}


def only(config: dict[str, Any]) -> PartReport:
    (part,) = inspect(config).parts
    return part


@pytest.mark.parametrize(
    "name, factor, noted",
    [
        ("ministral3", 1.0, False),
        ("llama", 1.0, False),
        ("qwen3", 1.0, False),
        ("mistral4", YaRN(16.0, 4096, mscale_all_dim=1.0).softmax_scaling, True),
    ],
)
def test_a_softmax_scale_is_reported_of_the_families_that_have_one(
    name: str, factor: float, noted: bool
) -> None:
    part = only(of_family(name))
    assert part.softmax_scaling == factor
    assert ("softmax" in {note.code for note in part.notes}) == noted
    one, other = inspect(of_family(name)), inspect(of_family("ministral3"))
    assert any("softmax" in why for each in compare(one, other).parts for why in each.why) == noted


def test_of_an_unknown_family_a_softmax_scale_is_a_question() -> None:
    stated = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}
    (part,) = inspect(of_family("zebra9"), **stated).parts
    (text,) = [note.text for note in part.notes if note.code == "softmax"]
    assert text.startswith("DeepSeek's attention multiplies its softmax scale by 1.63139 for")
    assert part.softmax_scaling is None
    assert json.loads(json.dumps(part.to_dict()))["softmax_scaling"] is None
    (known,) = compare(inspect(of_family("llama")), inspect(of_family("zebra9"), **stated)).parts
    assert "the factors on the softmax scale are 1 in one and unknown in the other" in known.why


@pytest.mark.parametrize(
    "config, key",
    [
        (of_family("ministral3", llama_4_scaling_beta=0.1), "rope_parameters.llama_4_scaling_beta"),
        ({**of_family("llama"), "attn_temperature_tuning": True}, "attn_temperature_tuning"),
        ({**of_family("llama"), "attn_temperature_tuning": False}, None),
        (of_family("ministral3"), None),
        (
            {
                "general.architecture": "llama",
                "llama.embedding_length": 4096,
                "llama.attention.head_count": 32,
                "llama.rope.freq_base": 5e5,
                "llama.block_count": 2,
                "llama.attention.temperature_scale": 0.1,
            },
            "llama.attention.temperature_scale",
        ),
    ],
)
def test_a_temperature_by_position_leaves_a_word(config: dict[str, Any], key: str | None) -> None:
    found = [note.text for note in only(config).notes if note.code == "temperature"]
    assert [text.partition(" is a temperature of the attention")[0] for text in found] == [key] * (
        key is not None
    )
