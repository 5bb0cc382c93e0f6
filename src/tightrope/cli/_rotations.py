"""The two rotations that the demo compares: this library, and the usual eager expression."""

from typing import Protocol

import torch
from torch import Tensor

from .. import RopeSpec
from ..functional import rotate_qk
from ..spec import PreparedRotation


class Rotation(Protocol):
    """Rotates q and k, laid out (batch, heads, seq, dim), at positions `offset`, `offset` + 1, …"""

    def __call__(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]: ...


class TightropeRotation:
    """This library: angles inside the operator, nothing stored per length."""

    def __init__(self, spec: RopeSpec) -> None:
        self._spec = spec
        self._from_zero = spec.at(None)

    def __call__(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        rope = self._spec.at(offset) if offset else self._from_zero
        return tightrope_rotate_qk(q, k, rope)


class EagerRotation:
    """What model files carry: float32 tables of cos and sin, and `rotate_half`."""

    def __init__(self, head_dim: int, base: float, length: int) -> None:
        self._cos, self._sin = eager_tables(head_dim, base, torch.arange(length))

    def __call__(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        rows = slice(offset, offset + q.shape[-2])
        return eager_rotate_qk(q, k, self._cos[rows], self._sin[rows])


def tightrope_rotate_qk(q: Tensor, k: Tensor, rope: PreparedRotation) -> tuple[Tensor, Tensor]:
    """`rotate_qk` in the layout of the demo's model."""
    return rotate_qk(q, k, rope, layout="bhsd")


def eager_tables(head_dim: int, base: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin in float32, of shape (positions, head_dim), with the halves duplicated."""
    inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = positions.float()[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def eager_rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The field's usual expression, out of place."""
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
