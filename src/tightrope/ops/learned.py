"""Frequencies that replace those of the spec, and can be learned."""

from __future__ import annotations

import torch

from .. import angles
from .._errors import check_local
from .call import Call
from .checks import check_heads


def with_frequencies(call: Call, inv_freq: torch.Tensor) -> Call:
    """Return the call with the phase words of ``inv_freq``, and ``inv_freq`` itself for its gradient.

    Args:
        inv_freq: as :meth:`tightrope.RopeSpec.at` has checked it.
    """
    check_local("inv_freq", inv_freq)
    axes, pairs = call.primary.shape[0], call.primary.shape[-1]
    full = inv_freq.reshape(axes, 1, 1 if inv_freq.dim() == 1 else inv_freq.shape[-2], pairs)
    check_heads("inv_freq", full.shape[2], call.names, call.xs(), call.layout())
    words, turns = angles.words_from(full.detach())
    # Turns mark frequencies that are NaN or too large, so they are needed even for integer positions.
    return call._replace(
        primary=words.contiguous(),
        secondary=turns.contiguous(),
        options=call.options._replace(learned=True),
        extras=call.extras._replace(frequencies=(full,)),
    )
