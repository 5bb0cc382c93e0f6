"""Small models that a table of sizes cannot describe."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch

from .stand_ins import Anything


def torchtitan(family: str, layers: int, heads: int | None = None) -> Any:
    """The debug model of a family of torchtitan, with this many layers and attention that runs on a CPU.

    With a number of heads, it has these in place of its own, whose complex products may be shorter than a vector.
    """
    attention = importlib.import_module("torchtitan.models.common.attention")
    home = importlib.import_module(f"torchtitan.models.{family}")
    config = vars(home)[f"{family}_configs"]["debugmodel"]("flex")
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
        if heads is not None:
            own, qkv = layer.attention, layer.attention.qkv_linear
            own.n_heads = qkv.n_heads = qkv.n_kv_heads = heads
            own.rope.dim = qkv.head_dim = own.dim // heads
    model = config.build()
    model.init_states()
    return model


def gpt_oss(config: Any) -> Any:
    """A Transformer of gpt-oss; its attention sinks, which it leaves uninitialised, are zeros."""
    model = importlib.import_module("gpt_oss.torch.model").Transformer(config)
    for block in model.block:
        torch.nn.init.zeros_(block.attn.sinks)
    return model


def z_image_controlnet(controlnet: Any, transformer: Any) -> Any:
    """A control network of Z-Image with the parts that it shares with a transformer."""
    controlnet.gradient_checkpointing = False  # its forward reads this, but its class lacks it
    return type(controlnet).from_transformer(controlnet, transformer)


class Megatron(torch.nn.Module):
    """A GPTModel of Megatron Core on the CPU, in a process group of one process."""

    def __init__(self, vocabulary: int, tokens: int, **config: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import gpt_layer_specs, gpt_model
        from megatron.core.transformer.transformer_config import TransformerConfig

        super().__init__()
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel_state.destroy_model_parallel()  # of a group that is gone
            parallel_state.initialize_model_parallel()
        self.model = gpt_model.GPTModel(
            TransformerConfig(use_cpu_initialization=True, **config),
            gpt_layer_specs.get_gpt_layer_local_spec(),
            vocabulary,
            tokens,
            position_embedding_type="rope",
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token."""
        from megatron.core import tensor_parallel

        count = tokens.shape[1]
        mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
        with (
            mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
            mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", Anything()),  # no dropout
        ):
            scores: torch.Tensor = self.model(tokens, torch.arange(count)[None], mask)
        return scores
