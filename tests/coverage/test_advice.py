"""Each refusal of the coverage of configurations ends with a call that works for that file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coverage import configs, rows, small
from tests.support.advice import calls_in, made_by
from tests.support.reading import outcome
from tightrope import RopeSpec, rotate
from tightrope.frequencies import Given

pytest.importorskip("transformers")
REFUSALS = [row["model"] for row in rows.read("configs")[1:] if row["status"] == "refused"]
# What sentences without a call say instead -> the types: no spec describes the rotation; only the weights hold the
# frequencies; no call reads several parts at once; a section for some layers; another part's key; another spec.
WITHOUT_CALL = {
    "tightrope.patch(model) rotates as the model's own code does.": """gemma4_vision hunyuan_vl hunyuan_vl_text
        neomme neucodec qwen2_5_omni_dit qwen2_5_omni_token2wav xcodec2""",
    "pairs neighbours.": "vjepa2",
    "inv_freq, the frequencies that it rotates by.": "mistral_large4 mistral_large4_text",
    "(to name some of them, add layer_types to the config).": "blt clvp",
    "make a spec by hand for each kind of layers.": "esmfold2",
    "at most 1 but got 4.0.": "efficientloftr",
    "RopeSpec(rope.head_dim, scaling=Given.of(-rope.frequencies().inv_freq)).": "nanochat",
}
ENDS = {name: end for end, names in WITHOUT_CALL.items() for name in names.split()}


def led_to(sentence: str, config: object, steps: int = 3) -> list[Any]:
    """Run every call of a sentence, and the calls of refusals that it leads to."""
    made = []
    for call in calls_in(sentence):
        try:
            made.append(made_by(call, config))
        except ValueError as error:
            assert steps > 1, sentence
            made += led_to(str(error), config, steps - 1)
    assert made, sentence
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")  # of strict=False
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", REFUSALS)
def test_the_advice_of_a_refusal_of_the_coverage_works(name: str) -> None:
    config = configs.file_of(small.prepare(name)[0].model)
    error = outcome(config)
    assert isinstance(error, ValueError)
    if name in ENDS:
        assert str(error).endswith(ENDS[name])
    else:
        assert None not in led_to(str(error), config)


def test_the_advice_for_nanochat_rotates_as_its_code_does() -> None:
    from transformers import NanoChatConfig
    from transformers.models.nanochat import modeling_nanochat as code

    config = NanoChatConfig(hidden_size=128, num_attention_heads=2)
    (call,) = calls_in(str(outcome(config)))
    rope = RopeSpec.from_config({**config.to_dict(), "model_type": "llama"})
    spec = eval(call, {"rope": rope, "RopeSpec": RopeSpec, "Given": Given})
    q, ids = torch.randn(1, 2, 5, 64), torch.arange(7, 12)[None]
    cos, sin = code.NanoChatRotaryEmbedding(config)(q, ids)
    theirs, _ = code.apply_rotary_pos_emb(q, q, cos, sin)
    for positions in (ids, 7):
        torch.testing.assert_close(rotate(q, spec, positions), theirs, rtol=0, atol=1e-5)
