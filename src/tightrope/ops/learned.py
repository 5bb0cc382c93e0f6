"""Frequencies that a caller gives in place of a spec's own, and may want to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import angles
from .._errors import bad_value, check_local
from ..spec import PreparedRotation
from .checks import check_floating, check_heads
from .layouts import Layout


def source(
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    inv_freq: torch.Tensor,
    rotation: PreparedRotation,
    layout: Layout,
) -> tuple[Any, ...]:
    """Check frequencies against what they turn.

    Returns:
        primary, secondary and carried of the schema.
    """
    if isinstance(inv_freq, torch.Tensor):
        check_local("inv_freq", inv_freq)
    check_floating("inv_freq", inv_freq)
    axes, pairs = rotation.words.shape[0], rotation.channels.rotary_dim // 2
    dims = inv_freq.dim()
    fits = dims in (1, 2) if axes == 1 else dims == 3 and inv_freq.shape[0] == axes
    if not fits or inv_freq.shape[-1] != pairs:
        shapes = (
            f"({pairs},) or (heads, {pairs})" if axes == 1 else f"({axes}, heads or 1, {pairs})"
        )
        raise bad_value(f"inv_freq must have shape {shapes}", inv_freq=inv_freq)
    if inv_freq.device != q.device:
        raise bad_value(f"inv_freq is on {inv_freq.device} but {names[0]} is on {q.device}")
    full = inv_freq.reshape(axes, 1, 1 if dims == 1 else inv_freq.shape[-2], pairs)
    check_heads("inv_freq", full.shape[2], names, (q, k), layout)
    words, turns = angles.words_from(full.detach())
    # Turns say of a frequency that it is no number, even where positions are whole.
    return words.contiguous(), turns.contiguous(), (full,)
