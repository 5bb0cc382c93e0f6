"""Who is measured. Each contender may be absent, and says why.

A contender is made for a case from its own copies of q and k. It gives a call to time, and the rotated
q and k of one call, which the gate compares with the definition in float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tightrope import RopeSpec
from tightrope.functional import rotate_qk, rotate_qk_

from .cases import Case
from .method import Call

Pair = tuple[torch.Tensor, torch.Tensor]


class Made(NamedTuple):
    """A contender ready to be timed.

    Attributes:
        call: what is timed.
        result: rotated q and k of a first call; None for floors, which rotate nothing.
    """

    call: Call
    result: Pair | None


@dataclass(frozen=True)
class Contender:
    """Somebody to measure.

    Attributes:
        name: unique.
        why_not: why it cannot take part in a case; None if it can.
        make: from a case, its q, k and ids to something to time.
    """

    name: str
    why_not: Callable[[Case], str | None]
    make: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Made]


def spec_of(case: Case) -> RopeSpec:
    """The rotation of a case."""
    return RopeSpec(case.head_dim, rotary_dim=case.rotary_dim, interleaved=case.interleaved)


def _always(_: Case) -> None:
    return None


def _training(
    rotate: Callable[[torch.Tensor, torch.Tensor], Pair], q: torch.Tensor, k: torch.Tensor
) -> Made:
    """Forward and backward. The leaves' gradients are handed over and dropped, not accumulated."""
    a, b = q.detach().requires_grad_(), k.detach().requires_grad_()
    grads = torch.randn_like(a), torch.randn_like(b)

    def call() -> None:
        torch.autograd.grad(rotate(a, b), (a, b), grads)

    y, z = rotate(a, b)
    return Made(call, (y.detach(), z.detach()))


def _functional(
    rotate: Callable[[torch.Tensor, torch.Tensor], Pair],
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
) -> Made:
    if case.work == "training":
        return _training(rotate, q, k)

    @torch.no_grad()
    def call() -> None:
        rotate(q, k)

    with torch.no_grad():
        return Made(call, rotate(q, k))


# ---- ours -----------------------------------------------------------------------------------------


def _tightrope(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    rope = spec_of(case).at(ids if case.ids_per_row else None)
    if case.work != "in place":
        return _functional(lambda q, k: rotate_qk(q, k, rope), case, q, k)  # type: ignore[arg-type, return-value]
    with torch.no_grad():
        result = rotate_qk(q, k, rope)

    @torch.no_grad()
    def call() -> None:
        rotate_qk_(q, k, rope)

    return Made(call, result)  # type: ignore[arg-type]


# ---- floors: what memory alone costs --------------------------------------------------------------


def _neg(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    return Made(lambda: (q.neg_(), k.neg_()), None)


def _clone(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    if case.work == "training":
        return Made(lambda: (q.clone(), k.clone(), q.clone(), k.clone()), None)
    return Made(lambda: (q.clone(), k.clone()), None)


def _copy(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    a, b = torch.empty_like(q), torch.empty_like(k)
    return Made(lambda: (a.copy_(q), b.copy_(k)), None)


# ---- eager: what model files do -------------------------------------------------------------------


def _tables(case: Case, ids: torch.Tensor, dtype: torch.dtype) -> Pair:
    omega = spec_of(case).frequencies().inv_freq
    angle = ids[:, None, :, None].double() * omega
    if case.interleaved:
        angle = angle.repeat_interleave(2, -1)
    else:
        angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turned_half(x: torch.Tensor) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def _turned_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _eager_function(
    case: Case, ids: torch.Tensor, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    cos, sin = _tables(case, ids, dtype)
    turned = _turned_neighbours if case.interleaved else _turned_half
    width = spec_of(case).rotary_dim

    def one(x: torch.Tensor) -> torch.Tensor:
        head = x[..., :width]
        y = head * cos + turned(head) * sin
        return y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)

    return lambda q, k: (one(q), one(k))


def _eager(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    return _functional(_eager_function(case, ids, q.dtype), case, q, k)


def _compiled(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    torch._dynamo.reset()
    compiled = torch.compile(_eager_function(case, ids, q.dtype), fullgraph=True)
    return _functional(compiled, case, q, k)


# ---- peers ----------------------------------------------------------------------------------------


def _missing(module: str) -> str | None:
    found = importlib.util.find_spec(module.partition(".")[0])
    return None if found else f"{module.partition('.')[0]} is not installed"


def _no_transformers(case: Case) -> str | None:
    if case.interleaved or case.rotary_dim is not None:
        return "its function rotates halves of the whole head"
    return _missing("transformers")


def _transformers(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, compiled: bool = False
) -> Made:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (table[:, 0] for table in _tables(case, ids, q.dtype))
    rotate = apply_rotary_pos_emb
    if compiled:
        torch._dynamo.reset()
        rotate = torch.compile(rotate, fullgraph=True)
    return _functional(lambda q, k: rotate(q, k, cos, sin), case, q, k)


def _no_rotary_embedding_torch(case: Case) -> str | None:
    if not case.interleaved or case.ids_per_row:
        return "it rotates neighbours, at 0..n-1"
    return _missing("rotary_embedding_torch")


def _rotary_embedding_torch(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor
) -> Made:
    from rotary_embedding_torch import RotaryEmbedding

    rope = RotaryEmbedding(spec_of(case).rotary_dim)
    rope.eval().requires_grad_(False)
    rotate = rope.rotate_queries_or_keys
    return _functional(lambda q, k: (rotate(q), rotate(k)), case, q, k)


CONTENDERS = (
    Contender("tightrope", _always, _tightrope),
    Contender("neg_", lambda case: None if case.work == "in place" else "not in place", _neg),
    Contender("clone", lambda case: "in place" if case.work == "in place" else None, _clone),
    Contender("copy_", lambda case: None if case.work == "out of place" else case.work, _copy),
    Contender("eager", _always, _eager),
    Contender("compiled eager", _always, _compiled),
    Contender("transformers", _no_transformers, _transformers),
    Contender(
        "transformers, compiled",
        _no_transformers,
        lambda case, q, k, ids: _transformers(case, q, k, ids, compiled=True),
    ),
    Contender("rotary-embedding-torch", _no_rotary_embedding_torch, _rotary_embedding_torch),
)
