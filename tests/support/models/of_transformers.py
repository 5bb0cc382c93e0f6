"""Small random models of the common transformers families, whose outputs depend on the rotation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen2VLForConditionalGeneration,
)

from tests.support.tolerances import value

VOCABULARY, TOKENS = 96, 12
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}
_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 2,
    "hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_PLAIN = {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "head_dim")}
IMAGE, START, END = 90, 91, 92

#: family -> model_type and settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", TEXT),
    "Mistral": ("mistral", {**TEXT, "sliding_window": 6}),
    "Qwen2": ("qwen2", TEXT),
    "Qwen3": ("qwen3", TEXT),
    "Gemma 3": (
        "gemma3_text",
        {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "Phi-3": ("phi3", TEXT),
    "GPT-NeoX": ("gpt_neox", _PLAIN),
    "GPT-J": (
        "gptj",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 8,
            "vocab_size": VOCABULARY,
            "n_positions": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Cohere": ("cohere", TEXT),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **_PLAIN,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
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
    "Qwen2-VL": (
        "qwen2_vl",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": _VISION,
            "image_token_id": IMAGE,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "video_token_id": 93,
        },
    ),
    "ModernBERT": (
        "modernbert",
        {
            **_PLAIN,
            "local_attention": 6,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}

_CLASSES: dict[str, Any] = {
    "ModernBERT": ModernBertForMaskedLM,
    "Qwen2-VL": Qwen2VLForConditionalGeneration,
}


def small_model(family: str, **settings: Any) -> PreTrainedModel:
    """Make a model in eval mode.

    Its weights keep the variance of activations, so that attention scores depend on angles.
    """
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**own, **settings})
    torch.manual_seed(0)
    maker = _CLASSES.get(family)
    if maker is None:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        model = maker._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return model.eval()


def small_inputs(family: str) -> dict[str, torch.Tensor]:
    """Make two rows of tokens; for Qwen2-VL with an image, whose tokens' coordinates differ."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 80, (2, TOKENS), generator=generator)
    if family != "Qwen2-VL":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    kinds = torch.zeros_like(ids)
    picture = torch.tensor([START, *[IMAGE] * 6, END])
    ids[:, 2:10] = picture
    kinds[:, 3:9] = 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(2 * 24, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 6]] * 2),
    }


def outputs(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits."""
    logits: torch.Tensor = model(**inputs).logits
    return logits


def gradients(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits and the gradients of a loss that depends on every logit."""
    model.zero_grad()
    logits = outputs(model, inputs)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).mean().backward()
    return logits.detach(), {
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


def assert_calls_operator(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.no_grad():
            outputs(model, given)
    assert any(event.key == "tightrope::rotate" for event in profile.key_averages())
