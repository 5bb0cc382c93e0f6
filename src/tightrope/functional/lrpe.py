"""LRPE rotate 1-D: given angles per head and pair, and an activation before they turn."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import positions
from .._errors import bad_type, bad_value, check_dense, check_local, describe, integer, public
from .._tracing import broadcasts
from ..activations import ACTS, SOFTMAX, Act
from ..channels import Channels
from ..ops.build import Request, around_of, build
from ..ops.checks import check_floating
from ..ops.run import run
from ..positions import Positions, PositionsLike
from ..spec import RopeSpec

#: How the one dimension of a θ may be meant.
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
    """Rotate pairs of channels by position · θ, after an activation.

    With R = rotary_dim / 2, channel ``start + i`` is paired with channel ``start + R + i``, and pair i
    of head h turns by ``(t + offset) · θ[h, i]``. The activation acts on all channels of a head, also
    on those that do not turn.

    Args:
        x: float32, float64, bfloat16 or float16 ``(batch, tokens, heads, channels)``, or ``(batch,
            tokens, channels)`` where there are no heads. Any strides.
        theta: radians per position, of any floating dtype, on the device of x; may require grad.
            ``(heads|1, E)`` or ``(E,)`` with E <= R: pairs from E on keep the value that the activation
            gives them. ``(heads,)`` or ``(heads, 1)``: one angle for all pairs of a head.
        offset: position of the first token: an int, one for each row of the batch ``(batch,)``, or a
            :class:`tightrope.positions.Positions`, for sequences that are packed, say.
        act: "none" or None, "relu", "sigmoid", "silu", "gelu" (exact), "elu", "relu2", "softplus",
            "exp", "leaky_relu", "tanh", "sin", "cos", "softmax", or an
            :class:`tightrope.activations.RMSNorm`.
        dim: along what softmax sums: -1 for the channels of a head, 1 for the tokens. None for all
            others.
        start: the first channel that turns.
        rotary_dim: how many channels turn; even; all from ``start`` on if None.
        theta_axis: what the dimension of a θ of one dimension is: "head", "pair", or "auto" for what
            fits. Of what fits both, one number for each head is taken as that; where there are as many
            heads as pairs, it must be said. For ``(heads, 1)``, "pair" turns the first pair alone.

    Returns:
        A new tensor of the shape and dtype of x. Differentiable by x and by theta, to any order.

    Raises:
        ValueError: shapes that do not fit, a θ that could be meant both ways, a name or dim that does
            not exist; a softmax over the tokens with an offset, which would need those before.
        TypeError: what is of a wrong type or dtype.

    Source: Qin et al., Linearized Relative Positional Encoding (arXiv 2307.09270), the unitary case;
    rotation as Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> x, theta = torch.randn(2, 5, 4, 16), torch.rand(4, 8)
    >>> lrpe_rotate_1d(x, theta, act="silu").shape
    torch.Size([2, 5, 4, 16])
    """
    over_tokens = _check(x, act, dim, offset)
    arguments = _arguments(x, theta, offset, start, rotary_dim, theta_axis)
    if not over_tokens:
        return _turned(x, *arguments, act)
    # Rounded once, at the end.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _turned(torch.softmax(x.to(wide), 1), *arguments, None).to(x.dtype)


@public("lrpe_rotate_1d_")
def lrpe_rotate_1d_(
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
    """:func:`lrpe_rotate_1d` in place.

    Args: as of :func:`lrpe_rotate_1d`, x as of :func:`tightrope.functional.rotate_`. A softmax over the
    tokens needs all of them at once and is refused.

    Returns:
        x itself.

    >>> x = torch.randn(2, 5, 4, 16)
    >>> lrpe_rotate_1d_(x, torch.rand(8), offset=100) is x
    True
    """
    if _check(x, act, dim, offset):
        raise bad_value("softmax over the tokens cannot be in place; call lrpe_rotate_1d", x=x)
    spec, where, angles = _arguments(x, theta, offset, start, rotary_dim, theta_axis)
    layout, around = _LAYOUTS[x.dim()], around_of(act, None, 1)
    request = Request(("x",), x, None, spec, where, layout, inv_freq=angles, around=around)
    run(build(request._replace(verb="in place")))
    return x


def _turned(
    x: torch.Tensor, spec: RopeSpec, where: PositionsLike, angles: torch.Tensor, act: Act
) -> torch.Tensor:
    layout, around = _LAYOUTS[x.dim()], around_of(act, None, 1)
    request = Request(("x",), x, None, spec, where, layout, inv_freq=angles, around=around)
    (y,) = run(build(request))
    return y


def _check(x: torch.Tensor, act: Act, dim: int | None, offset: object) -> bool:
    """Check what is not about θ.

    Returns:
        Whether a softmax goes over the tokens, which is no function of single heads.
    """
    check_floating("x", x)
    if x.dim() not in _LAYOUTS:
        raise bad_value(
            "x must have shape (batch, tokens, heads, channels) or (batch, tokens, channels)", x=x
        )
    around = around_of(act, None, 1)
    if around is None or around.acts[0] != ACTS[SOFTMAX]:
        if dim is not None:
            raise bad_value(f"dim must be None for act {describe(act)} but got {describe(dim)}")
        return False
    over = integer("dim", dim) if dim is not None else None
    if over is not None and over < 0:
        over += x.dim()
    if over not in (1, x.dim() - 1):
        raise bad_value(
            "dim must be -1, the channels of a head, or 1, the tokens, for act 'softmax' but got "
            f"{dim}",
            x=x,
        )
    if over == x.dim() - 1:
        return False
    if isinstance(offset, (torch.Tensor, Positions)) or offset != 0:
        raise bad_value(
            "offset must be 0 for a softmax over the tokens, which needs all of them in one row, "
            f"but got {describe(offset)}"
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
    """What is rotated, where, and by which frequencies ``(heads|1, pairs)``."""
    channels = Channels.checked(x.shape[-1], rotary_dim, start, False)
    # The compiler cannot see into a cache, and needs none.
    make = _spec if torch.compiler.is_compiling() else _kept_spec
    spec = make(channels.head_dim, channels.rotary_dim, channels.start)
    heads = x.shape[2] if x.dim() == 4 else None
    angles = _spread(x, theta, heads, channels.rotary_dim // 2, theta_axis)
    return spec, _where(x, offset), angles


def _spec(head_dim: int, rotary_dim: int, start: int) -> RopeSpec:
    """A spec of these channels. Its frequencies are not used, so they are given as a constant: torch
    2.10's Dynamo would make a symbol of a default."""
    return RopeSpec(head_dim, 10000.0, rotary_dim, start)


_kept_spec = lru_cache(maxsize=64)(_spec)


def _where(x: torch.Tensor, offset: int | torch.Tensor | Positions) -> PositionsLike:
    if isinstance(offset, Positions):
        return offset
    if not isinstance(offset, torch.Tensor):
        return integer("offset", offset)
    if offset.dtype not in positions.DTYPES:
        raise bad_type("offset must be int32, int64, float32 or float64", offset=offset)
    if offset.shape != (x.shape[0],):
        raise bad_value(
            f"offset must be an int or have shape ({x.shape[0]},), one for each row",
            x=x,
            offset=offset,
        )
    return positions.per_row(offset)


def _spread(
    x: torch.Tensor, theta: object, heads: int | None, pairs: int, theta_axis: str
) -> torch.Tensor:
    """θ as float64 ``(heads|1, pairs)``, with 0 for pairs that keep their value.

    Args:
        heads: None where x has none.
    """
    if theta_axis not in THETA_AXES:
        raise bad_value(
            f"theta_axis must be one of {', '.join(THETA_AXES)} but got {describe(theta_axis)}"
        )
    if not isinstance(theta, torch.Tensor) or not theta.is_floating_point():
        raise bad_type(f"theta must be a floating tensor but got {describe(theta)}")
    check_dense("theta", theta)
    check_local("theta", theta)
    if theta.device != x.device:
        raise bad_value(f"theta is on {theta.device} but x is on {x.device}")
    count = 1 if heads is None else heads
    by_head, by_pair = _readings(theta.shape, count, pairs)
    if theta_axis == "head":
        by_pair = False
    elif theta_axis == "pair":
        by_head = False
    elif by_head and by_pair:
        if theta.dim() == 1 and heads == pairs != 1:
            raise bad_value(
                f"theta may mean one angle for each of {heads} heads or of {pairs} pairs; say "
                "theta_axis='head' or theta_axis='pair'",
                x=x,
                theta=theta,
            )
        by_head = heads is not None
    if not by_head and not by_pair:
        raise bad_value(_rule(count, pairs, theta_axis), x=x, theta=theta)
    # One sum in float64, of what one number turns, is behind each gradient.
    wide = theta.to(torch.float64)
    if by_head:
        return wide.reshape(-1, 1).expand(-1, pairs)
    wide = wide if theta.dim() == 2 else wide[None]
    return torch.nn.functional.pad(wide, (0, pairs - wide.shape[1]))


def _readings(shape: torch.Size, heads: int, pairs: int) -> tuple[bool, bool]:
    """Whether a θ of that shape may have one angle for each head, and one for each pair."""
    if len(shape) == 1:
        return shape[0] == heads, shape[0] <= pairs
    if len(shape) == 2:
        return shape == (heads, 1), broadcasts(shape[0], heads) and shape[1] <= pairs
    return False, False


def _rule(heads: int, pairs: int, theta_axis: str) -> str:
    by_head = [f"({heads},)", f"({heads}, 1)"]
    by_pair = [f"({pairs},)", f"({heads}, {pairs})", f"(1, {pairs})"]
    if theta_axis == "head":
        return f"theta must have shape {' or '.join(by_head)} for theta_axis='head'"
    shapes = ", ".join(dict.fromkeys(by_pair if theta_axis == "pair" else by_pair + by_head))
    return f"theta must have shape {shapes}, or fewer than {pairs} pairs"
