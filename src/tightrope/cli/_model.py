"""A small causal byte-level transformer that is handed its rotation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Cache:
    """Rotated keys and values of one layer, for decoding token by token."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append along the sequence and return everything so far."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values


class _Attention(nn.Module):
    def __init__(self, size: ModelSize, rotation: Rotation) -> None:
        super().__init__()
        self.heads, self.head_dim = size.heads, size.head_dim
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.rotation = rotation

    def forward(self, x: Tensor, offset: int, cache: Cache | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        q, k = self.rotation(q, k, offset)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class _Block(nn.Module):
    def __init__(self, size: ModelSize, rotation: Rotation) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = _Attention(size, rotation)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, offset: int, cache: Cache | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), offset, cache)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


class ByteTransformer(nn.Module):
    """Pre-norm transformer over bytes; position enters through `rotation` alone."""

    def __init__(self, size: ModelSize, rotation: Rotation) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(_Block(size, rotation) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 1.0 / math.sqrt(2 * size.layers) if residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens: Tensor, offset: int = 0, caches: list[Cache] | None = None) -> Tensor:
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
