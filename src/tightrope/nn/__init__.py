"""Modules, which hold a spec and parameters and call :mod:`tightrope.functional`."""

from __future__ import annotations

from .lrpe import LrpeRotate1d as LrpeRotate1d
from .polar import (
    KVCache as KVCache,
    PolarRoPEAttention as PolarRoPEAttention,
    PolarRoPEHead as PolarRoPEHead,
)
from .rotary import (
    RotaryEmbedding as RotaryEmbedding,
    RotaryPositionalEmbedding as RotaryPositionalEmbedding,
)

__all__ = [
    "KVCache",
    "LrpeRotate1d",
    "PolarRoPEAttention",
    "PolarRoPEHead",
    "RotaryEmbedding",
    "RotaryPositionalEmbedding",
]
