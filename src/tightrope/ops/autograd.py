"""The operator under autograd, functorch and the dispatcher's Autograd key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import gradients, schema
from .checks import check_in_place, check_in_place_grad
from .schema import library

# `arguments` below is what follows xs in the schema: up to `amplitude`, or up to `tables`.
_POSITIONS, _COS, _SIN = 2, 11, 12


def differentiable(
    xs: Sequence[torch.Tensor], arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The functional operator, by the shortest way that keeps every gradient."""
    if torch.compiler.is_compiling():
        return schema.rotate(xs, *arguments)  # type: ignore[no-any-return]
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Functionalize:
        return schema.rotate(xs, *arguments)  # type: ignore[no-any-return]
    if transform is not None or needs_grad(xs, arguments):
        return OutOfPlace.apply(len(arguments), *arguments, *xs)  # type: ignore[no-any-return, no-untyped-call]
    # Nothing wants a gradient, so the autograd formula, which is Python, need not be asked.
    with torch._C._AutoDispatchBelowAutograd():
        return schema.rotate(xs, *arguments)


def in_place(
    operation: str, names: Sequence[str], xs: Sequence[torch.Tensor], arguments: tuple[Any, ...]
) -> None:
    """The operator in place, in an ordinary eager call.

    Args:
        operation, names: what the user called, and knows the tensors by.
    """
    if needs_grad(xs, arguments):
        check_in_place(operation, names, xs)
        check_in_place_grad(operation, names, xs)
        if _needs_angles(arguments):
            # Gradients by positions and tables need what a rotation in place overwrites.
            overwrite(xs, differentiable([x.clone() for x in xs], arguments))
            return
        # Autograd refuses one function that returns two views, so each is a call of its own.
        for x in xs:
            InPlace.apply(x, *arguments)  # type: ignore[no-untyped-call]
        return
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotate_(xs, *arguments)
    torch.autograd.graph.increment_version(xs)


def into(
    xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], arguments: tuple[Any, ...]
) -> None:
    """The operator into given memory, in an ordinary eager call that needs no gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotate_into(xs, outs, *arguments)
    torch.autograd.graph.increment_version(outs)


def overwrite(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> None:
    """Put each result where it belongs, with gradients and transforms following as they do."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)


def needs_grad(xs: Sequence[torch.Tensor], arguments: tuple[Any, ...]) -> bool:
    """Whether autograd must follow."""
    if not torch.is_grad_enabled():
        return False
    for x in xs:
        if x.requires_grad:
            return True
    return _needs_angles(arguments)


def _needs_angles(arguments: Sequence[Any]) -> bool:
    positions = arguments[_POSITIONS]
    if positions is not None and positions.requires_grad:
        return True
    return len(arguments) > _SIN and any(
        table is not None and table.requires_grad for table in (arguments[_COS], arguments[_SIN])
    )


def in_functorch() -> bool:
    """Whether a functorch transform (grad, vmap, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class OutOfPlace(torch.autograd.Function):
    """``rotate`` under eager autograd and functorch: xs come last, and a tuple comes out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *rest: Any) -> tuple[torch.Tensor, ...]:
        return tuple(schema.rotate(rest[count:], *rest[:count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        count, *rest = inputs
        # What a tensor says of itself is not to be trusted under vmap.
        needs, needs_x = ctx.needs_input_grad[1 : 1 + count], ctx.needs_input_grad[1 + count :]
        _remember(ctx, tuple(rest[:count]), needs, rest[count:], output)
        if not ctx.by_position and not ctx.by_table:
            idle = [y for y, needed in zip(output, needs_x, strict=True) if not needed]
            ctx.mark_non_differentiable(*idle)
        # A k that has no part in the loss should cost nothing.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        by_x, by_arguments = _gradients(ctx, grads, ctx.needs_input_grad[-len(grads) :])
        return (None, *by_arguments, *by_x)


class InPlace(torch.autograd.Function):
    """``rotate_`` of one tensor that alone needs a gradient: the raw operator, marked dirty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            schema.rotate_([x], *arguments)
        ctx.mark_dirty(x)
        _remember(ctx, arguments, (False,) * len(arguments), (), ())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        by_x, by_arguments = _gradients(ctx, [grad], ctx.needs_input_grad[:1])
        return (*by_x, *by_arguments)


def _remember(
    ctx: Any,
    arguments: tuple[Any, ...],
    needs: Sequence[bool],
    xs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients need: tensors among the arguments; results only where positions ask
    for them, and inputs only where tables do.

    Args:
        needs: of each argument, whether it needs a gradient.
    """
    ctx.by_position = needs[_POSITIONS]
    ctx.by_table = any(needs[_COS : _SIN + 1])
    kept = outputs if ctx.by_position else xs if ctx.by_table else ()
    where = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    ctx.tensors_at = where
    ctx.arguments = tuple(None if isinstance(value, torch.Tensor) else value for value in arguments)
    ctx.save_for_backward(*(arguments[i] for i in where), *kept)


def _gradients(
    ctx: Any, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Gradients by each x that needs one, and by each argument."""
    count = len(ctx.tensors_at)
    saved = ctx.saved_tensors  # read once: checkpointing hands them out only once
    kept = saved[count:]
    arguments = list(ctx.arguments)
    for at, tensor in zip(ctx.tensors_at, saved[:count], strict=True):
        arguments[at] = tensor
    words, turns, positions, offset, ramp, layout, start, interleaved, *rest = arguments
    direction, amplitude, *rest = rest

    wanted = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    present = [grad for grad in wanted if grad is not None]
    flipped = gradients.transposed(direction, amplitude)
    back = (words, turns, positions, offset, ramp, layout, start, interleaved, *flipped, *rest)
    turned = iter(differentiable(present, back) if present else ())
    by_x = [None if grad is None else next(turned) for grad in wanted]

    by_arguments: list[torch.Tensor | None] = [None] * len(arguments)
    form = (layout, start, interleaved, direction)
    if ctx.by_position:
        by_arguments[_POSITIONS] = gradients.by_positions(
            kept, grads, words, turns, positions, *form
        )
    if ctx.by_table:
        _, cos, sin, tables, *_ = rest
        by_arguments[_COS], by_arguments[_SIN] = gradients.by_tables(
            kept, grads, cos, sin, tables, positions, offset, ramp, *form, amplitude
        )
    return by_x, by_arguments


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    xs, *arguments = inputs
    arguments = arguments[: _SIN + 2]
    needs = [isinstance(a, torch.Tensor) and a.requires_grad for a in arguments]
    _remember(ctx, tuple(arguments), needs, xs, output)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    by_x, by_arguments = _gradients(ctx, grads, ctx.needs_input_grad[0])
    # The dispatcher drops arguments that equal their defaults, so how many there were varies.
    given = len(ctx.needs_input_grad) - 1
    return (by_x, *by_arguments[:given], *(None,) * (given - len(by_arguments)))


def _raw(operator: Any, written: int) -> Callable[..., None]:
    """The Autograd kernel of a raw operator that writes into its arguments.

    Without it a tensor that requires grad would be changed under an identity gradient, and no
    version counter would tell.

    Args:
        operator: the operator.
        written: which argument holds the tensors that it writes.
    """

    def kernel(keyset: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> None:
        tensors = (t for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,)))
        if torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in tensors
        ):
            name = operator.name()
            raise RuntimeError(
                f"[{name}] the raw operator has no gradient; call tightrope.functional.rotate or "
                "rotate_, which have."
            )
        with torch._C._AutoDispatchBelowAutograd():
            operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **named)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(tuple(arguments[written]))

    return kernel


def register() -> None:
    """Register the gradients; once, at import."""
    torch.library.register_autograd("tightrope::rotate", _backward, setup_context=_setup)
    library.impl("rotate_", _raw(schema.rotate_, 0), "Autograd", with_keyset=True)
    library.impl("rotate_into", _raw(schema.rotate_into, 1), "Autograd", with_keyset=True)
