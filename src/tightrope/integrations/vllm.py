"""Registration of this library's operator for the rotary modules of vLLM; see docs/plugs.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .._errors import sentence
from ..frequencies import NTK, Linear, Llama3, Proportional, Rule, YaRN
from ..functional import apply_rotary_pos_emb, apply_rotary_pos_emb_, rotate_qk, rotate_qk_
from ..spec import RopeSpec

__all__ = ["register"]

Result = tuple[torch.Tensor, torch.Tensor | None]

# Name of a class -> the rule that its module computes. A class that is not here has no exact angles.
_RULES: dict[str, Callable[[Any], Rule]] = {
    "RotaryEmbedding": lambda _: Linear(1.0),
    "LinearScalingRotaryEmbedding": lambda module: Linear(module.scaling_factors[0]),
    "DynamicNTKAlphaRotaryEmbedding": lambda module: NTK(module.scaling_alpha),
    # vLLM scales once, for the longest context.
    "DynamicNTKScalingRotaryEmbedding": lambda module: NTK(
        module.scaling_factor * module.max_position_embeddings / module.max_trained_positions
        - (module.scaling_factor - 1)
    ),
    "Llama3RotaryEmbedding": lambda module: Llama3(
        module.scaling_factor,
        module.low_freq_factor,
        module.high_freq_factor,
        module.orig_max_position,
    ),
    "YaRNScalingRotaryEmbedding": lambda module: YaRN(
        module.scaling_factor,
        module.max_position_embeddings,
        module.beta_fast,
        module.beta_slow,
        module.truncate,
        attention_factor=module.mscale,
    ),
    "Gemma4RotaryEmbedding": lambda module: Proportional(2 * module.rope_angles / module.head_size),
}


class _Rotated:
    """The forward methods of the replacements; the class replaced comes next in the order of bases."""

    head_size: int
    is_neox_style: bool
    _match_cos_sin_cache_dtype: Callable[[torch.Tensor], torch.Tensor]
    _rule: Callable[[Any], Rule] | None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._spec = None if type(self)._rule is None else self._exact()

    def _exact(self: Any) -> RopeSpec | None:
        if len(getattr(self, "scaling_factors", "1")) > 1:
            return None  # positions then select one of several tables
        options = {"rotary_dim": self.rotary_dim, "interleaved": not self.is_neox_style}
        return RopeSpec(self.head_size, base=self.base, scaling=type(self)._rule(self), **options)

    def _rotate(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, new: bool
    ) -> Result:
        ids = positions.flatten()
        q = query.view(len(ids), -1, self.head_size)
        k = None if key is None else key.view(len(ids), -1, self.head_size)
        if self._spec is not None:
            q, k = (rotate_qk if new else rotate_qk_)(q, k, self._spec, ids, layout="thd")
        else:
            cos, sin = self._match_cos_sin_cache_dtype(query).chunk(2, -1)
            q, k = (apply_rotary_pos_emb if new else apply_rotary_pos_emb_)(
                q,
                k,
                cos,
                sin,
                interleaved=not self.is_neox_style,
                tables="half",
                position_ids=ids,
                # Like the method that it replaces: torch rounds each step, a kernel rounds at the store.
                rounding="each" if new else "once",
            )
        if not new:
            return query, key
        return q.reshape(query.shape), k if key is None or k is None else k.reshape(key.shape)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Result:
        """Return new tensors, as vLLM's method in plain torch does."""
        return self._rotate(positions, query, key, True)

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Result:
        """Rotate in place, as vLLM's kernels do."""
        return self._rotate(positions, query, key, False)

    forward_hip = forward_xpu = forward_cpu = forward_cuda


def register(exact: bool = False) -> list[str]:
    """Register this library's rotation for the rotary modules that vLLM builds afterwards.

    It replaces ``RotaryEmbedding`` and those of its subclasses that change only the table. Modules that
    define a forward method of their own, such as those of M-RoPE, and classes that another plugin has
    registered stay as they are. A second call replaces the first registration.

    Args:
        exact: whether to compute angles exactly instead of reading the modules' tables. A module whose
            rule this library lacks reads its table nevertheless.

    Returns:
        The names of the replaced classes.

    Raises:
        ImportError: vLLM is not installed.

    >>> register()  # doctest: +SKIP
    ['DynamicNTKAlphaRotaryEmbedding', 'DynamicNTKScalingRotaryEmbedding', …]
    """
    try:
        package: Any = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
        custom_op: Any = importlib.import_module("vllm.model_executor.custom_op")
    except ImportError as error:
        raise ImportError(sentence("register", "needs vLLM: pip install vllm")) from error
    registry: dict[str, type] = custom_op.op_registry_oot
    base, replaced = package.RotaryEmbedding, []
    forwards = [name for name in dir(base) if name.startswith("forward")]
    for name, found in sorted(vars(package).items()):
        if not (isinstance(found, type) and issubclass(found, base)):
            continue
        cls: Any = found
        if any(getattr(cls, each) is not getattr(base, each) for each in forwards):
            continue
        if not issubclass(registry.get(name, _Rotated), _Rotated):
            continue
        registry.pop(name, None)
        rule = _RULES.get(name) if exact else None
        ours: Any = type(
            f"Tightrope{name}", (_Rotated, cls), {"_rule": rule and staticmethod(rule)}
        )
        cls.register_oot(ours)
        # vLLM's option custom_ops=["-rotary_embedding"] goes by this name, which register_oot changes.
        ours.name = cls.name
        replaced.append(name)
    return replaced
