"""`patch` warns of weights whose pairing is not that of the model's code, by the record of their own section."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.records import conversion, write_record
from tightrope import patch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 5,
    "text_config": {"model_type": "llama", "vocab_size": 16, **SIZES},
    "vision_config": {"model_type": "pixtral", "head_dim": 16, "image_size": 32, **SIZES},
}


def warnings_of(model: Any, recwarn: pytest.WarningsRecorder) -> list[str]:
    recwarn.clear()
    assert patch(model).replaced
    return [str(each.message) for each in recwarn if "tightrope_convert" in str(each.message)]


@pytest.mark.parametrize("section, model", [("text_config", "llama"), ("vision_config", "pixtral")])
def test_a_text_part_warns_as_the_whole_does(
    section: str, model: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA), encoding="utf-8")
    record = conversion("interleaved", section=section, model=f"model_type '{model}'")
    write_record(tmp_path, record)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    (text,) = warnings_of(transformers.LlavaModel(config), recwarn)
    assert "tightrope_convert.json beside its weights states that model.layers.0" in text
    # So does transformers.AutoModel.from_pretrained(folder, config=config.text_config).
    part = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    part.name_or_path = str(tmp_path)
    found = warnings_of(transformers.LlamaModel(part), recwarn)
    assert len(found) == (section == "text_config")
