"""Reference formulas of prologues f (activations, RMSNorm) and of angles, in float64.

They are independent of the library. Derivatives come from autograd, so this file has no formulas
for derivatives.
"""

import math
from collections.abc import Callable

import torch

#: f of float64 x, by the textbook formula.
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * torch.erfc(-x * math.sqrt(0.5)) / 2,
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(torch.where(x > 0, 0.0, x))),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "softplus": lambda x: torch.log1p(torch.exp(x)),
    "exp": torch.exp,
    "leaky_relu": lambda x: torch.where(x > 0, x, x * 0.01),
    "tanh": lambda x: torch.expm1(2 * x) / (torch.expm1(2 * x) + 2),
    "sin": torch.sin,
    "cos": torch.cos,
    "softmax": lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
}


def act(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return f of float64 x by the textbook formula."""
    return FORMULAS[name](x)


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
