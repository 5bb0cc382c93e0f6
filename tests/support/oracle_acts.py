"""Reference formulas of prologues f (activations, RMSNorm) and of angles, in float64.

They are independent of the library. Derivatives come from autograd, so this file has no formulas
for derivatives.
"""

import math

import torch

ROOT_HALF = math.sqrt(0.5)


def act(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return f of float64 x by the textbook formula."""
    one = torch.ones((), dtype=torch.float64)
    if name == "relu":
        return torch.where(x > 0, x, 0 * one)
    if name == "sigmoid":
        return 1 / (1 + torch.exp(-x))
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * torch.erfc(-x * ROOT_HALF) / 2
    if name == "elu":
        return torch.where(x > 0, x, torch.expm1(torch.where(x > 0, 0 * one, x)))
    if name == "relu2":
        return torch.where(x > 0, x * x, 0 * one)
    if name == "softplus":
        return torch.log1p(torch.exp(x))
    if name == "exp":
        return torch.exp(x)
    if name == "leaky_relu":
        return torch.where(x > 0, x, x * 0.01)
    if name == "tanh":
        return torch.expm1(2 * x) / (torch.expm1(2 * x) + 2)
    if name == "sin":
        return torch.sin(x)
    if name == "cos":
        return torch.cos(x)
    if name == "softmax":
        e = torch.exp(x)
        return e / e.sum(-1, keepdim=True)
    assert name == "none"
    return x


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    """Apply RMSNorm to x (rows, heads, tokens, channels).

    The weight is None, or of shape (channels,) or (heads, channels).
    """
    length = torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    if weight is None:
        return x / length
    factor = weight + offset
    return x / length * (factor if weight.dim() == 1 else factor[:, None])


def angles(tokens: int, offset: int, rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """Return the angles (tokens, pairs) of positions offset … offset + tokens − 1."""
    where = torch.arange(tokens, dtype=torch.float64) + offset
    k = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return where[:, None] * base ** (-2 * k / rotary_dim)
