"""y = a · R(φ) · x in plain torch: differentiable in every mode, traceable, for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import angles
from ...ops.autograd import overwrite
from ...ops.checks import shares_memory
from ...ops.layouts import BY_CODE
from ...ops.schema import FORWARD, TABLES, library, scale


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Nothing that the operator takes is beyond its definition."""
    return None


def compose(
    xs: Sequence[torch.Tensor],
    words: torch.Tensor | None,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    ramp: bool,
    layout: int,
    start: int,
    interleaved: bool,
    direction: int,
    amplitude: float,
    inv_freq: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    tables: int = 0,
    act: int = 0,
    weights: Sequence[torch.Tensor] | None = None,
    eps: float = 0.0,
    gate: int = 0,
    gates: Sequence[torch.Tensor] | None = None,
    numerics: int = 0,
) -> list[torch.Tensor]:
    """The operator out of ordinary torch functions; arguments as in :mod:`tightrope.ops.schema`.

    Differentiable in xs, floating positions and tables, backward and forward, to any order.
    """
    if act or gate or numerics or any(a is not None for a in (inv_freq, weights, gates)):
        raise NotImplementedError("tightrope::rotate: inv_freq, act, gate, numerics are reserved")
    where = BY_CODE[layout]
    views = [where.to_bhsd(x) for x in xs]
    dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    tokens = views[0].shape[-2]
    if cos is not None and sin is not None:
        form = TABLES[tables - 1]
        at = (form, positions, offset, ramp, tokens)
        c, s = (angles.look_up(table, *at).to(dtype) for table in (cos, sin))
    else:
        c, s = _cos_sin(_given(words), turns, positions, offset, ramp, tokens, dtype)
    if direction != FORWARD:
        s = -s
    if amplitude != 1.0:
        factor = scale(direction, amplitude)
        c, s = c * factor, s * factor
    width = 2 * c.shape[-1]
    ys = []
    for view in views:
        y = _turn(view.narrow(-1, start, width).to(dtype), c, s, interleaved).to(view.dtype)
        rest = view.shape[-1] - start - width
        if start or rest:
            tail = view.narrow(-1, start + width, rest)
            y = torch.cat((view.narrow(-1, 0, start), y, tail), -1)
        ys.append(where.from_bhsd(y))
    return ys


def _given(words: torch.Tensor | None) -> torch.Tensor:
    if words is None:
        raise RuntimeError("tightrope::rotate: neither words nor tables were given")
    return words


def _cos_sin(
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    ramp: bool,
    tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    phase = angles.phases(words, turns, positions, offset, ramp, tokens)
    cos, sin = angles.cos_sin(phase, dtype)
    lost = angles.is_lost(positions)
    if positions is None or lost is None:
        return cos, sin
    gone = lost.any(0)[:, None, :, None]
    cos, sin = torch.where(gone, torch.nan, cos), torch.where(gone, torch.nan, sin)
    # d(cos, sin)/dφ = (-sin, cos): a step of size zero along the circle, with its derivative.
    step = angles.position_angle(words, turns, positions, dtype)
    step_cos, step_sin = torch.cos(step), torch.sin(step)
    return cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        u, v = x[..., 0::2], x[..., 1::2]
        return torch.stack((u * cos - v * sin, u * sin + v * cos), -1).reshape(x.shape)
    u, v = x.chunk(2, -1)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)


def _rotate(xs: Sequence[torch.Tensor], *arguments: object, **named: object) -> list[torch.Tensor]:
    # Outputs have the strides that empty_like gives, as every backend's and the fake kernel's do.
    ys = compose(xs, *arguments, **named)  # type: ignore[arg-type]
    return [torch.empty_like(x).copy_(y) for x, y in zip(xs, ys, strict=True)]


def _rotate_(xs: Sequence[torch.Tensor], *arguments: object, **named: object) -> None:
    if shares_memory(xs):
        raise RuntimeError("tightrope::rotate_: memory overlaps")
    overwrite(xs, compose(xs, *arguments, **named))  # type: ignore[arg-type]


def _rotate_into(
    xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], *arguments: object, **named: object
) -> None:
    if shares_memory(outs, xs):
        raise RuntimeError("tightrope::rotate_into: memory overlaps")
    overwrite(outs, compose(xs, *arguments, **named))  # type: ignore[arg-type]


def register() -> None:
    """Make this the kernel of every device that has no other."""
    library.impl("rotate", _rotate, "CompositeExplicitAutograd")
    # The vmap under is_grads_batched and vectorised jacobians, which knows no rules of ours.
    library.impl("rotate", compose, "Batched")
    library.impl("rotate_", _rotate_, "CompositeExplicitAutograd")
    library.impl("rotate_into", _rotate_into, "CompositeExplicitAutograd")
