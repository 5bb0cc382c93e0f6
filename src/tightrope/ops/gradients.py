"""The formulas of the gradients, in plain torch, so that they can be differentiated again.

With (u, v) a pair before the rotation, (y, z) after it, and (dy, dz) the gradient of the result:

* by an angle, ``dφ = y·dz − z·dy``, since d(y, z)/dφ = (−z, y); hence by a floating position
  ``dp = Σ ω · (y·dz − z·dy)`` over heads and pairs, and by a frequency ``dω = Σ p · (y·dz − z·dy)``
  over tokens, and rows and heads that share it;
* by tables, ``dcos = u·dy + v·dz`` and ``dsin = u·dz − v·dy``.

The gradient by x is the operator itself with its direction flipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .. import angles
from .layouts import BY_CODE
from .schema import FORWARD, SOURCES, TRANSPOSE, Form, scale


def transposed(form: Form, amplitude: float) -> tuple[int, float]:
    """Form and amplitude of the transpose."""
    direction = TRANSPOSE if form.direction == FORWARD else FORWARD
    return form._replace(direction=direction).pack(), scale(form.direction, amplitude)


def by_angles(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: Form,
    by_positions: bool,
    by_frequencies: bool,
    learned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by positions ``[axes, rows, tokens]`` and by frequencies, shaped as words.

    Args:
        outputs, grads: results of the operator and their gradients.
        words, turns, positions, offset, form: as in the schema.
        by_positions, by_frequencies: which are wanted; the other has no axes.
        learned: the frequencies that words were made of, for whoever differentiates by them again.

    Returns:
        Both in the dtype of :func:`sum_dtype`.
    """
    axes, rows, heads, pairs = words.shape
    wide = sum_dtype(words.device)
    layout = BY_CODE[form.layout]
    some = layout.to_bhsd(outputs[0])
    of_positions = words.new_zeros(
        (axes if by_positions else 0, some.shape[0], some.shape[2]), dtype=wide
    )
    of_frequencies = words.new_zeros(
        (axes if by_frequencies else 0, rows, heads, pairs), dtype=wide
    )
    omega = angles.inv_freq(words, turns, wide) if learned is None else learned.to(wide)
    omega = omega[:, :, :, None]
    where = angles.real(positions, offset, form.ramp, some.shape[2], words.device, wide)
    # Without ids all axes are at the same positions.
    where = where[:, :, None, :, None].expand(axes, -1, -1, -1, -1)
    # One axis at a time keeps the peak at the size of x.
    for output, grad in zip(outputs, grads):
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        y, z = _pairs(output, pairs, form, dtype)
        dy, dz = _pairs(grad, pairs, form, dtype)
        by_angle = (y * dz - z * dy).to(wide)
        if form.direction != FORWARD:
            by_angle = -by_angle
        if by_positions:
            found = [_sum(by_angle * omega[axis], [1, 3]) for axis in range(axes)]
            of_positions = of_positions + torch.stack(found)
        if by_frequencies:
            over = [2, *([0] if rows == 1 else []), *([1] if heads == 1 else [])]
            found = [_sum(by_angle * where[axis], over) for axis in range(axes)]
            of_frequencies = of_frequencies + torch.stack(found).reshape(of_frequencies.shape)
    return of_positions, of_frequencies


def sum_dtype(device: torch.device) -> torch.dtype:
    """The widest floating dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def sum_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum ``[axes, rows, tokens]`` to a shape that broadcasts to it."""
    dims = [dim for dim in (1, 2) if shape[dim] == 1 and x.shape[dim] != 1]
    return _sum(x, dims).reshape(shape) if dims else x


def by_tables(
    xs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    offset: int,
    form: Form,
    amplitude: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by cosine and sine tables, shaped as they are.

    Args:
        xs, grads: what was rotated, and the gradients of the results, None where there is none.
        cos, sin: primary and secondary of the schema, and the rest as there.
    """
    source = SOURCES[form.source]
    pairs = angles.pairs_of(cos, source)
    by_cos = by_sin = None
    for x, grad in _present(xs, grads):
        dtype = _wide(x, cos)
        u, v = _pairs(x, pairs, form, dtype)
        dy, dz = _pairs(grad, pairs, form, dtype)
        one, other = u * dy + v * dz, u * dz - v * dy
        if cos.shape[1] == 1:
            one, other = (g.sum(1, keepdim=True) for g in (one, other))
        by_cos = one if by_cos is None else by_cos + one
        by_sin = other if by_sin is None else by_sin + other
    if by_cos is None or by_sin is None:
        return torch.zeros_like(cos), torch.zeros_like(sin)
    if form.direction != FORWARD:
        by_sin = -by_sin
    if amplitude != 1.0:
        factor = scale(form.direction, amplitude)
        by_cos, by_sin = by_cos * factor, by_sin * factor

    at = (source, positions, offset, form.ramp)
    return angles.put_back(by_cos, cos, *at), angles.put_back(by_sin, sin, *at)


def _present(
    tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    return ((x, g) for x, g in zip(tensors, grads, strict=True) if g is not None)


def _wide(*tensors: torch.Tensor) -> torch.dtype:
    double = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if double else torch.float32


def _pairs(
    x: torch.Tensor, pairs: int, form: Form, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second channels of the pairs, each ``[rows, heads, tokens, pairs]``."""
    x = BY_CODE[form.layout].to_bhsd(x).narrow(-1, form.start, 2 * pairs).to(dtype)
    if form.interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x[..., :pairs], x[..., pairs:]


def _sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """A sum that is the same for any number of threads.

    torch splits one sum among threads only where the result is a single number; two equal results
    keep it from that.
    """
    if all(size == 1 for dim, size in enumerate(x.shape) if dim not in dims):
        return x.expand(2, *x.shape).sum([dim + 1 for dim in dims])[0]
    return x.sum(dims)
