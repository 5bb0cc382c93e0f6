"""rotate, rotate_ and rotate_into by the Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...activations import NONE, RMS_NORM
from ...ops.arguments import carried_of
from ...ops.checks import shares_memory
from ...ops.schema import NO_GATE, TRANSPOSE, Form, form_of
from . import blocks as shapes, kernels
from .carried import carried_values
from .forms import amplitudes_of, require, slices_of, source_of, strides_of, unit_of, views_of
from .launch import INTERPRETED, handle_of, launcher
from .views import ACCESS, has_unit_channels, starts_aligned

_Tensors = Sequence[torch.Tensor]

# Whose memory is written: that of new tensors, of the tensors that are read, or of others.
NEW, IN_PLACE, GIVEN = 0, 1, 2


class _Plan(NamedTuple):
    """What a form of call comes to.

    Attributes:
        launch: of all arguments of the kernel; None where there is nothing to do.
        fixed: those that follow the tensors.
        partials: the shapes of the sums for the gradients by weights: tiles, heads, channels.
        apart: distances between tensors at which they share no memory.
        form: of a call that carries what the kernel reads; None if it carries nothing such.
    """

    launch: Callable[..., None] | None
    fixed: tuple[Any, ...] = ()
    partials: tuple[tuple[int, int, int], ...] = ()
    apart: set[tuple[int, ...]] = set()  # noqa: RUF012  (each plan is given its own)
    form: Form | None = None


# Plans by everything that they depend on, or why there is none.
_plans: dict[Any, _Plan | None] = {}
_MOST = 4096


def run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    whose: int,
    arguments: tuple[Any, ...],
) -> list[torch.Tensor] | None:
    """Rotate q and k into `outs`.

    Args:
        whose: memory `outs` are: NEW, IN_PLACE or GIVEN.
        arguments: what follows q and k in the schema, all of it.

    Returns:
        The gradients by weights, where the call has any; None if it is left to the definition.
    """
    index = q.device.index
    if index is not None and torch.accelerator.current_device_index() != index:
        with torch.accelerator.device_index(index):
            return run(q, k, outs, whose, arguments)
    primary, secondary, positions, offset, form, amplitude, carried, eps = arguments
    q_at = where = q.data_ptr()
    k_at = key_of_k = None
    if k is not None:
        k_at = k.data_ptr()
        where |= k_at
        key_of_k = (k.shape, k.stride(), k.dtype)
    if whose == GIVEN:
        for out in outs:
            where |= out.data_ptr()
    words_at = primary.data_ptr()
    key = (
        form, q.shape, q.stride(), q.dtype, index, where % ACCESS, whose, amplitude, eps, key_of_k,
        primary.shape, primary.stride(), primary.dtype, words_at % ACCESS,
        None if secondary is None else _said(secondary),
        None if positions is None else (positions.shape, positions.stride(), positions.dtype),
        tuple(map(_said, carried)) if carried else None,
        tuple(map(_said, outs)) if whose == GIVEN else None,
    )  # fmt: skip
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = _plan(q, k, outs, whose, where % ACCESS == 0, arguments)
    if plan is None:
        return None
    if whose != NEW and plan.launch is not None:
        _check_memory(plan, q, k, outs, whose)
    if plan.form is not None:
        return _run_carried(plan, plan.form, q, k, outs, arguments)
    if plan.launch is None:
        return []
    out_q, out_k = outs[0], outs[1] if k is not None else None
    if INTERPRETED:
        tensors: tuple[Any, ...] = (q, k, out_q, out_k, primary, secondary, positions)
    elif whose == IN_PLACE:
        tensors = (q_at, k_at, q_at, k_at, words_at, handle_of(secondary), handle_of(positions))
    else:
        tensors = (
            q_at, k_at, out_q.data_ptr(), handle_of(out_k), words_at, handle_of(secondary),
            handle_of(positions),
        )  # fmt: skip
    plan.launch(*tensors, offset, *_CARRIES_NOTHING, *plan.fixed)
    return []


_UNKNOWN: Any = object()
_CARRIES_NOTHING = (None,) * 8


def _check_memory(
    plan: _Plan,
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    whose: int,
) -> None:
    """Refuse to write what is read elsewhere, or twice; one look for each distance of the tensors."""
    xs = [q] if k is None else [q, k]
    start = q.data_ptr()
    gaps = tuple([x.data_ptr() - start for x in (xs if whose == IN_PLACE else [*xs, *outs])])
    if gaps in plan.apart:
        return
    require(not shares_memory(outs, xs if whose == GIVEN else ()), "memory overlaps")
    if len(plan.apart) < _MOST:
        plan.apart.add(gaps)


def _run_carried(
    plan: _Plan,
    form: Form,
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    arguments: tuple[Any, ...],
) -> list[torch.Tensor]:
    """A call with an act or a gate, and the gradients by its weights."""
    primary, secondary, positions, offset, _, _, carried, _ = arguments
    parts = carried_of(form, carried)
    partials = [q.new_empty(shape, dtype=torch.float32) for shape in plan.partials]
    if plan.launch is not None:
        out_k = outs[1] if k is not None else None
        norms = [norm.contiguous() for norm in parts.weights]
        tensors = (q, k, outs[0], out_k, primary, secondary, positions)
        more = (*_two(norms), *_two(parts.gates), *_two(parts.inputs), *_two(partials))
        plan.launch(*map(handle_of, tensors), offset, *map(handle_of, more), *plan.fixed)
    if form.act != RMS_NORM or form.direction != TRANSPOSE:
        return []
    if plan.launch is None:
        return [torch.zeros_like(weight, dtype=torch.float32) for weight in parts.weights]
    # The second stage: tiles in order, in float64.
    found = []
    for weight, partial in zip(parts.weights, partials, strict=True):
        total = partial.sum(0, dtype=torch.float64)
        if weight.shape[0] == 1:
            total = total.sum(0, keepdim=True)
        found.append(total.to(torch.float32))
    return found


def _said(x: torch.Tensor) -> tuple[Any, ...]:
    """What a launch depends on of a tensor."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ACCESS


def _two(found: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not found:
        return None, None
    return found[0], found[1] if len(found) > 1 else None


def _plan(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    whose: int,
    aligned: bool,
    arguments: tuple[Any, ...],
) -> _Plan | None:
    primary, secondary, positions, _, packed, amplitude, carried, eps = arguments
    form = form_of(packed)
    xs = [q] if k is None else [q, k]
    parts = carried_of(form, carried)
    wide = q.dtype == torch.float64
    if form.numerics or (wide and form.act != NONE):
        return None
    views = views_of(xs, form)
    out_views = views if whose == IN_PLACE else views_of(outs, form)
    require(
        [view.sizes for view in out_views] == [view.sizes for view in views]
        and outs[0].dtype == q.dtype
        and outs[0].device == q.device,
        "outs must have the shapes, dtype and device of q and k",
    )
    source = source_of(primary, secondary, positions, form, views, q.device)
    rows, _, tokens, head_dim = views[0].sizes
    block = shapes.power_of_two(source.pairs)
    if source.pairs == 0 or max(2 * block, head_dim) > shapes.WIDEST:
        return None
    rest = whose != IN_PLACE or form.act != NONE or form.gate != NO_GATE
    slices = slices_of(form, source.pairs, head_dim)
    heads = max(view.heads for view in views)
    every = [*views, *out_views]
    element = q.element_size()
    unit = unit_of(every, element, aligned)
    heavy = form.act != NONE or form.gate != NO_GATE or source.heads != 1
    blocks = (shapes.HEAVY if heavy else shapes.PLAIN)[element]
    held = 0
    if rest:
        behind = head_dim - form.start - 2 * source.pairs
        held = (slices["BLOCK_F"] if form.start else 0) + (slices["BLOCK_B"] if behind else 0)
    block_tokens = shapes.tokens_of(blocks, block, held)
    tiles = -(-rows * tokens // block_tokens)
    together = 1 if held else min(blocks.together, shapes.power_of_two(heads))
    chunk = shapes.chunk_of(heads, tiles, together)
    cosine, sine = amplitudes_of(form, amplitude, wide)
    values: dict[str, Any] = {
        "offset": 0,
        "count": rows * tokens,
        "tokens": tokens,
        "chunk": chunk,
        "amplitude": cosine,
        "sine_amplitude": sine,
        "eps": float(eps) if form.act == RMS_NORM else None,
        **source.values,
        **slices,
        "BLOCK_T": block_tokens,
        "INTERLEAVED": form.interleaved,
        "REST": rest,
        "UNIT": has_unit_channels(every),
        "VECTOR": unit,
        "BITS": INTERPRETED,
        "ACT": form.act,
        "GATE": form.gate,
        "DIRECTION": form.direction if heavy else 0,
        "TOGETHER": together,
        "WIDE": wide,
        "primary": primary.dtype,
        "secondary": None if secondary is None else secondary.dtype,
        "positions": None if positions is None else positions.dtype,
    }
    values |= carried_values(form, parts, views, source.axes, q.device)
    known = {"partial_q", "partial_k"}
    known |= {"q", "k", "out_q", "out_k"} if aligned else set()
    known |= {"primary"} if starts_aligned(primary) else set()
    known |= {"secondary"} if secondary is not None and starts_aligned(secondary) else set()
    known |= {"gate_q", "gate_k"} if values["GATE_VECTOR"] else set()
    known |= {"input_q", "input_k"} if values["INPUT_VECTOR"] else set()
    known |= {"norm_q", "norm_k"} if all(map(starts_aligned, parts.weights)) else set()
    partials = []
    for name, x, view, out_view in zip("qk", xs, views, out_views):
        values |= {name: x.dtype, f"out_{name}": x.dtype, f"{name}_heads": view.heads}
        values |= strides_of(name, view, unit) | strides_of(f"out_{name}", out_view, unit)
        if form.act == RMS_NORM and form.direction == TRANSPOSE:
            values[f"partial_{name}"] = torch.float32
            partials.append((tiles, view.heads, head_dim))
    carries = form if form.act != NONE or form.gate != NO_GATE else None
    if rows * tokens * heads * head_dim == 0:
        return _Plan(None, form=carries)
    kernel = kernels.rotate
    arguments_ = [values.get(name) for name in kernel.arg_names]
    grid = (tiles, -(-heads // chunk), 1)
    launch = launcher(kernel, grid, arguments_, frozenset(known), blocks.warps, q.device)
    fixed = tuple(arguments_[kernel.arg_names.index("ramp") :])
    return _Plan(launch, fixed, tuple(partials), set(), carries)
