"""The rotation as an implementation of ``rope`` in the dispatcher of Liger; see docs/plugs.md."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .._errors import bad_value, integer, public, sentence
from ..functional import apply_rotary_pos_emb

__all__ = ["register"]

_NAME = "tightrope"


@public("rope")
def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,  # noqa: ARG001  (no kernel of Liger reads it)
    unsqueeze_dim: int = 1,  # noqa: ARG001  (likewise)
    *,
    mode: str | None = None,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first channels of ``(rows, heads, tokens, channels)``, in half pairs, with the bits of transformers.

    Tables have an entry for each channel that rotates; or half of it, which ``rotary_dim`` tells.
    """
    if mode not in (None, "default"):
        raise bad_value(f"mode must be None or 'default' but got {mode!r}")
    # Products with tables in another dtype are not rounded; autograd rounds their gradients.
    rounding = "each" if cos.dtype == q.dtype else ("wide", "each")
    tables = "half" if rotary_dim == 2 * cos.shape[-1] else "cat"
    return apply_rotary_pos_emb(q, k, cos, sin, tables=tables, rounding=rounding)


@public("register")
def register(rank: int = 10) -> None:
    """Register this library's rotation as an implementation of ``rope`` in Liger, for every device.

    Liger then rotates by it wherever it has replaced the rotation of a model, forward and backward, without CUDA
    too. Results and gradients have the bits of the function of Llama in transformers. A second call replaces the
    first registration.

    Args:
        rank: Liger takes the implementation with the lowest rank; its own Triton kernel has 50. With a rank above
            that, Liger takes this one only where the environment variable ``LIGER_KERNEL_IMPL_ROPE`` is
            ``tightrope``.

    Raises:
        ImportError: Liger is not installed, or has no dispatcher.
        TypeError: the rank is not an int.

    >>> register()  # doctest: +SKIP
    """
    try:
        backends: Any = importlib.import_module("liger_kernel.backends")
    except ImportError as error:
        needs = "needs Liger with its dispatcher: pip install 'liger-kernel>=0.8.5'"
        raise ImportError(sentence("register", needs)) from error
    add = backends.register_impl(
        "rope",
        impl_name=_NAME,
        capability=backends.Capability(),
        preference_rank=integer("rank", rank),
    )
    add(_rope)
