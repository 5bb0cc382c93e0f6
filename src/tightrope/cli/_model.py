"""A small causal byte-level transformer that is handed its attention."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import KVCache
from ._rotations import Rotation

VOCABULARY = 256


@dataclass(frozen=True)
class ModelSize:
    """How large the model is and what it sees at once."""

    layers: int
    heads: int
    head_dim: int
    context: int
    batch: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class RotatedAttention(nn.Module):
    """Causal attention of queries and keys that `rotation` has rotated."""

    def __init__(self, size: ModelSize, rotation: Rotation) -> None:
        super().__init__()
        self.heads, self.head_dim = size.heads, size.head_dim
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.rotation = rotation

    def forward(self, x: Tensor, offset: int, cache: KVCache | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        q, k = self.rotation(q, k, offset)
        if cache is not None:
            k, v = cache.append_(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class _Block(nn.Module):
    def __init__(self, size: ModelSize, attention: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = attention
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, offset: int, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), offset, cache)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


MakeAttention = Callable[[ModelSize], nn.Module]
"""Makes what a block calls with (x, offset, cache)."""


class ByteTransformer(nn.Module):
    """Pre-norm transformer over bytes; position enters through its attention alone."""

    def __init__(self, size: ModelSize, make_attention: MakeAttention) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(_Block(size, make_attention(size)) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and name.endswith("weight"):
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 1.0 / math.sqrt(2 * size.layers) if residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(
        self, tokens: Tensor, offset: int = 0, caches: list[KVCache] | None = None
    ) -> Tensor:
        """Logits for `tokens` (batch, seq), which stand at positions `offset`, `offset` + 1, …"""
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, offset, None if caches is None else caches[index])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean nats per byte of predicting each next byte in `windows` (batch, context + 1)."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))
