"""Activations and norms: the prologue f of y = P · R · f(x), applied before rotation R and gate P.

An activation is given by name, a norm as an object that holds its weight::

    rotate_qk(q, k, spec, act="silu")
    rotate_qk(q, k, spec, act=(RMSNorm(q_weight), RMSNorm(k_weight)))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ._errors import (
    bad_type,
    bad_value,
    check_flag,
    check_local,
    check_place,
    check_tensor,
    describe,
    positive,
    public,
)
from ._parts import Take
from ._tracing import broadcasts

__all__ = ["ACTS", "Act", "ActLike", "RMSNorm"]

#: Names of all prologues f. The index of a name is its code in the operator's schema.
ACTS = (
    *("none", "relu", "sigmoid", "silu", "gelu", "elu", "relu2", "softplus", "exp", "leaky_relu"),
    *("tanh", "sin", "cos", "softmax", "rms_norm"),
)
NONE, SOFTMAX, RMS_NORM = 0, ACTS.index("softmax"), ACTS.index("rms_norm")

_NAMES = frozenset(ACTS[:RMS_NORM])

#: The slope of leaky_relu below 0.
LEAK = 0.01


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the channels of a head: the norm of queries and keys.

    The mean is over all channels of the head, including those that do not rotate. It is computed in
    float32 (float64 for float64), and nothing is rounded between the norm and the rotation. If the
    sum of squares of a head overflows (in float32, one channel of about 1.8e19 suffices), the head
    becomes 0, as in ``torch.nn.functional.rms_norm``.

    Args:
        weight: floating ``(head_dim,)`` or ``(heads|1, head_dim)``, learnable; None for ones.
        eps: added to the mean of squares.
        unit_offset: whether to multiply by 1 + weight, as in Gemma.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4;
    on queries and keys: Henry et al. (arXiv 2010.04245), Dehghani et al. (arXiv 2302.05442).

    >>> from tightrope import RopeSpec, rotate
    >>> y = rotate(torch.randn(8, 5, 64), RopeSpec(64), layout="thd", act=RMSNorm(torch.ones(64)))
    >>> torch.allclose(y.square().mean(-1), torch.ones(8, 5), atol=1e-4)
    True
    """

    weight: torch.Tensor | None = None
    eps: float = 1e-6
    unit_offset: bool = False

    @public("RMSNorm")
    def __post_init__(self) -> None:
        weight = self.weight
        if weight is not None:
            check_tensor("weight", weight, "a floating tensor", sharded=True, hint=_hint(weight))
            if weight.dim() not in (1, 2):
                raise bad_value(
                    "weight must have shape (head_dim,) or (heads, head_dim)", weight=weight
                )
        hint = ""
        if self.eps is None:
            hint = "; None of torch.nn.RMSNorm is torch.finfo(torch.float32).eps, in 16 bits too"
        positive("eps", self.eps, zero=True, hint=hint)
        check_flag("unit_offset", self.unit_offset)

    def factors(self, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the factors that multiply the normalised channels.

        Args:
            name: name of x in errors.
            x: the tensor to normalise.
            heads: number of heads of x.

        Returns:
            ``[heads|1, head_dim]`` in float32, or float64 if x is.

        Raises:
            ValueError: a weight whose shape or device does not fit x.
            TypeError: a DTensor as weight.
        """
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        width = x.shape[-1]
        weight = self.weight
        if weight is None:
            return torch.ones(1, width, dtype=dtype, device=x.device)
        check_local(f"the weight of RMSNorm for {name}", weight)
        full = weight if weight.dim() == 2 else weight[None]
        if full.shape[1] != width or not broadcasts(full.shape[0], heads):
            raise bad_value(
                f"the weight of RMSNorm for {name} must have shape ({width},) or ({heads}, "
                f"{width})",
                **{name: x, "weight": weight},
            )
        check_place("the weight of RMSNorm", weight, f"{name} is", x.device)
        full = full.to(dtype)
        return full + 1.0 if self.unit_offset else full

    def cut(self, take: Take) -> RMSNorm:
        """Return the norm for a part of the heads; see :meth:`tightrope.gates.Gate.cut`."""
        return replace(self, weight=take("weight of RMSNorm", self.weight, ("head", None)))


#: One f: None, a name, or a norm.
Act: TypeAlias = str | RMSNorm | None
#: The type of ``act=``: one f for all, or one for queries and one for keys.
ActLike: TypeAlias = Act | tuple[Act, Act]


def pair(act: object) -> tuple[Act, Act]:
    """Split ``act=`` into the f of queries and the f of keys; None for no activation.

    Raises:
        TypeError, ValueError: anything but None, a name, a norm, or a pair of them.

    >>> pair(("silu", "none"))
    ('silu', None)
    """
    both = act if isinstance(act, tuple) else (act, act)
    if len(both) != 2:
        raise bad_value(
            f"act must be one activation, or a pair for q and k, but got {len(both)} of them"
        )
    return _one(both[0]), _one(both[1])


def _one(act: object) -> Act:
    if act is None or isinstance(act, RMSNorm):
        return act
    if isinstance(act, str) and act in _NAMES:
        return None if act == ACTS[NONE] else act
    names = ", ".join(ACTS[:RMS_NORM])
    if not isinstance(act, str):
        raise bad_type(
            f"act must be None, one of {names}, an RMSNorm, or a pair of them for q and k, but got "
            f"{describe(act)}{_hint(act)}"
        )
    if act in (ACTS[RMS_NORM], "rmsnorm"):
        raise bad_value(
            f"act must be given as RMSNorm(weight), or RMSNorm() without a weight, but got {act!r}"
        )
    raise bad_value(f"act must be one of {names} but got {act!r}")


def _hint(given: object) -> str:
    """The call for a module in place of a norm or its weight."""
    a_module = isinstance(given, torch.nn.Module)
    return "; pass the module's weight: RMSNorm(module.weight, eps=...)" if a_module else ""


def code_of(act: Act) -> int:
    """Return the code of f in the schema of the operator.

    >>> code_of(None), code_of("relu")
    (0, 1)
    """
    return NONE if act is None else RMS_NORM if isinstance(act, RMSNorm) else ACTS.index(act)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    # 1 + erf would lose digits by cancellation below 0.
    "gelu": lambda x: 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5)),
    "elu": torch.nn.functional.elu,
    "relu2": lambda x: torch.relu(x).square(),
    # torch's own softplus returns x from 20 on, which is too inaccurate for float64.
    "softplus": lambda x: torch.logaddexp(x, x.new_zeros(())),
    "exp": torch.exp,
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, LEAK),
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "softmax": lambda x: torch.softmax(x, -1),
}


# f'. Each product of two sigmoids replaces a difference that would lose digits by cancellation.
_SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": torch.ones_like,
    "relu": lambda x: (~(x <= 0)).to(x.dtype),  # 1 at NaN, as in torch
    "sigmoid": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "silu": lambda x: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)),
    "gelu": lambda x: (
        0.5 * torch.special.erfc(x * -math.sqrt(0.5))
        + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    ),
    "elu": lambda x: torch.exp(x.clamp(max=0)),
    "relu2": lambda x: 2 * torch.relu(x),
    "softplus": torch.sigmoid,
    "exp": torch.exp,
    "leaky_relu": lambda x: torch.where(x > 0, x.new_ones(()), x.new_full((), LEAK)),
    "tanh": lambda x: 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x),
    "sin": torch.cos,
    "cos": lambda x: -torch.sin(x),
}


def apply(
    code: int, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """Return f(x), computed in plain torch.

    Args:
        code: index into ACTS.
        x: ``[..., heads, tokens, channels]``, in the dtype to compute in.
        weight: weight of a norm, ``[heads|1, channels]``.
        eps: eps of a norm.

    >>> apply(code_of("relu2"), torch.tensor([-1.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if code == RMS_NORM:
        scaled = x * _inverse_rms(x, eps)
        return scaled if weight is None else scaled * weight[:, None].to(x.dtype)
    return _FUNCTIONS[ACTS[code]](x)


def transpose(
    code: int,
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return f'(x)ᵀ · grad, the gradient of x; arguments as in :func:`apply`.

    >>> transpose(code_of("exp"), torch.zeros(2), torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    if code == RMS_NORM:
        inverse = _inverse_rms(x, eps)
        scaled = x * inverse
        by_scaled = grad if weight is None else grad * weight[:, None].to(x.dtype)
        return inverse * (by_scaled - scaled * (by_scaled * scaled).mean(-1, keepdim=True))
    if code == SOFTMAX:
        y = torch.softmax(x, -1)
        return y * (grad - (y * grad).sum(-1, keepdim=True))
    return _SLOPES[ACTS[code]](x) * grad


def by_weight(x: torch.Tensor, grad: torch.Tensor, heads: int, eps: float) -> torch.Tensor:
    """Return the gradient of the weight of a norm, ``[heads|1, channels]``.

    Args:
        x, grad: ``[rows, heads, tokens, channels]``.
        heads: number of heads of the weight.
        eps: see :func:`apply`.
    """
    each = x * _inverse_rms(x, eps) * grad
    sums = each.sum((0, 2))
    return sums.sum(0, keepdim=True) if heads == 1 else sums


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
