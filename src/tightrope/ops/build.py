"""Check the arguments of a public function and build its calls; :mod:`.run` checks memory and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import activations, gates as gates_
from .._errors import bad_type, bad_value, unsupported
from ..activations import Act, RMSNorm, code_of
from ..channels import Channels
from ..gates import Gate
from ..positions import PositionsLike
from ..spec import PreparedRotation, RopeSpec, SeqLen
from ..stacks import Stack
from . import gating, learned, phased, schema
from .call import Call, Extras, Slots
from .checks import (
    Operands,
    RoundingLike,
    check_flag,
    check_outs,
    layout_named,
    prepare,
    rounding_of,
)
from .phased import PhasesLike
from .registry import BACKENDS
from .slots import check_slots


class Stages(NamedTuple):
    """Prologue f and epilogue P of a call, for q and for k.

    Attributes:
        acts: the activation or norm of each; None for the identity.
        gates: the gates of each, any number; their factors multiply.
    """

    acts: tuple[Act, Act]
    gates: tuple[Sequence[Gate], Sequence[Gate]]


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
        outs: the result tensors, for the verb "out".
        stages: f and P; None if both are the identity.
        wider: whether the tensors may have more channels than the spec; the extra ones are copied.
        rounding: None for the rounding of the stack that the rotation was made for, or "once" if
            there is none.
        phases: angles for each token, added to those of the positions: one
            :class:`tightrope.phases.Phases`, or a pair for q and k.
        slots: where the last result goes, if its ``out`` is a cache.
    """

    names: Sequence[str]
    q: torch.Tensor
    k: torch.Tensor | None
    spec: RopeSpec | PreparedRotation
    positions: PositionsLike = None
    layout: str = "bhsd"
    inverse: bool = False
    inv_freq: torch.Tensor | None = None
    seq_len: SeqLen = None
    stages: Stages | None = None
    verb: str = "new"
    outs: Sequence[torch.Tensor] = ()
    backend: str | None = None
    wider: bool = False
    rounding: RoundingLike | None = None
    phases: PhasesLike = None
    slots: Slots | None = None


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
    rotation = prepare(operands, request.spec, request.positions, request.seq_len, request.wider)
    call = _call(request, operands, rotation)
    calls = [call] if request.stages is None else _add_stages(call, request.stages, rotation)
    if request.phases is not None:
        calls = phased.with_phases(calls, request.phases)
    if request.verb == "out":
        check_outs(names, xs, request.outs, cache=request.slots is not None)
        if request.slots is not None:
            check_slots(request.slots, names[-1], xs[-1], request.outs[-1], layout)
    if request.backend is not None:
        check_backend(request.backend, request.q)
    return calls


def check_backend(name: str, x: torch.Tensor) -> None:
    """Refuse a backend that does not exist or cannot rotate this tensor."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise bad_value(f"backend must be one of {', '.join(BACKENDS)} but got {name!r}")
    reason = BACKENDS[name].why_not(x)
    if reason is not None:
        raise unsupported(f"backend {name!r} cannot run: {reason}", tensor=x)


def _call(request: Request, operands: Operands, rotation: PreparedRotation) -> Call:
    """Build the call of a rotation without f and P: by phase words, or by the tables of a stack."""
    stack, where, channels = rotation.stack, rotation.where, rotation.channels
    if stack is not None:
        _check_stack(request, stack)
    given = request.rounding
    if given is None:
        given = "once" if stack is None else stack.rounding
    rounding, back = rounding_of(given)
    if request.stages is not None and (rounding, back) != (schema.ONCE, schema.ONCE):
        raise bad_value(
            f"rounding must be 'once' with an act or a gate but got {request.rounding!r}"
        )
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
        request.backend,
        request.slots,
    )
    if request.inv_freq is not None:
        return learned.with_frequencies(call, request.inv_freq)
    return call


def _check_stack(request: Request, stack: Stack) -> None:
    """Refuse what a rotation by the tables of another library cannot have."""
    apart = "; normalise or activate first, then rotate, then multiply by the gate"
    for name, value, hint in (
        ("act and gate", request.stages, apart),
        ("inv_freq", request.inv_freq, ""),
        ("phases", request.phases, ""),
    ):
        if value is not None:
            rule = f"{name} must be None with a rotation made for stack {stack.name!r}{hint}"
            raise bad_value(rule)


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
    xs, names = call.xs(), call.names
    views = [call.layout().to_bhsd(x) for x in xs]
    kinds: list[tuple[int, int, float]] = []
    weights: list[torch.Tensor | None] = []
    gates = gating.lower(names, views, stages.gates, rotation)
    for name, view, act, (gate, _) in zip(names, views, stages.acts, gates):
        if call.options.direction == schema.INVERSE and act is not None:
            raise bad_value(
                f"inverse must be False with an act, which has no inverse, but act is {act!r}"
            )
        norm = act if isinstance(act, RMSNorm) else None
        weights.append(None if norm is None else norm.factors(name, view, view.shape[1]))
        kinds.append((code_of(act), gate, float(norm.eps) if norm else 0.0))
    together = kinds[0] == kinds[-1]
    calls = []
    for which in [range(len(xs))] if together else [(i,) for i in range(len(xs))]:
        code, gate, eps = kinds[which[0]]
        # Lists first: torch 2.11 cannot trace a generator that reads variables of this function.
        some_weights = [weights[i] for i in which]
        some_gates = [gates[i][1] for i in which]
        extras = Extras(
            call.extras.frequencies,
            tuple([w for w in some_weights if w is not None]),
            tuple([g for g in some_gates if g is not None]),
        )
        options = call.options._replace(act=code, gate=gate)
        calls.append(call.only(which)._replace(options=options, extras=extras, eps=eps))
    return calls
