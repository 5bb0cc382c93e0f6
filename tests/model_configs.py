"""Configurations of public models, and the spec that a person who knows the model would write.

Each entry names the repository that it is from and the form of the file: ``v4`` for the flat keys that
transformers wrote until 2025, ``v5`` for ``rope_parameters``, ``hub`` for the author's own code. Keys
that have nothing to do with attention are left out for length; those around RoPE are as they are, with
the left-overs that real files carry. ``section`` and ``layers`` are what a caller has to add or gets.

Expectations are written from papers, model cards and modeling code, never from the reader under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, YaRN

Wanted = RopeSpec | Mapping[str, RopeSpec | None]


@dataclass(frozen=True)
class Model:
    """A configuration and what it means."""

    origin: str
    form: str
    config: dict[str, Any]
    wanted: Wanted
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        section = self.options.get("section")
        return f"{self.origin}:{section}" if section else self.origin


def llama3(factor: float) -> dict[str, Any]:
    return {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip


def v4(
    model_type: str, hidden: int, heads: int, theta: float | None, **more: Any
) -> dict[str, Any]:
    """What nearly all files of that time have in common."""
    made: dict[str, Any] = {
        "architectures": ["ForCausalLM"], "hidden_size": hidden, "model_type": model_type,
        "num_attention_heads": heads, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip
    if theta is not None:
        made["rope_theta"] = theta
    if "layer_types" in more:
        made["num_hidden_layers"] = len(more["layer_types"])
    return {"max_position_embeddings": 8192, **made, **more}


def v5(
    model_type: str, hidden: int, heads: int, rope: dict[str, Any], **more: Any
) -> dict[str, Any]:
    made = v4(model_type, hidden, heads, None, rope_parameters=rope, **more)
    made["dtype"] = made.pop("torch_dtype")
    return made


# microsoft/Phi-3.5-mini-instruct: 48 pairs.
PHI35_LONG = [
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601,
    1.5899999141693115, 1.600000023841858, 1.6200000047683716, 2.620000123977661,
    3.2300000190734863, 3.2300000190734863, 4.789999961853027, 7.400000095367432,
    7.700000286102295, 9.09000015258789, 12.199999809265137, 17.670000076293945,
    24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523,
    32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992,
    50.340003967285156, 50.45000457763672, 57.55000305175781, 57.93000411987305,
    58.21000289916992, 60.1400032043457, 62.61000442504883, 62.62000274658203,
    62.71000289916992, 63.1400032043457, 63.1400032043457, 63.77000427246094,
    63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688,
    64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938,
    64.4800033569336, 64.51000213623047, 64.52999877929688, 64.83999633789062,
]  # fmt: skip
PHI35_SHORT = [
    1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842,
    1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0499999523162842,
    1.0699999332427979, 1.0999999046325684, 1.1099998950958252, 1.1599998474121094,
    1.1599998474121094, 1.1699998378753662, 1.2899998426437378, 1.339999794960022,
    1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
    1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745,
    2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346,
    2.0199997425079346, 2.0199997425079346, 2.0299997329711914, 2.0299997329711914,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0799996852874756,
    2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533,
    2.729999542236328, 2.749999523162842, 2.8399994373321533,
]  # fmt: skip
# microsoft/Phi-4-mini-instruct: 48 pairs.
PHI4_MINI_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
# openbmb/MiniCPM3-4B: 16 pairs, one list for both lengths.
MINICPM3 = [
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725,
    2.093982484148734, 3.1446935121267696, 4.937952647693647, 7.524541999994549,
    10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266,
    16.461961959767827, 16.740306425132907, 16.87581087164081, 16.940876586213285,
]  # fmt: skip
# microsoft/Phi-3.5-MoE-instruct has 64 factors a list; these begin as its own do and go on evenly.
PHIMOE_LONG = [1.0199999809265137, 1.0299999713897705, 1.0399999618530273] + [
    1.0499999523162842 + k for k in range(61)
]
PHIMOE_SHORT = [1.0, 1.0399999618530273, 1.0399999618530273] + [
    1.0499999523162842 + k / 64 for k in range(61)
]

DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096,
    "type": "yarn",
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip


def latent(**more: Any) -> RopeSpec:
    """DeepSeek's head: 128 channels without positions, then 64 that rotate as neighbours."""
    return RopeSpec(192, rotary_dim=64, start=128, interleaved=True, **more)


SMOLLM3_LAYERS = [int((layer + 1) % 4 != 0) for layer in range(36)]
LLAMA4_LAYERS = [int((layer + 1) % 4 != 0) for layer in range(48)]
GEMMA3_LAYERS = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(26)]
OLMO3_LAYERS = ["full_attention" if (n + 1) % 4 == 0 else "sliding_attention" for n in range(32)]
GPT_OSS_LAYERS = ["sliding_attention", "full_attention"] * 12
COHERE2_LAYERS = OLMO3_LAYERS
EXAONE4_LAYERS = OLMO3_LAYERS * 2
QWEN3_NEXT_LAYERS = ["linear_attention"] * 3 + ["full_attention"]

QWEN2_VL_VISION = {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "in_channels": 3, "mlp_ratio": 4,
    "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN25_VL_VISION = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
    "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14, "window_size": 112,
}  # fmt: skip
QWEN2_VL = v4(
    "qwen2_vl", 3584, 28, 1000000.0, max_position_embeddings=32768, sliding_window=32768,
    use_sliding_window=False, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    vision_config=QWEN2_VL_VISION,
)  # fmt: skip
QWEN25_VL = v4(
    "qwen2_5_vl", 3584, 28, 1000000.0, max_position_embeddings=128000,
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    vision_config={**QWEN25_VL_VISION, "model_type": "qwen2_5_vl"},
)  # fmt: skip
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": v4(
        "qwen3_vl_text", 4096, 32, 5000000, head_dim=128, max_position_embeddings=262144,
        rope_scaling={
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        },
    ),
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152,
        "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304,
        "out_hidden_size": 4096, "patch_size": 16,
    },
}  # fmt: skip
LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": v4(
        "llama4_text", 5120, 40, 500000.0, attention_chunk_size=8192, attn_scale=0.1,
        attn_temperature_tuning=True, floor_scale=8192, head_dim=128,
        max_position_embeddings=10485760, no_rope_layers=LLAMA4_LAYERS, num_hidden_layers=48,
        rope_scaling={
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    ),
    "vision_config": {
        "hidden_size": 1408, "image_size": 336, "model_type": "llama4_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "rope_theta": 10000,
    },
}  # fmt: skip
LLAMA4_MAVERICK = {
    **LLAMA4_SCOUT,
    "text_config": {
        **LLAMA4_SCOUT["text_config"], "rope_scaling": None, "max_position_embeddings": 1048576,  # type: ignore[dict-item]
    },
}  # fmt: skip
PIXTRAL = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
    "image_token_index": 10,
    "text_config": v4(
        "mistral", 5120, 32, 1000000000.0, head_dim=128, is_composition=True,
        max_position_embeddings=1024000, sliding_window=None,
    ),
    "vision_config": {
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1024,
        "is_composition": True, "model_type": "pixtral", "num_attention_heads": 16,
        "patch_size": 16, "rope_theta": 10000.0,
    },
}  # fmt: skip
GLM41V = {
    "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v",
    "text_config": v4(
        "glm4v_text", 4096, 32, 10000.0, max_position_embeddings=65536, partial_rotary_factor=0.5,
        rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]},
    ),
    "vision_config": {
        "depth": 24, "hidden_size": 1536, "model_type": "glm4v", "num_heads": 12,
        "out_hidden_size": 4096, "patch_size": 14,
    },
}  # fmt: skip

MODELS = [
    # --- Llama and what has its shape ---
    Model(
        "meta-llama/Llama-2-7b-hf", "v5",
        v5("llama", 4096, 32, {"rope_theta": 10000.0, "rope_type": "default"}, head_dim=128),
        RopeSpec(128),
    ),
    Model(
        "codellama/CodeLlama-7b-hf", "v4", v4("llama", 4096, 32, 1000000, rope_scaling=None),
        RopeSpec(128, 1e6),
    ),
    Model(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "v4",
        v4("llama", 2048, 32, 10000.0, rope_scaling=None, max_position_embeddings=2048),
        RopeSpec(64),
    ),
    Model(
        "meta-llama/Meta-Llama-3-8B", "v4", v4("llama", 4096, 32, 500000.0, rope_scaling=None),
        RopeSpec(128, 5e5),
    ),
    Model(
        "meta-llama/Llama-3.1-8B", "v4",
        v4(
            "llama", 4096, 32, 500000.0, max_position_embeddings=131072, rope_scaling=llama3(8.0),
            attention_bias=False, mlp_bias=False, pretraining_tp=1,
        ),
        RopeSpec(128, 5e5, scaling=Llama3(8, 1, 4, 8192)),
    ),
    Model(
        "meta-llama/Llama-3.1-405B", "v4",
        v4("llama", 16384, 128, 500000.0, rope_scaling=llama3(8.0)),
        RopeSpec(128, 5e5, scaling=Llama3(8, 1, 4, 8192)),
    ),
    Model(
        "meta-llama/Llama-3.2-1B", "v4",
        v4("llama", 2048, 32, 500000.0, head_dim=64, rope_scaling=llama3(32.0)),
        RopeSpec(64, 5e5, scaling=Llama3(32, 1, 4, 8192)),
    ),
    Model(
        "meta-llama/Llama-3.2-3B", "v5",
        v5("llama", 3072, 24, {**llama3(32.0), "rope_theta": 500000.0}, head_dim=128),
        RopeSpec(128, 5e5, scaling=Llama3(32, 1, 4, 8192)),
    ),
    Model(
        "meta-llama/Llama-3.2-11B-Vision", "v4",
        {
            "architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama",
            "text_config": v4(
                "mllama_text_model", 4096, 32, 500000.0, cross_attention_layers=[3, 8, 13],
                rope_scaling=llama3(8.0),
            ),
            "vision_config": {
                "attention_heads": 16, "hidden_size": 1280, "model_type": "mllama_vision_model",
            },
        },
        RopeSpec(128, 5e5, scaling=Llama3(8, 1, 4, 8192)),
    ),
    Model(
        "meta-llama/Llama-4-Scout-17B-16E", "v4", LLAMA4_SCOUT,
        {
            "rope": RopeSpec(128, 5e5, interleaved=True, scaling=Llama3(16, 1, 1, 8192)),
            "no_rope": None,
        },
        {"section": "text_config"},
    ),
    Model(
        "meta-llama/Llama-4-Scout-17B-16E", "v4", LLAMA4_SCOUT,
        RopeSpec(88, interleaved=True, axes=Axes.blocks((22, 22))),
        {"section": "vision_config"},
    ),
    Model(
        "meta-llama/Llama-4-Maverick-17B-128E", "v4", LLAMA4_MAVERICK,
        {"rope": RopeSpec(128, 5e5, interleaved=True), "no_rope": None},
        {"section": "text_config"},
    ),
    Model(
        "01-ai/Yi-34B", "v4", v4("llama", 7168, 56, 5000000.0, rope_scaling=None),
        RopeSpec(128, 5e6),
    ),
    Model(
        "deepseek-ai/deepseek-coder-6.7b-base", "v4",
        v4(
            "llama", 4096, 32, 100000, max_position_embeddings=16384,
            rope_scaling={"factor": 4.0, "type": "linear"},
        ),
        RopeSpec(128, 1e5, scaling=Linear(4)),
    ),
    Model(
        "HuggingFaceTB/SmolLM2-1.7B", "v4",
        v4("llama", 2048, 32, 130000, rope_interleaved=False, rope_scaling=None),
        RopeSpec(64, 130000.0),
    ),
    Model(
        "tiiuae/Falcon3-7B-Base", "v4",
        v4("llama", 3072, 12, 1000042, head_dim=256, rope_scaling=None),
        RopeSpec(256, 1000042.0),
    ),
    # --- Mistral ---
    Model(
        "mistralai/Mistral-7B-v0.1", "v4", v4("mistral", 4096, 32, 10000.0, sliding_window=4096),
        RopeSpec(128),
    ),
    Model(
        "mistralai/Mistral-7B-Instruct-v0.3", "v4",
        v4("mistral", 4096, 32, 1000000.0, sliding_window=None),
        RopeSpec(128, 1e6),
    ),
    Model(
        "mistralai/Mistral-Nemo-Base-2407", "v4",
        v4("mistral", 5120, 32, 1000000.0, head_dim=128, max_position_embeddings=128000),
        RopeSpec(128, 1e6),
    ),
    Model(
        "mistralai/Ministral-8B-Instruct-2410", "v4",
        v4("mistral", 4096, 32, 100000000.0, head_dim=128, sliding_window=32768),
        RopeSpec(128, 1e8),
    ),
    Model(
        "mistralai/Ministral-3-8B-Base-2512", "v5",
        v5(
            "ministral3", 4096, 32,
            {
                "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                "original_max_position_embeddings": 16384, "max_position_embeddings": 262144,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            head_dim=128, max_position_embeddings=262144,
        ),
        RopeSpec(128, 1e6, scaling=YaRN(16, 16384, mscale=1, mscale_all_dim=1)),
    ),
    Model(
        "mistralai/Mixtral-8x7B-v0.1", "v4",
        v4("mixtral", 4096, 32, 1000000.0, num_local_experts=8, sliding_window=None),
        RopeSpec(128, 1e6),
    ),
    Model(
        "mistral-community/pixtral-12b", "v4", PIXTRAL, RopeSpec(128, 1e9),
        {"section": "text_config"},
    ),
    Model(
        "mistral-community/pixtral-12b", "v4", PIXTRAL,
        RopeSpec(64, axes=Axes.strided(2, pairs=32)), {"section": "vision_config"},
    ),
    # --- Qwen ---
    Model(
        "Qwen/Qwen1.5-7B", "v4",
        v4("qwen2", 4096, 32, 1000000.0, use_sliding_window=False, max_window_layers=28),
        RopeSpec(128, 1e6),
    ),
    Model(
        "Qwen/Qwen2-7B", "v4", v4("qwen2", 3584, 28, 1000000.0, max_position_embeddings=131072),
        RopeSpec(128, 1e6),
    ),
    Model(
        "Qwen/Qwen2.5-7B-Instruct, with the YaRN of its README", "v4",
        v4(
            "qwen2", 3584, 28, 1000000.0, max_position_embeddings=32768,
            rope_scaling={
                "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
            },
        ),
        RopeSpec(128, 1e6, scaling=YaRN(4, 32768)),
    ),
    Model(
        "Qwen/Qwen2.5-7B-Instruct-1M", "v4",
        v4(
            "qwen2", 3584, 28, 10000000.0, max_position_embeddings=1010000,
            dual_chunk_attention_config={
                "chunk_size": 262144, "local_size": 8192,
                "original_max_position_embeddings": 262144,
            },
        ),
        RopeSpec(128, 1e7),
    ),
    Model(
        "Qwen/Qwen1.5-MoE-A2.7B", "v4", v4("qwen2_moe", 2048, 16, 1000000.0, num_experts=60),
        RopeSpec(128, 1e6),
    ),
    Model(
        "Qwen/Qwen3-0.6B", "v4",
        v4("qwen3", 1024, 16, 1000000, head_dim=128, rope_scaling=None),
        RopeSpec(128, 1e6),
    ),
    Model(
        "Qwen/Qwen3-8B", "v5",
        v5(
            "qwen3", 4096, 32, {"rope_theta": 1000000, "rope_type": "default"}, head_dim=128,
            layer_types=["full_attention"] * 36,
        ),
        RopeSpec(128, 1e6),
    ),
    Model(
        "Qwen/Qwen3-30B-A3B", "v4",
        v4("qwen3_moe", 2048, 32, 1000000.0, head_dim=128, num_experts=128, rope_scaling=None),
        RopeSpec(128, 1e6),
    ),
    Model(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "v4",
        v4(
            "qwen3_next", 2048, 16, 10000000, head_dim=256, partial_rotary_factor=0.25,
            layer_types=QWEN3_NEXT_LAYERS * 12, linear_key_head_dim=128, rope_scaling=None,
        ),
        RopeSpec(256, 1e7, rotary_dim=64),
    ),
    Model(
        "Qwen/Qwen2-VL-7B-Instruct", "v4", QWEN2_VL,
        RopeSpec(128, 1e6, axes=Axes.sections((16, 24, 24))),
    ),
    Model(
        "Qwen/Qwen2-VL-7B-Instruct", "v4", QWEN2_VL, RopeSpec(80, axes=Axes.blocks((20, 20))),
        {"section": "vision_config"},
    ),
    Model(
        "Qwen/Qwen2.5-VL-7B-Instruct", "v4", QWEN25_VL,
        RopeSpec(128, 1e6, axes=Axes.sections((16, 24, 24))),
    ),
    Model(
        "Qwen/Qwen2.5-VL-7B-Instruct", "v4", QWEN25_VL, RopeSpec(80, axes=Axes.blocks((20, 20))),
        {"section": "vision_config"},
    ),
    Model(
        "Qwen/Qwen3-VL-8B-Instruct", "v4", QWEN3_VL,
        RopeSpec(128, 5e6, axes=Axes.sections((24, 20, 20), interleaved=True)),
        {"section": "text_config"},
    ),
    Model(
        "Qwen/Qwen3-VL-8B-Instruct", "v4", QWEN3_VL, RopeSpec(72, axes=Axes.blocks((18, 18))),
        {"section": "vision_config"},
    ),
    Model(
        "Qwen/Qwen3.5-27B", "v5",
        v5(
            "qwen3_5_text", 5120, 24,
            {
                "rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25,
                "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            },
            head_dim=256, layer_types=QWEN3_NEXT_LAYERS * 16,
        ),
        RopeSpec(256, 1e7, rotary_dim=64, axes=Axes.sections((11, 11, 10), interleaved=True)),
    ),
    # --- Gemma ---
    Model(
        "google/gemma-7b", "v4",
        v4("gemma", 3072, 16, 10000.0, head_dim=256, rope_scaling=None), RopeSpec(256),
    ),
    Model(
        "google/gemma-2-9b", "v4",
        v4(
            "gemma2", 3584, 16, 10000.0, head_dim=256, attn_logit_softcapping=50.0,
            query_pre_attn_scalar=256, sliding_window=4096,
        ),
        RopeSpec(256),
    ),
    Model(
        "google/gemma-3-1b-it", "v4",
        v4(
            "gemma3_text", 1152, 4, 1000000, head_dim=256, num_hidden_layers=26,
            query_pre_attn_scalar=256, rope_local_base_freq=10000, rope_scaling=None,
            sliding_window=512, sliding_window_pattern=6,
        ),
        {"full_attention": RopeSpec(256, 1e6), "sliding_attention": RopeSpec(256)},
    ),
    Model(
        "google/gemma-3-12b-it", "v5",
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": v5(
                "gemma3_text", 3840, 16,
                {
                    "full_attention": {
                        "factor": 8.0, "rope_type": "linear", "rope_theta": 1000000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
                head_dim=256, layer_types=GEMMA3_LAYERS, sliding_window=1024,
            ),
            "vision_config": {
                "hidden_size": 1152, "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
            },
        },
        {
            "full_attention": RopeSpec(256, 1e6, scaling=Linear(8)),
            "sliding_attention": RopeSpec(256),
        },
    ),
    Model(
        "google/gemma-3n-E2B-it", "v4",
        v4(
            "gemma3n_text", 2048, 8, 1000000.0, head_dim=256, layer_types=GEMMA3_LAYERS,
            rope_local_base_freq=10000.0, rope_scaling=None, sliding_window=512,
        ),
        {"full_attention": RopeSpec(256, 1e6), "sliding_attention": RopeSpec(256)},
    ),
    Model(
        "google/gemma-4-E2B-it", "v5",
        v5(
            "gemma4_text", 1536, 8,
            {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            global_head_dim=512, head_dim=256, layer_types=GEMMA3_LAYERS, sliding_window=512,
        ),
        {
            "full_attention": RopeSpec(512, 1e6, scaling=Proportional(0.25)),
            "sliding_attention": RopeSpec(256),
        },
    ),
    # --- Phi ---
    Model(
        "microsoft/phi-1_5", "v4",
        v4("phi", 2048, 32, 10000.0, partial_rotary_factor=0.5, rope_scaling=None),
        RopeSpec(64, rotary_dim=32),
    ),
    Model(
        "microsoft/phi-2", "v4",
        v4("phi", 2560, 32, 10000.0, partial_rotary_factor=0.4, qk_layernorm=False),
        RopeSpec(80, rotary_dim=32),
    ),
    Model(
        "microsoft/Phi-3-mini-4k-instruct", "v4",
        v4(
            "phi3", 3072, 32, 10000.0, max_position_embeddings=4096,
            original_max_position_embeddings=4096, rope_scaling=None, sliding_window=2047,
        ),
        RopeSpec(96),
    ),
    Model(
        "microsoft/Phi-3.5-mini-instruct", "v4",
        v4(
            "phi3", 3072, 32, 10000.0, max_position_embeddings=131072,
            original_max_position_embeddings=4096, sliding_window=262144,
            rope_scaling={
                "long_factor": PHI35_LONG, "short_factor": PHI35_SHORT, "type": "longrope",
            },
        ),
        RopeSpec(96, scaling=LongRoPE(tuple(PHI35_SHORT), tuple(PHI35_LONG), 4096, factor=32)),
    ),
    Model(
        "microsoft/Phi-3.5-MoE-instruct", "v4",
        v4(
            "phimoe", 4096, 32, 10000.0, max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_scaling={
                "long_factor": PHIMOE_LONG, "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096, "short_factor": PHIMOE_SHORT,
                "short_mscale": 1.243163121016122, "type": "longrope",
            },
        ),
        RopeSpec(
            128,
            scaling=LongRoPE(
                tuple(PHIMOE_SHORT), tuple(PHIMOE_LONG), 4096, factor=32,
                short_mscale=1.243163121016122, long_mscale=1.243163121016122,
            ),
        ),
    ),
    Model(
        "microsoft/phi-4", "v4",
        v4(
            "phi3", 5120, 40, 250000, max_position_embeddings=16384,
            original_max_position_embeddings=16384, rope_scaling=None,
        ),
        RopeSpec(128, 250000.0),
    ),
    Model(
        "microsoft/Phi-4-mini-instruct", "v4",
        v4(
            "phi3", 3072, 24, 10000.0, full_attn_mod=1, max_position_embeddings=131072,
            original_max_position_embeddings=4096, partial_rotary_factor=0.75,
            rope_scaling={
                "long_factor": PHI4_MINI_LONG, "short_factor": [1.0] * 48, "type": "longrope",
            },
        ),
        RopeSpec(
            128, rotary_dim=96,
            scaling=LongRoPE((1.0,) * 48, tuple(PHI4_MINI_LONG), 4096, factor=32),
        ),
    ),
    # --- latent attention ---
    Model(
        "deepseek-ai/DeepSeek-V2-Lite", "v4",
        v4(
            "deepseek_v2", 2048, 16, 10000, **{**LATENT, "q_lora_rank": None},
            max_position_embeddings=163840,
            rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        latent(scaling=YaRN(40, 4096, mscale=0.707, mscale_all_dim=0.707)),
    ),
    Model(
        "deepseek-ai/DeepSeek-V3", "v4",
        v4(
            "deepseek_v3", 7168, 128, 10000, **LATENT, max_position_embeddings=163840,
            num_nextn_predict_layers=1,
            quantization_config={"fmt": "e4m3", "quant_method": "fp8"},
            rope_scaling={**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        latent(scaling=YaRN(40, 4096, mscale=1, mscale_all_dim=1)),
    ),
    Model(
        "moonshotai/Kimi-K2-Instruct", "hub",
        v4(
            "kimi_k2", 7168, 64, 50000.0, **LATENT, max_position_embeddings=131072,
            rope_scaling={
                "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn",
            },
        ),
        latent(
            base=5e4, scaling=YaRN(32, 4096, beta_fast=1, beta_slow=1, mscale=1, mscale_all_dim=1)
        ),
    ),
    Model(
        "moonshotai/Moonlight-16B-A3B", "v4",
        v4("deepseek_v3", 2048, 16, 50000.0, **{**LATENT, "q_lora_rank": None}, rope_scaling=None),
        latent(base=5e4),
    ),
    Model(
        "openbmb/MiniCPM3-4B", "v5",
        v5(
            "minicpm3", 2560, 40,
            {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": MINICPM3,
                "short_factor": MINICPM3, "original_max_position_embeddings": 32768,
            },
            kv_lora_rank=256, max_position_embeddings=32768, q_lora_rank=768, qk_nope_head_dim=64,
            qk_rope_head_dim=32, scale_emb=12,
        ),
        RopeSpec(
            96, rotary_dim=32, start=64,
            scaling=LongRoPE(tuple(MINICPM3), tuple(MINICPM3), 32768, factor=1),
        ),
    ),
    # --- neighbours ---
    Model(
        "EleutherAI/gpt-j-6b", "v4",
        {
            "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096,
            "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True,
            "rotary_dim": 64, "vocab_size": 50400,
        },
        RopeSpec(256, rotary_dim=64, interleaved=True),
    ),
    Model(
        "Salesforce/codegen-350M-mono", "v4",
        {
            "architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "n_ctx": 2048,
            "n_embd": 1024, "n_head": 16, "n_layer": 20, "n_positions": 2048, "rotary_dim": 32,
        },
        RopeSpec(64, rotary_dim=32, interleaved=True),
    ),
    Model(
        "CohereForAI/c4ai-command-r-v01", "v4",
        v4(
            "cohere", 8192, 64, 8000000.0, logit_scale=0.0625, model_max_length=131072,
            use_qk_norm=False,
        ),
        RopeSpec(128, 8e6, interleaved=True),
    ),
    Model(
        "CohereForAI/c4ai-command-r7b-12-2024", "v4",
        v4(
            "cohere2", 4096, 32, 50000, head_dim=128, layer_switch=4,
            order_of_interleaved_layers="local_attn_first",
            position_embedding_type="rope_gptj", rope_scaling=None, rotary_pct=1.0,
            sliding_window=4096, sliding_window_pattern=4,
        ),
        {"sliding_attention": RopeSpec(128, 5e4, interleaved=True), "full_attention": None},
    ),
    Model(
        "THUDM/glm-4-9b-chat-hf", "v4",
        v4("glm", 4096, 32, 10000.0, head_dim=128, partial_rotary_factor=0.5),
        RopeSpec(128, rotary_dim=64, interleaved=True),
    ),
    Model(
        "THUDM/GLM-4-32B-0414", "v4",
        v4("glm4", 6144, 48, 10000.0, head_dim=128, partial_rotary_factor=0.5),
        RopeSpec(128, rotary_dim=64, interleaved=True),
    ),
    Model(
        "zai-org/GLM-4.1V-9B-Thinking", "v4", GLM41V,
        RopeSpec(128, rotary_dim=64, interleaved=True, axes=Axes.sections((8, 12, 12))),
        {"section": "text_config"},
    ),
    Model(
        "zai-org/GLM-4.1V-9B-Thinking", "v4", GLM41V, RopeSpec(128, axes=Axes.blocks((32, 32))),
        {"section": "vision_config"},
    ),
    Model(
        "baidu/ERNIE-4.5-0.3B-PT", "v4",
        v4("ernie4_5", 1024, 16, 500000.0, head_dim=128, rope_scaling=None),
        RopeSpec(128, 5e5, interleaved=True),
    ),
    Model(
        "baidu/ERNIE-4.5-21B-A3B-PT", "v4",
        v4("ernie4_5_moe", 2560, 20, 500000.0, moe_num_experts=64),
        RopeSpec(128, 5e5, interleaved=True),
    ),
    Model(
        "baidu/ERNIE-4.5-VL-28B-A3B-PT", "v5",
        v5(
            "ernie4_5_vl_moe_text", 2560, 20,
            {"rope_theta": 500000.0, "rope_type": "default", "mrope_section": [22, 22, 20]},
        ),
        RopeSpec(
            128, 5e5, interleaved=True,
            axes=Axes(3, tuple((1 + k % 2 if k < 44 else 0, k, 128) for k in range(64))),
        ),
    ),
    Model(
        "kyutai/helium-1-preview-2b", "v4", v4("helium", 2560, 20, 100000.0, head_dim=128),
        RopeSpec(128, 1e5, interleaved=True),
    ),
    Model(
        "UsefulSensors/moonshine-tiny", "v4",
        {
            "architectures": ["MoonshineForConditionalGeneration"], "model_type": "moonshine",
            "decoder_num_attention_heads": 8, "encoder_num_attention_heads": 8,
            "hidden_size": 288, "max_position_embeddings": 194, "partial_rotary_factor": 0.9,
            "rope_scaling": None, "rope_theta": 10000.0,
        },
        RopeSpec(36, rotary_dim=32, interleaved=True),
    ),
    Model(
        "junnyu/roformer_chinese_base", "v4",
        {
            "architectures": ["RoFormerForMaskedLM"], "embedding_size": 768, "hidden_size": 768,
            "max_position_embeddings": 1536, "model_type": "roformer",
            "num_attention_heads": 12, "rotary_value": False, "type_vocab_size": 2,
        },
        RopeSpec(64, interleaved=True),
    ),
    # --- a part of the channels ---
    Model(
        "EleutherAI/gpt-neox-20b", "v4",
        {
            "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 6144,
            "max_position_embeddings": 2048, "model_type": "gpt_neox",
            "num_attention_heads": 64, "rotary_emb_base": 10000, "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        RopeSpec(96, rotary_dim=24),
    ),
    Model(
        "EleutherAI/pythia-2.8b", "v4",
        {
            "hidden_size": 2560, "max_position_embeddings": 2048, "model_type": "gpt_neox",
            "num_attention_heads": 32, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        },
        RopeSpec(80, rotary_dim=20),
    ),
    Model(
        "EleutherAI/pythia-160m", "v5",
        v5(
            "gpt_neox", 768, 12,
            {"partial_rotary_factor": 0.25, "rope_theta": 10000, "rope_type": "default"},
        ),
        RopeSpec(64, rotary_dim=16),
    ),
    Model(
        "stabilityai/stablelm-2-1_6b", "v4",
        v4("stablelm", 2048, 32, 10000, partial_rotary_factor=0.25, use_qkv_bias=True),
        RopeSpec(64, rotary_dim=16),
    ),
    Model(
        "stabilityai/stablelm-3b-4e1t", "v4",
        v4("stablelm", 2560, 32, 10000, partial_rotary_factor=0.25),
        RopeSpec(80, rotary_dim=20),
    ),
    Model(
        "adept/persimmon-8b-base", "v4",
        v4("persimmon", 4096, 64, 25000.0, partial_rotary_factor=0.5, qk_layernorm=True),
        RopeSpec(64, 25000.0, rotary_dim=32),
    ),
    Model(
        "nvidia/Minitron-4B-Base", "v4",
        v4("nemotron", 3072, 24, 10000, head_dim=128, partial_rotary_factor=0.5),
        RopeSpec(128, rotary_dim=64),
    ),
    Model(
        "zai-org/GLM-4.5-Air", "v4",
        v4(
            "glm4_moe", 4096, 96, 1000000, head_dim=128, partial_rotary_factor=0.5,
            rope_scaling=None,
        ),
        RopeSpec(128, 1e6, rotary_dim=64),
    ),
    Model(
        "MiniMaxAI/MiniMax-M2", "v4",
        v4("minimax_m2", 3072, 48, 5000000, head_dim=128, rotary_dim=64, use_mtp=True),
        RopeSpec(128, 5e6, rotary_dim=64),
    ),
    # --- halves, each with something of its own ---
    Model(
        "tiiuae/falcon-11B", "v4",
        v4("falcon", 4096, 32, 500042, alibi=False, new_decoder_architecture=True),
        RopeSpec(128, 500042.0),
    ),
    Model(
        "tiiuae/Falcon-H1-7B-Base", "v4",
        v4("falcon_h1", 3072, 12, 100000000000.0, head_dim=128),
        RopeSpec(128, 1e11),
    ),
    Model(
        "databricks/dbrx-base", "v4",
        {
            "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144,
            "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        },
        RopeSpec(128, 5e5),
    ),
    Model("allenai/OLMo-1B-hf", "v4", v4("olmo", 2048, 16, 10000.0, clip_qkv=None), RopeSpec(128)),
    Model("allenai/OLMoE-1B-7B-0924", "v4", v4("olmoe", 2048, 16, 10000.0), RopeSpec(128)),
    Model(
        "allenai/OLMo-2-1124-7B", "v4", v4("olmo2", 4096, 32, 500000, rope_scaling=None),
        RopeSpec(128, 5e5),
    ),
    Model(
        "allenai/Olmo-3-7B-Think", "v4",
        v4(
            "olmo3", 4096, 32, 500000, layer_types=OLMO3_LAYERS, max_position_embeddings=65536,
            rope_scaling={
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
                "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            sliding_window=4096,
        ),
        {
            "full_attention": RopeSpec(
                128, 5e5, scaling=YaRN(8, 8192, attention_factor=1.2079441541679836)
            ),
            "sliding_attention": RopeSpec(128, 5e5),
        },
    ),
    Model(
        "openai/gpt-oss-20b", "v4",
        v4(
            "gpt_oss", 2880, 64, 150000, head_dim=64, initial_context_length=4096,
            layer_types=GPT_OSS_LAYERS, max_position_embeddings=131072,
            rope_scaling={
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
            },
        ),
        RopeSpec(64, 150000.0, scaling=YaRN(32, 4096, truncate=False)),
    ),
    Model(
        "ibm-granite/granite-3.1-8b-base", "v4",
        v4("granite", 4096, 32, 10000000.0, attention_multiplier=0.0078125, rope_scaling=None),
        RopeSpec(128, 1e7),
    ),
    Model(
        "ibm-granite/granite-4.0-micro", "v4",
        v4("granitemoehybrid", 2560, 40, 10000000, position_embedding_type="rope"),
        RopeSpec(64, 1e7),
    ),
    Model(
        "HuggingFaceTB/SmolLM3-3B", "v4",
        v4(
            "smollm3", 2048, 16, 5000000.0, layer_types=["full_attention"] * 36,
            no_rope_layer_interval=4, no_rope_layers=SMOLLM3_LAYERS, num_hidden_layers=36,
            rope_scaling=None,
        ),
        {"rope": RopeSpec(128, 5e6), "no_rope": None},
    ),
    Model(
        "bigcode/starcoder2-3b", "v4",
        v4("starcoder2", 3072, 24, 999999.4420358813, sliding_window=4096, use_bias=True),
        RopeSpec(128, 999999.4420358813),
    ),
    Model(
        "internlm/internlm2_5-7b-chat", "hub",
        v4(
            "internlm2", 4096, 32, 1000000, max_position_embeddings=32768,
            rope_scaling={"factor": 2.0, "type": "dynamic"},
        ),
        RopeSpec(128, 1e6, scaling=DynamicNTK(2, 32768)),
    ),
    Model(
        "tencent/Hunyuan-7B-Instruct", "v4",
        v4(
            "hunyuan_v1_dense", 4096, 32, 10000.0, head_dim=128, max_position_embeddings=32768,
            rope_scaling={
                "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "type": "dynamic",
            },
        ),
        RopeSpec(128, scaling=NTK(1000)),
    ),
    Model(
        "LGAI-EXAONE/EXAONE-4.0-32B", "v4",
        v4(
            "exaone4", 5120, 40, 1000000, head_dim=128, layer_types=EXAONE4_LAYERS,
            rope_scaling=llama3(16.0), sliding_window=4096, sliding_window_pattern="LLLG",
        ),
        {
            "sliding_attention": RopeSpec(128, 1e6, scaling=Llama3(16, 1, 4, 8192)),
            "full_attention": None,
        },
    ),
    Model(
        "LGAI-EXAONE/EXAONE-4.0-1.2B", "v4",
        v4(
            "exaone4", 2048, 32, 1000000, head_dim=64, layer_types=["full_attention"] * 30,
            rope_scaling=llama3(16.0), sliding_window=None, sliding_window_pattern=None,
        ),
        RopeSpec(64, 1e6, scaling=Llama3(16, 1, 4, 8192)),
    ),
    Model(
        "ByteDance-Seed/Seed-OSS-36B-Instruct", "v4",
        v4(
            "seed_oss", 5120, 80, 10000000.0, head_dim=128,
            rope_scaling={"rope_type": "default"}, max_position_embeddings=524288,
        ),
        RopeSpec(128, 1e7),
    ),
    Model(
        "LiquidAI/LFM2-1.2B", "v4",
        v4(
            "lfm2", 2048, 32, 1000000.0, conv_L_cache=3, full_attn_idxs=[2, 5, 8],
            layer_types=["conv", "conv", "full_attention"],
        ),
        RopeSpec(64, 1e6),
    ),
    Model(
        "microsoft/bitnet-b1.58-2B-4T", "v4", v4("bitnet", 2560, 20, 500000.0),
        RopeSpec(128, 5e5),
    ),
    Model(
        "swiss-ai/Apertus-8B-Instruct-2509", "v4",
        v4("apertus", 4096, 32, 12000000, rope_scaling={**llama3(8.0), "type": "llama3"}),
        RopeSpec(128, 1.2e7, scaling=Llama3(8, 1, 4, 8192)),
    ),
    Model(
        "arcee-ai/AFM-4.5B", "v4",
        v4(
            "arcee", 2560, 20, 10000.0, head_dim=128, max_position_embeddings=65536,
            rope_scaling={
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
            },
        ),
        RopeSpec(128, scaling=YaRN(20, 4096, mscale=1)),
    ),
    Model(
        "facebook/cwm", "v5",
        v5(
            "cwm", 6144, 48, {**llama3(16.0), "rope_theta": 1000000.0}, head_dim=128,
            layer_types=["full_attention", "sliding_attention"] * 32,
        ),
        RopeSpec(128, 1e6, scaling=Llama3(16, 1, 4, 8192)),
    ),
    # --- encoders ---
    Model(
        "answerdotai/ModernBERT-base", "v4",
        {
            "architectures": ["ModernBertForMaskedLM"], "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0, "hidden_size": 768, "local_attention": 128,
            "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
            "model_type": "modernbert", "num_attention_heads": 12, "num_hidden_layers": 22,
            "position_embedding_type": "absolute",
        },
        {"full_attention": RopeSpec(64, 160000.0), "sliding_attention": RopeSpec(64)},
    ),
    Model(
        "nomic-ai/nomic-embed-text-v1.5", "hub",
        {
            "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 768,
            "n_head": 12, "n_positions": 8192, "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        },
        RopeSpec(64, 1000.0),
    ),
    Model(
        "facebook/esm2_t33_650M_UR50D", "v4",
        {
            "architectures": ["EsmForMaskedLM"], "emb_layer_norm_before": False,
            "hidden_size": 1280, "max_position_embeddings": 1026, "model_type": "esm",
            "num_attention_heads": 20, "position_embedding_type": "rotary", "vocab_size": 33,
        },
        RopeSpec(64),
    ),
    Model(
        "facebook/dinov3-vits16-pretrain-lvd1689m", "v4",
        {
            "architectures": ["DINOv3ViTModel"], "hidden_size": 384, "image_size": 224,
            "model_type": "dinov3_vit", "num_attention_heads": 6, "num_register_tokens": 4,
            "patch_size": 16, "pos_embed_rescale": 2.0, "rope_theta": 100.0,
        },
        RopeSpec(64, 100.0, scaling=Linear(1 / (2 * math.pi)), axes=Axes.blocks((16, 16))),
    ),
    # --- other formats ---
    Model(
        "meta-llama/Meta-Llama-3-8B: original/params.json", "meta",
        {
            "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
            "multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05,
            "rope_theta": 500000.0,
        },
        RopeSpec(128, 5e5, interleaved=True),
    ),
    Model(
        "meta-llama/Llama-3.1-8B: original/params.json", "meta",
        {
            "dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "n_heads": 32,
            "n_kv_heads": 8, "n_layers": 32, "norm_eps": 1e-05, "rope_theta": 500000.0,
            "use_scaled_rope": True, "vocab_size": 128256,
        },
        RopeSpec(128, 5e5, interleaved=True, scaling=Llama3(8, 1, 4, 8192)),
    ),
    Model(
        "mistralai/Mistral-7B-Instruct-v0.3: params.json", "meta",
        {
            "dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32,
            "n_kv_heads": 8, "norm_eps": 1e-05, "vocab_size": 32768, "rope_theta": 1000000.0,
        },
        RopeSpec(128, 1e6, interleaved=True),
    ),
    Model(
        "TheBloke/CodeLlama-7B-GGUF", "gguf",
        {
            "general.architecture": "llama", "general.name": "codellama_codellama-7b-hf",
            "llama.attention.head_count": 32, "llama.attention.head_count_kv": 32,
            "llama.block_count": 32, "llama.context_length": 16384,
            "llama.embedding_length": 4096, "llama.rope.dimension_count": 128,
            "llama.rope.freq_base": 1000000.0,
        },
        RopeSpec(128, 1e6, interleaved=True),
    ),
    Model(
        "Qwen/Qwen2.5-7B-Instruct-GGUF, with YaRN", "gguf",
        {
            "general.architecture": "qwen2", "qwen2.attention.head_count": 28,
            "qwen2.block_count": 28, "qwen2.context_length": 131072,
            "qwen2.embedding_length": 3584, "qwen2.rope.freq_base": 1000000.0,
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 32768,
            "qwen2.rope.scaling.type": "yarn",
        },
        RopeSpec(128, 1e6, scaling=YaRN(4, 32768)),
    ),
    Model(
        "unsloth/DeepSeek-V3-GGUF", "gguf",
        {
            "general.architecture": "deepseek2", "deepseek2.attention.head_count": 128,
            "deepseek2.attention.key_length": 576, "deepseek2.attention.key_length_mla": 192,
            "deepseek2.context_length": 163840, "deepseek2.embedding_length": 7168,
            "deepseek2.rope.dimension_count": 64, "deepseek2.rope.freq_base": 10000.0,
            "deepseek2.rope.scaling.factor": 40.0,
            "deepseek2.rope.scaling.original_context_length": 4096,
            "deepseek2.rope.scaling.type": "yarn",
            "deepseek2.rope.scaling.yarn_log_multiplier": 0.1,
        },
        latent(scaling=YaRN(40, 4096, mscale=1, mscale_all_dim=1)),
    ),
    Model(
        "ggml-org/gemma-3-1b-it-GGUF", "gguf",
        {
            "general.architecture": "gemma3", "gemma3.attention.head_count": 4,
            "gemma3.attention.key_length": 256, "gemma3.attention.sliding_window": 512,
            "gemma3.context_length": 32768, "gemma3.embedding_length": 1152,
            "gemma3.rope.freq_base": 1000000.0,
        },
        {"full_attention": RopeSpec(256, 1e6), "sliding_attention": RopeSpec(256)},
    ),
    Model(
        "ggml-org/Qwen2-VL-2B-Instruct-GGUF", "gguf",
        {
            "general.architecture": "qwen2vl", "qwen2vl.attention.head_count": 12,
            "qwen2vl.context_length": 32768, "qwen2vl.embedding_length": 1536,
            "qwen2vl.rope.dimension_sections": [16, 24, 24, 0],
            "qwen2vl.rope.freq_base": 1000000.0,
        },
        RopeSpec(128, 1e6, axes=Axes.sections((16, 24, 24))),
    ),
    Model(
        "NVIDIA/Megatron-LM: arguments for Llama 3.1 8B", "megatron",
        {
            "apply_rope_fusion": True, "hidden_size": 4096, "kv_channels": 128,
            "max_position_embeddings": 131072, "num_attention_heads": 32,
            "position_embedding_type": "rope", "rope_scaling_factor": 8.0, "rotary_base": 500000,
            "rotary_interleaved": False, "rotary_percent": 1.0,
            "rotary_seq_len_interpolation_factor": None, "seq_length": 8192,
            "use_rope_scaling": True,
        },
        RopeSpec(128, 5e5, scaling=Llama3(8, 1, 4, 8192)),
    ),
    Model(
        "NVIDIA/Megatron-LM: arguments for Nemotron-4 15B", "megatron",
        {
            "hidden_size": 6144, "kv_channels": None, "num_attention_heads": 48,
            "position_embedding_type": "rope", "rope_scaling_factor": 8.0, "rotary_base": 10000,
            "rotary_interleaved": False, "rotary_percent": 0.5,
            "rotary_seq_len_interpolation_factor": 2, "use_rope_scaling": False,
        },
        RopeSpec(128, rotary_dim=64, scaling=Linear(2)),
    ),
    Model(
        "NVIDIA/Megatron-LM: arguments for DeepSeek-V3", "megatron",
        {
            "beta_fast": 32.0, "beta_slow": 1.0, "hidden_size": 7168, "kv_channels": 128,
            "mscale": 1.0, "mscale_all_dim": 1.0, "multi_latent_attention": True,
            "num_attention_heads": 128, "original_max_position_embeddings": 4096,
            "position_embedding_type": "rope", "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
            "rope_type": "yarn", "rotary_base": 10000, "rotary_interleaved": False,
            "rotary_percent": 1.0, "rotary_scaling_factor": 40,
        },
        latent(scaling=YaRN(40, 4096, mscale=1, mscale_all_dim=1)),
    ),
    Model(
        "vllm-project/vllm: get_rope for GPT-J", "vllm",
        {
            "head_size": 256, "rotary_dim": 64, "max_position": 2048, "rope_theta": 10000,
            "is_neox_style": False,
        },
        RopeSpec(256, rotary_dim=64, interleaved=True),
    ),
    Model(
        "vllm-project/vllm: get_rope for Qwen2.5 with YaRN", "vllm",
        {
            "head_size": 128, "rotary_dim": 128, "max_position": 131072, "is_neox_style": True,
            "rope_parameters": {
                "rope_theta": 1000000.0, "rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        RopeSpec(128, 1e6, scaling=YaRN(4, 32768)),
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """A configuration that says too little, or of a model that no spec describes."""

    origin: str
    config: dict[str, Any]
    why: str


REFUSED = [
    Refused(
        "meta-llama/Llama-2-7b-hf", v4("llama", 4096, 32, None, rope_scaling=None),
        "[from_config] the config must say how fast channels turn, by one of rope_theta, "
        "rotary_emb_base, rotary_base, rope_base, but has only the keys architectures, hidden_size, "
        "max_position_embeddings, model_type, num_attention_heads, num_key_value_heads, "
        "rms_norm_eps, rope_scaling, tie_word_embeddings, torch_dtype, use_cache.",
    ),
    Refused(
        "google/gemma-3-4b-it",
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        },
        "[from_config] model_type 'gemma3_text' has layers that differ, so the config must say "
        "text_config.rope_local_base_freq.",
    ),
    Refused(
        "mosaicml/mpt-7b",
        {
            "model_type": "mpt", "d_model": 4096, "n_heads": 32,
            "attn_config": {"alibi": True, "rope": False, "rope_theta": 10000},
        },
        "[from_config] model_type 'mpt' has no spec: it uses ALiBi.",
    ),
    Refused(
        "bigscience/bloom-7b1", {"model_type": "bloom", "n_embed": 4096, "num_attention_heads": 32},
        "[from_config] model_type 'bloom' has no spec: it uses ALiBi.",
    ),
    Refused(
        "ai21labs/Jamba-v0.1", v4("jamba", 4096, 32, None),
        "[from_config] model_type 'jamba' has no spec: its attention layers use no positions.",
    ),
    Refused(
        "tiiuae/falcon-rw-1b", v4("falcon", 2048, 32, None, alibi=True),
        "[from_config] the config has no RoPE: alibi is True.",
    ),
    Refused(
        "baichuan-inc/Baichuan2-7B-Base", v4("baichuan", 4096, 32, None),
        "[from_config] model_type 'baichuan' has no spec: its 7B rotates with a constant of its code "
        "and its 13B uses ALiBi, under one model_type.",
    ),
    Refused(
        "ibm-granite/granite-4.0-h-tiny",
        v4("granitemoehybrid", 1536, 12, 10000, position_embedding_type="nope"),
        "[from_config] the config has no RoPE: position_embedding_type is 'nope'.",
    ),
    Refused(
        "facebook/esm1b_t33_650M_UR50S",
        {
            "model_type": "esm", "hidden_size": 1280, "num_attention_heads": 20,
            "position_embedding_type": "absolute",
        },
        "[from_config] the config has no RoPE: position_embedding_type is 'absolute'.",
    ),
    Refused(
        "Qwen/Qwen-7B",
        {
            "hidden_size": 4096, "kv_channels": 128, "model_type": "qwen",
            "num_attention_heads": 32, "rotary_emb_base": 10000, "rotary_pct": 1.0,
            "seq_length": 8192, "use_dynamic_ntk": True, "use_logn_attn": True,
        },
        "[from_config] model_type 'qwen' has no spec: its scaling by logarithms of the length is not "
        "one of the rules here.",
    ),
    Refused(
        "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct",
        v4("exaone", 4096, 32, 1000000.0, head_dim=128, rope_scaling=llama3(8.0)),
        "[from_config] the config must say how channels are paired, and model_type 'exaone' is not in "
        "the table of families; pass interleaved=False if channel i is paired with i + rotary_dim / 2, "
        "as in Llama, or interleaved=True if neighbours are, as in GPT-J.",
    ),
    Refused(
        "Qwen/Qwen3-VL-8B-Instruct", QWEN3_VL,
        "[from_config] section must say which part of the config is meant, as RoPE is in "
        "'text_config', 'vision_config'; for example RopeSpec.from_config(config, "
        "section='vision_config').",
    ),
    Refused(
        "meta-llama/Llama-3.2-1B: original/params.json",
        {
            "dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "n_heads": 32,
            "n_kv_heads": 8, "n_layers": 16, "norm_eps": 1e-05, "rope_theta": 500000.0,
            "use_scaled_rope": True, "vocab_size": 128256,
        },
        "[from_config] use_scaled_rope must come with rope_scaling_factor for Llama 3.2 1B and 3B: "
        "Meta's code scales them by 8, their hub configurations by 32.",
    ),
]  # fmt: skip
