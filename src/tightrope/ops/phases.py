"""The operators for phases from data: definition, fake kernels, gradients and vmap rules."""

from __future__ import annotations

from typing import Any

import torch

from ..phases import _definition
from ..phases._definition import empty_as, phase_drift as phase_drift, rows_of, value_dtype
from . import gradients, schema
from .fake import check_devices
from .route import is_differentiated
from .vmap import into_rows


def phase_words(
    increments: torch.Tensor,
    state: torch.Tensor | None,
    reset: torch.Tensor | None,
    running: bool,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``phase_words``; see :mod:`tightrope.ops.schema`."""
    words, last = _definition.phase_words(increments, state, reset, running, wide)
    # Results have the same strides in every backend and in the fake kernel.
    return empty_as(increments, words.shape[0], words.dtype).copy_(words), last.contiguous()


def phase_sums(
    grad: torch.Tensor, grad_last: torch.Tensor | None, reset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``phase_sums``; see :mod:`tightrope.ops.schema`."""
    by_increments, by_state = _definition.phase_sums(grad, grad_last, reset)
    rows, dtype = by_increments.shape[0], by_increments.dtype
    return empty_as(grad, rows, dtype).copy_(by_increments), by_state.contiguous()


def _fake_words(
    increments: torch.Tensor,
    state: torch.Tensor | None,
    reset: torch.Tensor | None,
    running: bool,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices("phase_words", increments, state, reset)
    rows, (_, heads, _, pairs) = rows_of(increments, state, reset), increments.shape
    words = empty_as(increments, rows, torch.int64 if wide else torch.int32)
    return words, words.new_empty((rows if running else 0, heads, pairs), dtype=torch.int64)


def _fake_sums(
    grad: torch.Tensor, grad_last: torch.Tensor | None, reset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices("phase_sums", grad, grad_last, reset)
    rows, (_, heads, _, pairs) = rows_of(grad, grad_last, reset), grad.shape
    by_increments = empty_as(grad, rows, value_dtype(grad))
    return by_increments, by_increments.new_empty((rows, heads, pairs))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    increments, state, reset, ctx.running = inputs
    ctx.shape, ctx.dtype = increments.shape, increments.dtype
    ctx.state = None if state is None else (state.shape, state.dtype)
    ctx.save_for_backward(reset)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad: torch.Tensor | None, grad_last: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    (reset,) = ctx.saved_tensors
    if not ctx.running:
        return None if grad is None else grad.to(ctx.dtype), None, None, None
    if grad is None:
        if grad_last is None:
            return None, None, None, None
        grad = grad_last.new_zeros(()).expand(grad_last.shape[0], *ctx.shape[1:])
    add = _definition.phase_sums if is_differentiated() else schema.phase_sums
    by_increments, by_state = add(grad, grad_last, reset)
    found = gradients.sum_to(by_increments, ctx.shape).to(ctx.dtype)
    if ctx.state is None:
        return found, None, None, None
    shape, dtype = ctx.state
    return found, gradients.sum_to(by_state, shape).to(dtype), None, None


def _by_rows(operator: Any) -> Any:
    """Make a vmap rule that merges the mapped dimension of the three tensors, the first arguments, into
    the rows."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, tuple[int, int]]:
        size, tensors = info.batch_size, list(zip(arguments[:3], in_dims))
        rows = 1
        for x, dim in tensors:
            if x is not None and rows == 1:
                rows = x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]
        merged = [into_rows(x, dim, size, rows, 0) for x, dim in tensors]
        # Without running sums `last` has no rows.
        results = operator(*merged, *arguments[3:])
        return tuple([y.unflatten(0, (size, y.shape[0] // size)) for y in results]), (0, 0)

    return rule


def register() -> None:
    """Register everything but the kernels of other backends; called once, at import."""
    for operator, kernel in (
        (schema.phase_words, _fake_words),
        (schema.phase_drift, phase_drift),
        (schema.phase_sums, _fake_sums),
    ):
        torch.library.register_fake(operator, kernel)
    torch.library.register_autograd(schema.phase_drift, _backward, setup_context=_setup)
    for operator in (schema.phase_words, schema.phase_sums):
        torch.library.register_vmap(operator, _by_rows(operator))
