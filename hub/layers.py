"""Layers of the kernel: pure, as the ``kernels`` package requires. hub/build.py copies this file."""

import torch
from torch import nn

from .functional import apply_rotary_pos_emb


class RotaryPosEmb(nn.Module):
    """Rotate queries and keys, for functions with the layer name ``rotary_pos_emb`` in transformers.

    The result has the bits of the function of Llama, which pairs halves and rounds each step to the dtype
    of q. Do not map it to functions that pair neighbours.
    """

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated q and k."""
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, rounding="each")
