"""y = a · R(φ) · x in plain torch: differentiable in every mode, traceable, for every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import angles
from ...ops import gradients
from ...ops.autograd import overwrite
from ...ops.checks import shares_memory
from ...ops.layouts import BY_CODE
from ...ops.schema import FORWARD, SOURCES, WORDS, form_of, library, present, scale


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Nothing that the operator takes is beyond its definition."""
    return None


def compose(
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] | None = None,
    eps: float = 0.0,
) -> list[torch.Tensor]:
    """The operator out of ordinary torch functions; arguments as in :mod:`tightrope.ops.schema`.

    Differentiable in q, k, floating positions and tables, backward and forward, to any order.
    """
    what = form_of(form)
    if what.act or what.gate or what.numerics or eps or len(carried or ()) != what.learned:
        raise NotImplementedError("tightrope::rotate: act, gate, numerics, carried are reserved")
    layout = BY_CODE[what.layout]
    views = [layout.to_bhsd(x) for x in present(q, k)]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    at = (positions, offset, what.ramp, views[0].shape[-2])
    if what.source == WORDS:
        learned = carried[0] if carried else None
        c, s = _cos_sin(primary, secondary, *at, dtype, learned)
    elif secondary is None:
        raise RuntimeError("tightrope::rotate: cosines without sines")
    else:
        source = SOURCES[what.source]
        c, s = (angles.look_up(table, source, *at).to(dtype) for table in (primary, secondary))
    if what.direction != FORWARD:
        s = -s
    if amplitude != 1.0:
        factor = scale(what.direction, amplitude)
        c, s = c * factor, s * factor
    start, width = what.start, 2 * c.shape[-1]
    ys = []
    for view in views:
        y = _turn(view.narrow(-1, start, width).to(dtype), c, s, what.interleaved).to(view.dtype)
        rest = view.shape[-1] - start - width
        if start or rest:
            tail = view.narrow(-1, start + width, rest)
            y = torch.cat((view.narrow(-1, 0, start), y, tail), -1)
        ys.append(layout.from_bhsd(y))
    return ys


def _cos_sin(
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    ramp: bool,
    tokens: int,
    dtype: torch.dtype,
    learned: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    phase = angles.phases(words, turns, positions, offset, ramp, tokens)
    cos, sin = angles.cos_sin(phase, dtype)
    # d(cos, sin)/dφ = (-sin, cos): a step of size zero along the circle, with its derivatives.
    step = None
    if turns is not None:
        gone = angles.without_frequency(turns)
        cos, sin = torch.where(gone, torch.nan, cos), torch.where(gone, torch.nan, sin)
    lost = angles.is_lost(positions)
    if positions is not None and lost is not None:
        gone = lost.any(0)[:, None, :, None]
        cos, sin = torch.where(gone, torch.nan, cos), torch.where(gone, torch.nan, sin)
        step = angles.position_angle(words, turns, positions, dtype)
    if learned is not None:
        wide = gradients.sum_dtype(words.device)
        at = angles.real(positions, offset, ramp, tokens, words.device, wide)
        by_frequency = angles.frequency_angle(words, turns, learned, at, dtype)
        step = by_frequency if step is None else step + by_frequency
    if step is None:
        return cos, sin
    step_cos, step_sin = torch.cos(step), torch.sin(step)
    return cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        u, v = x[..., 0::2], x[..., 1::2]
        return torch.stack((u * cos - v * sin, u * sin + v * cos), -1).reshape(x.shape)
    u, v = x.chunk(2, -1)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)


def _rotate(
    q: torch.Tensor, k: torch.Tensor | None, *arguments: Any, **named: Any
) -> list[torch.Tensor]:
    # Outputs have the strides that empty_like gives, as every backend's and the fake kernel's do.
    ys = compose(q, k, *arguments, **named)
    return [torch.empty_like(x).copy_(y) for x, y in zip(present(q, k), ys, strict=True)]


def _rotate_(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any, **named: Any) -> None:
    xs = present(q, k)
    if shares_memory(xs):
        raise RuntimeError("tightrope::rotate_: memory overlaps")
    overwrite(xs, compose(q, k, *arguments, **named))


def _rotate_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    *arguments: Any,
    **named: Any,
) -> None:
    outs = present(out_q, out_k)
    if shares_memory(outs, present(q, k)):
        raise RuntimeError("tightrope::rotate_into: memory overlaps")
    overwrite(outs, compose(q, k, *arguments, **named))


def _angle_gradients(
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    ys, grads = present(y, z), present(grad_y, grad_z)
    at = (words, turns, positions, offset, form_of(form))
    return gradients.by_angles(ys, grads, *at, by_positions, by_frequencies)


def register() -> None:
    """Make this the kernel of every device that has no other."""
    library.impl("rotate", _rotate, "CompositeExplicitAutograd")
    # The vmap under is_grads_batched and vectorised jacobians, which knows no rules of ours.
    library.impl("rotate", compose, "Batched")
    library.impl("rotate_", _rotate_, "CompositeExplicitAutograd")
    library.impl("rotate_into", _rotate_into, "CompositeExplicitAutograd")
    library.impl("angle_gradients", _angle_gradients, "CompositeExplicitAutograd")
    library.impl("angle_gradients", _angle_gradients, "Batched")
