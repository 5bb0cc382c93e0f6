"""The operator under autograd, functorch and the dispatcher's Autograd key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import gradients, schema
from .checks import check_in_place, check_in_place_grad
from .schema import library, present

# `arguments` below is what follows q and k in the schema, up to `carried`.
_PRIMARY, _SECONDARY, _POSITIONS, _FIXED, _CARRIED = 0, 1, 2, 3, 6


def differentiable(
    q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The functional operator, by the shortest way that keeps every gradient."""
    if torch.compiler.is_compiling():
        return schema.rotate(q, k, *arguments)  # type: ignore[no-any-return]
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Functionalize:
        return schema.rotate(q, k, *arguments)  # type: ignore[no-any-return]
    if transform is not None or needs_grad(q, k, arguments):
        return OutOfPlace.apply(q, k, *_flat(arguments))  # type: ignore[no-any-return, no-untyped-call]
    return raw(q, k, arguments)


def raw(
    q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The operator where nothing needs a gradient: its formula, which is Python, is not asked."""
    with torch._C._AutoDispatchBelowAutograd():
        return schema.rotate(q, k, *arguments)  # type: ignore[no-any-return]


def in_place(
    operation: str,
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    arguments: tuple[Any, ...],
) -> None:
    """The operator in place, in an ordinary eager call.

    Args:
        operation, names: what the user called, and knows the tensors by.
    """
    if not needs_grad(q, k, arguments):
        raw_in_place(q, k, arguments)
        return
    xs = present(q, k)
    check_in_place(operation, names, xs)
    check_in_place_grad(operation, names, xs)
    if needs_angles(arguments):
        # Gradients by positions and tables need what a rotation in place overwrites.
        overwrite(xs, differentiable(*copies(q, k), arguments))
        return
    # Autograd refuses one function that returns two views, so each is a call of its own.
    for x in xs:
        InPlace.apply(x, *_flat(arguments))  # type: ignore[no-untyped-call]


def raw_in_place(q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]) -> None:
    """The operator in place where nothing needs a gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotate_(q, k, *arguments)
    torch.autograd.graph.increment_version(q if k is None else (q, k))


def into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    arguments: tuple[Any, ...],
) -> None:
    """The operator into given memory, in an ordinary eager call that needs no gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotate_into(q, k, *pair(outs), *arguments)
    torch.autograd.graph.increment_version(outs)


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
        q.requires_grad or (k is not None and k.requires_grad) or needs_angles(arguments)
    )


def needs_angles(arguments: Sequence[Any]) -> bool:
    """Whether what angles come from wants a gradient."""
    primary, secondary, positions = arguments[:_FIXED]
    return (
        primary.requires_grad
        or (secondary is not None and secondary.requires_grad)
        or (positions is not None and positions.requires_grad)
        or (arguments[_CARRIED] is not None and any(t.requires_grad for t in arguments[_CARRIED]))
    )


def _flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with what is carried at the end, one by one, as autograd wants tensors."""
    *rest, carried = arguments
    return (*rest, *(carried or ()))


def _nested(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse of :func:`_flat`."""
    return (*arguments[:_CARRIED], tuple(arguments[_CARRIED:]) or None)


def in_functorch() -> bool:
    """Whether a functorch transform (grad, vmap, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class OutOfPlace(torch.autograd.Function):
    """``rotate`` under eager autograd and functorch, which want a tuple."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any) -> Any:
        return tuple(schema.rotate(q, k, *_nested(arguments)))

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
    """``rotate_`` of one tensor that alone needs a gradient: the raw operator, marked dirty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            schema.rotate_(x, None, *_nested(arguments))
        ctx.mark_dirty(x)
        _remember(ctx, arguments, (False,) * len(arguments), (), ())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        by_x, _, *by_arguments = _gradients(ctx, [grad], ctx.needs_input_grad)
        return (by_x, *by_arguments)


def _remember(
    ctx: Any,
    arguments: Sequence[Any],
    needs: Sequence[bool],
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients need: tensors among the arguments; results only where positions or
    frequencies ask for them, and inputs only where tables do.

    Args:
        arguments: flat.
        needs: of each argument, whether it needs a gradient.
    """
    ctx.by_position, ctx.by_frequency = needs[_POSITIONS], any(needs[_CARRIED:])
    ctx.by_table = needs[_PRIMARY] or needs[_SECONDARY]
    by_angle = ctx.by_position or ctx.by_frequency
    kept = outputs if by_angle else inputs if ctx.by_table else ()
    ctx.rest = tuple(arguments[_FIXED:_CARRIED])
    tensors = (*arguments[:_FIXED], *arguments[_CARRIED:])
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *(x for x in kept if x is not None))


def _gradients(
    ctx: Any, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by q, k and each argument, flat.

    Args:
        grads: by each result.
        needed: whether q, and k if there are two results, need one.
    """
    saved = ctx.saved_tensors  # read once: checkpointing hands them out only once
    primary, secondary, positions, *carried = saved[: ctx.count]
    kept = saved[ctx.count :]
    offset, packed, amplitude = ctx.rest
    form = schema.form_of(packed)

    wanted = [grad if need else None for grad, need in zip(grads, needed)]
    there = [grad for grad in wanted if grad is not None]
    transposed = gradients.transposed(form, amplitude)
    back = (primary, secondary, positions, offset, *transposed, tuple(carried) or None)
    turned = iter(differentiable(*pair(there), back) if there else ())
    by_x = [None if grad is None else next(turned) for grad in wanted]

    by_primary = by_secondary = by_position = by_frequency = None
    if ctx.by_position or ctx.by_frequency:
        source = saved[:_FIXED]
        by_position, by_frequency = _by_angles(ctx, kept, grads, source, offset, packed, carried)
    if ctx.by_table:
        by_primary, by_secondary = gradients.by_tables(
            kept, grads, primary, secondary, positions, offset, form, amplitude
        )
    by_q, by_k = by_x if len(by_x) > 1 else (by_x[0], None)
    by_carried = [by_frequency.to(t.dtype) if by_frequency is not None else None for t in carried]
    return by_q, by_k, by_primary, by_secondary, by_position, None, None, None, *by_carried


def _by_angles(
    ctx: Any,
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    source: Sequence[Any],
    offset: int,
    packed: int,
    carried: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients by positions, shaped as they are, and by frequencies."""
    words, turns, positions = source
    there = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None]
    if not there:
        return (
            torch.zeros_like(positions) if ctx.by_position else None,
            torch.zeros_like(words, dtype=torch.float32) if ctx.by_frequency else None,
        )
    ys, gs = zip(*there, strict=True)
    which = (ctx.by_position, ctx.by_frequency)
    if torch.is_grad_enabled() or in_functorch():
        # Somebody differentiates this too.
        form = schema.form_of(packed)
        sums = gradients.by_angles(ys, gs, words, turns, positions, offset, form, *which, *carried)
    else:
        both = (*pair(ys), *pair(gs))
        sums = schema.angle_gradients(*both, words, turns, positions, offset, packed, *which)
    by_position, by_frequency = sums
    return (
        gradients.sum_to(by_position, positions.shape).to(positions.dtype)
        if ctx.by_position
        else None,
        by_frequency if ctx.by_frequency else None,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    q, k, *arguments = inputs
    carried = arguments[_CARRIED] if len(arguments) > _CARRIED else None
    flat = _flat((*arguments[:_CARRIED], carried))
    needs = [isinstance(a, torch.Tensor) and a.requires_grad for a in flat]
    _remember(ctx, flat, needs, (q, k), output)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    by_q, by_k, *found = _gradients(ctx, grads, ctx.needs_input_grad)
    # The dispatcher drops arguments that equal their defaults, so how many there were varies.
    rest = (list(found[_CARRIED:]) or None, None)[: len(ctx.needs_input_grad) - 2 - _CARRIED]
    return (by_q, by_k, *found[:_CARRIED], *rest)


def _raw(operator: Any, instead: str, written: slice = slice(0)) -> Callable[..., Any]:
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
            t.requires_grad for t in _tensors((*arguments, *named.values()))
        ):
            raise RuntimeError(
                f"[{operator.name()}] the raw operator has no gradient; call {instead}."
            )
        with torch._C._AutoDispatchBelowAutograd():
            result = operator.redispatch(
                keyset & torch._C._after_autograd_keyset, *arguments, **named
            )
        changed = tuple(_tensors(arguments[written]))
        if changed and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(changed)
        return result

    return kernel


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in lists among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def register() -> None:
    """Register the gradients; once, at import."""
    torch.library.register_autograd("tightrope::rotate", _backward, setup_context=_setup)
    own = "tightrope.functional.rotate or rotate_, which have"
    for name, kernel in {
        "rotate_": _raw(schema.rotate_, own, slice(0, 2)),
        "rotate_into": _raw(schema.rotate_into, own, slice(2, 4)),
        "angle_gradients": _raw(
            schema.angle_gradients, "torch.autograd.grad with create_graph=True"
        ),
    }.items():
        library.impl(name, kernel, "Autograd", with_keyset=True)
