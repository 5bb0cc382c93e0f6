"""The operator under autograd: autograd functions for eager code and transforms, and the gradient
formulas registered with the dispatcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch

from .._tracing import is_transformed
from ..activations import NONE
from . import gradients, schema
from .call import Call, pack, tensors_of, transposed, unpack
from .direct import launch
from .route import is_differentiated, is_plain_eager
from .schema import (
    FACTOR,
    FORWARD,
    IN_PLACE,
    LOG,
    NEW,
    NO_GATE,
    OUT,
    TRANSPOSE,
    Packed,
    library,
    pair,
    present,
)

#: A call without its tensors: a function that takes them and returns the call. An autograd function
#: accepts it as an argument; the fields of a call would be arguments of their own under transforms.
Template: TypeAlias = Callable[[Sequence[Any]], Call]


def template_of(call: Call) -> Template:
    """Return the template of a call, for new tensors, as backward calls always make."""
    empty = call.with_tensors([None] * len(call.tensors()))
    return empty._replace(verb="new", outs=()).with_tensors


class OutOfPlace(torch.autograd.Function):
    """The operator with results in new tensors; takes a template and the tensors of a call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(template: Template, *tensors: Any) -> Any:
        call = template(tensors)
        packed = pack(call)
        if is_transformed():
            return tuple(NEW.for_(packed)(call.q, call.k, *packed))
        # The operator's own gradient formula would only cost time here.
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(NEW.for_(packed)(call.q, call.k, *packed))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        template, *tensors = inputs
        # Under vmap requires_grad of a tensor is unreliable, but needs_input_grad is not.
        needs = ctx.needs_input_grad[1:]
        save(ctx, template(tensors), template(needs), output)
        if not any(needs[2:]):
            idle = [y for y, needed in zip(output, needs) if not needed]
            ctx.mark_non_differentiable(*idle)
        # The gradient of an output that the loss does not use is then None instead of zeros.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, *gradients_of(ctx, grads, ctx.needs_input_grad[1:3]).tensors())


# Torch reads the signature in each call, which takes a fifth of its time unless it is written down.
OutOfPlace.forward.__signature__ = inspect.signature(OutOfPlace.forward)  # type: ignore[attr-defined]


class Rotation(torch.autograd.Function):
    """A rotation into new tensors, in plain eager code, of which only q and k are differentiated.

    It is linear, so the gradient is the transposed rotation of the gradients: no call needs to be built.
    """

    @staticmethod
    def forward(ctx: Any, packed: Packed, q: torch.Tensor, k: torch.Tensor | None) -> Any:
        primary, secondary, positions, *ctx.rest = packed
        ctx.save_for_backward(primary, secondary, positions)
        ys = tuple(launch(NEW, q, k, packed))
        ctx.mark_non_differentiable(*[y for y, x in zip(ys, present(q, k)) if not x.requires_grad])
        ctx.set_materialize_grads(False)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        from .run import run, run_packed  # here, because run imports this module

        there = [grad for grad in grads if grad is not None]
        found: list[Any] = [None, None]
        if there:
            offset, options, amplitude = ctx.rest
            back = *ctx.saved_tensors, offset, *transposed(options, amplitude)
            q, k = pair(there)
            plain = is_plain_eager() and all(type(grad) is torch.Tensor for grad in there)
            turned = run_packed(q, k, back) if plain else run([unpack(q, k, *back)])
            rest = iter(turned)
            found[: len(grads)] = [None if grad is None else next(rest) for grad in grads]
        return (None, *found)


class InPlace(torch.autograd.Function):
    """The operator in place on one tensor x; q of the call is None, or with f a copy of x."""

    @staticmethod
    def forward(ctx: Any, template: Template, x: torch.Tensor, *tensors: Any) -> torch.Tensor:
        call = template(tensors)
        packed = pack(call)
        with torch._C._AutoDispatchBelowAutograd():
            IN_PLACE.for_(packed)(x, None, *packed)
        ctx.mark_dirty(x)
        save(ctx, call, template(ctx.needs_input_grad[2:]), ())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        found = gradients_of(ctx, [grad], [ctx.needs_input_grad[1], False])
        # Returned for x only: a gradient of its copy as well would count twice.
        return (None, found.q, *found._replace(q=None).tensors())


def save(
    ctx: Any,
    call: Call,
    needs: Call,
    outputs: Sequence[torch.Tensor],
) -> None:
    """Save the tensors that the backward pass reads; q, k and the results only if a gradient needs them.

    Args:
        needs: the call with a bool in place of each tensor: whether that tensor needs a gradient.
    """
    options = call.options
    angles, tables, gates = _needed(needs)
    forward = options.direction == FORWARD
    # The results contain the gate, so the backward pass rotates q and k again, without it.
    factors = gates and options.gate == FACTOR
    again = forward and (factors or (angles and options.gate != NO_GATE))
    from_outputs = (angles and not again) or (gates and forward and not factors)
    from_inputs = options.act != NONE or tables or again or (gates and not forward)
    if not from_inputs:
        call = call._replace(q=None, k=None)
    tensors = call.tensors()
    ctx.needs, ctx.template, ctx.count = needs, template_of(call), len(tensors)
    ctx.save_for_backward(*tensors, *(outputs if from_outputs else ()))


def _needed(needs: Call) -> tuple[bool, bool, bool]:
    """Return whether gradients of the angles, of tables and of gates are needed; see :func:`save`."""
    of = needs.extras
    angles = needs.positions or any(of.frequencies)
    return angles, needs.primary or needs.secondary, any(of.gates)


def gradients_of(
    ctx: Any,
    grads: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> Call:
    """Compute the gradient of each tensor of a call; return the call with gradients in place of tensors.

    Args:
        grads: gradient of each result.
        needed: whether q and k need a gradient.
    """
    found: Call = ctx.template([None] * ctx.count)
    if all(grad is None for grad in grads):
        return found
    # Read once: checkpointing allows no second read.
    saved = ctx.saved_tensors
    call: Call = ctx.template(saved[: ctx.count])
    inputs, outputs = call.xs() if call.q is not None else [], saved[ctx.count :]
    options, parts, needs = call.options, call.extras, ctx.needs
    by_angles, by_tables, by_gates = _needed(needs)
    if options.direction == TRANSPOSE and not call.is_plain():
        raise NotImplementedError(
            "[rotate] the first gradient must be computed with create_graph=True for a second one "
            "through an act or a gate."
        )
    # An inverse call divides x by P, so the gradient of its gate is computed from that of x.
    divides = by_gates and options.direction != FORWARD
    which = [
        i
        for i, grad in enumerate(grads)
        if grad is not None
        and (needed[i] or divides or (parts.weights and needs.extras.weights[i]))
    ]
    by_x: list[torch.Tensor | None] = [None, None]
    by_weight, extras = [*found.extras.weights], found.extras
    if which:
        there = [cast(torch.Tensor, grads[i]) for i in which]
        some = call._replace(extras=parts.of(which)).on(there)
        kept = [inputs[i] for i in which] if options.act != NONE else ()
        # A rotation alone is linear, so its gradient is differentiable by the same rule.
        turned = _rotated(some.transposed(kept), is_differentiated() and not call.is_plain())
        for i, by in zip(which, turned):
            by_x[i] = by
        for i, by in zip(which, turned[len(which) :]):
            by_weight[i] = by.to(parts.weights[i].dtype)
        extras = extras._replace(weights=tuple(by_weight))
    if by_angles:
        by_position, by_frequency = _by_angles(call, needs, inputs, outputs, grads)
        found = found._replace(positions=by_position)
        extras = extras._replace(frequencies=by_frequency)
    if by_tables:
        by_primary, by_secondary = gradients.by_tables(call, inputs, grads)
        found = found._replace(primary=by_primary, secondary=by_secondary)
    if by_gates:
        extras = extras._replace(gates=_by_gates(call, inputs, outputs, grads, by_x))
    by_q, by_k = (x if need else None for x, need in zip(by_x, (*needed, False)))
    return found._replace(q=by_q, k=by_k, extras=extras)


def _rotated(call: Call, define: bool) -> Sequence[torch.Tensor]:
    """Run the operator in a backward pass.

    Args:
        define: whether to use the definition, which is differentiable to any order.
    """
    from .run import run  # here, because run imports this module

    return run([call._replace(backend="reference") if define else call])


def _by_angles(
    call: Call,
    needs: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """Compute the gradients of positions and of frequencies, in their shapes; None if not needed."""
    options, positions, frequencies = call.options, call.positions, call.extras.frequencies
    which = [i for i, grad in enumerate(grads) if grad is not None]
    there = [cast(torch.Tensor, grads[i]) for i in which]
    some: Sequence[torch.Tensor]
    if options.gate != NO_GATE and options.direction == FORWARD:
        there = [gradients.gated(call, i, grad) for i, grad in zip(which, there)]
        some = _without_gate(call, which, inputs)
    else:
        some = [outputs[i] for i in which]
    call = call._replace(options=options._replace(act=NONE, gate=NO_GATE))
    by = needs.positions, any(needs.extras.frequencies)
    if is_differentiated():
        sums = gradients.by_angles(call, some, there, *by)
    else:
        source = (call.primary, call.secondary, positions, call.offset, call.options.pack())
        sums = schema.angle_gradients(*pair(some), *pair(there), *source, *by)
    by_position, by_frequency = (
        tuple([gradients.sum_to(total, t.shape).to(t.dtype) if need else None for t in ts])
        for total, ts, need in zip(sums, ((positions,), frequencies), by)
    )
    return by_position[0], by_frequency


def _without_gate(
    call: Call, which: Sequence[int], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Rotate some of the inputs again, without the gate.

    In float32 or float64: without it, results may exceed the range of a 16-bit dtype.
    """
    options, extras = call.options._replace(gate=NO_GATE), call.extras.of(which)
    xs = [inputs[i].to(gradients.value_dtype(inputs[i])) for i in which]
    alone = call._replace(options=options, extras=extras._replace(gates=())).on(xs)
    return _rotated(alone, is_differentiated())


def _by_gates(
    call: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    by_x: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of the gate tensors, in their shapes."""
    gates = call.extras.gates
    forward = call.options.direction == FORWARD
    # An inverse call divides x by P, so the gradient of log P is −Σ x · (gradient of x).
    some: Sequence[torch.Tensor]
    ys, by_ys = (outputs, grads) if forward else (inputs, by_x)
    found = [torch.zeros_like(gate) for gate in gates]
    which = [i for i in range(len(gates)) if by_ys[i] is not None]
    there, options = [cast(torch.Tensor, by_ys[i]) for i in which], call.options
    factors = options.gate == FACTOR
    if factors and forward:  # not y / P, as P may be 0
        some = _without_gate(call, which, inputs)
        there = [grad.to(y.dtype) for grad, y in zip(there, some)]
    else:
        some = [ys[i] for i in which]
    if factors:
        options = options._replace(gate=LOG)
    operator = gradients.gate_gradients if is_differentiated() else schema.gate_gradients
    flat = (*pair(some), *pair(there), *pair([gates[i] for i in which]))
    for i, total in zip(which, operator(*flat, call.positions, call.offset, options.pack())):
        if not forward:
            total = -total / gates[i] if factors else -total
        found[i] = total.to(gates[i].dtype)
    return tuple(found)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    call = unpack(*inputs)
    needs = [isinstance(t, torch.Tensor) and t.requires_grad for t in call.tensors()]
    save(ctx, call, call.with_tensors(needs), output)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None], has_extras: bool) -> tuple[Any, ...]:
    found = gradients_of(ctx, grads, ctx.needs_input_grad[:2])
    fixed = (found.q, found.k, found.primary, found.secondary, found.positions)
    # The first three None are for offset, options and amplitude, the last one is for eps.
    return (*fixed, None, None, None, *((list(found.extras.flat()), None) if has_extras else ()))


def refuse_gradient(operator: Any, instead: str, written: slice = slice(0)) -> None:
    """Register the Autograd kernel of a raw operator that has no gradient.

    Without this kernel, torch would silently use an identity gradient and not bump the versions of
    written tensors.

    Args:
        operator: the operator.
        instead: the function that the error recommends.
        written: slice of the arguments that the operator writes.
    """

    def kernel(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(arguments)):
            raise RuntimeError(
                f"[{operator.name()}] the raw operator has no gradient; call {instead}."
            )
        with torch._C._AutoDispatchBelowAutograd():
            result = operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
        changed = tuple(tensors_of(arguments[written]))
        if changed and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(changed)
        return result

    library.impl(operator, kernel, "Autograd", with_keyset=True)


def register() -> None:
    """Register the gradients; called once, at import."""
    for operator, has_extras in zip(NEW, (False, True)):
        backward = partial(_backward, has_extras=has_extras)
        torch.library.register_autograd(operator, backward, setup_context=_setup)
    own = "tightrope.functional.rotate or rotate_, which have one"
    again = "torch.autograd.grad with create_graph=True"
    for operators, instead, written in (
        (IN_PLACE, own, slice(0, 2)),
        (OUT, own, slice(2, 4)),
        ((schema.rotate_slots,), "tightrope.functional.rotate without slots", slice(2, 4)),
        ((schema.rotate_slots_extras,), "tightrope.functional.rotate without slots", slice(3, 6)),
        ((schema.rotate_slots_,), "tightrope.functional.rotate_ without slots", slice(0, 1)),
        ((schema.angle_gradients, schema.gate_gradients, schema.phase_sums), again, slice(0)),
    ):
        for operator in operators:
            refuse_gradient(operator, instead, written)
