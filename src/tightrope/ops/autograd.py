"""The operator under autograd, functorch and the dispatcher's Autograd key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..activations import NONE
from . import gradients, schema
from .arguments import Call, Carried, carried_of, tensors_of
from .checks import check_in_place, check_in_place_grad, copied_before, is_frozen
from .definition import compose
from .schema import FORWARD, NO_GATE, TRANSPOSE, library, present

# `arguments` below is what follows q and k in the schema of one overload or the other.
_PRIMARY, _SECONDARY, _POSITIONS, _FIXED, _FORM, _CARRIED = 0, 1, 2, 3, 4, schema.PLAIN
# Flat, as autograd wants tensors: up to `carried`, then `eps`, then what is carried, if anything.
_EPS, _FLAT_CARRIED = 6, 7


def differentiable(
    q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The functional operator, by the shortest way that keeps every gradient."""
    if torch.compiler.is_compiling():
        if in_functorch():
            # While compiling torch knows no formula of an operator from Python within `grad`. Plain
            # torch it can follow and fuse.
            return compose(q, k, *arguments)
        return schema.rotation(arguments)(q, k, *arguments)  # type: ignore[no-any-return]
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Functionalize:
        return schema.rotation(arguments)(q, k, *arguments)  # type: ignore[no-any-return]
    form = schema.form_of(arguments[_FORM]) if transform is not None else None
    if form is not None and (form.act != NONE or form.gate != NO_GATE):
        # Transforms follow plain torch wherever they are, and a weight that is mapped too.
        return compose(q, k, *arguments)
    if transform is not None or needs_grad(q, k, arguments):
        return OutOfPlace.apply(q, k, *_flat(arguments))  # type: ignore[no-any-return, no-untyped-call]
    return raw(q, k, arguments)


def raw(
    q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The operator where nothing needs a gradient: its formula, which is Python, is not asked."""
    with torch._C._AutoDispatchBelowAutograd():
        return schema.rotation(arguments)(q, k, *arguments)  # type: ignore[no-any-return]


def in_place(
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    arguments: tuple[Any, ...],
) -> None:
    """The operator in place, in an ordinary eager call.

    Args:
        names: what the user knows the tensors by.
    """
    if not needs_grad(q, k, arguments):
        raw_in_place(q, k, arguments)
        return
    xs = present(q, k)
    check_in_place(names, xs)
    check_in_place_grad(names, xs)
    # Gradients may be made of arguments, and k is rotated after q has changed.
    arguments = copied_before(arguments, xs)
    parts = _parts(arguments)
    if needs_angles(arguments) or any(gate.requires_grad for gate in parts.gates):
        # Gradients by positions, tables and gates need what a rotation in place overwrites.
        overwrite(xs, differentiable(*copies(q, k), arguments))
        return
    # Autograd refuses one function that returns two views, so each is a call of its own.
    is_linear = schema.form_of(arguments[_FORM]).act == NONE
    for i, x in enumerate(xs):
        own = (*arguments[:_CARRIED], *parts.of([i]).packed(_eps(arguments)))
        # The copy is made out here, so that it is part of the graph: the slope of an act depends on it.
        InPlace.apply(x, None if is_linear else x.clone(), *_flat(own))  # type: ignore[no-untyped-call]


def raw_in_place(q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]) -> None:
    """The operator in place where nothing needs a gradient."""
    if q.is_inference() or (k is not None and k.is_inference()):
        _refuse_frozen(present(q, k))
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotation_(arguments)(q, k, *arguments)
    torch.autograd.graph.increment_version(q if k is None else (q, k))


def into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    arguments: tuple[Any, ...],
) -> None:
    """The operator into given memory, in an ordinary eager call that needs no gradient."""
    _refuse_frozen(outs)
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotation_into(arguments)(q, k, *pair(outs), *arguments)
    torch.autograd.graph.increment_version(outs)


def _refuse_frozen(written: Sequence[torch.Tensor]) -> None:
    """Torch refuses such tensors in a key that our operators have no kernel for."""
    if any(map(is_frozen, written)):
        raise RuntimeError("tightrope: an inference tensor cannot change outside of inference mode")


def pair(outs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One or two outputs as the schema takes them."""
    return outs[0], outs[1] if len(outs) > 1 else None


def copies(q: torch.Tensor, k: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What gradients may keep, where q and k themselves are about to change."""
    return q.clone(), None if k is None else k.clone()


def overwrite(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> None:
    """Put each result where it belongs, with gradients and transforms following as they do."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)


def needs_grad(q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]) -> bool:
    """Whether autograd must follow."""
    return torch.is_grad_enabled() and (
        q.requires_grad or (k is not None and k.requires_grad) or _any_needs(arguments)
    )


def _any_needs(arguments: Sequence[Any]) -> bool:
    primary, secondary, positions = arguments[:_FIXED]
    return (
        primary.requires_grad
        or (secondary is not None and secondary.requires_grad)
        or (positions is not None and positions.requires_grad)
        or any(t.requires_grad for t in schema.carried(arguments))
    )


def needs_angles(arguments: Sequence[Any]) -> bool:
    """Whether what angles come from wants a gradient."""
    return _any_needs((*arguments[:_CARRIED], _parts(arguments).frequencies))


def keeps_inputs(arguments: Sequence[Any]) -> bool:
    """Whether gradients may be made of what is rotated, rather than of the result alone."""
    form = schema.form_of(arguments[_FORM])
    return form.act != NONE or form.gate != NO_GATE or form.source != schema.WORDS


def needs_outer(arguments: Sequence[Any]) -> bool:
    """Whether a weight of f or a tensor of P wants a gradient."""
    return any(t.requires_grad for part in _parts(arguments)[1:] for t in part)


def _parts(arguments: Sequence[Any]) -> Carried:
    return carried_of(schema.form_of(arguments[_FORM]), schema.carried(arguments))


def _eps(arguments: Sequence[Any]) -> float:
    return arguments[_CARRIED + 1] if len(arguments) > _CARRIED else 0.0


def wanted(arguments: Sequence[Any]) -> list[str]:
    """What besides q and k wants a gradient, in words for users."""
    names = []
    if needs_angles(arguments):
        names.append("positions or inv_freq")
    if needs_outer(arguments):
        names.append("act or gate")
    return names


def _flat(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with what is carried at the end, one by one."""
    return (*arguments[:_CARRIED], _eps(arguments), *schema.carried(arguments))


def _nested(flat: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse of :func:`_flat`."""
    carried = tuple(flat[_FLAT_CARRIED:])
    return (*flat[:_CARRIED], *((carried, flat[_EPS]) if carried else ()))


def in_functorch() -> bool:
    """Whether a functorch transform (grad, vmap, ...) is under way."""
    # The compiler has an object where there is none, so `is not None` would always be true of it.
    top = torch._C._functorch.peek_interpreter_stack()
    return isinstance(top, torch._C._functorch.CInterpreter)


class OutOfPlace(torch.autograd.Function):
    """``rotate`` under eager autograd and functorch, which want a tuple."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any) -> Any:
        nested = _nested(arguments)
        return tuple(schema.rotation(nested)(q, k, *nested))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        q, k, *arguments = inputs
        # What a tensor says of itself is not to be trusted under vmap.
        needs = ctx.needs_input_grad
        _remember(ctx, arguments, needs[2:], (q, k), output)
        if not any(needs[2:]):
            idle = [y for y, needed in zip(output, needs) if not needed]
            ctx.mark_non_differentiable(*idle)
        # A k that has no part in the loss should cost nothing.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, grads, ctx.needs_input_grad)


class InPlace(torch.autograd.Function):
    """``rotate_`` of one tensor, and of a copy of it where an act needs what was there before."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, before: torch.Tensor | None, *arguments: Any
    ) -> torch.Tensor:
        nested = _nested(arguments)
        with torch._C._AutoDispatchBelowAutograd():
            schema.rotation_(nested)(x, None, *nested)
        ctx.mark_dirty(x)
        _remember(ctx, arguments, ctx.needs_input_grad[2:], (before,), ())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        by_x, _, *by_arguments = _gradients(ctx, [grad], ctx.needs_input_grad[:1])
        return (by_x, None, *by_arguments)


def _remember(
    ctx: Any,
    arguments: Sequence[Any],
    needs: Sequence[bool],
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients need: tensors among the arguments; what was rotated where an act asks
    for it, or tables; results where positions, frequencies or gates do.

    Args:
        arguments: flat.
        needs: of each argument, whether it needs a gradient.
    """
    form = schema.form_of(arguments[_FORM])
    parts = carried_of(form, needs[_FLAT_CARRIED:])
    ctx.by_position, ctx.by_frequency = needs[_POSITIONS], any(parts.frequencies)
    ctx.by_table = needs[_PRIMARY] or needs[_SECONDARY]
    ctx.by_weight, ctx.by_gate = parts.weights, any(parts.gates)
    by_angle = ctx.by_position or ctx.by_frequency
    ahead = form.direction == FORWARD
    # What gates have multiplied is no rotated pair: it is rotated again.
    again = by_angle and form.gate != NO_GATE and ahead
    from_outputs = (by_angle and not again) or (ctx.by_gate and ahead)
    from_inputs = form.act != NONE or ctx.by_table or again or (ctx.by_gate and not ahead)
    ctx.rest = tuple(arguments[_FIXED:_CARRIED])
    ctx.eps = arguments[_EPS]
    tensors = (*arguments[:_FIXED], *arguments[_FLAT_CARRIED:])
    before = [x for x in inputs if x is not None] if from_inputs else []
    after = outputs if from_outputs else ()
    ctx.counts = len(tensors), len(before)
    ctx.save_for_backward(*tensors, *before, *after)


def _gradients(
    ctx: Any, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by q, k and each argument, flat.

    Args:
        grads: by each result.
        needed: whether q, and k if there are two results, need one.
    """
    saved = ctx.saved_tensors  # read once: checkpointing hands them out only once
    arguments, before = ctx.counts
    (primary, secondary, positions), carried = saved[:_FIXED], saved[_FIXED:arguments]
    inputs, outputs = saved[arguments : arguments + before], saved[arguments + before :]
    offset, packed, amplitude = ctx.rest
    form = schema.form_of(packed)
    parts = carried_of(form, carried)
    call = Call(primary, secondary, positions, offset, form, amplitude, parts, ctx.eps)
    is_plain = form.act == NONE and form.gate == NO_GATE
    if form.direction == TRANSPOSE and not is_plain:
        raise NotImplementedError(
            "[rotate] the gradient of a gradient by an act or a gate goes through the definition; call "
            "it with create_graph=True."
        )
    # Whoever differentiates this too gets the definition, but for a rotation alone, which is linear.
    again = torch.is_grad_enabled() or in_functorch()

    # An inverse divides what comes in, so the gradient by its gate is made of that by x.
    divides = ctx.by_gate and form.direction != schema.FORWARD
    which = [
        i
        for i, grad in enumerate(grads)
        if grad is not None and (needed[i] or divides or (ctx.by_weight and ctx.by_weight[i]))
    ]
    turned: Sequence[torch.Tensor] = ()
    if which:
        there = [cast(torch.Tensor, grads[i]) for i in which]
        back = gradients.transposed(call, inputs, which)
        turned = _run(again and not is_plain, *pair(there), back)
    by_x: list[torch.Tensor | None] = [None, None]
    by_weight: list[torch.Tensor | None] = [None] * len(parts.weights)
    for i, found in zip(which, turned):
        by_x[i] = found
    for i, found in zip(which, turned[len(which) :]):
        by_weight[i] = found.to(parts.weights[i].dtype)

    by_primary = by_secondary = by_position = by_frequency = None
    if ctx.by_position or ctx.by_frequency:
        by_position, by_frequency = _by_angles(ctx, call, inputs, outputs, grads, again)
    if ctx.by_table:
        by_primary, by_secondary = gradients.by_tables(call, inputs, grads)
    by_gate: list[torch.Tensor | None] = [None] * len(parts.gates)
    if ctx.by_gate:
        by_gate = _by_gates(call, inputs, outputs, grads, by_x, again)
    by_frequencies = [
        None if by_frequency is None else by_frequency.to(t.dtype) for t in parts.frequencies
    ]
    by_carried = (*by_frequencies, *by_weight, *by_gate)
    rest = (None,) * len(carried[len(by_carried) :])
    fixed = (by_primary, by_secondary, by_position, None, None, None, None)
    by_q, by_k = (x if need else None for x, need in zip(by_x, (*needed, False)))
    return (by_q, by_k, *fixed, *by_carried, *rest)


def _run(
    define: bool, q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The operator in a backward pass; by its definition, for whoever differentiates that too."""
    return compose(q, k, *arguments) if define else differentiable(q, k, arguments)


def _by_angles(
    ctx: Any,
    call: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    again: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients by positions, shaped as they are, and by frequencies."""
    words, positions = call.primary, call.positions
    which = [i for i, grad in enumerate(grads) if grad is not None]
    if not which:
        return (
            torch.zeros_like(cast(torch.Tensor, positions)) if ctx.by_position else None,
            torch.zeros_like(words, dtype=torch.float32) if ctx.by_frequency else None,
        )
    form = call.form
    there = [cast(torch.Tensor, grads[i]) for i in which]
    some: Sequence[torch.Tensor]
    if form.gate != NO_GATE and form.direction == FORWARD:
        there = [gradients.gated(call, i, cast(torch.Tensor, grads[i])) for i in which]
        # In the dtype of factors: what gates bring back into the range of a narrow one may lie beyond.
        xs = pair([inputs[i].to(grad.dtype) for i, grad in zip(which, there)])
        some = _run(again, *xs, call.without_gates(which).packed())
    else:
        some = [outputs[i] for i in which]
    alone = form._replace(act=NONE, gate=NO_GATE)
    wanted = (ctx.by_position, ctx.by_frequency)
    source = (words, call.secondary, positions, call.offset)
    if again:
        frequencies = call.carried.frequencies
        sums = gradients.by_angles(some, there, *source, alone, *wanted, *frequencies)
    else:
        sums = schema.angle_gradients(*pair(some), *pair(there), *source, alone.pack(), *wanted)
    by_position, by_frequency = sums
    return (
        gradients.sum_to(by_position, positions.shape).to(positions.dtype)
        if ctx.by_position and positions is not None
        else None,
        by_frequency if ctx.by_frequency else None,
    )


def _by_gates(
    call: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    by_x: Sequence[torch.Tensor | None],
    again: bool,
) -> list[torch.Tensor | None]:
    """Gradients by what gates are made of, shaped as it is."""
    gates = call.carried.gates
    ahead = call.form.direction == FORWARD
    # An inverse divides what comes in.
    ys, slopes = (outputs, grads) if ahead else (inputs, by_x)
    found: list[torch.Tensor | None] = [torch.zeros_like(gate) for gate in gates]
    which = [i for i in range(len(gates)) if slopes[i] is not None]
    if which:
        some, there = [ys[i] for i in which], [cast(torch.Tensor, slopes[i]) for i in which]
        own = [gates[i] for i in which]
        if again:
            sums = gradients.by_gates(some, there, own, call.positions, call.offset, call.form)
        else:
            flat = (*pair(some), *pair(there), *pair(own))
            sums = schema.gate_gradients(*flat, call.positions, call.offset, call.form.pack())
        for i, total in zip(which, sums):
            found[i] = (total if ahead else -total).to(gates[i].dtype)
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    q, k, *arguments = inputs
    flat = _flat(arguments)
    needs = [isinstance(a, torch.Tensor) and a.requires_grad for a in flat]
    _remember(ctx, flat, needs, (q, k), output)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    by_q, by_k, *found = _gradients(ctx, grads, ctx.needs_input_grad)
    is_plain = len(ctx.needs_input_grad) == 2 + schema.PLAIN
    rest = () if is_plain else (list(found[_FLAT_CARRIED:]), None)
    return (by_q, by_k, *found[:_CARRIED], *rest)


def _raw(operator: Any, instead: str, written: slice) -> Callable[..., Any]:
    """The Autograd kernel of a raw operator that has no gradient.

    Without it a tensor that requires grad would be changed under an identity gradient, and no
    version counter would tell; or its gradient would be lost.

    Args:
        operator: the operator.
        instead: what to call.
        written: which arguments it writes.
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
    """Register the gradients; once, at import."""
    for operator in (schema.rotate, schema.rotate_carried):
        torch.library.register_autograd(operator, _backward, setup_context=_setup)
    own = "tightrope.functional.rotate or rotate_, which have"
    again = "torch.autograd.grad with create_graph=True"
    for operator, instead, written in (
        (schema.rotate_, own, slice(0, 2)),
        (schema.rotate_carried_, own, slice(0, 2)),
        (schema.rotate_into, own, slice(2, 4)),
        (schema.rotate_carried_into, own, slice(2, 4)),
        (schema.angle_gradients, again, slice(0)),
        (schema.gate_gradients, again, slice(0)),
    ):
        kernel = _raw(operator, instead, written)
        library.impl(operator, kernel, "Autograd", with_keyset=True)
