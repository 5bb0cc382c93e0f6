"""What single families need besides the general rules: settings, inputs, the class to build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .catalogue import ModelType


@dataclass(frozen=True)
class Family:
    """What is special about a model type.

    `config` holds settings, nested for the parts of a configuration; `inputs` makes some inputs, given
    the maker of the rest; `without` names inputs that it must not be given; `model` is the class to
    build; `patches` says how pixels come where a grid comes with them: flat rows or small squares.
    """

    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] | None = None
    without: tuple[str, ...] = ()
    model: str = ""
    patches: str = "flat"


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
TEXT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ERNIE = {"rope_parameters": {**TEXT_ROPE, "mrope_section": [22, 22, 20]}}
COMPASS = {"rope_parameters": {"full_attention": {**TEXT_ROPE, "mrope_section": [2, 3, 3]}}}
VQ = {"base_channels": 32, "channel_multiplier": (1, 1), "num_res_blocks": 1, "resolution": 32}
CODES = {f"IMGIMG{chr(65 + i)}Z": 100 + i for i in range(8)} | {"<image>": 120}
VISUAL = {f"<|visual token {i:06d}|>": 100 + i for i in range(8)}
VISUAL |= {"<image>": 120, "<|extra_200|>": 121}
CLVP = {"hidden_size": 128, "projection_dim": 128, "intermediate_size": 96}

FAMILIES: dict[str, Family] = {
    "bamba": Family({**MAMBA, "attn_layer_indices": [1]}),
    "jamba": Family({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}),
    "recurrent_gemma": Family({"num_hidden_layers": 3}),
    "granitemoehybrid": Family(
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "rope",
        }
    ),
    "chameleon": Family(
        {"vocabulary_map": CODES, "vq_config": VQ}, without=("pixel_values",)
    ),
    "emu3": Family(
        {"vocabulary_map": VISUAL, "vq_config": VQ}, without=("pixel_values", "image_sizes")
    ),
    "clvp": Family({"text_config": CLVP, "speech_config": CLVP}),
    "clvp_encoder": Family(CLVP),
    "cohere_compass": Family({"text_config": COMPASS}),
    "cohere_compass_text": Family(COMPASS),
    "deepseek_ocr2_text": Family({"mlp_layer_types": ["dense", "sparse"]}),
    "ernie4_5_vl_moe": Family({"text_config": ERNIE}),
    "ernie4_5_vl_moe_text": Family(ERNIE),
    "esm": Family({"vocab_size": 128, "position_embedding_type": "rotary", "pad_token_id": 1}),
    "dbrx": Family({"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}}),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "kimi_k25": Family(patches="square"),
    "kimi_k25_vision": Family(patches="square"),
    "aria": Family({"projector_patch_to_query_dict": {16: 4}}),
}  # fmt: skip


def of(model_type: ModelType) -> Family:
    """The family's entry, or nothing special."""
    return FAMILIES.get(model_type.name, Family())
