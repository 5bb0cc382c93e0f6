"""Prologue f and epilogue P of a case: tensors, arguments of tightrope, and plain torch code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightrope import gates
from tightrope.activations import RMSNorm

from .case import Case

EPS = 1e-6

#: The torch functions that model files call, by the value of `act`.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "softmax": lambda x: torch.softmax(x, -1),
}


def is_alone(case: Case) -> bool:
    """Return whether a case has neither f nor P."""
    return case.act is None and case.gate is None


def increments_of(case: Case) -> torch.Tensor:
    """Return the angles of a case with phases, or their increments, in radians.

    Returns:
        ``(rows, heads or 1, tokens, pairs)`` in the dtype of the case, strided like q.
    """
    generator = torch.Generator(case.device).manual_seed(3)
    pairs = (case.rotary_dim or case.head_dim) // 2
    shape = case.rows, case.tokens, case.angle_heads, pairs
    x = torch.randn(shape, generator=generator, device=case.device)
    return x.to(getattr(torch, case.dtype)).transpose(1, 2)


def alone(case: Case) -> str | None:
    """Return why a contender without f and P cannot take part in a case; None if it can."""
    if case.work == "backward":
        return "it is measured only in forward and in training cases"
    if case.neighbours:
        return "it is measured only without neighbouring operations"
    if case.phases is not None:
        return "it takes no phases"
    return None if is_alone(case) else "it has neither f nor P"


def tensors_of(case: Case) -> list[torch.Tensor]:
    """Return the weights of the norm, then the tensors of the gate: of each, one for q and one for k."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, case.dtype)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found: list[torch.Tensor] = []
    if case.act == "rms_norm":
        found += [1 + 0.1 * noise(case.head_dim) for _ in range(2)]
    heads = (case.q_heads, case.k_heads)
    if case.gate == "exp":
        # The factors of successive calls in place multiply: keep them near 1.
        found += [0.01 * noise(count, case.head_dim) for count in heads]
    elif case.gate == "slope":
        found += [noise(count, case.head_dim).abs() * (-0.1 / case.tokens) for count in heads]
    return [one.to(case.device, dtype) for one in found]


def arguments(case: Case, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the arguments `act` and `gate` of tightrope's functions.

    Args:
        tensors: see :func:`tensors_of`.
    """
    if is_alone(case):
        return {}
    norm = case.act == "rms_norm"
    act = tuple(RMSNorm(weight, EPS) for weight in tensors[:2]) if norm else case.act
    gate = None
    if case.gate is not None:
        make = {"exp": gates.Exp, "slope": gates.Slope}[case.gate]
        gate = tuple(make(one) for one in tensors[2 * norm :])
    return {"act": act, "gate": gate}


def before(
    case: Case, tensors: Sequence[torch.Tensor], which: int, x: torch.Tensor
) -> torch.Tensor:
    """Return f(x), computed with torch's functions.

    Args:
        tensors: see :func:`tensors_of`.
        which: 0 for q, 1 for k.
    """
    if case.act == "rms_norm":
        return torch.nn.functional.rms_norm(x, (case.head_dim,), tensors[which], EPS)
    return x if case.act is None else FUNCTIONS[case.act](x)


def after(
    case: Case, tensors: Sequence[torch.Tensor], which: int, ids: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return P times x, computed with torch's functions; for other arguments see :func:`before`.

    Args:
        ids: ``(rows, tokens)``.
    """
    if case.gate is None:
        return x
    log = tensors[-2 + which]
    if case.gate == "exp":
        return x * log.exp()[:, None]
    # A 16-bit type cannot represent large positions.
    return x * (log.float()[:, None] * ids[:, None, :, None]).exp().to(x.dtype)
