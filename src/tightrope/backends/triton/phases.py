"""Phases from data: phase words, their running sums and the gradients, from cached launch plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...phases._definition import empty_as, rows_of, value_dtype
from . import blocks as shapes, kernels
from .arguments import require
from .groups import Steps, Walk
from .launch import flat, handle_of, launcher
from .views import broadcast_strides

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Kinds of sums; the codes are those of the kernel.
GIVEN, RUNNING, BACK, TOTALS = range(4)


class _Launch(NamedTuple):
    """One launch of a call: a function, and those of its arguments that are the same in all calls."""

    run: Callable[..., None]
    fixed: tuple[Any, ...]

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch the kernel with its tensors."""
        self.run(*map(handle_of, tensors), *self.fixed)


class _Plan(NamedTuple):
    """The launches of one kind of call, reused for all calls of that kind.

    Attributes:
        rows, chunks: rows of the results, and chunks of tokens of a row.
        results: launches the kernel for the results.
        totals, between: launch it for the sum of each chunk and for the sums of these; None if there is
            one chunk.
    """

    rows: int
    chunks: int
    results: _Launch
    totals: _Launch | None = None
    between: _Launch | None = None


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
    kind, dtype = RUNNING if running else GIVEN, torch.int64 if wide else torch.int32
    return _run(kind, increments, state, reset, dtype)


def phase_sums(
    grad: torch.Tensor, grad_last: torch.Tensor | None, reset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute ``phase_sums`` of :mod:`tightrope.ops.schema`; None if the definition must do it."""
    return _run(BACK, grad, grad_last, reset, value_dtype(grad))


def _run(
    kind: int,
    x: torch.Tensor,
    start: torch.Tensor | None,
    reset: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Add up x; return the sums in ``dtype``, and the last ones."""
    index = x.get_device()
    if index >= 0 and torch.accelerator.current_device_index() != index:
        with torch.accelerator.device_index(index):
            return _run(kind, x, start, reset, dtype)
    key = (
        kind,
        dtype,
        _key(x),
        None if start is None else _key(start),
        None if reset is None else _key(reset),
    )
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = _plan(kind, x, start, reset, dtype)
    if plan is None:
        return None
    rows, (_, heads, _, pairs) = plan.rows, x.shape
    out = empty_as(x, rows, dtype)
    of_last = dtype if kind == BACK else torch.int64
    last = x.new_empty((0 if kind == GIVEN else rows, heads, pairs), dtype=of_last)
    before = restarts = None
    if plan.totals is not None and plan.between is not None:
        parts, wide = _held(kind)
        totals = x.new_empty((rows, heads, plan.chunks, parts * pairs), dtype=wide)
        before = torch.empty_like(totals)
        if reset is not None:
            restarts = reset.new_empty((rows, plan.chunks))
        plan.totals(x, start, reset, None, None, None, totals, restarts)
        plan.between(totals, None, restarts, None, before, None, None, None)
    plan.results(x, start, reset, before, out, None if kind == GIVEN else last, None, None)
    return out, last


def _key(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a plan depends on."""
    return x.shape, x.stride(), x.dtype, x.get_device()


def _held(kind: int) -> tuple[int, torch.dtype]:
    """Return the number of parts and the dtype of a sum."""
    return (1, torch.float64) if kind == BACK else (2, torch.int64)


def _check(
    kind: int, x: torch.Tensor, start: torch.Tensor | None, reset: torch.Tensor | None
) -> None:
    require(x.dim() == 4, "increments must be [rows|1, heads, tokens, pairs]")
    if kind == BACK:
        require(x.dtype in _FLOATING[2:], "gradients of phases must be float32 or float64")
    require(x.dtype in _FLOATING, "increments must be float16, bfloat16, float32 or float64")
    require(
        kind != GIVEN or (start is None and reset is None),
        "only running sums have a state and resets",
    )
    _, heads, tokens, pairs = x.shape
    if start is not None:
        require(
            start.dim() == 3
            and start.dtype == (x.dtype if kind == BACK else torch.int64)
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


def _plan(
    kind: int,
    x: torch.Tensor,
    start: torch.Tensor | None,
    reset: torch.Tensor | None,
    dtype: torch.dtype,
) -> _Plan | None:
    _check(kind, x, start, reset)
    rows, (_, heads, tokens, pairs) = rows_of(x, start, reset), x.shape
    if 0 in (rows, heads, tokens, pairs) or 2 * pairs > shapes.MOST_ACROSS:
        return None
    chunk = min(tokens, shapes.APIECE if kind == GIVEN else shapes.CHUNK)
    chunks = -(-tokens // chunk)
    steps = (
        Steps(*broadcast_strides(x)),
        None if start is None else _steps(start, 0, 1, None, 2),
        None if reset is None else _steps(reset, 0, None, 1, None),
        Steps(*broadcast_strides(empty_as(x, rows, dtype))),
    )
    walk = Walk(rows * heads * chunks, heads, chunks, chunk, tokens, pairs)
    by_start, by_reset = (None if one is None else one.dtype for one in (start, reset))
    inputs = x.dtype, by_start, by_reset
    of_last = None if kind == GIVEN else dtype if kind == BACK else torch.int64
    if kind == GIVEN or chunks == 1:
        results = _launch(kind, (*inputs, None, dtype, of_last, None, None), walk, steps, x.device)
        return _Plan(rows, chunks, results)
    parts, wide = _held(kind)
    width = parts * pairs
    held = Steps(heads * chunks * width, chunks * width, width, 1)
    along = None if reset is None else Steps(chunks, 0, 1, 0)
    over = Walk(rows * heads, heads, 1, chunks, chunks, width)
    return _Plan(
        rows,
        chunks,
        _launch(kind, (*inputs, wide, dtype, of_last, None, None), walk, steps, x.device),
        _launch(kind, (*inputs, None, None, None, wide, by_reset), walk, steps, x.device),
        _launch(
            TOTALS,
            (wide, None, by_reset, None, wide, None, None, None),
            over,
            (held, None, along, held),
            x.device,
        ),
    )


def _steps(x: torch.Tensor, *dims: int | None) -> Steps:
    """Return the strides of the given dimensions; 0 for None."""
    strides = broadcast_strides(x)
    return Steps(*(0 if dim is None else strides[dim] for dim in dims))


def _launch(
    kind: int,
    types: tuple[torch.dtype | None, ...],
    walk: Walk,
    steps: tuple[Steps | None, ...],
    device: torch.device,
) -> _Launch:
    """Prepare a launch of the kernel, for tensors of these dtypes."""
    block = min(shapes.power_of_two(walk.pairs), shapes.WALKS.pairs)
    lanes = shapes.WALKS.pairs // block
    fixed = walk, *steps, kind, lanes, block
    grid = -(-walk.lanes // lanes), -(-walk.pairs // block), 1
    run = launcher(kernels.add_tokens, grid, (*types, *fixed), {}, shapes.WALKS, device)
    return _Launch(run, flat(fixed))
