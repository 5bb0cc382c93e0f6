"""A small model whose frequencies depend on its weights."""

from typing import Any

from transformers import AutoConfig, AutoModel

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 9}
SMALL |= {"intermediate_size": 32, "moe_intermediate_size": 8, "n_routed_experts": 4}
LARGE = {**SMALL, "kv_lora_rank": 8, "index_n_heads": 2, "no_rope_layers": [1, 0]}


def model_of(model_type: str, **settings: Any) -> Any:
    return AutoModel.from_config(AutoConfig.for_model(model_type, **settings))


def large() -> Any:
    """A small Mistral Large 4 whose factors are not 1, as in its weights."""
    model = model_of("mistral_large4_text", **LARGE)
    model.rotary_emb.alpha.normal_()
    return model
