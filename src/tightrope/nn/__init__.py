"""Modules: they hold a spec and parameters, and call the functions."""

from __future__ import annotations

from .rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
