"""The ``inv_freq`` argument: frequencies that replace those of the spec and can be learned."""

from __future__ import annotations

import warnings

import torch

from .. import angles
from .._errors import bad_value, outside, sentence
from .call import Call
from .checks import check_floating, check_heads

_NARROW = torch.bfloat16, torch.float16


def with_frequencies(call: Call, inv_freq: torch.Tensor) -> Call:
    """Return the call with the phase words of ``inv_freq``, and ``inv_freq`` itself for its gradient."""
    check_floating("inv_freq", inv_freq)
    axes, pairs = call.primary.shape[0], call.primary.shape[-1]
    dims = inv_freq.dim()
    fits = dims in (1, 2) if axes == 1 else dims == 3 and inv_freq.shape[0] == axes
    if not fits or inv_freq.shape[-1] != pairs:
        if axes == 1:
            shapes = f"(pairs,) or (heads, pairs), here ({pairs},) or (heads, {pairs}),"
        else:
            shapes = f"(axes, heads or 1, pairs), here ({axes}, heads or 1, {pairs}),"
        raise bad_value(
            f"inv_freq must have shape {shapes} but got {tuple(inv_freq.shape)}", inv_freq=inv_freq
        )
    if inv_freq.device != call.q.device:
        raise bad_value(
            f"inv_freq is on {inv_freq.device} but {call.names[0]} is on {call.q.device}"
        )
    warn_of_rounding("inv_freq", inv_freq)
    full = inv_freq.reshape(axes, 1, 1 if dims == 1 else inv_freq.shape[-2], pairs)
    check_heads("inv_freq", full.shape[2], call.names, call.xs(), call.layout())
    words, turns = angles.words_from(full.detach())
    # Turns mark frequencies that are NaN or too large, so they are needed even for integer positions.
    return call._replace(
        primary=words.contiguous(),
        secondary=turns.contiguous(),
        options=call.options._replace(learned=True),
        extras=call.extras._replace(frequencies=(full,)),
    )


def warn_of_rounding(name: str, frequencies: torch.Tensor) -> None:
    """Warn of 16-bit frequencies: usually a cast of the whole model rounded the parameter."""
    dtype = frequencies.dtype
    if dtype not in _NARROW or torch.compiler.is_compiling():
        return
    least = torch.finfo(dtype).smallest_normal
    more = f" (more below {least:.0e})" if dtype == torch.float16 else ""
    rule = (
        f"frequencies should be float32 but are {str(dtype).removeprefix('torch.')}, which rounds "
        f"them by up to {50 * torch.finfo(dtype).eps:.1g} %{more}, an error that the position "
        f"multiplies; keep the parameter in float32 when you cast the model, or pass {name}.float() if "
        "these values are right"
    )
    warnings.warn(sentence(name, rule), UserWarning, stacklevel=outside())
