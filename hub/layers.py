"""Layers of the kernel: pure, as the ``kernels`` package requires. hub/build.py copies this file."""

import torch
from torch import nn

from .functional import apply_rotary_pos_emb


class RotaryPosEmb(nn.Module):
    """Rotate queries and keys, for functions with the layer name ``rotary_pos_emb`` in transformers.

    The result has the bits of the functions of Llama, of gpt-oss, whose tables have half the width, and of
    OLMo 2, whose tables are float32. Do not map it to functions that pair neighbours or rotate a part.
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
        """Return the rotated q and k, in the dtype of q."""
        return apply_rotary_pos_emb(
            q,
            k,
            cos,
            sin,
            unsqueeze_dim,
            tables="half" if 2 * cos.shape[-1] == q.shape[-1] else "cat",
            # Products with tables in another dtype are not rounded; autograd rounds their gradients.
            rounding="each" if cos.dtype == q.dtype else ("wide", "each"),
        )
