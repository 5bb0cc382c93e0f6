"""Gradients of the operator.

The gradient by x is the operator with its direction flipped. The gradient by a floating position is
``dp = Σ ω · (u·dv − v·du)`` over heads and pairs, with (u, v) the rotated pair and (du, dv) its
gradient, because d(u, v)/dφ = (−v, u).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import angles
from . import schema
from .checks import check_in_place_grad
from .layouts import BY_CODE
from .schema import FORWARD, INVERSE, TRANSPOSE, library

# How many arguments of the schema are no tensors and not reserved: offset .. amplitude.
_PLAIN = 7


def _transposed(direction: int, amplitude: float) -> tuple[int, float]:
    if direction == FORWARD:
        return TRANSPOSE, amplitude
    return FORWARD, 1.0 / amplitude if direction == INVERSE else amplitude


def _remember(
    ctx: Any,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    plain: tuple[Any, ...],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients need: nothing of x, and outputs only where positions ask for them.

    Args:
        plain: the arguments of the schema from ``offset`` to ``amplitude``.
    """
    ctx.by_position = positions is not None and positions.requires_grad
    ctx.plain = plain
    ctx.save_for_backward(words, turns, positions, *(outputs if ctx.by_position else ()))


def _gradients(
    ctx: Any, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Gradients by each x that needs one, and by positions."""
    words, turns, positions, *outputs = ctx.saved_tensors
    wanted = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    present = [grad for grad in wanted if grad is not None]
    turned = iter(_by_x(present, words, turns, positions, ctx.plain) if present else ())
    by_x = [None if grad is None else next(turned) for grad in wanted]
    if not ctx.by_position:
        return by_x, None
    return by_x, _by_positions(outputs, grads, words, turns, positions, ctx.plain)


def _by_x(
    grads: Sequence[torch.Tensor],
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    plain: tuple[Any, ...],
) -> Sequence[torch.Tensor]:
    *kept, direction, amplitude = plain
    flipped = _transposed(direction, amplitude)
    return differentiable(grads, (words, turns, positions, *kept, *flipped))


def _by_positions(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor,
    plain: tuple[Any, ...],
) -> torch.Tensor:
    """Plain torch throughout, so that it can be differentiated again."""
    _, _, layout, start, interleaved, direction, _ = plain
    total = torch.zeros((), dtype=torch.float32, device=positions.device)
    for output, grad in zip(outputs, grads, strict=True):
        if grad is None:
            continue
        double = torch.float64 in (output.dtype, positions.dtype)
        dtype = torch.float64 if double else torch.float32
        y, dy = (BY_CODE[layout].to_bhsd(x).to(dtype) for x in (output, grad))
        y_u, y_v = _pairs(y, start, words.shape[3], interleaved)
        dy_u, dy_v = _pairs(dy, start, words.shape[3], interleaved)
        by_angle = y_u * dy_v - y_v * dy_u
        omega = angles.inv_freq(words, turns, dtype)[:, :, :, None]
        # One axis at a time keeps the peak at the size of x.
        by_token = [_sum(by_angle * omega[axis], [1, 3]) for axis in range(words.shape[0])]
        total = total + torch.stack(by_token)
    if total.dim() == 0:
        return torch.zeros_like(positions)
    if direction != FORWARD:
        total = -total
    return _sum_to(total, positions.shape).to(positions.dtype)


def _pairs(
    x: torch.Tensor, start: int, pairs: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x[..., start : start + 2 * pairs]
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x[..., :pairs], x[..., pairs:]


def _sum_to(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum ``[axes, rows, tokens]`` to a shape that broadcasts to it."""
    dims = [dim for dim in (1, 2) if shape[dim] == 1 and x.shape[dim] != 1]
    return _sum(x, dims).reshape(shape) if dims else x


def _sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """A sum that is the same for any number of threads.

    torch splits one sum among threads only where the result is a single number; two equal results
    keep it from that.
    """
    if all(size == 1 for dim, size in enumerate(x.shape) if dim not in dims):
        return x.expand(2, *x.shape).sum([dim + 1 for dim in dims])[0]
    return x.sum(dims)


def differentiable(
    xs: Sequence[torch.Tensor], arguments: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The functional operator, by the shortest way that keeps every gradient.

    Args:
        arguments: what follows xs in the schema, up to ``amplitude``.
    """
    if torch.compiler.is_compiling():
        return schema.rotate(xs, *arguments)  # type: ignore[no-any-return]
    if in_functorch() or needs_grad(xs, arguments[2]):
        return OutOfPlace.apply(*arguments, *xs)  # type: ignore[no-any-return, no-untyped-call]
    # Nothing wants a gradient, so the autograd formula, which is Python, need not be asked.
    with torch._C._AutoDispatchBelowAutograd():
        return schema.rotate(xs, *arguments)  # type: ignore[no-any-return]


def in_place(
    operation: str, names: Sequence[str], xs: Sequence[torch.Tensor], arguments: tuple[Any, ...]
) -> None:
    """The operator in place, in an ordinary eager call.

    Args:
        operation, names: what the user called, and knows the tensors by.
        arguments: what follows xs in the schema, up to ``amplitude``.
    """
    if needs_grad(xs, arguments[2]):
        check_in_place_grad(operation, names, xs)
        # Autograd refuses one function that returns two views, so each is a call of its own.
        for x in xs:
            InPlace.apply(x, *arguments)  # type: ignore[no-untyped-call]
        return
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotate_(xs, *arguments)
    torch.autograd.graph.increment_version(xs)


def needs_grad(xs: Sequence[torch.Tensor], positions: torch.Tensor | None) -> bool:
    """Whether autograd must follow."""
    if not torch.is_grad_enabled():
        return False
    return any(x.requires_grad for x in xs) or (positions is not None and positions.requires_grad)


def in_functorch() -> bool:
    """Whether a functorch transform (grad, vmap, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class OutOfPlace(torch.autograd.Function):
    """``rotate`` under eager autograd and functorch: xs come last, and a tuple comes out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        words: torch.Tensor,
        turns: torch.Tensor | None,
        positions: torch.Tensor | None,
        *plain_and_xs: Any,
    ) -> tuple[torch.Tensor, ...]:
        plain, xs = plain_and_xs[:_PLAIN], plain_and_xs[_PLAIN:]
        return tuple(schema.rotate(xs, words, turns, positions, *plain))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        words, turns, positions, *rest = inputs
        _remember(ctx, words, turns, positions, tuple(rest[:_PLAIN]), output)
        # A k that has no part in the loss should cost nothing.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        by_x, by_positions = _gradients(ctx, grads, ctx.needs_input_grad[3 + _PLAIN :])
        return (None, None, by_positions, *(None,) * _PLAIN, *by_x)


class InPlace(torch.autograd.Function):
    """``rotate_`` of one tensor under eager autograd: the raw operator, marked dirty."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        words: torch.Tensor,
        turns: torch.Tensor | None,
        positions: torch.Tensor | None,
        *plain: Any,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            schema.rotate_([x], words, turns, positions, *plain)
        ctx.mark_dirty(x)
        _remember(ctx, words, turns, positions, plain, (x,))
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        by_x, by_positions = _gradients(ctx, [grad], ctx.needs_input_grad[:1])
        return (*by_x, None, None, by_positions, *(None,) * _PLAIN)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    _, words, turns, positions, *rest = inputs
    _remember(ctx, words, turns, positions, tuple(rest[:_PLAIN]), output)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    by_x, by_positions = _gradients(ctx, grads, ctx.needs_input_grad[0])
    # The dispatcher drops arguments that equal their defaults, so how many there were varies.
    return (by_x, None, None, by_positions, *(None,) * (len(ctx.needs_input_grad) - 4))


def _raw_in_place(
    keyset: torch._C.DispatchKeySet, xs: Sequence[torch.Tensor], *arguments: Any, **named: Any
) -> None:
    """A call of the raw mutable operator through autograd.

    Without this kernel a tensor that requires grad would be changed under an identity gradient, and
    no version counter would tell.
    """
    tensors = (*xs, *(a for a in arguments if isinstance(a, torch.Tensor)))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            "[tightrope::rotate_] the raw operator has no gradient; "
            "call tightrope.functional.rotate_, which has."
        )
    with torch._C._AutoDispatchBelowAutograd():
        schema.rotate_.redispatch(keyset & torch._C._after_autograd_keyset, xs, *arguments, **named)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tuple(xs))


def register() -> None:
    """Register the gradients; once, at import."""
    torch.library.register_autograd("tightrope::rotate", _backward, setup_context=_setup)
    library.impl("rotate_", _raw_in_place, "Autograd", with_keyset=True)
