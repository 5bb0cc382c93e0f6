"""The gradient formulas in plain torch, so that they can be differentiated again.

Let (u, v) be a pair of frequency ω at position p before the rotation, (y, z) the pair after it, and
(dy, dz) the gradient of (y, z). Then the gradient of

* an angle is ``dφ = y·dz − z·dy``, since d(y, z)/dφ = (−z, y); therefore that of a floating-point
  position is ``dp = Σ ω · (y·dz − z·dy)`` over heads and pairs, and that of a frequency is
  ``dω = Σ p · (y·dz − z·dy)`` over tokens, and over the rows and heads that share it;
* the tables is ``dcos = u·dy + v·dz`` and ``dsin = u·dz − v·dy``; in tables with an entry for every
  channel, the cosine and the sine of the first channel get ``u·dy`` and ``−v·dy``, those of the second
  ``v·dz`` and ``u·dz``;
* the logarithm of a gate, which multiplies last, is ``dg = y·dy``, and that of its factor ``y·dy`` for y before it.

The gradient of x is the operator itself with its direction flipped, applied to the gradient of the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from .. import angles
from ..activations import NONE, apply
from ..channels import by_head, join_pairs, split_pairs
from ..phases._definition import value_dtype as value_dtype
from .call import Call
from .layouts import BY_CODE
from .schema import (
    EACH,
    FACTOR,
    FORWARD,
    FULL,
    INVERSE,
    LOG,
    PHASES,
    SLOPE,
    SOURCES,
    Options,
    options_of,
    present,
    scale,
)


def angle_gradients(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``angle_gradients``; see :mod:`tightrope.ops.schema`."""
    call = Call(y, z, words, turns, positions, offset, options_of(options), 1.0)
    return by_angles(call, call.xs(), present(grad_y, grad_z), by_positions, by_frequencies)


def by_angles(
    call: Call,
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of positions, ``[axes, rows, tokens]`` or with heads, and of frequencies, like the phase words.

    Args:
        call: the call to differentiate, with phase words or phases. The result is differentiable with
            respect to its learned frequencies.
        outputs, grads: results of the rotation and their gradients.
        by_positions, by_frequencies: whether to compute each gradient; one that is not computed has
            size 0 in dimension 0.

    Returns:
        Both gradients in the dtype of :func:`sum_dtype`; those of phases as the schema states.
    """
    if call.options.source == PHASES:
        return _by_phases(call, outputs, grads, by_frequencies)
    words, turns, options, layout = call.primary, call.secondary, call.options, call.layout()
    learned = call.extras.frequencies
    axes, rows, heads, pairs = words.shape
    wide = sum_dtype(words.device)
    some = layout.to_bhsd(outputs[0])
    own_heads = () if call.positions is None else call.positions.shape[3:]
    shape = (axes if by_positions else 0, some.shape[0], some.shape[2], *own_heads)
    of_positions = words.new_zeros(shape, dtype=wide)
    of_frequencies = words.new_zeros(
        (axes if by_frequencies else 0, rows, heads, pairs), dtype=wide
    )
    omega = learned[0].to(wide) if learned else angles.inv_freq(words, turns, wide)
    omega = omega[:, :, :, None]
    where = places(call, some.shape[2], words.device)
    # Without ids all axes have the same positions.
    where = by_head(where).expand(axes, -1, -1, -1, -1)
    # One axis at a time limits peak memory to the size of x.
    for output, grad in zip(outputs, grads):
        by_angle = _by_angle(output, grad, pairs, options)
        if by_positions:
            dims = [1, 3] if own_heads in ((), (1,)) else [3]
            found = [_sum(by_angle * omega[axis], dims) for axis in range(axes)]
            if len(dims) == 1:
                found = [one.transpose(1, 2) for one in found]
            of_positions = of_positions + torch.stack(found).reshape(shape)
        if by_frequencies:
            shared = (rows, heads, 1, pairs)
            found = [sum_to(by_angle * where[axis], shared) for axis in range(axes)]
            of_frequencies = of_frequencies + torch.stack(found).reshape(of_frequencies.shape)
    return of_positions, of_frequencies


def _by_phases(
    call: Call,
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of phases, in their shape; the gradient of positions is empty."""
    phases, x = call.primary, call.layout().to_bhsd(outputs[0])
    wide = sum_dtype(phases.device)
    total = phases.new_zeros((phases.shape[0] if wanted else 0, *phases.shape[1:]), dtype=wide)
    for output, grad in zip(outputs, grads) if wanted else ():
        by_angle = _by_angle(output, grad, phases.shape[-1], call.options)
        total = total + sum_to(by_angle, phases.shape)
    return phases.new_zeros((0, x.shape[0], x.shape[2]), dtype=wide), total.to(value_dtype(x))


def _by_angle(
    output: torch.Tensor, grad: torch.Tensor, pairs: int, options: Options
) -> torch.Tensor:
    """Gradient of each angle of one result, ``[rows, heads, tokens, pairs]``, in :func:`sum_dtype`."""
    y, z = _pairs(output, pairs, options, value_dtype(output))
    dy, dz = _pairs(grad, pairs, options, value_dtype(output))
    by_angle = (y * dz - z * dy).to(sum_dtype(output.device))
    return by_angle if options.direction == FORWARD else -by_angle


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def places(call: Call, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the positions of a call, ``[axes, rows|1, tokens|1]`` or with heads, in the widest floating dtype."""
    offset, add_index = call.offset, call.options.add_index
    return angles.real(call.positions, offset, add_index, tokens, device, sum_dtype(device))


def sum_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum a tensor to a shape that broadcasts to its own."""
    dims = [dim for dim, size in enumerate(shape) if size == 1 and x.shape[dim] != 1]
    return _sum(x, dims).reshape(shape) if dims else x


def by_tables(
    call: Call, xs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the cosine and sine tables, in their shapes.

    Args:
        call: the call to differentiate.
        xs, grads: q and k, and the gradient of each result or None.
    """
    options, cos, sin = call.options, call.primary, cast(torch.Tensor, call.secondary)
    source = SOURCES[options.source]
    pairs = angles.pairs_of(cos, source)
    forward = options.direction == FORWARD
    positions, offset, add_index = call.positions, call.offset, options.add_index
    # One sum over all dimensions, as PyTorch sums the gradient of a tensor that was broadcast.
    whole = angles.is_whole(cos, positions, offset, add_index, xs[0].shape[call.layout().token])
    shared = [dim for dim in (0, 1) if cos.shape[dim] == 1 and (whole or dim == 1)]
    sums: list[list[torch.Tensor]] = [[], []]
    for i, (x, grad) in enumerate(zip(xs, grads, strict=True)):
        if grad is None:
            continue
        dtype = value_dtype(x, cos)
        if options.back == EACH:
            dtype = torch.promote_types(x.dtype, cos.dtype)
        x, grad = _stages(call, i, x.to(dtype), grad.to(dtype))
        u, v = _pairs(x, pairs, options, dtype)
        dy, dz = _pairs(grad, pairs, options, dtype)
        if options.source != FULL:
            one, other = u * dy + v * dz, u * dz - v * dy
        else:
            # The transpose reads the sine of the other channel, negated below.
            first, second = (-v * dy, u * dz) if forward else (u * dz, -v * dy)
            one = join_pairs(u * dy, v * dz, options.interleaved)
            other = join_pairs(first, second, options.interleaved)
        if shared:
            one, other = (g.sum(shared, keepdim=True) for g in (one, other))
        sums[0].append(one)
        sums[1].append(other)
    by_cos, by_sin = (sum(own[1:], own[0]) for own in sums)
    if not forward:
        by_sin = -by_sin
    if call.amplitude != 1.0:
        factor = scale(options.direction, call.amplitude)
        by_cos, by_sin = by_cos * factor, by_sin * factor

    return (
        angles.put_back(by_cos, cos, source, positions, offset, add_index),
        angles.put_back(by_sin, sin, source, positions, offset, add_index),
    )


def gate_gradients(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    gate_q: torch.Tensor,
    gate_k: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
) -> list[torch.Tensor]:
    """Implement ``gate_gradients``; see :mod:`tightrope.ops.schema`."""
    call = Call(y, z, None, None, positions, offset, options_of(options), 1.0)
    layout, found = call.layout(), []
    both = present(grad_y, grad_z), present(gate_q, gate_k)
    for output, grad, gate in zip(call.xs(), *both, strict=True):
        dtype = value_dtype(output)
        wide = sum_dtype(output.device)
        each = (layout.to_bhsd(output).to(dtype) * layout.to_bhsd(grad).to(dtype)).to(wide)
        shape = gate.shape
        if call.options.gate == SLOPE:
            where = places(call, each.shape[2], gate.device)
            each = each * by_head(where[0], 1)
            shape = torch.Size((1, shape[0], 1, shape[1]))
        total = sum_to(each, shape).reshape(gate.shape)
        # The fake kernel promises contiguous results, whatever the strides of the outputs.
        found.append(total.to(dtype).contiguous())
    return found


def gate_factor(call: Call, which: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return P, or 1 / P for an inverse call, to broadcast with ``[rows, heads, tokens, channels]``.

    Args:
        call: the call.
        which: 0 for q, 1 for k.
        tokens: the number of tokens.
        dtype: dtype of the result.
    """
    gate: torch.Tensor = call.extras.gates[which]
    sign = -1.0 if call.options.direction == INVERSE else 1.0
    if call.options.gate == FACTOR:
        return gate.to(dtype).reciprocal() if sign < 0 else gate.to(dtype)
    if call.options.gate == LOG:
        return (sign * gate.to(dtype)).exp()
    # The exponent, slope times position, needs more digits than float32 has.
    wide, where = sum_dtype(gate.device), places(call, tokens, gate.device)
    if where.shape[0] != 1:
        raise RuntimeError(
            "tightrope::rotate: positions must have 1 axis for a gate of slopes but got "
            f"{where.shape[0]}"
        )
    return (sign * gate[:, None].to(wide) * by_head(where[0], 1)).exp().to(dtype)


def _stages(
    call: Call, which: int, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the rotation alone, without f and P, and the gradient of its output."""
    parts, layout = call.extras, call.layout()
    if call.options.act != NONE:
        weight = parts.weights[which] if parts.weights else None
        inside = apply(call.options.act, layout.to_bhsd(x), weight, call.eps)
        x = layout.from_bhsd(inside)
    if parts.gates:
        if call.options.direction == FORWARD:
            grad = gated(call, which, grad)
        else:
            x = gated(call, which, x)
    return x, grad


def gated(call: Call, which: int, x: torch.Tensor) -> torch.Tensor:
    """Return x times P, or divided by P for an inverse call, in float32 or float64."""
    layout, dtype = call.layout(), value_dtype(x)
    factor = gate_factor(call, which, x.shape[layout.token], dtype)
    return layout.from_bhsd(layout.to_bhsd(x).to(dtype) * factor)


def _pairs(
    x: torch.Tensor, pairs: int, options: Options, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second channels of the pairs, each ``[rows, heads, tokens, pairs]``."""
    x = BY_CODE[options.layout].to_bhsd(x).narrow(-1, options.start, 2 * pairs).to(dtype)
    return split_pairs(x, options.interleaved)


def _sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Sum with a result that does not depend on the number of threads.

    torch splits a sum among threads only if the result is a single number, so that case is computed
    as two equal sums.
    """
    if all(size == 1 for dim, size in enumerate(x.shape) if dim not in dims):
        return x.expand(2, *x.shape).sum([dim + 1 for dim in dims])[0]
    return x.sum(dims)
