"""Rotation of one tensor, or of queries and keys, out of place or in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar, cast

import torch

from .._errors import bad_type, bad_value, describe, public
from ..activations import Act, ActLike
from ..gates import Gate
from ..ops.build import Request, Stages, stages_of
from ..ops.call import Slots
from ..ops.checks import RoundingLike
from ..ops.phased import PhasesLike
from ..ops.run import run_entries, run_quick
from ..ops.scaled import ScaleLike, run_scaled
from ..ops.sharded import perform
from ..ops.slots import slots_of
from ..phases import Phases
from ..positions import PositionsLike
from ..spec import PreparedRotation, RopeSpec, SeqLen

#: One gate for queries and keys, or one for each.
GateLike: TypeAlias = Gate | tuple[Gate | None, Gate | None] | None

#: Values and their cache.
ValuesLike: TypeAlias = tuple[torch.Tensor, torch.Tensor] | None

# The type of k: a tensor or None; the function returns the same type.
_K = TypeVar("_K", bound=torch.Tensor | None)

# Names of the tensors in error messages.
_X, _QK = ("x",), ("q", "k")


@public("rotate")
def rotate(  # noqa: PLR0913  (one argument for each option)
    x: torch.Tensor,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    phases: Phases | None = None,
    seq_len: SeqLen = None,
    act: Act = None,
    gate: Gate | None = None,
    inverse: bool = False,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    values: ValuesLike = None,
    scale: ScaleLike = None,
    rounding: RoundingLike | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotate the channel pairs of a tensor by the angles of its positions.

    Args:
        x: float32, float64, bfloat16 or float16, in the given ``layout``. Any strides are read
            without a copy; fastest if the channels of a head are contiguous. A DTensor may be sharded
            along rows, heads or tokens; the other arguments then describe the whole tensor, and nothing
            is communicated: see docs/distributed.md.
        spec: the rotation; or one prepared by :meth:`RopeSpec.at`, which includes its positions.
        positions: None for 0..n-1; an int offset; ids ``(tokens,)`` or ``(rows, tokens)`` of int32,
            int64, float32 or float64; or a :class:`tightrope.positions.Positions`. Types and shapes are
            checked. Whether the numbers are the right ones cannot be: an attention mask of integers is
            taken as positions 0 and 1. Pass :func:`tightrope.positions.left_padded` of it.
        layout: "bhsd" (batch, heads, tokens, channels), "bshd", "sbhd", "thd" (packed tokens, heads,
            channels), "bsd" or "sd".
        inv_freq: frequencies that replace the spec's, in radians per position: floating
            ``(pairs,)`` or ``(heads, pairs)``, or for a spec of several axes ``(axes, heads or 1,
            pairs)``; fixed or learned. Each call converts them to phase words on the device; see
            docs/numerics.md. Outside of compiled code, 16-bit frequencies raise a warning, once per line.
        seq_len: length of the sequences, for rules that depend on it; see :meth:`RopeSpec.at`.
        phases: angles for each token, head and pair, added to those of the positions, made by
            :func:`tightrope.phases.given` or :func:`tightrope.phases.running`. To rotate by these
            angles alone, give the spec frequencies of zero:
            ``RopeSpec(64, scaling=tightrope.frequencies.Proportional(0.0))``.
        act: the prologue f, applied to the whole head vector before the rotation: a name from
            :data:`tightrope.activations.ACTS`, such as "silu", or a
            :class:`tightrope.activations.RMSNorm`.
        gate: the epilogue P, a gate of :mod:`tightrope.gates` that multiplies the whole head vector
            after the rotation.
        inverse: undo the rotation and the gate instead; no act, which could not be undone.
        out: the tensor to write to, in the same pass: shape, dtype and device of x, any strides (a
            slice of a key cache, for example); x itself, or no memory shared with it. It gets no gradient.
            With ``slots``, a key cache.
        slots: the entry of the cache ``out`` that each token goes to, int32 or int64 ``(rows, tokens)``,
            or ``(tokens,)`` for one row. The cache is laid out like x, any strides, with blocks in place of
            rows and entries in place of tokens: ``(blocks, heads, entries, channels)`` for "bhsd". For "thd" it
            is ``(slots, heads, channels)`` or ``(blocks, entries, heads, channels)``, for "sd" ``(slots,
            channels)`` or ``(blocks, entries, channels)``. Slot s is entry ``s % entries`` of block ``s //
            entries``; -1 skips the token. Of several tokens with one slot, any may win. A slot outside the cache
            is an IndexError on the CPU, before anything is written (in compiled code a RuntimeError of the
            kernel; with ``backend="reference"`` its token is skipped there); on a GPU its token is skipped.
        values: a pair, values and their cache: the values are copied to the same slots, in the same call. They
            have the layout, rows, tokens and dtype of x, with heads and channels of their own; their cache has
            the blocks and entries of ``out``.
        scale: for an ``out`` of float8_e4m3fn or float8_e5m2, with or without slots: a positive number or a tensor
            of one element that the result is divided by, in float32, before it is limited to the range of the
            format and rounded. Reading multiplies by it. With values, whose cache has the same format, one for
            both or a pair, for keys and values. With ``rounding="once"`` the result is rounded only to float8;
            otherwise first to the dtype of x.
        rounding: where 16-bit and float32 results round, to equal another implementation bit for
            bit; only "once" with an act or a gate. "once", the most exact: fused multiply-adds in
            float32, rounded when stored. "wide": products and their sum, each rounded to float32.
            "each": cosines, sines, products and sums, each rounded to the dtype of x. A tuple is (forward,
            backward). None: "once", or for a rotation made for a stack, where the stack rounds. See
            docs/numerics.md.
        backend: None to choose the fastest; "cpu", "triton" or "reference" to force one.

    Returns:
        ``out`` if given, else a new tensor of the shape, dtype and (if x is dense) strides of x; for
        a DTensor, one that is placed like it.
        Channels outside the slice do not rotate; without act and gate they are copied.
        Differentiable with respect to x, floating positions, inv_freq, the angles of phases and the
        tensors of act and gate, to any order.

    Raises:
        TypeError, ValueError, IndexError: invalid arguments; the message names the argument.
        NotImplementedError: the forced backend cannot run this call, or rows would need different
            attention scalings (see :meth:`RopeSpec.at`); the message gives the reason.

    Source: Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> from tightrope import RopeSpec
    >>> q = torch.randn(2, 8, 16, 64)
    >>> rotate(q, RopeSpec(head_dim=64)).shape
    torch.Size([2, 8, 16, 64])
    """
    verb, outs = ("new", ()) if out is None else ("out", (out,))
    stages = stages_of(act, gate, 1)
    return rotate_with(
        *(_X, verb, x, None, spec, positions, layout, inverse),
        *(stages, rounding, phases, inv_freq, seq_len, outs, backend),
        slots=slots_of(slots, values, out),
        scale=scale,
    )[0]


@public("rotate_")
def rotate_(  # noqa: PLR0913  (one argument for each option)
    x: torch.Tensor,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    phases: Phases | None = None,
    seq_len: SeqLen = None,
    act: Act = None,
    gate: Gate | None = None,
    inverse: bool = False,
    slots: torch.Tensor | None = None,
    rounding: RoundingLike | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotate a tensor in place: :func:`rotate` without a new tensor.

    Recommended for attention layers; x may be a slice or a transposed view of a fused projection.
    Gradients are exact: the backward pass of a rotation does not need its input, and an activation
    that needs it saves a copy.

    Args: see :func:`rotate`. No two elements of x may share memory. If autograd records the call, x
    must not be a leaf that requires grad or a view of one, nor come from chunk, split or unbind
    (slice instead).

    With ``slots``, x is a cache like ``out`` of :func:`rotate`, and only these entries of it rotate: int32 or int64
    ``(rows, tokens)``, or ``(tokens,)`` for one row; the positions have this shape too. -1 skips a token; no entry
    may be named twice (a ValueError on the CPU, in compiled code a RuntimeError). There is no gradient.

    Returns:
        x itself.

    >>> from tightrope import RopeSpec
    >>> k = torch.randn(2, 8, 16, 64)
    >>> rotate_(k, RopeSpec(head_dim=64), 100) is k
    True
    """
    stages = stages_of(act, gate, 1)
    entries = slots_of(slots, None, x)
    if entries is not None:
        request = Request(
            *(_X, x, None, spec, positions, layout, inverse, inv_freq, seq_len, stages),
            backend=backend,
            rounding=rounding,
            phases=phases,
        )
        return run_entries(request, entries)
    rotate_with(
        *(_X, "in place", x, None, spec, positions, layout, inverse),
        *(stages, rounding, phases, inv_freq, seq_len, (), backend),
    )
    return x


@public("rotate_qk")
def rotate_qk(  # noqa: PLR0913  (one argument for each option)
    q: torch.Tensor,
    k: _K,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    phases: PhasesLike = None,
    seq_len: SeqLen = None,
    act: ActLike = None,
    gate: GateLike = None,
    inverse: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    slots: torch.Tensor | None = None,
    values: ValuesLike = None,
    scale: ScaleLike = None,
    rounding: RoundingLike | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys in one launch, with their angles computed once.

    Args:
        q, k: like x of :func:`rotate`; the same rows, tokens and dtype; numbers of heads may differ
            (GQA, MQA). k may be None.
        spec, positions, layout, inv_freq, seq_len, inverse, rounding, backend: see :func:`rotate`. With
            frequencies per head, q and k must have the same number of heads.
        phases: see :func:`rotate`; or a pair, one for q and one for k, which takes two launches.
        act, gate: see :func:`rotate`; or a pair, one for q and one for k. Given as one gate for
            both, xPos is inverted for k. If q and k have different kinds of act or gate, this takes
            two launches.
        out: a pair of tensors for q and k, see :func:`rotate`; None for k if k is None. q may be its own
            ``out``, also with slots.
        slots, values: the entries of a key cache, ``out[1]``, that the keys go to, and values for the same
            entries, see :func:`rotate`. q is rotated for every token, also where the slot is -1.
        scale: see :func:`rotate`; ``out[1]`` is in float8, and ``out[0]`` in the dtype of q.

    Returns:
        Rotated q and k; None for k if k is None.

    >>> from tightrope import RopeSpec
    >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    >>> q, k = rotate_qk(q, k, RopeSpec(head_dim=64))
    """
    verb, outs = ("new", ()) if out is None else ("out", _outs(out))
    stages, to = stages_of(act, gate), slots_of(slots, values, out)
    if scale is not None and k is None:
        raise bad_value("scale must come with k, which it divides; to write q alone, call rotate")
    if to is not None and k is None:
        raise bad_value("slots must come with k, which goes to them; to write q alone, call rotate")
    ys = rotate_with(
        *(_QK, verb, q, k, spec, positions, layout, inverse),
        *(stages, rounding, phases, inv_freq, seq_len, outs, backend),
        slots=to,
        scale=scale,
    )
    return ys[0], cast(_K, None if k is None else ys[1])


def _outs(out: object) -> list[torch.Tensor]:
    """Check ``out=`` and return its tensors, q first."""
    if not isinstance(out, (tuple, list)) or (len(out) and out[0] is None):
        first = isinstance(out, (tuple, list))
        found = "None for q; pass torch.empty_like(q)" if first else describe(out)
        raise bad_type(
            "out must be a pair of tensors for q and k, with None for a k that is None, but got "
            f"{found}"
        )
    return [x for x in out if x is not None]


@public("rotate_qk_")
def rotate_qk_(  # noqa: PLR0913  (one argument for each option)
    q: torch.Tensor,
    k: _K,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    phases: PhasesLike = None,
    seq_len: SeqLen = None,
    act: ActLike = None,
    gate: GateLike = None,
    inverse: bool = False,
    rounding: RoundingLike | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys in place: :func:`rotate_qk` without new tensors.

    Args: see :func:`rotate_qk`. q and k must not overlap in memory, but may be slices of one
    projection. This takes one launch, or usually one for each tensor if autograd records
    the call.

    Returns:
        q and k themselves.

    >>> from tightrope import RopeSpec
    >>> qkv = torch.randn(1, 16, 3 * 8 * 64).unflatten(-1, (24, 64))
    >>> q, k = rotate_qk_(qkv[:, :, :8], qkv[:, :, 8:16], RopeSpec(head_dim=64), layout="bshd")
    """
    stages = stages_of(act, gate)
    rotate_with(
        *(_QK, "in place", q, k, spec, positions, layout, inverse),
        *(stages, rounding, phases, inv_freq, seq_len, (), backend),
    )
    return q, k


def rotate_with(  # noqa: PLR0913, PLR0917  (a tuple of arguments would cost a decoded token time)
    names: Sequence[str],
    verb: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    layout: str,
    inverse: bool,
    stages: Stages | None = None,
    rounding: RoundingLike | None = None,
    phases: PhasesLike = None,
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    outs: Sequence[torch.Tensor] = (),
    backend: str | None = None,
    wider: bool = False,
    slots: Slots | None = None,
    scale: ScaleLike = None,
) -> Sequence[torch.Tensor]:
    """Rotate by the fast path if it can be taken, else by building the call; see :class:`Request`.

    All functions that rotate by a spec call this one, and so do modules that parsed f and P themselves.

    >>> x = torch.ones(3, 8)
    >>> rotate_with(("x",), "new", x, None, RopeSpec(8), None, "sd", False)[0].shape
    torch.Size([3, 8])
    """
    if inv_freq is None and seq_len is None and backend is None and scale is None:
        found = run_quick(
            *(names, verb, spec, positions, q, k, layout, inverse),
            *(stages, rounding, phases, outs, slots),
        )
        if found is not None:
            return found
    request = Request(
        *(names, q, k, spec, positions, layout, inverse, inv_freq, seq_len),
        *(stages, verb, outs, backend, wider, rounding, phases, slots),
    )
    return perform(request) if scale is None else run_scaled(request, scale)


@public("rotary_pos_embedding")
def rotary_pos_embedding(
    input_: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = True,
    *,
    rounding: RoundingLike = "once",
) -> torch.Tensor:
    """Rotary position embedding of the whole last dimension, in interleaved pairs by default, with base 10000.

    Args:
        input_: floating, shape ``(..., seq_len, embed_dim)`` with any leading dimensions and an even
            ``embed_dim``.
        position_ids: shape ``(seq_len,)``, int32, int64, float32 or float64; 0..seq_len-1 if None.
        interleaved: pair channels (0, 1), (2, 3), … if true, and the first half with the second if
            false.
        rounding: see :func:`rotate`.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: an odd ``embed_dim``, fewer than two dimensions, or ids of a wrong shape.
        TypeError: an input or ids of an unsupported dtype.

    Source: Su et al., RoFormer (arXiv 2104.09864), equations 15, 16 and 34.

    >>> rotary_pos_embedding(torch.randn(2, 12, 8, 64)).shape
    torch.Size([2, 12, 8, 64])
    """
    if not isinstance(input_, torch.Tensor):
        raise bad_type(f"input_ must be a tensor but got {describe(input_)}")
    if input_.dim() < 2:
        raise bad_value("input_ must have shape (..., seq_len, embed_dim)", input_=input_)
    *lead, tokens, width = input_.shape
    if width % 2:
        raise bad_value(f"embed_dim must be even but got {width}", input_=input_)
    if position_ids is not None and (
        not isinstance(position_ids, torch.Tensor) or position_ids.shape != (tokens,)
    ):
        raise bad_value(
            f"position_ids must have shape ({tokens},)", position_ids=position_ids, input_=input_
        )
    # Dynamo would warn of a cache.
    is_cached = type(interleaved) is bool and not torch.compiler.is_compiling()
    spec = (_whole if is_cached else RopeSpec)(width, interleaved=interleaved)
    # All leading dimensions share the positions, so any of them can act as rows and heads.
    layout = _BY_LEAD[min(len(lead), 2)]
    x = input_.flatten(0, len(lead) - 2) if len(lead) > 2 else input_
    (y,) = rotate_with(
        ("input_",), "new", x, None, spec, position_ids, layout, False, rounding=rounding
    )
    return y.reshape(input_.shape) if len(lead) > 2 else y


_BY_LEAD = "sd", "bsd", "bhsd"


@lru_cache(maxsize=64)
def _whole(width: int, interleaved: bool) -> RopeSpec:
    return RopeSpec(width, interleaved=interleaved)
