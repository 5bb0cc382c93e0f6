"""The definition: y = P · a · R(φ) · f(x) in plain torch.

It runs on every device, can be traced, and is differentiable in every mode. All kernels are tested
against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import activations, angles
from .._tracing import broadcasts
from . import gradients
from .call import Call
from .schema import FORWARD, LOG, SLOPE, SOURCES, WORDS, Options, scale


def define(call: Call) -> list[torch.Tensor]:
    """Compute the operator with ordinary torch functions.

    Differentiable to any order, backward and forward, with respect to q, k, floating positions,
    tables and extra tensors.

    Returns:
        The same list as the operator ``rotate``; see :mod:`tightrope.ops.schema`.
    """
    options, parts, layout = call.options, call.extras, call.layout()
    if options.numerics:
        raise NotImplementedError("tightrope::rotate: numerics is reserved")
    views = [layout.to_bhsd(x) for x in call.xs()]
    inputs = [layout.to_bhsd(x) for x in parts.inputs]
    _check(call, views, inputs)
    dtype = torch.float64 if views[0].dtype == torch.float64 else torch.float32
    tokens = views[0].shape[-2]
    if options.source == WORDS:
        c, s = _cos_sin(call, tokens, dtype)
    elif call.secondary is None:
        raise RuntimeError("tightrope::rotate: a table of cosines must come with one of sines")
    else:
        source, positions = SOURCES[options.source], call.positions
        c, s = (
            angles.look_up(table, source, positions, call.offset, options.add_index, tokens).to(
                dtype
            )
            for table in (call.primary, call.secondary)
        )
    if options.direction != FORWARD:
        s = -s
    if call.amplitude != 1.0:
        factor = scale(options.direction, call.amplitude)
        c, s = c * factor, s * factor
    ys, by_weights = [], []
    for i, view in enumerate(views):
        x = view if call.is_plain() else view.to(dtype)
        weight = parts.weights[i] if parts.weights else None
        gate = gradients.gate_factor(call, i, tokens, dtype) if parts.gates else None
        if options.direction == FORWARD:
            if options.act != activations.NONE:
                x = activations.apply(options.act, x, weight, call.eps)
            y = _rotate_slice(x, c, s, options, dtype)
            if gate is not None:
                y = y * gate
        else:
            if gate is not None:
                x = x * gate
            y = _rotate_slice(x, c, s, options, dtype)
            if options.act != activations.NONE:
                inside = inputs[i].to(dtype)
                if weight is not None:
                    by_weights.append(activations.by_weight(inside, y, weight.shape[0], call.eps))
                y = activations.transpose(options.act, inside, y, weight, call.eps)
        ys.append(layout.from_bhsd(y.to(view.dtype)))
    return ys + by_weights


def _check(call: Call, views: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse the input that kernels refuse. Public functions raise readable errors before this."""
    options, parts = call.options, call.extras
    if options.act >= len(activations.ACTS) or options.gate > SLOPE:
        raise RuntimeError(
            "tightrope::rotate: act and gate must be codes of the schema but got "
            f"{options.act} and {options.gate}"
        )
    if call.eps and options.act != activations.RMS_NORM:
        raise RuntimeError("tightrope::rotate: eps must be 0 without a norm")
    fits = all(len(part) in (0, len(views)) for part in parts[1:])
    for i, view in enumerate(views if fits else ()):
        heads, width = view.shape[1], view.shape[3]
        if parts.weights:
            shape = parts.weights[i].shape
            fits &= len(shape) == 2 and broadcasts(shape[0], heads) and shape[1] == width
        if parts.gates:
            shape = parts.gates[i].shape
            full = view.shape if options.gate == LOG else (heads, width)
            fits &= len(shape) == len(full) and all(map(broadcasts, shape, full))
        if inputs:
            fits &= inputs[i].shape == view.shape
    if not fits:
        raise RuntimeError("tightrope::rotate: extras must fit q and k")


def _rotate_slice(
    x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, options: Options, dtype: torch.dtype
) -> torch.Tensor:
    """Rotate the slice of channels and pass the others through, in the dtype of x."""
    start, width = options.start, 2 * c.shape[-1]
    y = _rotate_pairs(x.narrow(-1, start, width).to(dtype), c, s, options.interleaved).to(x.dtype)
    rest = x.shape[-1] - start - width
    if start or rest:
        y = torch.cat((x.narrow(-1, 0, start), y, x.narrow(-1, start + width, rest)), -1)
    return y


def _cos_sin(call: Call, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    words, turns, positions = call.primary, call.secondary, call.positions
    phase = angles.phases(words, turns, positions, call.offset, call.options.add_index, tokens)
    cos, sin = angles.cos_sin(phase, dtype)
    # A further rotation by an angle that is zero but differentiable: d(cos, sin)/dφ = (-sin, cos).
    step = None
    if turns is not None:
        invalid = angles.without_frequency(turns)
        cos, sin = torch.where(invalid, torch.nan, cos), torch.where(invalid, torch.nan, sin)
    lost = angles.is_lost(positions)
    if positions is not None and lost is not None:
        invalid = lost.any(0)[:, None, :, None]
        cos, sin = torch.where(invalid, torch.nan, cos), torch.where(invalid, torch.nan, sin)
        step = angles.position_angle(words, turns, positions, dtype)
    if call.extras.frequencies:
        where = gradients.places(call, tokens, words.device)
        by_frequency = angles.frequency_angle(call.extras.frequencies[0], where, dtype)
        step = by_frequency if step is None else step + by_frequency
    if step is None:
        return cos, sin
    step_cos, step_sin = torch.cos(step), torch.sin(step)
    return cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin


def _rotate_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    if interleaved:
        u, v = x[..., 0::2], x[..., 1::2]
        return torch.stack((u * cos - v * sin, u * sin + v * cos), -1).reshape(x.shape)
    u, v = x.chunk(2, -1)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)
