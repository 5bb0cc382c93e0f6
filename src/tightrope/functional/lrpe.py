"""LRPE rotate 1-D: an activation, then a rotation by the caller's θ for each head and pair."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import positions
from .._errors import (
    bad_value,
    check_place,
    check_tensor,
    describe,
    integer,
    is_dtensor,
    public,
)
from .._tracing import broadcasts
from ..activations import ACTS, SOFTMAX, Act
from ..channels import Channels
from ..ops.build import Request, stages_of
from ..ops.checks import check_floating
from ..ops.gradients import value_dtype
from ..ops.sharded import check_gradient, perform
from ..positions import Positions, PositionsLike, as_positions
from ..spec import RopeSpec, prepared, warn_of_rounding

#: Meanings of the dimension of a one-dimensional θ.
THETA_AXES = ("auto", "head", "pair")

_LAYOUTS = {3: "bsd", 4: "bshd"}


@public("lrpe_rotate_1d")
def lrpe_rotate_1d(
    x: torch.Tensor,
    theta: torch.Tensor,
    offset: int | torch.Tensor | Positions = 0,
    act: Act = "none",
    dim: int | None = None,
    *,
    start: int = 0,
    rotary_dim: int | None = None,
    theta_axis: str = "auto",
) -> torch.Tensor:
    """Rotate half pairs of channels by position · θ, after an activation.

    With R = rotary_dim / 2, channel ``start + i`` is paired with channel ``start + R + i``, and pair i
    of head h of token t rotates by ``(t + offset) · θ[h, i]``. The activation applies to all channels
    of a head, rotated or not.

    Args:
        x: float32, float64, bfloat16 or float16 ``(batch, tokens, heads, channels)``, or ``(batch,
            tokens, channels)`` without heads. Any strides. A DTensor may be sharded along all but its
            channels; see docs/distributed.md.
        theta: radians per position, of any floating dtype, on the device of x; may require grad.
            Outside of compiled code, 16 bits raise a warning, once per line.
            ``(heads|1, E)`` or ``(E,)`` with E <= R: pairs from E on do not rotate. ``(heads,)`` or
            ``(heads, 1)``: one θ for all pairs of a head.
        offset: position of the first token: an int, one for each row of the batch ``(batch,)``, or a
            :class:`tightrope.positions.Positions`, for packed sequences for example.
        act: "none" or None, "relu", "sigmoid", "silu", "gelu" (exact), "elu", "relu2", "softplus",
            "exp", "leaky_relu", "tanh", "sin", "cos", "softmax", or an
            :class:`tightrope.activations.RMSNorm`.
        dim: the dimension of softmax: -1 for the channels of a head, 1 for the tokens. None for all
            other activations.
        start: the first channel that rotates.
        rotary_dim: number of channels that rotate; even; all from ``start`` on if None.
        theta_axis: meaning of a one-dimensional θ: "head", "pair", or "auto" for the one that fits.
            If both fit, "auto" means "head" if x has heads, and raises an error for ``(heads,)`` if
            there are as many heads as pairs. For ``(heads, 1)``, "pair" rotates only the first pair.

    Returns:
        A new tensor of the shape and dtype of x. Differentiable with respect to x and theta, to any
        order.

    Raises:
        ValueError: shapes that do not fit, an ambiguous θ, an unknown name or dim; a softmax over the
            tokens with an offset, which would need the tokens before it.
        TypeError: an argument of a wrong type or dtype.

    Source: Qin et al., Linearized Relative Positional Encoding (arXiv 2307.09270), the unitary case;
    rotation: Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> x, theta = torch.randn(2, 5, 4, 16), torch.rand(4, 8)
    >>> lrpe_rotate_1d(x, theta, act="silu").shape
    torch.Size([2, 5, 4, 16])
    """
    over_tokens = _check(x, act, dim, offset)
    spec, where, angles = _arguments(x, theta, offset, start, rotary_dim, theta_axis)
    dtype = x.dtype
    if over_tokens:
        # Compute in a wide dtype and round once, at the end.
        act, x = None, torch.softmax(x.to(value_dtype(x)), 1)
    rope = prepared(spec, as_positions(where, sharded=True), x.device, inv_freq=angles)
    layout, stages = _LAYOUTS[x.dim()], stages_of(act, None, 1)
    (y,) = perform(Request(("x",), "new", x, None, rope, None, layout, stages=stages))
    return y.to(dtype)


def _check(x: torch.Tensor, act: Act, dim: int | None, offset: object) -> bool:
    """Check x, act, dim and offset.

    Returns:
        True for a softmax over the tokens, which the kernels do not compute.
    """
    check_floating("x", x, sharded=True)
    if x.dim() not in _LAYOUTS:
        raise bad_value(
            "x must have shape (batch, tokens, heads, channels) or (batch, tokens, channels)", x=x
        )
    stages = stages_of(act, None, 1)
    if stages is None or stages.acts[0] != ACTS[SOFTMAX]:
        if dim is not None:
            raise bad_value(f"dim must be None for act {describe(act)} but got {describe(dim)}")
        return False
    over = integer("dim", dim) if dim is not None else None
    if over is not None and over < 0:
        over += x.dim()
    if over not in (1, x.dim() - 1):
        raise bad_value(
            "dim must be -1 (the channels of a head) or 1 (the tokens) for act 'softmax' but got "
            f"{dim}",
            x=x,
        )
    if over == x.dim() - 1:
        return False
    if isinstance(offset, (torch.Tensor, Positions)) or offset != 0:
        raise bad_value(
            "offset must be 0 for a softmax over the tokens, which needs all of them in one call, "
            f"but got {describe(offset)}"
        )
    if is_dtensor(x) and any(placement.is_shard(1) for placement in x.placements):  # type: ignore[attr-defined]
        raise bad_value(
            "x must not be sharded along tokens for a softmax over the tokens, which needs all of them; "
            "call x.redistribute",
            x=x,
        )
    return True


def _arguments(
    x: torch.Tensor,
    theta: torch.Tensor,
    offset: int | torch.Tensor | Positions,
    start: int,
    rotary_dim: int | None,
    theta_axis: str,
) -> tuple[RopeSpec, PositionsLike, torch.Tensor]:
    """Return the spec, the positions and the frequencies ``(heads|1, pairs)`` of the rotation."""
    channels = Channels.checked(x.shape[-1], rotary_dim, start, False)
    # Dynamo cannot trace a cache, and needs none.
    make = _spec if torch.compiler.is_compiling() else _cached_spec
    spec = make(channels.head_dim, channels.rotary_dim, channels.start)
    heads = x.shape[2] if x.dim() == 4 else None
    angles = _expand_theta(x, theta, heads, channels.rotary_dim // 2, theta_axis)
    return spec, _positions(x, offset), angles


def _spec(head_dim: int, rotary_dim: int, start: int) -> RopeSpec:
    """Return a spec of these channels. Its frequencies are not used; the base is spelled out because
    Dynamo of torch 2.10 makes a symbol of a default value."""
    return RopeSpec(head_dim, base=10000.0, rotary_dim=rotary_dim, start=start)


_cached_spec = lru_cache(maxsize=64)(_spec)


def _positions(x: torch.Tensor, offset: int | torch.Tensor | Positions) -> PositionsLike:
    if isinstance(offset, Positions):
        if offset.axes != 1:
            raise bad_value(f"offset must have 1 axis but got {offset.axes}", offset=offset.ids)
        return offset
    if not isinstance(offset, torch.Tensor):
        return integer("offset", offset)
    check_tensor("offset", offset, "int32, int64, float32 or float64", sharded=True)
    if offset.shape != (x.shape[0],):
        raise bad_value(
            f"offset must be an int or have shape ({x.shape[0]},), one for each row",
            x=x,
            offset=offset,
        )
    return positions.per_row(offset)


def _expand_theta(
    x: torch.Tensor, theta: torch.Tensor, heads: int | None, pairs: int, theta_axis: str
) -> torch.Tensor:
    """Return θ as float64 ``(heads|1, pairs)``, with 0 for pairs that do not rotate.

    Args:
        heads: number of heads of x; None if x has no heads dimension.
    """
    if theta_axis not in THETA_AXES:
        raise bad_value(
            f"theta_axis must be one of {', '.join(THETA_AXES)} but got {describe(theta_axis)}"
        )
    check_tensor("theta", theta, "a floating tensor", sharded=is_dtensor(x))
    if is_dtensor(x) and not is_dtensor(theta):
        check_gradient("theta", theta, "x")
    check_place("theta", theta, "x is", x.device)
    count = 1 if heads is None else heads
    by_head, by_pair = _meanings(theta.shape, count, pairs)
    if theta_axis == "head":
        by_pair = False
    elif theta_axis == "pair":
        by_head = False
    elif by_head and by_pair:
        if theta.dim() == 1 and heads == pairs != 1:
            raise bad_value(
                f"theta may mean one angle for each of {heads} heads or of {pairs} pairs; pass "
                "theta_axis='head' or theta_axis='pair'",
                x=x,
                theta=theta,
            )
        by_head = heads is not None
    if not by_head and not by_pair:
        raise bad_value(_shape_rule(count, pairs, theta_axis), x=x, theta=theta)
    warn_of_rounding("theta", theta)
    # Widen before expanding: the gradient of a shared number is then one sum in float64.
    wide = theta.to(torch.float64)
    if by_head:
        return wide.reshape(-1, 1).expand(-1, pairs)
    wide = wide if theta.dim() == 2 else wide[None]
    missing = pairs - wide.shape[1]
    return torch.nn.functional.pad(wide, (0, missing)) if missing else wide


def _meanings(shape: torch.Size, heads: int, pairs: int) -> tuple[bool, bool]:
    """Return whether a θ of this shape can hold one angle per head, and one per pair."""
    if len(shape) == 1:
        return shape[0] == heads, shape[0] <= pairs
    if len(shape) == 2:
        return shape == (heads, 1), broadcasts(shape[0], heads) and shape[1] <= pairs
    return False, False


def _shape_rule(heads: int, pairs: int, theta_axis: str) -> str:
    by_head = [f"({heads},)", f"({heads}, 1)"]
    by_pair = [f"({pairs},)", f"({heads}, {pairs})", f"(1, {pairs})"]
    if theta_axis == "head":
        return f"theta must have shape {' or '.join(by_head)} for theta_axis='head'"
    shapes = list(dict.fromkeys(by_pair if theta_axis == "pair" else by_pair + by_head))
    one_of = " or ".join((", ".join(shapes[:-1]), shapes[-1]))
    return f"theta must have shape {one_of}; fewer than {pairs} pairs are accepted too"
