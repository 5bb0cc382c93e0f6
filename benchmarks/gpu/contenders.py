"""GPU kernels of other libraries, added to the contenders of `benchmarks.speed`."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from ..speed import CONTENDERS as SHARED, FLOORS, Case, Contender, Made
from ..speed.contender import Rotate, functional, spec_of, tables_of
from ..speed.factors import alone
from . import peers
from .plugin import OPTIONS

#: The only cases that run autotuned kernels, because autotuning takes dozens of compilations.
_TUNED_IN = ("12 x 32768, 12 heads", "prefill 32k")

#: The contenders that must never be faster than this library.
RIVALS = ("compiled eager", "definition, compiled", "Liger", "flash-attention", "xopes")


def _made(case: Case, q: torch.Tensor, k: torch.Tensor, rotate: Rotate) -> Made:
    """Prepare a rotation, in place if the case is in place."""
    if case.work != "in place":
        return functional(rotate, case, q, k)
    return Made(lambda: rotate(q, k), rotate(q.clone(), k.clone()))


def _no_liger(case: Case) -> str | None:
    if case.work == "out of place":
        return "it writes into q and k"
    if case.interleaved or case.positions == "M-RoPE":
        return "it takes only the half pairing and positions of one axis"
    return alone(case) or peers.missing("Liger")


def _liger(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    kernel = peers.function("Liger")
    cos, sin = (table[:, 0] for table in tables_of(case, ids, q.dtype))
    return _made(case, q, k, lambda q, k: kernel.apply(q, k, cos, sin))


def _no_rotary(name: str, case: Case) -> str | None:
    if case.positions == "M-RoPE":
        return "it takes only positions of one axis"
    if name == "FLA" and case.name not in _TUNED_IN:
        return "its autotuning takes long"
    return alone(case) or peers.missing(name)


def _by_token(case: Case, x: torch.Tensor, ids: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """Return cos/sin of all positions up to the largest, and the kernel's keyword arguments."""
    reach = int(ids.max()) + 1
    angle = torch.arange(reach, device=x.device).double()[:, None]
    angle = angle * spec_of(case).frequencies().inv_freq.to(x.device)
    named: dict[str, Any] = {"interleaved": case.interleaved, "inplace": case.work == "in place"}
    if case.positions == "ids per row":
        named["seqlen_offsets"] = ids[:, 0].contiguous()
    elif case.positions == "packed":
        ends = [*range(0, case.tokens, reach), case.tokens]
        named["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=x.device)
    return [angle.cos().to(x.dtype), angle.sin().to(x.dtype)], named


def _rotary(name: str, case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Prepare flash-attention's kernel, or FLA's, which derives from it."""
    kernel = peers.function(name)
    (cos, sin), named = _by_token(case, q, ids)
    # flash-attention takes packed sequences without a batch dimension.
    flat = name == "flash-attention" and "cu_seqlens" in named
    if flat:
        named["max_seqlen"] = len(cos)

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        y = kernel(x[0] if flat else x, cos, sin, **named)
        return (y[None] if flat else y).transpose(1, 2)

    return _made(case, q, k, lambda q, k: (one(q), one(k)))


def _no_xopes(case: Case) -> str | None:
    if case.name not in _TUNED_IN:
        return "its autotuning takes long"
    return alone(case) or peers.missing("xopes")


def _xopes(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    kernel = peers.function("xopes")
    theta = spec_of(case).frequencies().inv_freq.float().to(q.device)[None]

    def one(x: torch.Tensor) -> torch.Tensor:
        return kernel(x.transpose(1, 2), theta, 0, "none", None).transpose(1, 2)

    return _made(case, q, k, lambda q, k: (one(q), one(k)))


KERNELS = (
    Contender("Liger", _no_liger, _liger),
    *(
        Contender(name, partial(_no_rotary, name), partial(_rotary, name))
        for name in ("flash-attention", "FLA")
    ),
    Contender("xopes", _no_xopes, _xopes),
)

#: The shared contenders that run on a GPU, besides the copies.
_TAKEN = ("eager", "transformers", "compiled eager", "definition, compiled")

OURS = SHARED[0]
CONTENDERS = (
    OURS,
    *(
        one
        for one in (*SHARED[1:], *KERNELS)
        if one.name in FLOORS
        or ((one in KERNELS or one.name in _TAKEN) and re.search(OPTIONS.against, one.name))
    ),
)
