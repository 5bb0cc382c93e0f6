"""Attention around the RotaryEmbedding of rotary-embedding-torch, which has no models."""

from __future__ import annotations

from typing import Any

import torch
from rotary_embedding_torch import apply_rotary_emb
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    """Self-attention over the tokens of x (batch, seq, width), rotated by a RotaryEmbedding."""

    def __init__(self, rotary: Any, width: int, heads: int) -> None:
        super().__init__()
        self.rotary, self.heads = rotary, heads
        self.qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention's result, in the shape of x."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = self.rotated(q.movedim(-2, 1), k.movedim(-2, 1))
        y = scaled_dot_product_attention(
            q.flatten(2, -2), k.flatten(2, -2), v.movedim(-2, 1).flatten(2, -2)
        )
        return y.transpose(1, 2).reshape(x.shape)

    def rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k (batch, heads, seq, dim), rotated by the positions of tokens."""
        return self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)


class AxialAttention(Attention):
    """Self-attention over the pixels of x (batch, rows, columns, width)."""

    def rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k (batch, heads, rows, columns, dim), rotated by rows and columns."""
        freqs = self.rotary.get_axial_freqs(*q.shape[2:4])
        return apply_rotary_emb(freqs, q), apply_rotary_emb(freqs, k)
