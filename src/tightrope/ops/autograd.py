"""The operator under autograd: autograd functions for eager code and transforms, and the gradient
formulas registered with the dispatcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from .._errors import is_dtensor
from .._tracing import is_transformed
from ..activations import NONE
from . import gradients, schema
from .call import Call, Extras, pack, tensors_of, unpack
from .route import is_differentiated
from .schema import FORWARD, IN_PLACE, NEW, NO_GATE, TRANSPOSE, library, pair


class Template:
    """A call without its tensors: an opaque object that an autograd function accepts as an argument."""

    def __init__(self, call: Call) -> None:
        self._call = call

    @classmethod
    def of(cls, call: Call) -> Template:
        """Make the template of a call."""
        empty = call.with_tensors([None] * len(call.tensors()))
        # Backward calls always make new tensors.
        return cls(empty._replace(verb="new", outs=()))

    def filled(self, tensors: Sequence[Any]) -> Call:
        """Return the call with these values as its tensors."""
        return self._call.with_tensors(tensors)


class OutOfPlace(torch.autograd.Function):
    """The operator with results in new tensors; takes a template and the tensors of a call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(template: Template, *tensors: Any) -> Any:
        call = template.filled(tensors)
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
        wants = save(ctx, template.filled(tensors), template.filled(needs), output)
        if not wants.any_but_x():
            idle = [y for y, needed in zip(output, needs) if not needed]
            ctx.mark_non_differentiable(*idle)
        # The gradient of an output that the loss does not use is then None instead of zeros.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, *gradients_of(ctx, grads, ctx.needs_input_grad[1:3]).tensors())


# Torch reads the signature in each call, which takes a fifth of its time unless it is written down.
OutOfPlace.forward.__signature__ = inspect.signature(OutOfPlace.forward)  # type: ignore[attr-defined]


class InPlace(torch.autograd.Function):
    """The operator in place on one tensor x; q of the call is None, or with f a copy of x."""

    @staticmethod
    def forward(ctx: Any, template: Template, x: torch.Tensor, *tensors: Any) -> torch.Tensor:
        call = template.filled(tensors)
        packed = pack(call)
        with torch._C._AutoDispatchBelowAutograd():
            IN_PLACE.for_(packed)(x, None, *packed)
        ctx.mark_dirty(x)
        save(ctx, call, template.filled(ctx.needs_input_grad[2:]), ())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        found = gradients_of(ctx, [grad], [ctx.needs_input_grad[1], False])
        # Returned for x only: a gradient of its copy as well would count twice.
        return (None, found.q, *found._replace(q=None).tensors())


class _Wants(NamedTuple):
    """The tensors, other than q and k, that need a gradient.

    Attributes:
        positions, frequencies, tables: whether these need one.
        weights: whether each weight of a norm needs one.
        gates: whether any gate tensor needs one.
    """

    positions: bool
    frequencies: bool
    tables: bool
    weights: tuple[bool, ...]
    gates: bool

    def angles(self) -> bool:
        return self.positions or self.frequencies

    def any_but_x(self) -> bool:
        return self.angles() or self.tables or any(self.weights) or self.gates


def save(
    ctx: Any,
    call: Call,
    needs: Call,
    outputs: Sequence[torch.Tensor],
    watched: Sequence[torch.Tensor] = (),
) -> _Wants:
    """Save the tensors that the backward pass reads; q, k and the results only if a gradient needs them.

    Args:
        needs: the call with a bool in place of each tensor: whether that tensor needs a gradient.
        watched: tensors that must not change before the backward pass.
    """
    options, of = call.options, needs.extras
    wants = _Wants(
        bool(needs.positions),
        any(of.frequencies),
        bool(needs.primary or needs.secondary),
        of.weights,
        any(of.gates),
    )
    forward = options.direction == FORWARD
    # The results contain the gate, so the backward pass rotates q and k again, without it.
    again = wants.angles() and options.gate != NO_GATE and forward
    from_outputs = (wants.angles() and not again) or (wants.gates and forward)
    from_inputs = options.act != NONE or wants.tables or again or (wants.gates and not forward)
    if not from_inputs:
        call = call._replace(q=None, k=None)
    tensors = call.tensors()
    ctx.wants, ctx.template, ctx.count = wants, Template.of(call), len(tensors)
    ctx.results = len(outputs) if from_outputs else 0
    ctx.save_for_backward(*tensors, *(outputs if from_outputs else ()), *watched)
    return wants


def gradients_of(
    ctx: Any,
    grads: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    to_local: Callable[[Any], torch.Tensor] | None = None,
) -> Call:
    """Compute the gradient of each tensor of a call; return the call with gradients in place of tensors.

    Args:
        grads: gradient of each result.
        needed: whether q and k need a gradient.
        to_local: converts saved tensors that are DTensors.
    """
    # Read once: checkpointing allows no second read.
    saved = ctx.saved_tensors[: ctx.count + ctx.results]
    if to_local is not None:
        saved = [to_local(t) if is_dtensor(t) else t for t in saved]
    call: Call = ctx.template.filled(saved[: ctx.count])
    inputs, outputs = call.xs() if call.q is not None else [], saved[ctx.count :]
    options, parts, wants = call.options, call.extras, ctx.wants
    if options.direction == TRANSPOSE and not call.is_plain():
        raise NotImplementedError(
            "[rotate] the first gradient must be computed with create_graph=True for a second one "
            "through an act or a gate."
        )
    # An inverse call divides x by P, so the gradient of its gate is computed from that of x.
    divides = wants.gates and options.direction != FORWARD
    which = [
        i
        for i, grad in enumerate(grads)
        if grad is not None and (needed[i] or divides or (wants.weights and wants.weights[i]))
    ]
    turned: Sequence[torch.Tensor] = ()
    if which:
        there = [cast(torch.Tensor, grads[i]) for i in which]
        some = call._replace(extras=parts.of(which)).on(there)
        kept = [inputs[i] for i in which] if options.act != NONE else ()
        # A rotation alone is linear, so its gradient is differentiable by the same rule.
        turned = _rotated(some.transposed(kept), is_differentiated() and not call.is_plain())
    by_x: list[torch.Tensor | None] = [None, None]
    by_weight: list[torch.Tensor | None] = [None] * len(parts.weights)
    for i, found in zip(which, turned):
        by_x[i] = found
    for i, found in zip(which, turned[len(which) :]):
        by_weight[i] = found.to(parts.weights[i].dtype)

    by_primary = by_secondary = by_position = by_frequency = None
    if wants.angles():
        by_position, by_frequency = _by_angles(call, wants, inputs, outputs, grads)
    if wants.tables:
        by_primary, by_secondary = gradients.by_tables(call, inputs, grads)
    by_gate: list[torch.Tensor | None] = [None] * len(parts.gates)
    if wants.gates:
        by_gate = _by_gates(call, inputs, outputs, grads, by_x)
    by_frequencies = [
        None if by_frequency is None else gradients.sum_to(by_frequency, t.shape).to(t.dtype)
        for t in parts.frequencies
    ]
    by_q, by_k = (x if need else None for x, need in zip(by_x, (*needed, False)))
    extras = Extras(
        tuple(by_frequencies), tuple(by_weight), tuple(by_gate), (None,) * len(parts.inputs)
    )
    return call._replace(
        q=by_q,
        k=by_k,
        primary=by_primary,
        secondary=by_secondary,
        positions=by_position,
        extras=extras,
    )


def _rotated(call: Call, define: bool) -> Sequence[torch.Tensor]:
    """Run the operator in a backward pass.

    Args:
        define: whether to use the definition, which is differentiable to any order.
    """
    from .run import run  # here, because run imports this module

    return run([call._replace(backend="reference") if define else call])


def _by_angles(
    call: Call,
    wants: _Wants,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of positions, in their shape, and of frequencies."""
    words, positions = call.primary, call.positions
    which = [i for i, grad in enumerate(grads) if grad is not None]
    if not which:
        return (
            torch.zeros_like(positions) if wants.positions else None,
            torch.zeros_like(words, dtype=torch.float32) if wants.frequencies else None,
        )
    options = call.options
    there = [cast(torch.Tensor, grads[i]) for i in which]
    some: Sequence[torch.Tensor]
    if options.gate != NO_GATE and options.direction == FORWARD:
        there = [gradients.gated(call, i, cast(torch.Tensor, grads[i])) for i in which]
        # In float32 or float64: without the gate, results may exceed the range of a 16-bit dtype.
        xs = [inputs[i].to(grad.dtype) for i, grad in zip(which, there)]
        alone = call._replace(extras=call.extras.of(which)).on(xs).without_gates()
        some = _rotated(alone, is_differentiated())
    else:
        some = [outputs[i] for i in which]
    call = call._replace(options=options._replace(act=NONE, gate=NO_GATE))
    if is_differentiated():
        sums = gradients.by_angles(call, some, there, wants.positions, wants.frequencies)
    else:
        source = (words, call.secondary, positions, call.offset, call.options.pack())
        sums = schema.angle_gradients(
            *pair(some), *pair(there), *source, wants.positions, wants.frequencies
        )
    by_position, by_frequency = sums
    return (
        gradients.sum_to(by_position, positions.shape).to(positions.dtype)
        if wants.positions
        else None,
        by_frequency if wants.frequencies else None,
    )


def _by_gates(
    call: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    by_x: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Compute the gradients of the gate tensors, in their shapes."""
    gates = call.extras.gates
    forward = call.options.direction == FORWARD
    # An inverse call divides x by P, so the gradient of log P is −Σ x · (gradient of x).
    ys, by_ys = (outputs, grads) if forward else (inputs, by_x)
    found: list[torch.Tensor | None] = [torch.zeros_like(gate) for gate in gates]
    which = [i for i in range(len(gates)) if by_ys[i] is not None]
    if which:
        some, there = [ys[i] for i in which], [cast(torch.Tensor, by_ys[i]) for i in which]
        own = [gates[i] for i in which]
        if is_differentiated():
            sums = gradients.by_gates(call, some, there, own)
        else:
            flat = (*pair(some), *pair(there), *pair(own))
            sums = schema.gate_gradients(*flat, call.positions, call.offset, call.options.pack())
        for i, total in zip(which, sums):
            found[i] = (total if forward else -total).to(gates[i].dtype)
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    call = unpack(*inputs)
    needs = [isinstance(t, torch.Tensor) and t.requires_grad for t in call.tensors()]
    save(ctx, call, call.with_tensors(needs), output)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None], has_extras: bool) -> tuple[Any, ...]:
    found = gradients_of(ctx, grads, ctx.needs_input_grad[:2])
    fixed = (found.q, found.k, found.primary, found.secondary, found.positions)
    # The first three None are for offset, options and amplitude, the last one is for eps.
    return (*fixed, None, None, None, *((list(found.extras.flat()), None) if has_extras else ()))


def raw(operator: Any, instead: str, written: slice) -> Callable[..., Any]:
    """Make the Autograd kernel of a raw operator that has no gradient.

    Without this kernel, torch would silently use an identity gradient and not bump the versions of
    written tensors.

    Args:
        operator: the operator.
        instead: the function that the error recommends.
        written: slice of the arguments that the operator writes.
    """

    def kernel(keyset: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in tensors_of((*arguments, *named.values()))
        ):
            raise RuntimeError(
                f"[{operator.name()}] the raw operator has no gradient; call {instead}."
            )
        with torch._C._AutoDispatchBelowAutograd():
            result = operator.redispatch(
                keyset & torch._C._after_autograd_keyset, *arguments, **named
            )
        changed = tuple(tensors_of(arguments[written]))
        if changed and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(changed)
        return result

    return kernel


def register() -> None:
    """Register the gradients; called once, at import."""
    for operator, has_extras in ((schema.rotate, False), (schema.rotate_extras, True)):
        backward = partial(_backward, has_extras=has_extras)
        torch.library.register_autograd(operator, backward, setup_context=_setup)
    own = "tightrope.functional.rotate or rotate_, which have one"
    again = "torch.autograd.grad with create_graph=True"
    for operator, instead, written in (
        (schema.rotate_, own, slice(0, 2)),
        (schema.rotate_extras_, own, slice(0, 2)),
        (schema.rotate_into, own, slice(2, 4)),
        (schema.rotate_extras_into, own, slice(2, 4)),
        (schema.angle_gradients, again, slice(0)),
        (schema.gate_gradients, again, slice(0)),
    ):
        kernel = raw(operator, instead, written)
        library.impl(operator, kernel, "Autograd", with_keyset=True)
