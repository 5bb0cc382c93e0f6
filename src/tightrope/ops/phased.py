"""Phases of a rotation: angles for each token that are added to those of the positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import angles
from .._errors import bad_type, bad_value
from .._tracing import broadcasts, have_tangents, is_transformed
from ..channels import by_head
from ..phases import Phases, _definition
from ..spec import PhasesLike
from . import gradients
from .call import Call
from .schema import PHASES, SLOPE


def with_phases(calls: Sequence[Call], given: PhasesLike) -> list[Call]:
    """Return the calls with these phases: one call for each tensor if theirs differ.

    Args:
        calls: calls with phase words: one, or one for q and one for k.
        given: the phases of a prepared rotation, not None.
    """
    both = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if isinstance(given, (tuple, list)) and sum(len(call.xs()) for call in calls) == 1:
        name = calls[0].names[0]
        if name not in ("q", "k"):
            raise bad_type(
                "the rotation of one tensor must have one value of phases but has a pair"
            )
        both = (given["qk".index(name)],) * 2
    if both[0] is not both[1]:
        calls = [call.only([i]) for call in calls for i in range(len(call.xs()))]
    return [call if own is None else _added(call, own) for call, own in zip(calls, both)]


def _added(call: Call, phases: Phases) -> Call:
    """Return the call with phases, which :func:`_check` accepts, in addition to its phase words."""
    _check(call, phases)
    words, positions = call.primary, call.positions
    if call.options.learned or (positions is not None and positions.is_floating_point()):
        found, drift = _sum(call, phases)
        # A Slope still reads the positions, with their tangents.
        if positions is not None and call.options.gate != SLOPE:
            positions = positions.detach()
        words = torch.zeros_like(words[:, :1, :1])
    else:
        found, drift = phases.words(call.q.dtype == torch.float64), phases.drift
    return call._replace(
        primary=found.expand(-1, -1, -1, words.shape[-1]),
        secondary=words,
        positions=positions,
        options=call.options._replace(source=PHASES, learned=drift is not None),
        extras=call.extras._replace(frequencies=() if drift is None else (drift,)),
    )


def _sum(call: Call, phases: Phases) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add the angles of positions to phases in plain torch, which has gradients by both.

    Returns:
        Phases as the rotation of the call reads them, and the zeros through which gradients flow, or None.
    """
    words, turns, positions, options = call.primary, call.secondary, call.positions, call.options
    tokens = call.q.shape[call.layout().token]
    own = angles.phase_at(words, turns, positions, call.offset, options.add_index, tokens)
    given = phases.words(True)
    invalid = angles.is_no_phase(given)
    lost = None if positions is None else angles.is_lost(positions)
    if lost is not None:
        invalid = invalid | by_head(lost.any(0), 1)
    if turns is not None:
        invalid = invalid | angles.without_frequency(turns)
    wide = call.q.dtype == torch.float64
    found = _definition.marked(given + own, invalid, wide)
    dtype = torch.float64 if wide else torch.float32
    steps = [] if phases.drift is None else [phases.drift.to(dtype)]
    if positions is not None and lost is not None and _has_gradient(positions):
        steps.append(angles.position_angle(words, turns, positions, dtype))
    if call.extras.frequencies and _has_gradient(call.extras.frequencies[0]):
        where = gradients.places(call, tokens, words.device)
        steps.append(angles.frequency_angle(call.extras.frequencies[0], where, dtype))
    return found, sum(steps[1:], steps[0]).expand(found.shape) if steps else None


def _has_gradient(x: torch.Tensor) -> bool:
    transformed = is_transformed()
    return x.requires_grad or transformed or have_tangents([x], transformed)


def _check(call: Call, phases: Phases) -> None:
    """Refuse phases that do not fit the tensors of a call."""
    rows, heads, tokens, pairs = phases.shape
    layout, words = call.layout(), call.primary.shape[-1]
    for name, x in zip(call.names, call.xs()):
        own = [1 if dim is None else x.shape[dim] for dim in (layout.row, layout.head)]
        fits = broadcasts(rows, own[0]) and broadcasts(heads, own[1]) and broadcasts(pairs, words)
        if not fits or tokens != x.shape[layout.token]:
            if words == 0:
                hint = "; a spec with rotary_dim=0 rotates no pair: pass scaling=Proportional(0.0) instead"
            else:
                hint = "; give a pair, one for q and one for k" if len(call.names) > 1 else ""
            raise bad_value(
                f"phases must have shape ({own[0]}|1, {own[1]}|1, {x.shape[layout.token]}, "
                f"{words}|1) for {name}, in this order for every layout, but got "
                f"{tuple(phases.shape)}{hint}",
                **{name: x},
            )
    if phases.device != call.q.device:
        raise bad_value(f"phases are on {phases.device} but {call.names[0]} is on {call.q.device}")
