"""Run rotate, rotate_ and rotate_into with the Triton kernel, from cached launch plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...activations import NONE, RMS_NORM
from ...ops.call import Extras, Slots, extras_of
from ...ops.layouts import BY_CODE
from ...ops.memory import is_written, shares_memory, shares_slots
from ...ops.schema import (
    NO_GATE,
    ONCE,
    TRANSPOSE,
    Arguments,
    Options,
    options_of,
    pair,
    present,
)
from . import blocks as shapes, kernels
from .arguments import Source, amplitudes_of, head_of, require, source_of, unit_of, views_of
from .extras import Read, read
from .groups import Carried, Carries, Extent, Kind, OperandSteps
from .launch import INTERPRETED, flat, handle_of, launcher, rounds_by_bits
from .slots import Eight, copy_values, entries_of, scale_step, steps_of_slots, view_of_cache
from .views import ACCESS, NEAR, address, starts_aligned, view_of

_Tensors = Sequence[torch.Tensor]

# Memory that is written: new tensors, the inputs themselves, or the caller's tensors.
NEW, IN_PLACE, GIVEN = 0, 1, 2


class _Launch(NamedTuple):
    """One launch of a call.

    Attributes:
        run: launches the kernel, given all of its arguments.
        first: the first tile of the launch; None if it covers all tiles.
        tiles: number of tiles.
    """

    run: Callable[..., None]
    first: int | None
    tiles: int


class _Plan(NamedTuple):
    """The launches of one kind of call, reused for all calls of that kind.

    Attributes:
        launches: empty if there is nothing to do; several only if the sums of all tiles are more than
            MOST_SUMS floats.
        fixed: the arguments from `extent` on, which are the same in all calls.
        partials: shapes of the sums for the gradients of the weights: (tiles, heads or groups of
            heads, channels).
        apart: distances in bytes between tensors that were found to share no memory.
        options: the options of a call with an activation or a gate; None for other calls.
    """

    launches: tuple[_Launch, ...] = ()
    fixed: tuple[Any, ...] = ()
    partials: tuple[tuple[int, int, int], ...] = ()
    apart: set[Any] = set()  # noqa: RUF012  (each plan is given its own)
    options: Options | None = None


# Plans by everything that they depend on; None if the definition must run the call.
_plans: dict[Any, _Plan | None] = {}
_MOST = 4096


def run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    whose: int,
    given: Sequence[Any],
    slots: Slots | None = None,
    eight: Eight | None = None,
) -> list[torch.Tensor] | None:
    """Rotate q and k into `outs`.

    Args:
        whose: the memory of `outs`: NEW, IN_PLACE or GIVEN.
        given: the arguments that follow q and k in the schema.
        slots: where the last result goes, if its `out` is a cache, and values that go there too.
        eight: the scales of caches in 8 bits, which may come without an index of slots.

    Returns:
        The gradients of the norm weights, empty if the call computes none; None if the definition
        must run the call.
    """
    index = q.get_device()
    if index >= 0 and torch.accelerator.current_device_index() != index:
        with torch.accelerator.device_index(index):
            return run(q, k, outs, whose, given, slots, eight)
    primary, secondary, positions, offset, options, amplitude, *more = given
    extras, eps = Arguments(*given)[6:] if more else ((), 0.0)
    # A call of `address` takes as long as all the rest for a tensor.
    q_at = where = at if (at := q.data_ptr()) > NEAR else address(q)
    k_at = key_of_k = ids_at = key_of_ids = None
    if k is not None:
        k_at = at if (at := k.data_ptr()) > NEAR else address(k)
        where |= k_at
        key_of_k = (k.shape, k.stride(), k.dtype, k.get_device())
    if whose == GIVEN:
        for out in outs:
            where |= address(out)
    words_at = at if (at := primary.data_ptr()) > NEAR else address(primary)
    if positions is not None:
        ids_at = at if (at := positions.data_ptr()) > NEAR else address(positions)
        key_of_ids = (positions.shape, positions.stride(), positions.dtype, positions.get_device())
    key = (
        options,
        q.shape,
        q.stride(),
        q.dtype,
        index,
        where % ACCESS,
        whose,
        amplitude,
        eps,
        key_of_k,
        primary.shape,
        primary.stride(),
        primary.dtype,
        words_at % ACCESS,
        primary.get_device(),
        None if secondary is None else _key(secondary),
        key_of_ids,
        tuple(map(_key, extras)) if extras else (),
        tuple(map(_key, outs)) if whose == GIVEN else None,
        None if slots is None else tuple(None if x is None else _key(x) for x in slots[:3]),
        None if eight is None else (eight.format, _key(eight.keys)),
    )
    try:
        plan = _plans[key]
    except KeyError:
        if len(_plans) >= _MOST:
            _plans.clear()
        aligned = where % ACCESS == 0
        plan = _plans[key] = _plan(q, k, outs, whose, aligned, Arguments(*given), slots, eight)
    if plan is None:
        return None
    if whose != NEW and (plan.launches or slots is not None):
        others = () if slots is None else (*slots.read(), *slots.written())
        read = [x for x in (secondary, *extras) if x is not None]
        gaps: Any = k_at and k_at - q_at, ids_at and ids_at - q_at, words_at - q_at
        if read or whose == GIVEN or slots is not None:
            gaps = (*gaps, *[x.data_ptr() - q_at for x in (*read, *outs, *others)])
        if gaps not in plan.apart:  # each set of distances between the tensors is checked once
            xs = present(q, k) if whose == GIVEN else []
            shares = shares_slots(xs, outs, slots) if xs and slots else shares_memory(outs, xs)
            require(not shares, "memory overlaps")
            read += [primary] if positions is None else [primary, positions]
            if any(is_written(x, outs) for x in read):
                return run(q, k, outs, whose, _kept(given, outs), slots, eight)
            if len(plan.apart) < _MOST:
                plan.apart.add(gaps)
    if slots is not None and slots.values is not None and slots.cache is not None:
        code = options_of(options).layout
        copy_values(slots.values, slots.cache, slots.slot, outs[-1], code, eight)
    if plan.options is not None:
        return _run_extras(plan, plan.options, q, k, outs, Arguments(*given), slots, eight)
    if not plan.launches:
        return []
    if INTERPRETED:
        tensors: tuple[Any, ...] = (q, k, *pair(outs), primary, secondary, positions)
    else:
        ats = (q_at, k_at) if whose == IN_PLACE else (*[x.data_ptr() for x in outs], None)[:2]
        tensors = (q_at, k_at, *ats, words_at, handle_of(secondary), ids_at)
    carries = _CARRIES_NOTHING
    if slots is not None:
        scale = None if eight is None else handle_of(eight.keys)
        carries = flat([Carries(slots=handle_of(slots.slot), scale=scale)])
    plan.launches[0].run(*tensors, offset, *carries, *plan.fixed)
    return []


def _kept(given: Sequence[Any], outs: _Tensors) -> Sequence[Any]:
    """Return the arguments with copies of tensors that one program may write before another reads them."""

    def kept(x: torch.Tensor | None) -> torch.Tensor | None:
        return x.clone() if x is not None and is_written(x, outs) else x

    angles = [*map(kept, given[:3])]
    extras = [[*map(kept, given[6])]] if len(given) > 6 else []
    return *angles, *given[3:6], *extras, *given[7:]


_CARRIES_NOTHING = flat([Carries()])


def _run_extras(
    plan: _Plan,
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    given: Arguments,
    slots: Slots | None,
    eight: Eight | None,
) -> list[torch.Tensor]:
    """Run a call with an activation or a gate; return the gradients of its norm weights."""
    primary, secondary, positions, offset, *_ = given
    parts = extras_of(options, given.extras)
    if not plan.launches:
        return [
            weight.new_zeros(weight.shape, dtype=torch.float32)
            for weight in _summed(options, parts)
        ]
    out_k = outs[1] if k is not None else None
    norms = [norm.contiguous() for norm in parts.weights]
    partials = [q.new_empty(shape, dtype=torch.float32) for shape in plan.partials]
    tensors = (*map(handle_of, (q, k, outs[0], out_k, primary, secondary, positions)), offset)
    every = norms, parts.gates, parts.inputs, partials
    count = 1 if k is None else 2
    carried = [Carried(*[handle_of(x[i]) if x else None for x in every]) for i in range(count)]
    if not plan.partials:
        index = None if slots is None else handle_of(slots.slot)
        scale = None if eight is None else handle_of(eight.keys)
        plan.launches[0].run(*tensors, *_carries(carried, None, index, scale), *plan.fixed)
        return []
    # Add up the sums of the tiles, in order, in float64.
    totals: list[Any] = [0] * len(partials)
    for launch in plan.launches:
        launch.run(*tensors, *_carries(carried, launch.first), *plan.fixed)
        for i, partial in enumerate(partials):
            totals[i] = totals[i] + partial[: launch.tiles].sum(0, dtype=torch.float64)
    return [
        (total.sum(0, keepdim=True) if weight.shape[0] == 1 else total).to(torch.float32)
        for weight, total in zip(parts.weights, totals, strict=True)
    ]


def _carries(
    carried: Sequence[Carried], first: int | None, slots: Any = None, scale: Any = None
) -> tuple[Any, ...]:
    """Return ``flat([Carries(...)])``, but faster."""
    q, k = (*carried, Carried())[:2]
    return (Carries(q, k, first, slots, scale),) if INTERPRETED else (*q, *k, first, slots, scale)


def _summed(options: Options, parts: Extras) -> Sequence[torch.Tensor]:
    """Return the norm weights whose gradients the call computes."""
    return parts.weights if options.act == RMS_NORM and options.direction == TRANSPOSE else ()


def _key(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a plan depends on."""
    return x.shape, x.stride(), x.dtype, address(x) % ACCESS, x.get_device()


def _all_whole(source: Source, reads: Read) -> bool:
    """Return whether tables, inputs and gates (unless constant over channels) are read in 16-byte units."""
    return (
        (source.vector > 0 or not source.kind.TABLES)
        and (reads.input_vector > 0 or not reads.inputs)
        and (reads.gate_vector > 0 or all(steps.channel == 0 for steps in reads.gates))
    )


def _plan(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
    whose: int,
    aligned: bool,
    given: Arguments,
    slots: Slots | None = None,
    eight: Eight | None = None,
) -> _Plan | None:
    primary, secondary, positions, _, packed, amplitude, extras, eps = given
    options = options_of(packed)
    xs = [q] if k is None else [q, k]
    parts = extras_of(options, extras)
    wide = q.dtype == torch.float64
    require(options.layout < len(BY_CODE), "the layout must be known")
    # Caches in 8 bits may come without an index: then each result goes to its own place.
    placed = slots is not None and slots.slot is not None
    layout, own = BY_CODE[options.layout], len(outs) - placed
    kinds = [q.dtype] * len(outs)
    if eight is not None:
        kinds[-1] = torch.uint8
    of_slots = None
    if slots is not None and whose == IN_PLACE:
        cache = view_of_cache(q, layout)
        views = [entries_of(cache, slots.slot)]
        of_slots = steps_of_slots(slots.slot, views[0], cache, q.device)._replace(in_place=1)
    else:
        views = views_of(xs, options)
    out_views = views if whose == IN_PLACE else [view_of(out, layout) for out in outs[:own]]
    require(
        [view.sizes for view in out_views] == [view.sizes for view in views[: len(out_views)]]
        and all(out.dtype == kind and out.device == q.device for out, kind in zip(outs, kinds)),
        "outs must have the shapes, dtype and device of q and k",
    )
    if slots is not None and placed and whose == GIVEN:
        out_views.append(view_of_cache(outs[-1], layout))
        of_slots = steps_of_slots(slots.slot, views[-1], out_views[-1], q.device)
        require(
            slots.values is None or eight is not None or slots.values.dtype == q.dtype,
            "values must have the dtype of the keys",
        )
    source = source_of(primary, secondary, positions, options, views, q.device)
    rows, _, tokens, head_dim = views[0].sizes
    block = shapes.power_of_two(source.pairs)
    if wide and options.act != NONE:
        return None
    if (
        slots is not None
        and slots.values is not None
        and view_of(slots.values, layout).heads > shapes.MOST_ACROSS
    ):
        return None
    if source.pairs == 0 or max(2 * block, head_dim) > shapes.WIDEST:
        return None
    reads = read(options, parts, views, source.axes, q.device)
    plain = options.act == NONE and options.gate == NO_GATE
    require(
        plain or (options.rounding == ONCE and not source.kind.FULL),
        "an act or a gate needs rounding once, and tables that are not full",
    )
    carries = options if options.act != NONE or options.gate != NO_GATE else None
    heads = max(view.heads for view in views)
    if 0 in (rows, heads, tokens, head_dim) or (
        of_slots is not None and len(xs) == 1 and of_slots.count == 0
    ):
        return _Plan(options=carries)
    rest = whose != IN_PLACE or options.act != NONE or options.gate != NO_GATE
    head = head_of(options, source.pairs, head_dim)
    every = [*views, *out_views]
    element = q.element_size()
    unit = unit_of(every, element, aligned)
    heavy = options.act != NONE or options.gate != NO_GATE or source.kind.HEADS
    held = 0
    if rest:
        behind = head_dim - options.start - 2 * source.pairs
        held = (head.BLOCK_F if options.start else 0) + (head.BLOCK_B if behind else 0)
    step = 2 * source.pairs if options.interleaved else source.pairs
    whole = unit > 1 and options.start % unit == 0 and step % unit == 0
    back = options.act != NONE and options.direction == TRANSPOSE
    # The backward pass of a norm over more pairs would spill.
    more = held > 0 or (back and options.act == RMS_NORM and head.BLOCK_P > 64)
    blocks = shapes.blocks_of(element, heavy, back, more, whole, _all_whole(source, reads))
    # The kernel loads at most two heads at a time, and only one if a head needs more registers.
    together = 1 if held or heavy else min(blocks.together, heads, 2)
    summed = _summed(options, parts)
    # What is added up has the same order on every device.
    programs = shapes.PROGRAMS if summed else shapes.programs_on(q.device)
    apart = [-(-view.heads // together) for view in views]
    few = not summed and rows * tokens * sum(apart) <= shapes.FEW * programs
    if few:
        blocks = shapes.of_one_token(blocks, block)
    block_tokens = 1 if few else shapes.tokens_of(blocks, block, held)
    tiles = -(-rows * tokens // block_tokens)
    chunk = together if few else shapes.chunk_of(heads, tiles, together, programs)
    # Heads that share their weights share a sum.
    one_sum = bool(summed) and all(weight.shape[0] == 1 for weight in summed)
    kind = Kind(
        ACT=options.act,
        GATE=options.gate,
        DIRECTION=options.direction if heavy else 0,
        REST=rest,
        TOGETHER=together,
        FEW=few,
        ONE_SUM=one_sum,
        BITS=INTERPRETED or (eight is not None and rounds_by_bits()),
        ROUNDING=options.rounding,
        NARROW=options.narrow,
        EIGHT=0 if eight is None else eight.format,
    )
    known = {"x": unit, "out": unit, "cos": source.vector, "sin": source.vector}
    known |= {"gate": reads.gate_vector, "input": reads.input_vector, "partial": ACCESS}
    known |= dict.fromkeys(("q", "k", "out_q", "out_k"), ACCESS if aligned else 0)
    tables = {"primary": [primary], "secondary": [] if secondary is None else [secondary]}
    for name, tensors in (tables | {"norm": parts.weights}).items():
        known[name] = ACCESS if all(map(starts_aligned, tensors)) else 0
    parts_of_heads = sum(apart) if few else -(-heads // chunk)
    own_sums = bool(summed) and not one_sum
    at_once = min(tiles, shapes.tiles_summed(heads * head_dim)) if own_sums else tiles
    partials = []
    carried: dict[str, Carried] = {}
    values: dict[str, Any] = {
        "offset": 0,
        "extent": Extent(rows * tokens, tokens, chunk, apart[0] if few else None),
        "amplitude": amplitudes_of(options, amplitude, wide),
        "eps": float(eps) if options.act == RMS_NORM else None,
        "primary": primary.dtype,
        "secondary": None if secondary is None else secondary.dtype,
        "positions": None if positions is None else positions.dtype,
        **source.values,
        "HEAD": head._replace(BLOCK_T=block_tokens, WIDE=wide),
        "KIND": kind,
    }
    for i, (name, x, view, out_view) in enumerate(zip("qk", xs, views, out_views)):
        values |= {name: x.dtype, f"out_{name}": kinds[i]}
        values[f"{name}_steps"] = OperandSteps(
            view.heads, view.steps, out_view.steps, **reads.steps(i)
        )
        if i + 1 == len(xs):
            of_scale = None if eight is None else scale_step(eight.keys, view.heads, q.device)
            last = values[f"{name}_steps"]._replace(slots=of_slots, scale=of_scale)
            values[f"{name}_steps"] = last
        types = [x[i].dtype if x else None for x in (parts.weights, parts.gates, parts.inputs)]
        carried[name] = Carried(*types)._replace(partial=torch.float32 if summed else None)
        if summed:
            each = view.heads if own_sums else parts_of_heads
            partials.append((at_once, each, head_dim))
    kernel = kernels.rotate.rotate
    values["carries"] = Carries(
        **carried,
        first_tile=0 if at_once < tiles else None,
        slots=slots.slot.dtype if slots is not None and placed else None,
        scale=None if eight is None else torch.float32,
    )
    arguments_ = [values.get(name) for name in kernel.arg_names]
    launches = []
    for first in range(0, tiles, at_once):
        some = min(at_once, tiles - first)
        grid = (some, parts_of_heads, 1)
        launch = launcher(kernel, grid, arguments_, known, blocks, q.device)
        launches.append(_Launch(launch, first if at_once < tiles else None, some))
    fixed = flat(arguments_[kernel.arg_names.index("extent") :])
    return _Plan(tuple(launches), fixed, tuple(partials), set(), carries)
