"""The contenders: this library, memory floors, the eager code of model files, and other libraries.

Each contender is made for a case with its own copies of q and k. It consists of a call to time and
the results of one call, which are compared with the definition in float64. Contenders that do not
compute the case's rotation (floors, "copy_", "0..n-1", "rotation") have no results to compare. If a
contender does not apply to a case, its `why_not` returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ... import phases
from ...functional import apply_rotary_pos_emb, apply_rotary_pos_emb_, rotate_qk, rotate_qk_
from . import factors
from .case import PHASES, Case
from .contender import (
    QK,
    Contender,
    Made,
    between,
    functional,
    missing,
    positions_of,
    spec_of,
    tables_of,
)
from .runtimes import jax_jit, no_jax, no_onnxruntime, onnxruntime


def _always(_: Case) -> None:
    return None


# ---- ours -----------------------------------------------------------------------------------------


def _tightrope(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    if case.neighbours:
        return _ours_compiled(case, q, k, ids)
    tensors = factors.tensors_of(case)
    given: dict[str, Any] = factors.arguments(case, tensors) | {"rounding": case.rounding}
    angles: tuple[Any, ...] = (spec_of(case).at(positions_of(case, ids), device=q.device),)
    new: Callable[..., QK] = rotate_qk
    in_place: Callable[..., Any] = rotate_qk_
    if case.tables is not None:
        # Tables without a heads dimension, as transformers passes them.
        angles = tuple(table[:, 0] for table in tables_of(case, ids, q.dtype))
        given |= {"tables": case.tables, "interleaved": case.interleaved}
        new, in_place = apply_rotary_pos_emb, apply_rotary_pos_emb_
    if case.work == "backward":
        # The backward pass of a rotation is the rotation of the gradients by the opposite angles.
        given["inverse"] = True
    if case.positions in PHASES:
        make, leaves = _phases(case, ids)
        new, in_place = _with(make, new), _with(make, in_place)
        tensors += leaves
    if case.work != "in place":
        return functional(lambda q, k: new(q, k, *angles, **given), case, q, k, tensors)
    result = q.clone(), k.clone()
    in_place(*result, *angles, **given)
    return Made(lambda: in_place(q, k, *angles, **given), result)


def _phases(
    case: Case, ids: torch.Tensor
) -> tuple[Callable[[], phases.Phases | None], list[torch.Tensor]]:
    """Return a function that makes the phases of a case, if any, and the angles that it reads.

    Given angles become phases once, except in training.
    """
    if case.positions not in PHASES:
        return lambda: None, []
    leaf = ids.mT.detach()
    if case.positions == "running":
        return lambda: phases.running(leaf), [leaf]
    if case.work == "training":
        return lambda: phases.given(leaf), [leaf]
    made = phases.given(leaf)
    return lambda: made, []


def _with(make: Callable[[], Any], rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rotation by phases that are made in each call."""
    return lambda *xs, **named: rotate(*xs, phases=make(), **named)


def _no_plain(case: Case) -> str | None:
    return "the positions are 0..n-1" if case.positions == "0..n-1" else None


def _plain(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Rotate the same tensors at 0..n-1, to show the cost of the case's positions."""
    made = _tightrope(replace(case, positions="0..n-1"), q, k, ids)
    return Made(made.call, None)


def _no_rotation(case: Case) -> str | None:
    usual = factors.is_alone(case) and case.rounding == "once" and case.tables in (None, "cat")
    return "the case is the plain rotation" if usual else None


def _rotation(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Rotate without f and P, rounding once, to show the cost of the case's options.

    If the case has tables, they are "cat", or "repeat" for interleaved pairs.
    """
    tables = None if case.tables is None else "repeat" if case.interleaved else "cat"
    plain = replace(case, act=None, gate=None, rounding="once", tables=tables)
    made = _tightrope(plain, q, k, ids)
    return Made(made.call, None)


def _no_compiled(case: Case) -> str | None:
    if case.work == "backward":
        return "training cases cover its backward pass"
    return None if case.compiled else "the case does not measure compilation"


def _ours_compiled(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, backend: str | None = None
) -> Made:
    """Compile our function: the operator, or the definition for Inductor to fuse."""
    rope = spec_of(case).at(positions_of(case, ids), device=q.device)
    tensors = factors.tensors_of(case)
    make, leaves = _phases(case, ids)

    def rotate(q: torch.Tensor, k: torch.Tensor) -> QK:
        f_and_p = factors.arguments(case, tensors)
        return rotate_qk(q, k, rope, backend=backend, phases=make(), **f_and_p)

    compiled = torch.compile(between(case, rotate), fullgraph=True)
    return functional(compiled, case, q, k, [*tensors, *leaves])


# ---- floors: memory traffic alone -----------------------------------------------------------------


def _no_neg(case: Case) -> str | None:
    return None if case.work == "in place" else "it is measured only in place"


def _neg(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    return Made(lambda: (q.neg_(), k.neg_()), None)


def _no_clone(case: Case) -> str | None:
    return "it is not measured in place" if case.work == "in place" else None


def _clone(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    if case.work == "training":
        return Made(lambda: (q.clone(), k.clone(), q.clone(), k.clone()), None)
    return Made(lambda: (q.clone(), k.clone()), None)


def _no_copy(case: Case) -> str | None:
    return None if case.work == "out of place" else "it is measured only out of place"


def _copy(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    a, b = torch.empty_like(q), torch.empty_like(k)
    return Made(lambda: (a.copy_(q), b.copy_(k)), None)


# ---- eager: the code of model files ---------------------------------------------------------------


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return the partner of each channel: (−x₂, x₁) for halves x₁ and x₂."""
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def _turned_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _no_eager(case: Case) -> str | None:
    if case.work == "backward":
        return "training cases cover its backward pass"
    known = case.act in (None, "rms_norm", *factors.FUNCTIONS)
    return None if known else f"eager code has no {case.act} before a rotation"


def _eager_function(
    case: Case, ids: torch.Tensor, dtype: torch.dtype, tensors: list[torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor], QK]:
    """Return the rotation; if it makes its tables from ids in each call, add these to `tensors`."""
    leaf = ids.detach()
    turned = _turned_neighbours if case.interleaved else rotate_half
    width = spec_of(case).rotary_dim
    running = case.positions == "running"
    if running or (case.positions in PHASES and case.work == "training"):
        tensors.append(leaf)

        def tables() -> QK:
            angles = leaf.mT.cumsum(2).mT if running else leaf
            return tables_of(case, angles, dtype)

    else:
        both = tables_of(case, leaf, dtype)

        def tables() -> QK:
            return both

    def one(x: torch.Tensor, which: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = factors.before(case, tensors, which, x)
        head = x[..., :width]
        if case.rounding == "wide":
            head = head.float()
        y = (head * cos + turned(head) * sin).to(x.dtype)
        y = y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)
        return factors.after(case, tensors, which, ids, y)

    def rotate(q: torch.Tensor, k: torch.Tensor) -> QK:
        cos, sin = tables()
        return one(q, 0, cos, sin), one(k, 1, cos, sin)

    return rotate


def _eager(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    tensors = factors.tensors_of(case)
    rotate = between(case, _eager_function(case, ids, q.dtype, tensors))
    return functional(rotate, case, q, k, tensors)


def _compiled(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    tensors = factors.tensors_of(case)
    rotate = between(case, _eager_function(case, ids, q.dtype, tensors))
    return functional(torch.compile(rotate, fullgraph=True), case, q, k, tensors)


# ---- peers ----------------------------------------------------------------------------------------


def _no_transformers(case: Case) -> str | None:
    if case.interleaved or case.rotary_dim is not None:
        return "its function rotates only whole heads, in the half pairing"
    return factors.alone(case) or missing("transformers")


def _transformers(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, compiled: bool = False
) -> Made:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (table[:, 0] for table in tables_of(case, ids, q.dtype))
    rotate = apply_rotary_pos_emb
    if compiled:
        rotate = torch.compile(rotate, fullgraph=True)
    return functional(lambda q, k: rotate(q, k, cos, sin), case, q, k)


def _no_rotary_embedding_torch(case: Case) -> str | None:
    if not case.interleaved or case.positions != "0..n-1":
        return "it rotates only interleaved pairs at 0..n-1"
    return factors.alone(case) or missing("rotary_embedding_torch")


def _rotary_embedding_torch(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor
) -> Made:
    from rotary_embedding_torch import RotaryEmbedding

    rope = RotaryEmbedding(spec_of(case).rotary_dim).to(q.device)
    rope.eval().requires_grad_(False)
    rotate = rope.rotate_queries_or_keys
    return functional(lambda q, k: (rotate(q), rotate(k)), case, q, k)


CONTENDERS = (
    Contender("tightrope", _always, _tightrope),
    Contender("neg_", _no_neg, _neg),
    Contender("clone", _no_clone, _clone),
    Contender("copy_", _no_copy, _copy),
    Contender("0..n-1", _no_plain, _plain),
    Contender("rotation", _no_rotation, _rotation),
    Contender("tightrope, compiled", _no_compiled, _ours_compiled),
    Contender(
        "definition, compiled",
        _no_compiled,
        lambda case, q, k, ids: _ours_compiled(case, q, k, ids, backend="reference"),
    ),
    Contender("eager", _no_eager, _eager),
    Contender("compiled eager", _no_eager, _compiled),
    Contender("transformers", _no_transformers, _transformers),
    Contender(
        "transformers, compiled",
        _no_transformers,
        lambda case, q, k, ids: _transformers(case, q, k, ids, compiled=True),
    ),
    Contender("rotary-embedding-torch", _no_rotary_embedding_torch, _rotary_embedding_torch),
    Contender("onnxruntime", no_onnxruntime, onnxruntime, own_threads=True),
    Contender("jax jit", no_jax, jax_jit, own_threads=True),
)
