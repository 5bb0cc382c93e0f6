"""A hook that rotates SGLang's queries and keys by this library's operator; see docs/plugs.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .._errors import sentence
from ..functional import apply_rotary_pos_emb_

__all__ = ["register"]

_METHOD = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda"


def _rotate(
    original: Callable[..., Any],
    module: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate in place by the module's table, and write keys and values to the cache if SGLang asks for it."""
    written = fused_set_kv_buffer_arg
    if module.use_fallback_kernel or positions.dim() != 1:  # other tables, or other positions
        return original(module, positions, query, key, offsets, written)  # type: ignore[no-any-return]
    tokens = len(positions)
    cos, sin = module.cos_sin_cache.chunk(2, -1)
    apply_rotary_pos_emb_(
        query.view(tokens, -1, module.head_size),
        key.view(tokens, -1, module.head_size),
        cos,
        sin,
        interleaved=not module.is_neox_style,
        tables="half",
        position_ids=positions,
    )
    if written is not None:
        written.k_buffer[written.cache_loc] = key.reshape(tokens, -1)
        written.v_buffer[written.cache_loc] = written.value.reshape(tokens, -1)
    return query, key


def register() -> None:
    """Register a hook on SGLang's rotary method for CUDA, which SGLang applies when it has loaded its plugins.

    It covers ``RotaryEmbedding`` and its subclasses that do not override ``forward_cuda``. Head sizes for which SGLang
    has a kernel of another kind stay SGLang's.

    Raises:
        ImportError: SGLang is not installed.

    >>> register()  # doctest: +SKIP
    """
    try:
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    except ImportError as error:
        raise ImportError(sentence("register", "needs SGLang: pip install sglang")) from error
    hooks.HookRegistry.register(_METHOD, _rotate, hooks.HookType.AROUND)
