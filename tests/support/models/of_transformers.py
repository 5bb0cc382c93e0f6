"""Small random models of families of transformers, whose outputs depend on the rotation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.support.tolerances import value

VOCABULARY, TOKENS, DIM = 96, 12, 16
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": DIM,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN = {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "head_dim")}
DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
MROPE: dict[str, Any] = {**DEFAULT, "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
#: Beyond 32 tokens the long factors count.
LONGROPE: dict[str, Any] = {
    **DEFAULT,
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + pair for pair in range(8)],
}
YARN: dict[str, Any] = {
    **DEFAULT,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LLAMA3: dict[str, Any] = {
    **DEFAULT,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC: dict[str, Any] = {**DEFAULT, "rope_type": "dynamic", "factor": 4.0}

#: Family -> model_type and settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", TEXT),
    "Phi-3": (
        "phi3",
        {**TEXT, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "GPT-NeoX": (
        "gpt_neox",
        {**_PLAIN, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    ),
    "GPT-J": ("gptj", {**_PLAIN, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    "Gemma 3": (
        "gemma3_text",
        {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **_PLAIN,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": DIM,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "rope_interleave": True,
        },
    ),
    "Llama 4": (
        "llama4_text",
        {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 64},
    ),
    "Qwen2.5-VL": ("qwen2_5_vl_text", {**TEXT, "rope_parameters": MROPE}),
}


def small_model(family: str, **settings: Any) -> Any:
    """Make a model in eval mode.

    Its weights keep the variance of activations, so that attention scores depend on angles.
    """
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**own, **settings})
    torch.manual_seed(0)
    maker: Any = AutoModel if family == "Qwen2.5-VL" else AutoModelForCausalLM
    model = maker.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return model.eval()


def small_inputs(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Make two rows of tokens."""
    ids = torch.randint(5, 80, (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def outputs(model: Any, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the logits, or the hidden states of a model without a head."""
    found: torch.Tensor = model(**(inputs or small_inputs()))[0]
    return found


def gradients(
    model: Any, inputs: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the outputs, and the gradients of a loss that depends on all of them."""
    model.zero_grad()
    found = outputs(model, inputs)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).mean().backward()
    return found.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_outputs(got: torch.Tensor, want: torch.Tensor, name: str = "patched outputs") -> None:
    """Assert that outputs are close, relative to the largest magnitude in `want`; NaN fails."""
    assert got.shape == want.shape
    off = ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()
    assert off <= value(name), off


def assert_equal_runs(
    got: tuple[torch.Tensor, dict[str, torch.Tensor]],
    want: tuple[torch.Tensor, dict[str, torch.Tensor]],
) -> None:
    """Assert that outputs and gradients are equal, bit for bit except for the signs of zeros."""
    assert got[0].dtype == want[0].dtype
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name
