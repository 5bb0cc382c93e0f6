"""Frequencies that replace those of the spec, and can be learned."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from .. import angles
from .._errors import check_local
from .._tracing import is_readable, outside_modes
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
    words, turns = _words_of(full.detach())
    # Turns mark frequencies that are NaN or too large, so they are needed even for integer positions.
    return call._replace(
        primary=words.contiguous(),
        secondary=turns.contiguous(),
        options=call.options._replace(learned=True),
        extras=call.extras._replace(frequencies=(full,)),
    )


def _words_of(inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return phase words and turns; on the CPU, those of values that came before are kept.

    A model that does not learn passes the same frequencies with every token.
    """
    if not inv_freq.numel() or not is_readable(inv_freq):
        return angles.words_from(inv_freq)
    values = inv_freq.resolve_neg().contiguous()
    # Not by numpy, which need not be installed, and would fix the size of memory that FSDP frees.
    data = ctypes.string_at(values.data_ptr(), values.nbytes)
    return _kept(data, inv_freq.dtype, inv_freq.shape)


@lru_cache(maxsize=256)
def _kept(data: bytes, dtype: torch.dtype, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    with outside_modes():  # so that autograd can save them
        return angles.words_from(torch.frombuffer(bytearray(data), dtype=dtype).view(shape))
