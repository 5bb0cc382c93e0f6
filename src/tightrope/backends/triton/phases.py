"""Phases from data: phase words, their running sums and the gradients, from cached launch plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ...phases._definition import empty_as, rows_of, running_sum, value_dtype
from . import blocks as shapes, kernels
from .arguments import require
from .groups import Steps, Walk
from .launch import flat, handle_of, launcher
from .views import broadcast_strides

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Plan(NamedTuple):
    """The launches of one kind of call, reused for all calls of that kind.

    Attributes:
        rows: rows of the results.
        shape: rows, heads, chunks, parts and pairs of the chunks' sums.
        chunk: tokens per chunk.
        total: launches the kernel for the sums of the chunks; None if there is one chunk.
        final: launches the kernel for the results.
        fixed: the arguments that are the same in all calls.
    """

    rows: int
    shape: tuple[int, ...]
    chunk: int
    total: Callable[..., None] | None
    final: Callable[..., None]
    fixed: tuple[Any, ...]


# Plans by everything that they depend on; None if the definition must run the call.
_plans: dict[Any, _Plan | None] = {}
_MOST = 4096
_UNKNOWN: Any = object()


def phase_words(
    increments: torch.Tensor,
    state: torch.Tensor | None,
    reset: torch.Tensor | None,
    running: bool,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute ``phase_words`` of :mod:`tightrope.ops.schema`; None if the definition must do it."""
    dtype = torch.int64 if wide else torch.int32
    return _run(increments, state, reset, dtype, torch.int64, running, False)


def phase_sums(
    grad: torch.Tensor, grad_last: torch.Tensor | None, reset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute ``phase_sums`` of :mod:`tightrope.ops.schema`; None if the definition must do it."""
    dtype = value_dtype(grad)
    return _run(grad, grad_last, reset, dtype, dtype, True, True)


def _run(
    x: torch.Tensor,
    start: torch.Tensor | None,
    reset: torch.Tensor | None,
    dtype: torch.dtype,
    of_last: torch.dtype,
    running: bool,
    back: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Add up x, in reverse if ``back``; return the sums in ``dtype`` and the last ones in ``of_last``."""
    index = x.get_device()
    if index >= 0 and torch.accelerator.current_device_index() != index:
        with torch.accelerator.device_index(index):
            return _run(x, start, reset, dtype, of_last, running, back)
    key = (_key(x), start is not None and _key(start), reset is not None and _key(reset), dtype,
           running, back)  # fmt: skip
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = _plan(x, start, reset, dtype, running, back)
    if plan is None:
        return None
    rows, heads, chunks, parts, pairs = plan.shape
    out = empty_as(x, rows, dtype)
    last = x.new_empty((rows if running else 0, heads, pairs), dtype=of_last)
    handles = handle_of(x), handle_of(start), handle_of(reset)
    before = None
    if plan.total is not None:
        totals = x.new_empty(plan.shape, dtype=torch.float64 if back else torch.int64)
        plan.total(handles[0], None, handles[2], None, None, None, handle_of(totals), *plan.fixed)
        first = start
        if start is not None:
            first = start.to(totals.dtype)
            if not back:
                first = torch.cat((first, (first == torch.iinfo(first.dtype).min).long()), -1)
        restarts = None if reset is None else _restarts(reset, chunks, plan.chunk, back)
        before = running_sum(totals.flatten(3), first, restarts).contiguous()
    ends = handle_of(last) if running else None
    plan.final(*handles, handle_of(before), handle_of(out), ends, None, *plan.fixed)
    return out, last


def _restarts(reset: torch.Tensor, chunks: int, chunk: int, back: bool) -> torch.Tensor:
    """Return which chunks of tokens have a reset; in reverse order it starts the sum after its token."""
    if back:
        reset = pad(reset.flip(1)[:, :-1], (1, 0))
    return pad(reset, (0, chunks * chunk - reset.shape[1])).unflatten(1, (chunks, chunk)).any(2)


def _key(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a plan depends on."""
    return x.shape, x.stride(), x.dtype, x.get_device()


def _plan(
    x: torch.Tensor,
    start: torch.Tensor | None,
    reset: torch.Tensor | None,
    dtype: torch.dtype,
    running: bool,
    back: bool,
) -> _Plan | None:
    require(x.dim() == 4, "increments must be [rows|1, heads, tokens, pairs]")
    if back:
        require(x.dtype in _FLOATING[2:], "gradients of phases must be float32 or float64")
    require(x.dtype in _FLOATING, "increments must be float16, bfloat16, float32 or float64")
    require(
        running or (start is None and reset is None), "only running sums have a state and resets"
    )
    _, heads, tokens, pairs = x.shape
    if start is not None:
        require(
            start.dim() == 3
            and start.dtype == (x.dtype if back else torch.int64)
            and start.device == x.device
            and start.shape[1:] == (heads, pairs),
            "a state must be [rows|1, heads, pairs]",
        )
    if reset is not None:
        require(
            reset.dim() == 2
            and reset.dtype == torch.bool
            and reset.device == x.device
            and reset.shape[1] == tokens,
            "reset must be bool [rows|1, tokens]",
        )
    rows = rows_of(x, start, reset)
    require(
        all(one is None or one.shape[0] in (1, rows) for one in (x, start, reset)),
        "state and reset must have 1 row or those of the increments",
    )
    if 0 in (rows, heads, tokens, pairs):
        return None
    chunk = min(tokens, shapes.CHUNK if running else shapes.APIECE)
    chunks = -(-tokens // chunk)
    lanes = rows * heads * chunks
    block = min(shapes.power_of_two(pairs), shapes.WALKS.pairs)
    across = shapes.WALKS.pairs // block
    grid = (-(-lanes // across), -(-pairs // block), 1)
    if grid[1] > shapes.MOST_ACROSS:
        return None
    start_steps = Steps(0, 0, 0, 0)
    if start is not None:
        row, head, pair = broadcast_strides(start)
        start_steps = Steps(row, head, 0, pair)
    reset_steps = Steps(0, 0, 0, 0)
    if reset is not None:
        row, token = broadcast_strides(reset)
        reset_steps = Steps(row, 0, token, 0)
    fixed = [
        Walk(lanes, heads, chunks, chunk, tokens, pairs),
        Steps(*broadcast_strides(x)),
        start_steps,
        reset_steps,
        Steps(*broadcast_strides(empty_as(x, rows, dtype))),
        running,
        back,
        across,
        block,
    ]
    wide = torch.float64 if back else torch.int64
    last = (x.dtype if back else torch.int64) if running else None

    def launch(*types: torch.dtype | None) -> Callable[..., None]:
        values = [x.dtype, *types, *fixed]
        return launcher(kernels.add_tokens, grid, values, frozenset(), shapes.WALKS, x.device)

    by_reset = None if reset is None else reset.dtype
    many = running and chunks > 1
    return _Plan(
        rows,
        (rows, heads, chunks, 1 if back else 2, pairs),
        chunk,
        launch(None, by_reset, None, None, None, wide) if many else None,
        launch(
            None if start is None else start.dtype, by_reset, wide if many else None, dtype, last, None
        ),
        flat(fixed),
    )
