"""Check the arguments of a public function and build its calls; :mod:`.run` checks memory and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import activations, gates as gates_
from .._errors import bad_type, bad_value, check_flag, unsupported
from .._rounding import ONCE, codes_of
from ..channels import Channels
from ..positions import PositionsLike
from ..spec import PreparedRotation, Rope
from . import gating, learned, phased, registry, scaled, schema
from .call import Call, Extras, Slots
from .checks import (
    Operands,
    check_outs,
    layout_named,
    prepare,
)
from .gating import Stages as Stages
from .slots import check_slots


def stages_of(act: object, gate: object, count: int = 2) -> Stages | None:
    """Parse ``act=`` and ``gate=`` of a public function; None if both are the identity.

    Args:
        count: the number of tensors; for one tensor, a pair of values is an error.
    """
    if act is None and gate is None:
        return None
    for name, value in (("act", act), ("gate", gate)):
        if count == 1 and isinstance(value, tuple):
            raise bad_type(f"{name} must be a single value for one tensor but got a pair")
    acts, (first, second) = activations.pair(act), gates_.pair(gate)
    if acts == (None, None) and first is None and second is None:
        return None
    return Stages(acts, ([] if first is None else [first], [] if second is None else [second]))


class Request(NamedTuple):
    """The arguments of a public function, named as in :func:`tightrope.functional.rotate_qk`.

    Attributes:
        names: names of q and k in error messages.
        verb: one of :data:`tightrope.ops.call.VERBS`.
        stages: f and P; None if both are the identity.
        outs: the result tensors, for the verb "out".
        slots: where the last result goes, if its ``out`` is a cache.
        wider: whether the tensors may have more channels than the spec; the extra ones are copied.
    """

    names: Sequence[str]
    verb: str
    q: torch.Tensor
    k: torch.Tensor | None
    rope: Rope
    positions: PositionsLike = None
    layout: str = "bhsd"
    inverse: bool = False
    stages: Stages | None = None
    outs: Sequence[torch.Tensor] = ()
    slots: Slots | None = None
    wider: bool = False


def build(request: Request) -> list[Call]:
    """Check all arguments against each other and build the calls.

    Returns:
        One call, or one for each tensor if q and k differ in the kind of f or P, or in their phases.
    """
    layout = layout_named(request.layout)
    check_flag("inverse", request.inverse)
    if request.q is None and isinstance(request.k, torch.Tensor):
        name = "rotate_" if request.verb == "in place" else "rotate"
        gate = "" if request.stages is None else ", with gate=gate.for_keys() if there is a gate"
        raise bad_type(
            f"q must be a tensor but got None; to rotate k alone, call {name}(k, …){gate}"
        )
    xs = schema.present(request.q, request.k)
    names = request.names[: len(xs)]
    operands = Operands(names, xs, layout)
    rotation = prepare(operands, request.rope, request.positions, request.wider)
    call = _call(request, operands, rotation)
    calls = [call] if request.stages is None else _add_stages(call, request.stages, rotation)
    if rotation.phases is not None:
        calls = phased.with_phases(calls, rotation.phases)
    if request.verb == "out":
        check_outs(names, xs, request.outs, cache=request.slots is not None)
        if request.slots is not None:
            check_slots(request.slots, names[-1], xs[-1], request.outs[-1], layout)
            scaled.check_heads(request.slots, xs[-1], layout)
    return calls


def forced_for(x: torch.Tensor) -> str | None:
    """Return the backend that :func:`tightrope.backends.use` forces, or None; refuse one that cannot rotate x."""
    name = registry.forced
    if name is not None:
        reason = registry.BACKENDS[name].why_not(x)
        if reason is not None:
            raise unsupported(f"backend {name!r} cannot run: {reason}", tensor=x)
    return name


def _call(request: Request, operands: Operands, rotation: PreparedRotation) -> Call:
    """Build the call of a rotation without f and P: by phase words, or by the tables of a stack."""
    stack, where, channels = rotation.stack, rotation.where, rotation.channels
    if request.stages is not None and stack is not None:
        raise bad_value(
            f"act and gate must be None with a rotation made for stack {stack.name!r}; normalise or activate "
            "first, then rotate, then multiply by the gate"
        )
    if request.stages is not None and rotation.rounding != ONCE:
        raise bad_value(
            "act and gate must be None with a rotation whose rounding is not 'once' but "
            f"{rotation.rounding!r}"
        )
    rounding, back = codes_of(rotation.rounding)
    direction = schema.INVERSE if request.inverse else schema.FORWARD
    options = rotation_options(
        channels, operands.layout.code, direction, where.add_index, rounding, back
    )
    if stack is None:
        primary, secondary = rotation.angles.words, rotation.angles.turns
        positions, offset, amplitude = rotation.ids, where.offset, rotation.amplitude
    else:
        tokens = request.q.shape[operands.layout.token]
        primary, secondary = rotation.tables(tokens, request.q.dtype)
        positions, offset, amplitude = None, 0, 1.0
        options = options._replace(add_index=True, source=schema.HALF, narrow=False)
    call = Call(
        request.q,
        request.k,
        primary,
        secondary,
        positions,
        offset,
        options,
        amplitude,
        Extras(),
        0.0,  # given, because the compiler would turn the default of a float field into a symbol
        operands.names,
        request.verb,
        request.outs,
        forced_for(request.q),
        request.slots,
    )
    if rotation.inv_freq is not None:
        return learned.with_frequencies(call, rotation.inv_freq)
    return call


def rotation_options(
    channels: Channels, layout: int, direction: int, add_index: bool, rounding: int, back: int
) -> schema.Options:
    """Return the options of a rotation by phase words, without f and P."""
    return schema.Options(
        layout,
        channels.start,
        channels.interleaved,
        direction,
        add_index,
        rounding=rounding,
        back=back,
        narrow=rounding == schema.EACH,
    )


def _add_stages(call: Call, stages: Stages, rotation: PreparedRotation) -> list[Call]:
    """Add f and P to a rotation; return two calls if q and k differ in the kind of f or P."""
    xs, inverse = call.xs(), call.options.direction == schema.INVERSE
    found = gating.lower(stages, call.names, xs, call.layout(), rotation, inverse)
    together = found[0].kind == found[-1].kind
    calls = []
    for which in [range(len(xs))] if together else [(i,) for i in range(len(xs))]:
        code, gate, eps = found[which[0]].kind
        # Lists first: torch 2.11 cannot trace a generator that reads variables of this function.
        some = [found[i] for i in which]
        extras = Extras(
            call.extras.frequencies,
            tuple([one.weight for one in some if one.weight is not None]),
            tuple([one.gate for one in some if one.gate is not None]),
        )
        options = call.options._replace(act=code, gate=gate)
        calls.append(call.only(which)._replace(options=options, extras=extras, eps=eps))
    return calls
