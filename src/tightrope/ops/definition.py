"""y = P · a · R(φ) · f(x) in plain torch: differentiable in every mode, traceable, for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import activations, angles
from .._tracing import broadcasts
from . import gradients
from .arguments import Call, Carried, carried_of
from .layouts import BY_CODE
from .schema import (
    FORWARD,
    LOG,
    NO_GATE,
    SLOPE,
    SOURCES,
    WORDS,
    Form,
    form_of,
    present,
    scale,
)


def compose(
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> list[torch.Tensor]:
    """The operator out of ordinary torch functions; arguments as in :mod:`tightrope.ops.schema`.

    Differentiable in q, k, floating positions, tables and all that is carried, backward and forward,
    to any order.
    """
    what = form_of(form)
    if what.numerics:
        raise NotImplementedError("tightrope::rotate: numerics is reserved")
    layout = BY_CODE[what.layout]
    views = [layout.to_bhsd(x) for x in present(q, k)]
    parts = carried_of(what, carried)
    _check(what, parts, views, [layout.to_bhsd(x) for x in parts.inputs], eps)
    call = Call(primary, secondary, positions, offset, what, amplitude, parts, eps)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    at = (positions, offset, what.ramp, views[0].shape[-2])
    if what.source == WORDS:
        learned = parts.frequencies[0] if parts.frequencies else None
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
    ys, by_weights = [], []
    for i, view in enumerate(views):
        plain = what.act == activations.NONE and what.gate == NO_GATE
        x = view if plain else view.to(dtype)
        weight = parts.weights[i] if parts.weights else None
        gate = gradients.gate_factor(call, i, views[0].shape[-2], dtype) if parts.gates else None
        if what.direction == FORWARD:
            if what.act != activations.NONE:
                x = activations.apply(what.act, x, weight, eps)
            y = _turn(x, c, s, what, dtype)
            if gate is not None:
                y = y * gate
        else:
            if gate is not None:
                x = x * gate
            y = _turn(x, c, s, what, dtype)
            if what.act != activations.NONE:
                inside = layout.to_bhsd(parts.inputs[i]).to(dtype)
                if weight is not None:
                    by_weights.append(activations.by_weight(inside, y, weight.shape[0], eps))
                y = activations.transpose(what.act, inside, y, weight, eps)
        ys.append(layout.from_bhsd(y.to(view.dtype)))
    return ys + by_weights


def _check(
    form: Form,
    parts: Carried,
    views: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    eps: float,
) -> None:
    """What kernels refuse too: sentences for users are worded before."""
    if form.act >= len(activations.ACTS) or form.gate > SLOPE:
        raise RuntimeError("tightrope::rotate: act and gate must be known")
    if eps and form.act != activations.RMS_NORM:
        raise RuntimeError("tightrope::rotate: eps is of a norm")
    fits = all(len(part) in (0, len(views)) for part in parts[1:])
    for i, view in enumerate(views if fits else ()):
        heads, width = view.shape[1], view.shape[3]
        if parts.weights:
            shape = parts.weights[i].shape
            fits &= len(shape) == 2 and broadcasts(shape[0], heads) and shape[1] == width
        if parts.gates:
            shape = parts.gates[i].shape
            full = view.shape if form.gate == LOG else (heads, width)
            fits &= len(shape) == len(full) and all(map(broadcasts, shape, full))
        if inputs:
            fits &= inputs[i].shape == view.shape
    if not fits:
        raise RuntimeError("tightrope::rotate: carried must fit q and k")


def _turn(
    x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, form: Form, dtype: torch.dtype
) -> torch.Tensor:
    """Rotated channels among those that pass, in the dtype of x."""
    start, width = form.start, 2 * c.shape[-1]
    y = _turn_pairs(x.narrow(-1, start, width).to(dtype), c, s, form.interleaved).to(x.dtype)
    rest = x.shape[-1] - start - width
    if start or rest:
        y = torch.cat((x.narrow(-1, 0, start), y, x.narrow(-1, start + width, rest)), -1)
    return y


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
        by_frequency = angles.frequency_angle(learned, at, dtype)
        step = by_frequency if step is None else step + by_frequency
    if step is None:
        return cos, sin
    step_cos, step_sin = torch.cos(step), torch.sin(step)
    return cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin


def _turn_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    if interleaved:
        u, v = x[..., 0::2], x[..., 1::2]
        return torch.stack((u * cos - v * sin, u * sin + v * cos), -1).reshape(x.shape)
    u, v = x.chunk(2, -1)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)
