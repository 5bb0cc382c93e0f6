"""Overrides for torchtitan: its rotary modules, rotated by this library's operator.

``--override.imports`` names one or both of :func:`complex_rope` and :func:`cos_sin_rope`; see
docs/plugs.md. Importing this module needs torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.rope import (
    ComplexRoPE,
    CosSinRoPE,
    _maybe_check_max_pos,
    _maybe_wrap_positions,
)

from ..frequencies import Llama3, YaRN
from ..functional import apply_rotary_pos_emb, rotate_qk
from ..spec import RopeSpec

__all__ = ["complex_rope", "cos_sin_rope"]


def _spec(config: Any, interleaved: bool) -> RopeSpec:
    """Return the frequencies that a config of torchtitan describes; neither rule scales the result."""
    rule: Llama3 | YaRN | None = None
    if config.scaling == "llama":
        low, high = config.low_freq_factor, config.high_freq_factor
        rule = Llama3(config.scaling_factor, low, high, config.original_max_position_embeddings)
    elif config.scaling == "yarn" and config.rope_factor > 1.0:
        rule = YaRN(
            config.rope_factor,
            config.original_seq_len,
            config.beta_fast,
            config.beta_slow,
            config.truncate,
            attention_factor=1.0,
        )
    return RopeSpec(config.dim, base=config.theta, scaling=rule, interleaved=interleaved)


class _Rotated:
    """The forward method of both replacements."""

    config: Any
    cache: torch.Tensor
    _interleaved: bool

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the next class is torchtitan's
        self.spec = _spec(config, self._interleaved) if config.exact else None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query and key like the replaced module.

        They are (batch, seq, heads, dim) in torchtitan 0.3 and (tokens, heads, dim) on its main branch.
        """
        # torchtitan's positions are the part of this process even where query is a DTensor.
        positions = _maybe_wrap_positions(positions, query)
        if self.spec is not None:
            layout = "thd" if query.dim() == 3 else "bshd"
            return rotate_qk(query, key, self.spec, positions, layout=layout)
        # A cache that is a DTensor is replicated.
        cache = self.cache.to_local() if hasattr(self.cache, "to_local") else self.cache
        if positions is None:
            cache = cache[: query.shape[-3]]
        else:
            _maybe_check_max_pos(positions, max_valid_pos=len(cache) - 1)
        if self._interleaved:
            cos, sin = torch.view_as_real(cache).unbind(-1)
        else:  # cosines of all channels, then sines; the second half of each repeats the first
            cos, _, sin, _ = cache.chunk(4, -1)
        return apply_rotary_pos_emb(
            query,
            key,
            cos,
            sin,
            unsqueeze_dim=query.dim() - 2,
            interleaved=self._interleaved,
            tables="half",
            position_ids=positions,
            rounding="wide",
        )


class TightropeComplexRoPE(_Rotated, ComplexRoPE):
    """The replacement of ComplexRoPE, with its config, cache and bits."""

    _interleaved = True

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """ComplexRoPE's config, and whether to compute exact angles instead of reading the cache."""

        exact: bool = False


class TightropeCosSinRoPE(_Rotated, CosSinRoPE):
    """The replacement of CosSinRoPE, with its config, cache and bits."""

    _interleaved = False

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """CosSinRoPE's config, and whether to compute exact angles instead of reading the cache."""

        exact: bool = False


@override(target=ComplexRoPE.Config, exact=True, description="ComplexRoPE by tightrope.")
def complex_rope(cfg: ComplexRoPE.Config, *, exact: bool = False) -> TightropeComplexRoPE.Config:
    """Replace ComplexRoPE; torchtitan calls this function for each config that it replaces.

    Args:
        cfg: the config of the replaced module.
        exact: whether to compute angles exactly from the config's frequencies, instead of reading the
            module's cache.

    Returns:
        The config of :class:`TightropeComplexRoPE`.

    >>> config = complex_rope(ComplexRoPE.Config(dim=64, max_seq_len=2048), exact=True)
    >>> type(config.build()).__name__
    'TightropeComplexRoPE'
    """
    return derive(cfg, TightropeComplexRoPE.Config, exact=exact)  # type: ignore[no-any-return]


@override(target=CosSinRoPE.Config, exact=True, description="CosSinRoPE by tightrope.")
def cos_sin_rope(cfg: CosSinRoPE.Config, *, exact: bool = False) -> TightropeCosSinRoPE.Config:
    """Replace CosSinRoPE; see :func:`complex_rope`.

    Args:
        cfg, exact: see :func:`complex_rope`.

    Returns:
        The config of :class:`TightropeCosSinRoPE`.

    >>> config = cos_sin_rope(CosSinRoPE.Config(dim=64, max_seq_len=2048))
    """
    return derive(cfg, TightropeCosSinRoPE.Config, exact=exact)  # type: ignore[no-any-return]
