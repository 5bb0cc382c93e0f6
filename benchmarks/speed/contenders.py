"""The contenders: this library, memory floors, the eager code of model files, and other libraries.

Each contender is made for a case with its own copies of q and k. It consists of a call to time and
the results of one call, which are compared with the definition in float64. Contenders that do not
compute the case's rotation (floors, "copy_", "0..n-1", "rotation") have no results to compare. If a
contender does not apply to a case, its `why_not` returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tightrope import phases
from tightrope.frequencies import Given
from tightrope.functional import apply_rotary_pos_emb, apply_rotary_pos_emb_, rotate_qk, rotate_qk_

from . import factors
from .case import Case
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
    if case.phases is not None:
        increments = factors.increments_of(case)
        if case.phases == "running" or case.work == "training":

            def turned(q: torch.Tensor, k: torch.Tensor) -> QK:
                return rotate_qk(q, k, *angles, phases=_phases(case, increments), **given)

            return functional(turned, case, q, k, [*tensors, increments])
        given["phases"] = _phases(case, increments)
    if case.work != "in place":
        return functional(lambda q, k: new(q, k, *angles, **given), case, q, k, tensors)
    result = q.clone(), k.clone()
    in_place(*result, *angles, **given)
    return Made(lambda: in_place(q, k, *angles, **given), result)


def _phases(case: Case, increments: torch.Tensor) -> phases.Phases:
    return (phases.running if case.phases == "running" else phases.given)(increments)


def _no_plain(case: Case) -> str | None:
    return "the positions are 0..n-1" if case.positions == "0..n-1" else None


def _plain(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Rotate the same tensors at 0..n-1, to show the cost of the case's positions."""
    made = _tightrope(replace(case, positions="0..n-1"), q, k, ids)
    return Made(made.call, None)


def _no_rotation(case: Case) -> str | None:
    usual = factors.is_alone(case) and case.rounding == "once" and case.tables in (None, "cat")
    usual = usual and case.phases is None
    return "the case is the plain rotation" if usual else None


def _rotation(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Rotate without f and P, rounding once, to show the cost of the case's options.

    If the case has tables, they are "cat", or "repeat" for interleaved pairs.
    """
    tables = None if case.tables is None else "repeat" if case.interleaved else "cat"
    plain = replace(case, act=None, gate=None, rounding="once", tables=tables, phases=None)
    made = _tightrope(plain, q, k, ids)
    return Made(made.call, None)


def _no_frequencies(case: Case) -> str | None:
    per_head = case.phases == "given" and case.q_heads == case.k_heads
    per_head = per_head or case.positions == "ids per head"
    return None if per_head else "the case has no given phases, or positions, per head"


def _frequencies(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Rotate by a frequency for each head and pair, to show the cost of phases or positions per head."""
    pairs = (case.rotary_dim or case.head_dim) // 2
    rule = Given.of(torch.rand(case.q_heads, pairs))
    where = None if case.positions == "ids per head" else positions_of(case, ids)
    rope = replace(spec_of(case), scaling=rule).at(where, device=q.device)
    if case.work == "in place":
        return Made(lambda: rotate_qk_(q, k, rope), None)
    return Made(functional(lambda q, k: rotate_qk(q, k, rope), case, q, k).call, None)


def _all_tensors(case: Case) -> list[torch.Tensor]:
    """Return the tensors of f and P, and the angles or increments of phases after them."""
    more = [] if case.phases is None else [factors.increments_of(case)]
    return [*factors.tensors_of(case), *more]


def _no_compiled(case: Case) -> str | None:
    if case.work == "backward":
        return "training cases cover its backward pass"
    return None if case.compiled else "the case does not measure compilation"


def _ours_compiled(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, backend: str | None = None
) -> Made:
    """Compile our function: the operator, or the definition for Inductor to fuse."""
    rope = spec_of(case).at(positions_of(case, ids), device=q.device)
    tensors = _all_tensors(case)

    def rotate(q: torch.Tensor, k: torch.Tensor) -> QK:
        given = factors.arguments(case, tensors)
        if case.phases is not None:
            given["phases"] = _phases(case, tensors[-1])
        return rotate_qk(q, k, rope, backend=backend, **given)

    compiled = torch.compile(between(case, rotate), fullgraph=True)
    return functional(compiled, case, q, k, tensors)


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
    case: Case, ids: torch.Tensor, dtype: torch.dtype, tensors: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor], QK]:
    cos, sin = tables_of(case, ids, dtype)
    turned = _turned_neighbours if case.interleaved else rotate_half
    width = spec_of(case).rotary_dim

    def one(x: torch.Tensor, which: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = factors.before(case, tensors, which, x)
        head = x[..., :width]
        if case.rounding == "wide":
            head = head.float()
        y = (head * cos + turned(head) * sin).to(x.dtype)
        y = y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)
        return factors.after(case, tensors, which, ids, y)

    if case.phases is None:
        return lambda q, k: (one(q, 0, cos, sin), one(k, 1, cos, sin))

    def both(q: torch.Tensor, k: torch.Tensor) -> QK:
        angle = tensors[-1].float()
        angle = angle.cumsum(2) if case.phases == "running" else angle
        angle = angle.repeat_interleave(2, -1) if case.interleaved else torch.cat((angle,) * 2, -1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return one(q, 0, cos, sin), one(k, 1, cos, sin)

    return both


def _eager(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    tensors = _all_tensors(case)
    rotate = between(case, _eager_function(case, ids, q.dtype, tensors))
    return functional(rotate, case, q, k, tensors)


def _compiled(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    tensors = _all_tensors(case)
    rotate = between(case, _eager_function(case, ids, q.dtype, tensors))
    return functional(torch.compile(rotate, fullgraph=True), case, q, k, tensors)


# ---- peers ----------------------------------------------------------------------------------------


def _no_transformers(case: Case) -> str | None:
    if case.interleaved or case.rotary_dim is not None:
        return "its function rotates only whole heads, in the half pairing"
    if case.positions == "ids per head":
        return "its positions are those of all heads"
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


#: The implementations that take turns, this library first, then single passes over the same memory.
CONTENDERS = (
    Contender("tightrope", _always, _tightrope),
    Contender("neg_", _no_neg, _neg),
    Contender("clone", _no_clone, _clone),
    Contender("copy_", _no_copy, _copy),
    Contender("0..n-1", _no_plain, _plain),
    Contender("rotation", _no_rotation, _rotation),
    Contender("inv_freq per head", _no_frequencies, _frequencies),
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
