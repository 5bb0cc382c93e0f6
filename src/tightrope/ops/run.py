"""Run calls, by verb (where results go) and route.

Every route can make new tensors. For the other verbs these are copied into their destination, unless the
route can write there itself. docs/design.md shows what runs for each verb and route, and
tests/laws/test_modes.py runs every case. If q and k differ in the kind of f or P, a public call becomes
two calls, one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._errors import Refusal, bad_value, unsupported
from .._tracing import have_tangents, is_repeated, needs_plain
from ..activations import NONE
from . import memory, scaled
from .autograd import InPlace, OutOfPlace, Rotation, template_of
from .build import Request, build
from .call import Call, Slots, pack, tensors_of
from .checks import layout_named
from .definition import define
from .direct import launch
from .route import (
    AUTOGRAD,
    DEFINITION,
    KERNEL,
    TRACED,
    Way,
    any_requires_grad,
    either_learns,
    is_plain,
    learns_angles,
    route,
    route_quick,
)
from .schema import (
    IN_PLACE,
    NEW,
    OUT,
    SLOTS,
    Packed,
    pair,
    present,
    rotate_slots_,
)
from .slots import (
    check_distinct,
    check_entries,
    check_range,
    gather,
    names_of,
    stand_in,
    write,
    write_all,
)

Results = Sequence[torch.Tensor]


def run(calls: Sequence[Call]) -> Results:
    """Route each call and run it.

    Args:
        calls: one, or one for q and one for k.

    Returns:
        The rotated tensors, in the order of q and k.
    """
    if len(calls) == 1:
        (call,) = calls
        return _run(call, route(call))
    ways = [route(call) for call in calls]
    calls = _separated(calls, ways)
    return [_run(call, way)[0] for call, way in zip(calls, ways)]


def run_entries(request: Request, slot: torch.Tensor) -> torch.Tensor:
    """Rotate entries of a cache in place.

    Args:
        request: q is the cache; k is None.
        slot: the entries.

    Returns:
        The cache.
    """
    cache, layout, slots = request.q, layout_named(request.layout), Slots(slot)
    check_entries(slot, request.names[0], cache, layout)
    (call,) = build(request._replace(q=stand_in(cache, slot, layout), verb="new"))
    way = route(call)
    _check_mode(call._replace(slots=Slots(slot, cache)), way)
    if torch.is_grad_enabled() and any_requires_grad((*tensors_of(call.tensors()), cache)):
        raise bad_value(
            "slots rotate without a gradient, but the cache or another tensor requires one; use torch.no_grad()"
        )
    if way.route == TRACED:
        rotate_slots_(cache, slot, *with_extras(pack(call)))
        return cache

    def check() -> None:
        memory.check_in_place(call.names, [cache])
        check_range(slots, cache, layout, call.names[0])
        check_distinct(slot)

    if way.route != KERNEL or is_repeated():
        if way.sees_memory:
            check()
        (y,) = _new(call.on([gather(cache, slot, layout)]), way)
        write(y, cache, slot, layout)
        return cache
    memory.check_not_frozen(call.names, [cache])
    try:
        with torch._C._AutoDispatchBelowAutograd():
            rotate_slots_(cache, slot, *with_extras(pack(call)))
    except RuntimeError:
        check()
        raise
    torch.autograd.graph.increment_version(cache)
    return cache


def run_quick(request: tuple[Any, ...]) -> Results | None:
    """Call the kernel directly, if :func:`tightrope.ops.route.route_quick` allows it.

    Args:
        request: the fields of a :class:`Request`, as any tuple.

    Returns:
        The rotated tensors; None if the call must be built in full and go through :func:`run`.
    """
    packed = route_quick(request)
    if packed is None:
        return None
    names, verb, q, k, rope, _, _, _, stages, outs, slots, _ = request
    if torch.is_grad_enabled() and either_learns(q, k):
        # Phases may require grad.
        if verb != "new" or stages is not None or getattr(rope, "phases", None) is not None:
            return None
    if outs and len(outs) != (1 if k is None else 2):
        return None
    for out in outs:  # a generator takes twice as long
        if not is_plain(out) or out.is_neg():
            return None
    if slots is not None and not _are_plain(q, k, outs, slots):
        return None
    return launch_quick(names, verb, q, k, packed, lambda: build(Request(*request)), outs, slots)


def _are_plain(
    q: torch.Tensor, k: torch.Tensor | None, outs: Sequence[torch.Tensor], slots: Slots
) -> bool:
    slot, values, cache, scales = slots
    if scales is not None:
        return False
    if values is not None and cache is not None:
        if not (is_plain(values) and is_plain(cache)) or values.is_neg() or cache.is_neg():
            return False
        if slot is None:  # no kernel checks the values then
            if values.shape != cache.shape or values.dtype != cache.dtype:
                return False
            if values.dtype != q.dtype or memory.is_written(values, outs):
                return False
            return not memory.share_storage(cache, (*present(q, k), *outs, values))
    return slot is None or is_plain(slot)


def launch_quick(
    names: Sequence[str],
    verb: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    packed: Packed,
    rebuild: Callable[[], list[Call]],
    outs: Sequence[torch.Tensor] = (),
    slots: Slots | None = None,
) -> Results:
    """Call the kernel on arguments that only it checks.

    Args:
        names: names of q and k in error messages.
        verb: one of :data:`tightrope.ops.call.VERBS`.
        rebuild: makes the calls with all checks, to raise the readable error.
    """
    try:
        if verb == "new":
            return run_packed(q, k, packed)
        if verb == "out":
            written = outs if slots is None or slots.cache is None else [*outs, slots.cache]
            for one in written:
                if one.is_inference():
                    memory.check_not_frozen(names_of(outs, slots), written)
            with torch._C._AutoDispatchBelowAutograd():
                _write_out(q, k, outs, slots, packed)
            torch._C._increment_version(written)
            return outs
        if q.is_inference() or (k is not None and k.is_inference()):
            memory.check_not_frozen(names, present(q, k))
        launch(IN_PLACE, q, k, packed)
        xs = (q,) if k is None else (q, k)
        torch._C._increment_version(xs)
        return xs
    except RuntimeError as error:
        # Kernels refuse invalid arguments before they write: the checks raise the readable error. Any
        # other error may have come after the kernel wrote, so the call must not run again.
        try:
            calls = rebuild()
            if verb != "new":
                _check_memory(calls, False)
        except Refusal:
            raise
        except Exception:  # noqa: BLE001  (of a hook that fails once more)
            raise error from None
        raise


def run_packed(q: torch.Tensor, k: torch.Tensor | None, packed: Packed) -> Results:
    """Rotate into new tensors, by arguments that the caller has checked; :func:`.route.mode` must be "eager".

    If q or k require grad, the arguments must be those of a rotation alone, and must not require one.
    """
    if torch.is_grad_enabled() and either_learns(q, k):
        return Rotation.apply(packed, q, k)  # type: ignore[no-any-return, no-untyped-call]
    return launch(NEW, q, k, packed)


def _run(call: Call, way: Way) -> Results:
    if call.verb == "new":
        return _new(call, way)
    if call.slots is not None:
        _check_mode(call, way)
    if call.verb == "out":
        _check_out_grad(call)
    written = call.outs or call.xs()
    # Selective checkpointing may skip an operator in the repeated pass, and what it wrote in the first
    # would be missing. A copy is always repeated.
    repeated = is_repeated()
    eight = call.slots is not None and call.slots.scales is not None
    encodes = not eight or call.q.device.type not in scaled.WITHOUT_SCALES
    if way.route == KERNEL and encodes and not repeated:
        return _write_by_kernel(call)
    if way.route == TRACED and encodes and not (way.transformed or way.needs_grad):
        _write(call)
        return written
    # Transforms check the memory of the tensors that they wrap.
    if way.sees_memory:
        _check_memory([call], way.needs_grad)
    if way.route == AUTOGRAD and not (way.transformed or repeated):
        # The backward pass may read the arguments, and k is rotated after q has changed.
        call = memory.copied_before(call, written)
        # Gradients of angles, tables and gates need the values that an in-place rotation overwrites.
        if not learns_angles(call):
            return _in_place_by_autograd(call)
    if call.verb == "in place" and (way.route == DEFINITION or call.keeps_inputs()):
        call = call.copied()
    if call.slots is not None:
        check_range(call.slots, written[-1], call.layout())
        rotated = scaled.in_bytes(call, lambda one: _new(one, way)) if eight else None
        write_all(*(rotated or (_new(call, way), written, call.slots)), call.layout())
        return written
    ys = _new(call, way)
    for x, y in zip(written, ys, strict=True):
        x.copy_(y)  # visible to autograd and transforms
    return written


def _new(call: Call, way: Way) -> Results:
    """Rotate into new tensors."""
    if way.route == DEFINITION:
        ys, xs = define(call), call.xs()
        if way.transformed:
            return ys
        # A gradient by f has those of the weights after those of x.
        return [*(_laid_out(y, x) for y, x in zip(ys, xs)), *ys[len(xs) :]]
    if way.route == AUTOGRAD:
        return OutOfPlace.apply(template_of(call), *call.tensors())  # type: ignore[no-any-return, no-untyped-call]
    packed = pack(call)
    if way.route == KERNEL:
        return launch(NEW, call.q, call.k, packed)
    return NEW.for_(packed)(call.q, call.k, *packed)  # type: ignore[no-any-return]


def _laid_out(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return y with the order in memory of x, as kernels return it; in compiled code if x is contiguous."""
    if x.is_contiguous() or 0 in x.stride():  # of an expanded tensor
        return y.contiguous()
    if torch.compiler.is_compiling():
        return y
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    # Not written into new memory: selective checkpointing refuses a result that changes after it was saved.
    return y.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def _write(call: Call) -> None:
    """Call the operator that writes in place or into ``out``."""
    packed = pack(call)
    if call.verb == "in place":
        IN_PLACE.for_(packed)(call.q, call.k, *packed)
    else:
        _write_out(call.q, call.k, call.outs, call.slots, packed)


def _write_out(
    q: torch.Tensor, k: torch.Tensor | None, outs: Results, slots: Slots | None, packed: Packed
) -> None:
    """Call the operator that writes into ``out``."""
    if slots is None or (slots.slot is None and slots.scales is None):
        OUT.for_(packed)(q, k, *pair(outs), *packed)
        if slots is not None and slots.values is not None and slots.cache is not None:
            slots.cache.copy_(slots.values)
        return
    slot, values, cache, scales = slots
    if values is None and scales is None and len(packed) == _PLAIN:
        SLOTS.plain(q, k, *pair(outs), slot, *packed)
    else:
        of = (None, None) if scales is None else scaled.on(slots, q.device)
        more = *pair(outs), cache, slot, *of
        SLOTS.carrying(q, k, values, *more, *with_extras(packed))


_PLAIN = 6  # arguments of a call without extra tensors


def with_extras(packed: Packed) -> Packed:
    """Add an empty list of extra tensors, for operators that have one overload."""
    return packed if len(packed) > _PLAIN else (*packed, (), 0.0)


def _write_by_kernel(call: Call) -> Results:
    if call.slots is not None and call.slots.slot is None:
        _check_memory([call], False)  # of the values, which no kernel checks
    xs = call.names, call.verb, call.q, call.k
    return launch_quick(*xs, pack(call), lambda: [call], call.outs, call.slots)


def _in_place_by_autograd(call: Call) -> Results:
    # Autograd does not allow one function to return two views, so q and k are separate calls.
    for i, x in enumerate(call.xs()):
        one = call.only([i])
        # The copy is made here so that it is part of the graph: the derivative of f depends on it.
        one = one._replace(q=None if one.options.act == NONE else x.clone())
        InPlace.apply(template_of(one), x, *one.tensors())  # type: ignore[no-untyped-call]
    return call.xs()


def _separated(calls: Sequence[Call], ways: Sequence[Way]) -> Sequence[Call]:
    """Check both calls before the first one writes; copy tensors that it overwrites and the second reads."""
    if calls[0].verb == "new":
        return calls
    if calls[0].verb == "out":
        for call in calls:
            _check_out_grad(call)
    written = [x for call in calls for x in (call.outs or call.xs())]
    sees = ways[0].sees_memory
    if sees:
        _check_memory(calls, any(way.needs_grad for way in ways))
    elif written[0] is written[1]:
        raise bad_value("the results of q and k must not share memory")
    # Without data pointers overlap cannot be checked, so positions and extra tensors are all copied.
    later = [memory.copied_before(call, written if sees else None) for call in calls[1:]]
    for i, call in enumerate(later):
        slots = call.slots
        if slots is None or slots.slot is None:
            continue
        if not sees or memory.is_written(slots.slot, written):
            later[i] = call._replace(slots=slots._replace(slot=slots.slot.clone()))
    return [calls[0], *later]


def _check_memory(calls: Sequence[Call], needs_grad: bool) -> None:
    """Raise the readable error if the tensors that calls write cannot be written."""
    xs = [x for call in calls for x in call.xs()]
    if calls[0].verb == "out":
        last = calls[-1]
        if last.slots is not None:
            check_range(last.slots, last.outs[-1], last.layout())
        memory.check_out(xs, [out for call in calls for out in call.outs], last.slots)
        return
    names = [name for call in calls for name in call.names]
    memory.check_in_place(names, xs)
    if needs_grad:
        memory.check_in_place_grad(names, xs)


def _check_mode(call: Call, way: Way) -> None:
    """Refuse slots where the write into a cache could not be recorded."""
    slots = call.slots
    if needs_plain():
        raise unsupported(
            "a cache cannot be written in an export to ONNX; rotate without it, and write it with operators of ONNX"
        )
    if way.transformed and way.route != TRACED:
        raise unsupported(
            "a cache cannot be written in vmap, grad or another transform of torch.func"
        )
    if have_tangents(tensors_of((call.tensors(), call.outs, slots)), False):
        raise unsupported("what is written to a cache has no forward-mode derivative; call rotate")


def _check_out_grad(call: Call) -> None:
    """Refuse a gradient through what is written to ``out`` or to a cache."""
    if not torch.is_grad_enabled():
        return
    what, without = "a result written to out", "use torch.no_grad(), or omit out"
    extras, slots = call.extras, call.slots
    learned = (call.primary, call.secondary, call.positions, *extras.frequencies)
    named: list[tuple[str, Sequence[torch.Tensor | None]]] = [
        ("positions, inv_freq or phases require", learned),
        ("act or gate require", (*extras.weights, *extras.gates)),
        *(
            (f"{x} or its destination requires", both)
            for x, *both in zip(call.names, call.xs(), call.outs)
        ),
    ]
    if slots is not None:
        what, without = "what is written to a cache", "use torch.no_grad()"
        named.append(("v or its cache requires", slots[:3]))
    for who, tensors in named:
        if any_requires_grad(tensors):
            raise bad_value(f"{what} has no gradient, but {who} one; {without}")
