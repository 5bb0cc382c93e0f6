"""The definition: y = P · a · R(φ) · f(x) in plain torch, where a is the amplitude.

It runs on every device, can be traced, and is differentiable in every mode. All kernels are tested
against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from .. import activations, angles
from .._tracing import broadcasts, exact_factor, lowerings, needs_plain
from ..channels import by_head, join_pairs, split_pairs
from . import gradients
from .call import Call
from .schema import (
    EACH,
    FACTOR,
    FORWARD,
    FULL,
    INVERSE,
    ONCE,
    PHASES,
    SLOPE,
    SOURCES,
    WORDS,
    Options,
    scale,
)

# Rotates a tensor [rows, heads, tokens, channels]; the result has its dtype.
Turn: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def define(call: Call) -> list[torch.Tensor]:
    """Compute the operator with ordinary torch functions.

    The results are differentiable to any order, backward and forward, with respect to q, k,
    floating positions, tables and extra tensors.

    Returns:
        The same list as the operator ``rotate``; see :mod:`tightrope.ops.schema`.
    """
    options, parts, layout = call.options, call.extras, call.layout()
    views = [layout.to_bhsd(x) for x in call.xs()]
    inputs = [layout.to_bhsd(x) for x in parts.inputs]
    _check(call, views, inputs)
    dtype = gradients.value_dtype(views[0])
    tokens = views[0].shape[-2]
    lowering = lowerings[-1] if needs_plain() and lowerings else None
    turn = (lowering or turn_by)(call, tokens, dtype)
    ys, by_weights = [], []
    for i, view in enumerate(views):
        x = view if call.is_plain() else view.to(dtype)
        weight = parts.weights[i] if parts.weights else None
        gate = gradients.gate_factor(call, i, tokens, dtype) if parts.gates else None
        if options.direction == FORWARD:
            if options.act != activations.NONE:
                x = activations.apply(options.act, x, weight, call.eps)
            y = turn(x)
            if gate is not None:
                y = y * gate
        else:
            if gate is not None:
                x = x * gate
            y = turn(x)
            if options.act != activations.NONE:
                inside = inputs[i].to(dtype)
                if weight is not None:
                    by_weights.append(activations.by_weight(inside, y, weight.shape[0], call.eps))
                y = activations.transpose(options.act, inside, y, weight, call.eps)
        ys.append(layout.from_bhsd(y.to(view.dtype)))
    return ys + by_weights


def turn_by(call: Call, tokens: int, dtype: torch.dtype) -> Turn:
    """Return the function that rotates a view ``[rows, heads, tokens, channels]`` of a call.

    Args:
        call: the call.
        tokens: the number of tokens.
        dtype: float32 or float64, of the arithmetic.
    """
    c, s = cos_sin(call, tokens, dtype)
    return partial(
        _rotate_slice, table=_table(c, s, call.options), options=call.options, dtype=dtype
    )


def cos_sin(call: Call, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of a call times its amplitude, ``[rows|1, heads|1, tokens, pairs]``.

    Args:
        call: the call; tables of the source "full" hold channels in place of pairs.
        tokens: the number of tokens.
        dtype: float32 or float64, of the results.
    """
    options = call.options
    if options.source in (WORDS, PHASES):
        c, s = _cos_sin(call, tokens, dtype)
    elif call.secondary is None:
        raise RuntimeError("tightrope::rotate: a table of cosines must come with a table of sines")
    else:
        source, positions = SOURCES[options.source], call.positions
        if positions is not None and positions.dim() == 4:
            raise RuntimeError("tightrope::rotate: positions in a table must have no heads")
        c, s = (
            angles.look_up(table, source, positions, call.offset, options.add_index, tokens).to(
                dtype
            )
            for table in (call.primary, call.secondary)
        )
    if call.amplitude != 1.0:
        factor = exact_factor(scale(options.direction, call.amplitude), c)
        c, s = c * factor, s * factor
    if options.source in (WORDS, PHASES) and options.narrow:
        c, s = (table.to(call.q.dtype).to(dtype) for table in (c, s))
    return c, s


def _check(call: Call, views: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse the input that kernels refuse. Public functions raise readable errors before this."""
    options, parts = call.options, call.extras
    if options.act >= len(activations.ACTS) or options.gate > FACTOR:
        raise RuntimeError(
            "tightrope::rotate: act and gate must be codes of the schema but got "
            f"{options.act} and {options.gate}"
        )
    if options.source >= len(SOURCES) or max(options.rounding, options.back) > EACH:
        raise RuntimeError(
            "tightrope::rotate: source and both roundings must be codes of the schema but got "
            f"{options.source}, {options.rounding} and {options.back}"
        )
    if call.eps and options.act != activations.RMS_NORM:
        raise RuntimeError(f"tightrope::rotate: eps must be 0 without a norm but got {call.eps}")
    fits = all(len(part) in (0, len(views)) for part in parts[1:])
    for i, view in enumerate(views if fits else ()):
        heads, width = view.shape[1], view.shape[3]
        if parts.weights:
            shape = parts.weights[i].shape
            fits &= len(shape) == 2 and broadcasts(shape[0], heads) and shape[1] == width
        if parts.gates:
            shape = parts.gates[i].shape
            full = (heads, width) if options.gate == SLOPE else view.shape
            fits &= len(shape) == len(full) and all(map(broadcasts, shape, full))
        if inputs:
            fits &= inputs[i].shape == view.shape
    if not fits:
        raise RuntimeError("tightrope::rotate: the extra tensors must fit q and k")
    has_full = options.source == FULL
    if (has_full or options.rounding != ONCE) and not call.is_plain():
        raise RuntimeError(
            "tightrope::rotate: an act or a gate needs rounding once, and tables that are not full"
        )
    if has_full and options.direction == INVERSE:
        raise RuntimeError("tightrope::rotate: full tables have no inverse")


# Cosines and sines for the first channels of the pairs (c, s), and for the second ones (c2, s2).
_Table: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _table(c: torch.Tensor, s: torch.Tensor, options: Options) -> _Table:
    """Arrange the cosines and sines of the pairs for the direction of the call."""
    (c, c2), (s, s2) = (c, c), (s, s)
    if options.source == FULL:
        (c, c2), (s, s2) = (split_pairs(t, options.interleaved) for t in (c, s))
    if options.direction != FORWARD:
        s, s2 = -s2, -s
    return c, s, c2, s2


def _rotate_slice(
    x: torch.Tensor, table: _Table, options: Options, dtype: torch.dtype
) -> torch.Tensor:
    """Rotate the slice of channels and copy the others; the result has the dtype of x."""
    start, width = options.start, 2 * table[0].shape[-1]
    y = _rotate_pairs(x.narrow(-1, start, width), table, options, dtype)
    rest = x.shape[-1] - start - width
    if start or rest:
        y = torch.cat((x.narrow(-1, 0, start), y, x.narrow(-1, start + width, rest)), -1)
    return y


def _rotate_pairs(
    x: torch.Tensor, table: _Table, options: Options, dtype: torch.dtype
) -> torch.Tensor:
    """Rotate pairs with the roundings of the call; the result has the dtype of x.

    PyTorch's own derivative of this function rounds like the transposed call. The gradient of a
    conversion from a 16-bit dtype rounds; so if the transposed call rounds each product, every product
    here converts x separately.
    """
    narrow = x.dtype
    if options.back != EACH:
        x = x.to(dtype)
    u, v = split_pairs(x, options.interleaved)

    def product(channel: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        found = channel.to(dtype) * by
        return found.to(narrow) if options.rounding == EACH else found

    c, s, c2, s2 = table
    first = product(u, c) - product(v, s)
    second = product(v, c2) + product(u, s2)
    return join_pairs(first, second, options.interleaved).to(narrow)


def _cos_sin(call: Call, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if call.options.source == PHASES:
        return _cos_sin_of_phases(call, tokens, dtype)
    words, turns, positions = call.primary, call.secondary, call.positions
    phase = angles.phase_at(words, turns, positions, call.offset, call.options.add_index, tokens)
    cos, sin = angles.cos_sin(phase, dtype)
    lost = angles.is_lost(positions)
    if turns is not None:
        invalid = angles.without_frequency(turns)
        cos, sin = torch.where(invalid, torch.nan, cos), torch.where(invalid, torch.nan, sin)
    if lost is not None:
        invalid = by_head(lost.any(0), 1)
        cos, sin = torch.where(invalid, torch.nan, cos), torch.where(invalid, torch.nan, sin)
    if needs_plain():
        return cos, sin  # runtimes compute no derivatives
    # `step` is an angle of zero that has a derivative. Rotating by it too makes cos and sin
    # differentiable: d(cos, sin)/dφ = (-sin, cos).
    step = None
    if positions is not None and lost is not None:
        step = angles.position_angle(words, turns, positions, dtype)
    if call.extras.frequencies:
        where = gradients.places(call, tokens, words.device)
        by_frequency = angles.frequency_angle(call.extras.frequencies[0], where, dtype)
        step = by_frequency if step is None else step + by_frequency
    return (cos, sin) if step is None else _turned(cos, sin, step)


def _cos_sin_of_phases(
    call: Call, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    given, words = call.primary, call.secondary
    if (
        given.dim() != 4
        or given.dtype not in (torch.int32, torch.int64)
        or given.shape[2] != tokens
    ):
        raise RuntimeError(
            "tightrope::rotate: phases must be int32 or int64 [rows|1, heads|1, tokens, pairs]"
        )
    if words is not None and words.shape[-1] != given.shape[-1]:
        raise RuntimeError("tightrope::rotate: phases must have the pairs of the phase words")
    invalid = angles.is_no_phase(given)
    phase = angles.widened(given)
    if words is not None:
        phase = phase + angles.phase_at(
            words, None, call.positions, call.offset, call.options.add_index, tokens
        )
    cos, sin = angles.cos_sin(phase, dtype)
    cos, sin = torch.where(invalid, torch.nan, cos), torch.where(invalid, torch.nan, sin)
    drift = call.extras.frequencies
    return _turned(cos, sin, drift[0].to(dtype)) if drift else (cos, sin)


def _turned(
    cos: torch.Tensor, sin: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines turned by a further angle."""
    step_cos, step_sin = torch.cos(step), torch.sin(step)
    return cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin
