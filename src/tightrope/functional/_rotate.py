"""Rotation of one tensor, or of queries and keys, out of place or in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import torch

from .._errors import bad_type, bad_value, check_type, describe, public
from .._rounding import RoundingLike, rounding_pair
from ..activations import Act, ActLike
from ..gates import Gate
from ..ops.build import Request, Stages, stages_of
from ..ops.call import Slots
from ..ops.run import run_quick
from ..ops.sharded import perform
from ..positions import PositionsLike, as_positions
from ..spec import Rope, RopeSpec, prepared

#: One gate for queries and keys, or one for each.
GateLike: TypeAlias = Gate | tuple[Gate | None, Gate | None] | None

# The type of k: a tensor or None; the function returns the same type.
_K = TypeVar("_K", bound=torch.Tensor | None)

# Names of the tensors in error messages.
_X, _QK = ("x",), ("q", "k")


@public("rotate")
def rotate(
    x: torch.Tensor,
    rope: Rope,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    act: Act = None,
    gate: Gate | None = None,
    inverse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the channel pairs of a tensor by the angles of its positions.

    Args:
        x: float32, float64, bfloat16 or float16, in the given ``layout``. Any strides are read
            without a copy; fastest if the channels of a head are contiguous. A DTensor may be sharded
            along rows, heads or tokens; the other arguments then describe the whole tensor, and nothing
            is communicated: see docs/distributed.md.
        rope: the rotation: a :class:`tightrope.RopeSpec`; or one at positions, made by
            :meth:`tightrope.RopeSpec.at`, which states everything else about the rotation: lengths, the
            bits of another library, learned frequencies, phases.
        positions: with a spec, its positions: None for 0..n-1; an int offset; ids ``(tokens,)`` or ``(rows,
            tokens)`` of int32, int64, float32 or float64; or a :class:`tightrope.positions.Positions`. See
            :meth:`tightrope.RopeSpec.at`.
        layout: "bhsd" (batch, heads, tokens, channels), "bshd", "sbhd", "thd" (packed tokens, heads,
            channels), "bsd" or "sd".
        act: the prologue f, applied to the whole head vector before the rotation: a name from
            :data:`tightrope.activations.ACTS`, such as "silu", or a
            :class:`tightrope.activations.RMSNorm`.
        gate: the epilogue P, a gate of :mod:`tightrope.gates` that multiplies the whole head vector
            after the rotation.
        inverse: undo the rotation and the gate instead; no act, which could not be undone.
        out: the tensor to write to, in the same pass: shape, dtype and device of x, any strides; x itself,
            or no memory shared with it. It gets no gradient. To write to a cache of keys and values, call
            :func:`write_kv`.

    Returns:
        ``out`` if given, else a new tensor of the shape, dtype and (if x is dense) strides of x; for
        a DTensor, one that is placed like it.
        Channels outside the slice do not rotate; without act and gate they are copied.
        Differentiable with respect to x, floating positions, learned frequencies, the angles of phases and
        the tensors of act and gate, to any order.

    Raises:
        TypeError, ValueError, IndexError: invalid arguments; the message names the argument.
        NotImplementedError: the backend that :func:`tightrope.backends.use` forces cannot run this call, or
            rows would need different attention scalings (see :meth:`tightrope.RopeSpec.at`); the message
            gives the reason.

    Source: Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> from tightrope import RopeSpec
    >>> q = torch.randn(2, 8, 16, 64)
    >>> rotate(q, RopeSpec(head_dim=64)).shape
    torch.Size([2, 8, 16, 64])
    """
    verb, outs = ("new", ()) if out is None else ("out", (out,))
    stages = stages_of(act, gate, 1)
    return rotate_with(_X, verb, x, None, rope, positions, layout, inverse, stages, outs)[0]


@public("rotate_")
def rotate_(
    x: torch.Tensor,
    rope: Rope,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    act: Act = None,
    gate: Gate | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate a tensor in place: :func:`rotate` without a new tensor.

    Recommended for attention layers; x may be a slice or a transposed view of a fused projection.
    Gradients are exact: the backward pass of a rotation does not need its input, and an activation
    that needs it saves a copy.

    Args: see :func:`rotate`. No two elements of x may share memory. If autograd records the call, x
    must not be a leaf that requires grad or a view of one, nor come from chunk, split or unbind
    (slice instead). To rotate some entries of a cache, call :func:`rerotate_`.

    Returns:
        x itself.

    >>> from tightrope import RopeSpec
    >>> k = torch.randn(2, 8, 16, 64)
    >>> rotate_(k, RopeSpec(head_dim=64), 100) is k
    True
    """
    rotate_with(_X, "in place", x, None, rope, positions, layout, inverse, stages_of(act, gate, 1))
    return x


@public("rotate_qk")
def rotate_qk(  # noqa: PLR0913  (two tensors)
    q: torch.Tensor,
    k: _K,
    rope: Rope,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    act: ActLike = None,
    gate: GateLike = None,
    inverse: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys in one launch, with their angles computed once.

    Args:
        q, k: like x of :func:`rotate`; the same rows, tokens and dtype; numbers of heads may differ
            (GQA, MQA). k may be None.
        rope, positions, layout, inverse: see :func:`rotate`. With frequencies per head, q and k must have the
            same number of heads.
        act, gate: see :func:`rotate`; or a pair, one for q and one for k. Given as one gate for
            both, xPos is inverted for k. If q and k have different kinds of act or gate, this takes
            two launches.
        out: a pair of tensors for q and k, see :func:`rotate`; None for k if k is None.

    Returns:
        Rotated q and k; None for k if k is None.

    >>> from tightrope import RopeSpec
    >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    >>> q, k = rotate_qk(q, k, RopeSpec(head_dim=64))
    """
    verb, outs = ("new", ()) if out is None else ("out", _outs(out))
    stages = stages_of(act, gate)
    ys = rotate_with(_QK, verb, q, k, rope, positions, layout, inverse, stages, outs)
    return ys[0], None if k is None else ys[1]  # type: ignore[return-value]


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
def rotate_qk_(
    q: torch.Tensor,
    k: _K,
    rope: Rope,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    act: ActLike = None,
    gate: GateLike = None,
    inverse: bool = False,
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
    rotate_with(_QK, "in place", q, k, rope, positions, layout, inverse, stages_of(act, gate))
    return q, k


def rotate_with(  # noqa: PLR0913, PLR0917  (the fields of a request)
    names: Sequence[str],
    verb: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    rope: Rope,
    positions: PositionsLike,
    layout: str,
    inverse: bool,
    stages: Stages | None = None,
    outs: Sequence[torch.Tensor] = (),
    slots: Slots | None = None,
    wider: bool = False,
) -> Sequence[torch.Tensor]:
    """Rotate by the fast path if it can be taken, else by building the call; see :class:`Request`.

    All functions that rotate by a spec call this one, and so do modules that parsed f and P themselves.

    >>> x = torch.ones(3, 8)
    >>> rotate_with(("x",), "new", x, None, RopeSpec(8), None, "sd", False)[0].shape
    torch.Size([3, 8])
    """
    # To name its fields would take a decoded token a microsecond.
    request = names, verb, q, k, rope, positions, layout, inverse, stages, outs, slots, wider
    found = run_quick(request)
    return perform(Request(*request)) if found is None else found


def with_rounding(
    spec: RopeSpec, rounding: RoundingLike, x: torch.Tensor, positions: PositionsLike
) -> tuple[Rope, PositionsLike]:
    """Return a spec and positions for a function that takes ``rounding``: prepared, unless it is the default."""
    if isinstance(rounding, str) and rounding == "once":
        return spec, positions
    where = as_positions(positions, sharded=True)
    return prepared(spec, where, x.device, rounding=rounding_pair(rounding)), None


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
        rounding: see :meth:`tightrope.RopeSpec.at`.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: an odd ``embed_dim``, fewer than two dimensions, or ids of a wrong shape.
        TypeError: an input or ids of an unsupported dtype.

    Source: Su et al., RoFormer (arXiv 2104.09864), equations 15, 16 and 34.

    >>> rotary_pos_embedding(torch.randn(2, 12, 8, 64)).shape
    torch.Size([2, 12, 8, 64])
    """
    check_type("input_", input_)
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
    rope, where = with_rounding(spec, rounding, x, position_ids)
    (y,) = rotate_with(("input_",), "new", x, None, rope, where, layout, False)
    return y.reshape(input_.shape) if len(lead) > 2 else y


_BY_LEAD = "sd", "bsd", "bhsd"


@lru_cache(maxsize=64)
def _whole(width: int, interleaved: bool) -> RopeSpec:
    return RopeSpec(width, interleaved=interleaved)
