"""The first lines of `tightrope inspect` answer what rotates, by which frequencies, in which layers and how far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import call
from tests.support.model_configs import llama3
from tightrope_tools.command import main

HEADS = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "rope_theta": 5e5}
LLAMA3 = llama3(16.0) | {"original_max_position_embeddings": 64}
VISION = {"model_type": "qwen2_5_vl_vision", "hidden_size": 160, "num_heads": 2}
FILES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all layers alike": (
        {"model_type": "llama", **HEADS, "max_position_embeddings": 4096},
        ["whole model halves 0 to 127 of 128 500,000 none all 4,096"],
    ),
    "a part of the channels, neighbours": (
        {"model_type": "glm4", **HEADS, "partial_rotary_factor": 0.5},
        ["whole model neighbours 0 to 63 of 128 500,000 none all"],
    ),
    "layers without RoPE, scaling": (
        {
            "model_type": "smollm3",
            **HEADS,
            "num_hidden_layers": 9,
            "no_rope_layer_interval": 4,
            "max_position_embeddings": 1024,
            "rope_scaling": LLAMA3,
        },
        [
            "rope halves 0 to 127 of 128 500,000 Llama3 16 0–2, 4–6, 8 1,024",
            "no_rope none rotate 3, 7",
        ],
    ),
    "text and images": (
        {
            "model_type": "qwen2_5_vl",
            "text_config": {**HEADS, "model_type": "qwen2"},
            "vision_config": VISION,
        },
        [
            "text_config halves 0 to 127 of 128 500,000 none all",
            "vision_config halves 0 to 79 of 80 10,000 none all",
        ],
    ),
    "images alone": (
        {"text_config": {"model_type": "gpt2", "n_embd": 64}, "vision_config": VISION},
        ["vision_config halves 0 to 79 of 80 10,000 none all"],
    ),
    "latent attention": (
        {
            "model_type": "deepseek_v3",
            "rope_theta": 1e4,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
        },
        ["whole model neighbours 128 to 191 of 192 10,000 none all"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_first_ten_lines_answer(name: str, tmp_path: Path) -> None:
    config, answers = FILES[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    code, out, _ = call(main, "inspect", path, width=120)
    assert code == 0
    first = [" ".join(line.split()) for line in out.splitlines()[:10]]
    assert "part pairs channels base scaling layers context" in first
    assert set(answers) <= set(first)
