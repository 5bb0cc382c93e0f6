"""y = a · R(φ) · x in plain torch: differentiable in every mode, traceable, for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import angles
from ...ops.checks import may_overlap, may_overlap_itself
from ...ops.layouts import BY_CODE, Layout
from ...ops.schema import FORWARD, INVERSE, library


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Nothing that the operator takes is beyond its definition."""
    return None


def compose(
    xs: Sequence[torch.Tensor],
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    ramp: bool,
    layout: int,
    start: int,
    interleaved: bool,
    direction: int,
    amplitude: float,
    act: int = 0,
    weights: Sequence[torch.Tensor] | None = None,
    eps: float = 0.0,
    gate: int = 0,
    gates: Sequence[torch.Tensor] | None = None,
    numerics: int = 0,
) -> list[torch.Tensor]:
    """The operator out of ordinary torch functions; arguments as in :mod:`tightrope.ops.schema`.

    Differentiable in xs and in floating positions, backward and forward, to any order.
    """
    if act or gate or numerics or weights is not None or gates is not None:
        raise NotImplementedError("tightrope::rotate: act, gate and numerics are reserved")
    return [
        _rotate_one(
            x, words, turns, positions, offset, ramp,
            BY_CODE[layout], start, interleaved, direction, amplitude,
        )
        for x in xs
    ]  # fmt: skip


def _rotate_one(
    x: torch.Tensor,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    ramp: bool,
    layout: Layout,
    start: int,
    interleaved: bool,
    direction: int,
    amplitude: float,
) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    view = layout.to_bhsd(x)
    cos, sin = _cos_sin(words, turns, positions, offset, ramp, view.shape[2], dtype)
    if direction != FORWARD:
        sin = -sin
    if amplitude != 1.0:
        scale = 1.0 / amplitude if direction == INVERSE else amplitude
        cos, sin = cos * scale, sin * scale
    stop = start + 2 * words.shape[3]
    turned = _turn(view[..., start:stop].to(dtype), cos, sin, interleaved).to(x.dtype)
    if stop - start != view.shape[3]:
        turned = torch.cat((view[..., :start], turned, view[..., stop:]), -1)
    return layout.from_bhsd(turned)


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
        return torch.stack((u * cos - v * sin, u * sin + v * cos), -1).flatten(-2)
    u, v = x.chunk(2, -1)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)


def _rotate(xs: Sequence[torch.Tensor], *arguments: object, **named: object) -> list[torch.Tensor]:
    # Outputs have the strides that empty_like gives, as every backend's and the fake kernel's do.
    ys = compose(xs, *arguments, **named)  # type: ignore[arg-type]
    return [torch.empty_like(x).copy_(y) for x, y in zip(xs, ys, strict=True)]


def _rotate_(xs: Sequence[torch.Tensor], *arguments: object, **named: object) -> None:
    if any(map(may_overlap_itself, xs)) or (len(xs) == 2 and may_overlap(xs[0], xs[1])):
        raise RuntimeError("tightrope::rotate_: memory overlaps")
    for x, y in zip(xs, compose(xs, *arguments, **named), strict=True):  # type: ignore[arg-type]
        x.copy_(y)


def register() -> None:
    """Make this the kernel of every device that has no other."""
    library.impl("rotate", _rotate, "CompositeExplicitAutograd")
    library.impl("rotate_", _rotate_, "CompositeExplicitAutograd")
