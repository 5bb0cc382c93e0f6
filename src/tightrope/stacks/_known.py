"""The known stacks, each with the files and the version that it follows."""

from __future__ import annotations

import torch

from ..frequencies import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rule, YaRN
from ._formulas import (
    Formula,
    default,
    dynamic,
    dynamic_once,
    fixed,
    linear,
    linear_by_dividing,
    linear_by_multiplying,
    llama3,
    llama3_clamped,
    longrope,
    longrope_of_sglang,
    proportional,
    yarn,
    yarn_of_gpt_oss,
    yarn_of_litgpt,
)
from ._stack import BY_NAME, GIVEN_TABLES, READ, RUN, Stack

_META_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_NO_MSCALES = {"attention_factor": None, "mscale": None, "mscale_all_dim": None}
_YARN_BY_GIVEN = fixed(lambda problem: yarn(problem, zero=True), attention_factor=None)
_TRANSFORMERS: dict[type[Rule] | None, Formula] = {
    None: default,
    Linear: linear,
    DynamicNTK: dynamic,
    YaRN: yarn,
    LongRoPE: fixed(longrope, short_mscale=None, long_mscale=None),
    Llama3: llama3,
    Proportional: proportional,
}
_SERVING: dict[type[Rule] | None, Formula] = {
    None: default,
    Linear: linear_by_dividing,
    YaRN: yarn,
    Llama3: llama3,
}
_LONGROPE = fixed(longrope, attention_factor=None)
_SGLANG = {**_SERVING, YaRN: _YARN_BY_GIVEN}
_VLLM = {
    **_SERVING,
    LongRoPE: _LONGROPE,
    DynamicNTK: dynamic_once,
    Proportional: fixed(proportional, factor=1.0),
}
_CONFIGURED = "the longest that the server is configured for (max_model_len), whatever is rotated"
_ENGINE: dict[type[Rule] | None, Formula] = {None: default, Linear: linear_by_multiplying}
_ROTARY = "model_executor/layers/rotary_embedding"

_ALL = [
    Stack(
        "transformers",
        "transformers, eager, as in Llama",
        "transformers 5.23: modeling_rope_utils.py; models/llama/modeling_llama.py",
        RUN,
        _TRANSFORMERS,
        on_cpu=True,
        casts="frequencies",
    ),
    Stack(
        "transformers-compiled",
        "transformers, whole model in one graph of torch.compile, which does not round tables",
        "transformers 5.23 and torch 2.13 (Inductor, CPU)",
        GIVEN_TABLES,
        _TRANSFORMERS,
        ("wide", "wide"),
        torch.float32,
        on_cpu=True,
        casts="frequencies",
    ),
    Stack(
        "meta",
        "Meta's Llama: complex64",
        "llama-models 0.3.0: llama3/model.py",
        RUN,
        {None: default, Llama3: fixed(llama3, factor=8.0, **_META_LLAMA3)},
        ("wide", "wide"),
        torch.float32,
        polar=True,
    ),
    Stack(
        "gpt-oss",
        "OpenAI's reference in PyTorch",
        "gpt-oss at 7b58334: gpt_oss/torch/model.py",
        RUN,
        {None: default, YaRN: fixed(yarn_of_gpt_oss, **_NO_MSCALES, truncate=False)},
    ),
    Stack(
        "torchtune",
        "torchtune",
        "torchtune 0.6.1: modules/position_embeddings.py; models/llama3_1/_position_embeddings.py",
        RUN,
        {None: default, Llama3: llama3},
        ("wide", "wide"),
        torch.float32,
        casts="tables",
    ),
    Stack(
        "litgpt",
        "LitGPT, with tables in float32",
        "litgpt 0.5.13: model.py",
        RUN,
        {
            None: default,
            Linear: linear,
            Llama3: llama3_clamped,
            YaRN: fixed(yarn_of_litgpt, attention_factor=None),
        },
        ("wide", "each"),
        torch.float32,
        casts="tables",
    ),
    Stack(
        "diffusers",
        "diffusers' shared function, frequencies in float32",
        "diffusers 0.42.1: models/embeddings.py (get_1d_rotary_pos_embed, apply_rotary_emb)",
        RUN,
        {None: default, Linear: linear},
        ("wide", "each"),
        torch.float32,
    ),
    Stack(
        "diffusers-float64",
        "diffusers' shared function, frequencies in float64, as in Flux and Wan",
        "diffusers 0.42.1: models/embeddings.py (freqs_dtype=torch.float64)",
        RUN,
        {None: default, Linear: linear},
        ("wide", "each"),
        torch.float32,
        torch.float64,
    ),
    Stack(
        "megatron",
        "Megatron-LM without fusion",
        "megatron-core 0.16.1: models/common/embeddings/rotary_pos_embedding.py, "
        "yarn_rotary_pos_embedding.py, rope_utils.py",
        RUN,
        {
            **_ENGINE,
            Llama3: fixed(llama3, **_META_LLAMA3),
            YaRN: _YARN_BY_GIVEN,
        },
    ),
    Stack(
        "flash-attention-reference",
        "flash-attention's reference in PyTorch",
        "flash-attn 2.8.3: layers/rotary.py (apply_rotary_emb_torch)",
        RUN,
        {None: default},
    ),
    Stack(
        "flash-attention",
        "flash-attention's layer and Triton kernel",
        "flash-attn 2.8.3: layers/rotary.py, ops/triton/rotary.py",
        READ,
        {None: default},
        ("once", "once"),
    ),
    Stack(
        "vllm-native",
        "vLLM, forward_native",
        f"vllm 0.33.0: {_ROTARY}/",
        RUN,
        _VLLM,
        length=_CONFIGURED,
    ),
    Stack(
        "vllm",
        "vLLM as it runs by default, compiled, and its CUDA kernel",
        f"vllm 0.33.0: {_ROTARY}/; csrc/pos_encoding_kernels.cu",
        READ,
        _VLLM,
        ("once", "once"),
        length=_CONFIGURED,
    ),
    Stack(
        "sglang-native",
        "SGLang, forward_native",
        "sglang 0.5.23: srt/layers/rotary_embedding/",
        RUN,
        {**_SGLANG, LongRoPE: fixed(longrope_of_sglang, attention_factor=None)},
        length="the largest position of all requests of a step, plus 1",
    ),
    Stack(
        "sglang",
        "SGLang's CUDA kernel, with its cache in float32",
        "sglang 0.5.23: srt/layers/rotary_embedding/",
        READ,
        _SGLANG,
        ("once", "once"),
        torch.float32,
    ),
    Stack(
        "flashinfer",
        "FlashInfer with a cache of cosines and sines, which must be float32",
        "flashinfer-python 0.7.2: rope.py (apply_rope_with_cos_sin_cache)",
        READ,
        {**_SERVING, LongRoPE: _LONGROPE},
        ("once", "once"),
        torch.float32,
        length="the one that the cache of cosines and sines was made for",
    ),
    Stack(
        "transformer-engine-unfused",
        "TransformerEngine without fusion",
        "TransformerEngine at d0067d0: pytorch/attention/rope.py (_apply_rotary_pos_emb_base)",
        RUN,
        _ENGINE,
        casts="frequencies and positions",
    ),
    Stack(
        "transformer-engine",
        "TransformerEngine's fused kernel, which takes angles in float32",
        "TransformerEngine at d0067d0: pytorch/attention/rope.py; common/fused_rope/fused_rope.cu",
        READ,
        _ENGINE,
        ("once", "once"),
        torch.float32,
        casts="frequencies and positions",
    ),
]
BY_NAME.update({stack.name: stack for stack in _ALL})
