"""Arithmetic in float64 whose bits do not depend on the number of tokens in a call.

A matrix product rounds differently for one token and for many, and torch's exp and tanh on the CPU
round differently at the end of a tensor. Here products are exact, and functions are made of additions,
multiplications and divisions, each of which rounds in one way only. So a token has the same result in a
prefill, in chunks and alone, in any batch, on any device with float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_EXPONENT = 0x7FF << 52
_LN2 = math.log(2.0)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round vectors, so that scalar products of two of them are exact in float64.

    Each channel becomes a multiple of 2^-b of the power of two above the largest channel, with
    b = (53 - log2 channels) / 2: 22 for 512 channels, 20 for 8192. A product of two such numbers has 2b
    bits, and float64 holds the sum of all products, in any order. Gradients pass through the rounding.

    Args:
        x: ``(..., channels)``, floating.
    """
    bits = (53 - math.ceil(math.log2(x.shape[-1]))) // 2
    wide = x.to(torch.float64)
    fixed = wide.detach()
    top = fixed.abs().amax(-1, keepdim=True).clamp(min=2.0**-500)
    power = (top.view(torch.int64) & _EXPONENT).view(torch.float64)
    unit = power * 2.0 ** (1 - bits)
    return (fixed / unit).round() * unit + (wide - fixed)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T`` of rounded vectors x ``(..., channels)``; rounds the weight."""
    return x @ rounded(weight).mT


def norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return sqrt(Σ x² + eps) of rounded vectors ``(..., channels)``, as ``(..., 1)``."""
    return (x.square().sum(-1, keepdim=True) + eps).sqrt()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)) of a float64 tensor."""
    return _differentiable(lambda x: 1.0 / (1.0 + _exp(-x)), torch.sigmoid, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the hyperbolic tangent of a float64 tensor, with an absolute error of 1e-15."""
    return _differentiable(lambda x: 1.0 - 2.0 / (1.0 + _exp(2.0 * x)), torch.tanh, x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp(x)) of a float64 tensor."""
    return _differentiable(_softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x)), x)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    small = _exp(-x.abs())
    s = small / (2.0 + small)
    square, series = s * s, torch.zeros_like(s)
    for n in reversed(range(17)):
        series = series * square + 1.0 / (2 * n + 1)
    return x.clamp(min=0.0) + 2.0 * s * series


def _exp(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x), with x clamped to ±700, by a series on [-ln 2 / 2, ln 2 / 2]."""
    x = x.clamp(-700.0, 700.0)
    power = (x * (1.0 / _LN2)).round()
    rest, series = x - power * _LN2, torch.ones_like(x)
    for n in reversed(range(1, 15)):
        series = series * (rest / n) + 1.0
    return series * ((power.to(torch.int64) + 1023) << 52).view(torch.float64)


def _differentiable(
    value: Callable[[torch.Tensor], torch.Tensor],
    smooth: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    """Return the value of one function with the gradient of another."""
    like = smooth(x)
    return value(x.detach()) + (like - like.detach())
