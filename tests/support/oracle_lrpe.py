"""Reference results of LRPE: activations and angles with many digits, gradients derived by hand.

Nothing here comes from the library under test. f and f' of each element, and each cosine and sine, are
computed with 40 digits and rounded once to float64; products and sums follow in float64. Inputs are
taken as exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import mpmath
import torch

MP = mpmath.mp.clone()
MP.dps = 40

Real = Any  # a number of MP; mpmath has no types


def _logistic(x: Real) -> Real:
    return 1 / (1 + MP.exp(-x))


def _normal(x: Real) -> Real:
    """Return the cumulative normal distribution at x."""
    return MP.erfc(-x / MP.sqrt(2)) / 2


#: Name -> f.
FUNCTIONS: dict[str, Callable[[Real], Real]] = {
    "none": lambda x: x,
    "relu": lambda x: x if x > 0 else MP.mpf(0),
    "sigmoid": _logistic,
    "silu": lambda x: x * _logistic(x),
    "gelu": lambda x: x * _normal(x),
    "elu": lambda x: x if x > 0 else MP.expm1(x),
    "relu2": lambda x: x * x if x > 0 else MP.mpf(0),
    "softplus": lambda x: MP.log1p(MP.exp(x)),
    "exp": MP.exp,
    "leaky_relu": lambda x: x if x > 0 else x / 100,
    "tanh": MP.tanh,
    "sin": MP.sin,
    "cos": MP.cos,
}

#: Name -> f', derived by hand.
SLOPES: dict[str, Callable[[Real], Real]] = {
    "none": lambda x: MP.mpf(1),  # noqa: ARG005
    "relu": lambda x: MP.mpf(x > 0),
    "sigmoid": lambda x: _logistic(x) * _logistic(-x),
    "silu": lambda x: _logistic(x) + x * _logistic(x) * _logistic(-x),
    "gelu": lambda x: _normal(x) + x * MP.exp(-x * x / 2) / MP.sqrt(2 * MP.pi),
    "elu": lambda x: MP.mpf(1) if x > 0 else MP.exp(x),
    "relu2": lambda x: 2 * x if x > 0 else MP.mpf(0),
    "softplus": _logistic,
    "exp": MP.exp,
    "leaky_relu": lambda x: MP.mpf(1) if x > 0 else MP.mpf(1) / 100,
    "tanh": lambda x: 1 - MP.tanh(x) ** 2,
    "sin": MP.cos,
    "cos": lambda x: -MP.sin(x),
}


@cache
def _element(name: str, x: float, slope: bool) -> float:
    return float((SLOPES if slope else FUNCTIONS)[name](MP.mpf(x)))


def _each(name: str, x: torch.Tensor, slope: bool = False) -> torch.Tensor:
    values = [_element(name, value, slope) for value in x.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(x.shape)


def activated(name: str, x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return f(x) as float64; softmax along dimension ``dim`` of x."""
    if name != "softmax":
        return _each(name, x)
    assert dim is not None
    powers = x.double().movedim(dim, -1)
    lines = []
    for line in powers.flatten(0, -2).tolist():
        top = MP.mpf(max(line))
        shares = [MP.exp(MP.mpf(value) - top) for value in line]
        total = MP.fsum(shares)
        lines.append([float(share / total) for share in shares])
    return torch.tensor(lines, dtype=torch.float64).reshape(powers.shape).movedim(-1, dim)


def slope(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return f'(x) as float64, for elementwise f."""
    return _each(name, x, slope=True)


def pulled_back(
    name: str, x: torch.Tensor, grad: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """Return f'(x)ᵀ · grad as float64."""
    if name != "softmax":
        return slope(name, x) * grad
    assert dim is not None
    y = activated(name, x, dim)
    return y * (grad - (y * grad).sum(dim, keepdim=True))


@cache
def _turn(theta: float, position: int) -> tuple[float, float]:
    # A 64-bit position uses up 20 of the 40 digits.
    cos, sin = MP.cos_sin(MP.mpf(theta) * position)
    return float(cos), float(sin)


def cos_sin(
    theta: torch.Tensor, positions: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``(rows, tokens, heads, pairs)``.

    Args:
        theta: ``(heads, pairs)``.
        positions: positions of the tokens, for each row.
    """
    values = [
        _turn(angle, position)
        for row in positions
        for position in row
        for angle in theta.double().flatten().tolist()
    ]
    shape = len(positions), len(positions[0]), *theta.shape
    both = torch.tensor(values, dtype=torch.float64).reshape(*shape, 2)
    return both[..., 0], both[..., 1]


class Truth(NamedTuple):
    """Exact results, float64.

    Attributes:
        y: the result.
        dx: the gradient with respect to x.
        inner: f(x).
        distance: |position| of each token, ``(rows|1, tokens, 1, 1)``.
    """

    y: torch.Tensor
    dx: torch.Tensor
    inner: torch.Tensor
    distance: torch.Tensor


def rotated(
    x: torch.Tensor,
    theta: torch.Tensor,
    positions: Sequence[Sequence[int]],
    grad: torch.Tensor,
    act: str = "none",
    dim: int | None = None,
    start: int = 0,
) -> Truth:
    """Evaluate the LRPE equations; pair i consists of channels start + i and start + pairs + i.

    Args:
        x, grad: input, and gradient of the result, ``(rows, tokens, heads, channels)``.
        theta: ``(heads, pairs)``, 0 for pairs that do not rotate.
        positions: positions of the tokens, for each row; a single row is used for all.
    """
    pairs = theta.shape[1]
    first = slice(start, start + pairs)
    second = slice(start + pairs, start + 2 * pairs)
    cos, sin = cos_sin(theta, positions)
    grad = grad.double()

    inner = activated(act, x, dim)
    y = inner.clone()
    y[..., first] = inner[..., first] * cos - inner[..., second] * sin
    y[..., second] = inner[..., first] * sin + inner[..., second] * cos

    back = grad.clone()
    back[..., first] = grad[..., first] * cos + grad[..., second] * sin
    back[..., second] = grad[..., second] * cos - grad[..., first] * sin
    dx = pulled_back(act, x, back, dim)

    return Truth(y, dx, inner, _where(positions).abs())


def _where(positions: Sequence[Sequence[int]]) -> torch.Tensor:
    where = torch.tensor([[float(p) for p in row] for row in positions], dtype=torch.float64)
    return where[:, :, None, None]


def angle_sums(
    y: torch.Tensor,
    grad: torch.Tensor,
    positions: Sequence[Sequence[int]],
    pairs: int,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of θ, and the sum that its error is compared with.

    For the pairs (u, v) of y and (du, dv) of grad, the gradient is Σ position · (u · dv − v · du), and
    the sum is Σ |position| · |(u, v)| · |(du, dv)|.

    Args:
        y, grad: a result and its gradient, as in :func:`rotated`.

    Returns:
        Two tensors ``(heads, pairs)``.
    """
    first = slice(start, start + pairs)
    second = slice(start + pairs, start + 2 * pairs)
    u, v, du, dv = y[..., first], y[..., second], grad[..., first], grad[..., second]
    du, dv = du.double(), dv.double()
    where = _where(positions)
    moduli = where.abs() * torch.hypot(u, v) * torch.hypot(du, dv)
    return (where * (u * dv - v * du)).sum((0, 1)), moduli.sum((0, 1))


def pair_lengths(x: torch.Tensor, pairs: int, start: int = 0) -> torch.Tensor:
    """Return for each element the length of its pair, or its absolute value if it has no pair."""
    first = slice(start, start + pairs)
    second = slice(start + pairs, start + 2 * pairs)
    lengths = x.double().abs()
    both = torch.hypot(lengths[..., first], lengths[..., second])
    lengths[..., first] = lengths[..., second] = both
    return lengths
