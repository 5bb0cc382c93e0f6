"""Run calls: a table with one short function for each verb (where results go) and route.

docs/design.md shows the same table and tests/unit/ops/test_route.py tests every cell. If q and k differ in
the kind of f or P, a public call becomes two calls, one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._errors import Refusal, bad_value
from .._tracing import is_repeated
from ..activations import NONE
from ..positions import PositionsLike
from ..spec import PreparedRotation, RopeSpec
from . import memory
from .autograd import InPlace, OutOfPlace, Template
from .build import Request, Stages, build
from .call import Call, pack, unpack
from .checks import RoundingLike
from .definition import define
from .phased import PhasesLike
from .route import (
    AUTOGRAD,
    DEFINITION,
    KERNEL,
    TRACED,
    Way,
    any_requires_grad,
    route,
    route_quick,
    wanted,
)
from .schema import IN_PLACE, NEW, OUT, Operator, Packed, pair, present

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


def run_quick(  # noqa: PLR0913, PLR0917  (a tuple of arguments would cost a decoded token time)
    names: Sequence[str],
    verb: str,
    rope: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    q: torch.Tensor,
    k: torch.Tensor | None,
    layout: str,
    inverse: bool,
    stages: Stages | None,
    rounding: RoundingLike | None = None,
    phases: PhasesLike = None,
) -> Results | None:
    """Call the kernel directly, if :func:`tightrope.ops.route.route_quick` allows it.

    Args:
        names: names of q and k in error messages.
        verb: "new" or "in place".

    Returns:
        The rotated tensors; None if the call must be built in full and go through :func:`run`.
    """
    packed = route_quick(rope, positions, q, k, layout, inverse, stages, rounding, phases)
    if packed is None:
        return None
    try:
        if verb == "new":
            return _launch(NEW, q, k, packed)
        _launch_in_place(q, k, packed)
    except RuntimeError as error:
        # Kernels refuse invalid arguments before they write: the checks raise the readable error. Any
        # other error may have come after the kernel wrote, so the call must not run again.
        request = Request(
            names,
            q,
            k,
            rope,
            positions,
            layout,
            inverse,
            stages=stages,
            verb=verb,
            rounding=rounding,
            phases=phases,
        )
        try:
            calls = build(request)
            if verb == "in place":
                _check_in_place(calls, False)
        except Refusal:
            raise
        except Exception:  # noqa: BLE001  (of a hook that fails once more)
            raise error from None
        raise
    return present(q, k)


def run_packed(q: torch.Tensor, k: torch.Tensor | None, packed: Packed) -> Results:
    """Run the operator on arguments that the caller has checked; :func:`.route.mode` must be "eager"."""
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad)):
        return run([unpack(q, k, *packed)])
    return _launch(NEW, q, k, packed)


def _run(call: Call, way: Way) -> Results:
    if call.verb == "out":
        _check_out_grad(call, way)
    if call.verb != "new" and way.route in (KERNEL, AUTOGRAD) and is_repeated():
        return _run_repeated(call, way)
    return TABLE[call.verb, way.route](call, way)


def _run_repeated(call: Call, way: Way) -> Results:
    """Write into the inputs or `out` by a copy, which selective checkpointing always runs again.

    It may skip the operator in the repeated pass, and what the operator wrote in the first would be missing.
    """
    if call.verb == "in place":
        _check_in_place([call], way.needs_grad)
    else:
        _check_out_memory([call])
    before = call.copied() if call.keeps_inputs() else call
    return _overwrite(call.outs or call.xs(), TABLE["new", way.route](before, way))


def _separated(calls: Sequence[Call], ways: Sequence[Way]) -> Sequence[Call]:
    """Check both calls before the first one writes; copy tensors that it overwrites and the second reads."""
    if calls[0].verb == "new":
        return calls
    if calls[0].verb == "out":
        for call, way in zip(calls, ways):
            _check_out_grad(call, way)
    written = [x for call in calls for x in (call.outs or call.xs())]
    sees = ways[0].sees_memory()
    if not sees:
        memory.check_apart([name for call in calls for name in call.names], written)
    elif calls[0].verb == "out":
        _check_out_memory(calls)
    else:
        _check_in_place(calls, any(way.needs_grad for way in ways))
    # Without data pointers overlap cannot be checked, so positions and extra tensors are all copied.
    later = [memory.copied_before(call, written if sees else None) for call in calls[1:]]
    return [calls[0], *later]


# --- new tensors ----------------------------------------------------------------------------------


def _new_by_kernel(call: Call, way: Way) -> Results:
    """The operator, below autograd."""
    return _launch(NEW, call.q, call.k, pack(call))


def _new_by_autograd(call: Call, way: Way) -> Results:
    """`OutOfPlace.apply`."""
    return OutOfPlace.apply(Template.of(call), *call.tensors())  # type: ignore[no-any-return, no-untyped-call]


def _new_by_definition(call: Call, way: Way) -> Results:
    """`define`."""
    return define(call)


def _new_traced(call: Call, way: Way) -> Results:
    """The registered operator."""
    packed = pack(call)
    return NEW.for_(packed)(call.q, call.k, *packed)  # type: ignore[no-any-return]


# --- in place -------------------------------------------------------------------------------------


def _in_place_by_kernel(call: Call, way: Way) -> Results:
    """The operator in place, below autograd; the versions of the tensors are bumped."""
    try:
        _launch_in_place(call.q, call.k, pack(call))
    except RuntimeError:
        # Kernels refuse overlapping memory before they write; raise the readable error.
        _check_in_place([call], False)
        raise
    return call.xs()


def _in_place_by_autograd(call: Call, way: Way) -> Results:
    """`InPlace.apply` for each tensor, if only q, k and norm weights require grad; otherwise, and under
    transforms, `OutOfPlace.apply` on copies, written back."""
    if way.transformed:
        return _overwrite(call.xs(), _new_by_autograd(call.copied(), way))
    _check_in_place([call], True)
    # The backward pass may read the arguments, and k is rotated after q has changed.
    call = memory.copied_before(call, call.xs())
    others = (call.primary, call.secondary, call.positions, *call.extras.frequencies)
    if any_requires_grad((*others, *call.extras.gates)):
        # Gradients of angles, tables and gates need the values that an in-place rotation overwrites.
        return _overwrite(call.xs(), _new_by_autograd(call.copied(), way))
    # Autograd does not allow one function to return two views, so q and k are separate calls.
    for i, x in enumerate(call.xs()):
        one = call.only([i])
        # The copy is made here so that it is part of the graph: the derivative of f depends on it.
        one = one._replace(q=None if one.options.act == NONE else x.clone())
        InPlace.apply(Template.of(one), x, *one.tensors())  # type: ignore[no-untyped-call]
    return call.xs()


def _in_place_by_definition(call: Call, way: Way) -> Results:
    """`define` on copies, written back."""
    # Transforms check the memory of the tensors that they wrap.
    if way.sees_memory():
        _check_in_place([call], way.needs_grad)
    # Gradients of angles need the values that the results overwrite.
    return _overwrite(call.xs(), define(call.copied()))


def _in_place_traced(call: Call, way: Way) -> Results:
    """The registered operator in place; if a tensor requires grad, and under transforms, the one for
    new tensors, written back."""
    if way.transformed:
        return _overwrite(call.xs(), _new_traced(call.copied(), way))
    if way.needs_grad:
        before = call.copied() if call.keeps_inputs() else call
        return _overwrite(call.xs(), _new_traced(before, way))
    packed = pack(call)
    IN_PLACE.for_(packed)(call.q, call.k, *packed)
    return call.xs()


# --- out= -----------------------------------------------------------------------------------------


def _out_by_kernel(call: Call, way: Way) -> Results:
    """The operator into `out`, below autograd; its version is bumped."""
    try:
        memory.refuse_frozen(call.outs)
        packed = pack(call)
        with torch._C._AutoDispatchBelowAutograd():
            OUT.for_(packed)(call.q, call.k, *pair(call.outs), *packed)
        torch.autograd.graph.increment_version(call.outs)
    except RuntimeError:
        # Kernels refuse overlapping memory before they write; raise the readable error.
        _check_out_memory([call])
        raise
    return call.outs


def _out_by_autograd(call: Call, way: Way) -> Results:
    """Refused, because `out` has no gradient; under transforms without gradients, `OutOfPlace.apply`,
    written into `out`."""
    return _overwrite(call.outs, _new_by_autograd(call, way))


def _out_by_definition(call: Call, way: Way) -> Results:
    """`define`, written into `out`."""
    if way.sees_memory():
        _check_out_memory([call])
    return _overwrite(call.outs, define(call))


def _out_traced(call: Call, way: Way) -> Results:
    """The registered operator into `out`; under transforms the one for new tensors, written
    into `out`."""
    if way.transformed:
        return _overwrite(call.outs, _new_traced(call, way))
    packed = pack(call)
    OUT.for_(packed)(call.q, call.k, *pair(call.outs), *packed)
    return call.outs


#: The function that runs a call, by verb and route.
TABLE: dict[tuple[str, str], Callable[[Call, Way], Results]] = {
    ("new", KERNEL): _new_by_kernel,
    ("new", AUTOGRAD): _new_by_autograd,
    ("new", DEFINITION): _new_by_definition,
    ("new", TRACED): _new_traced,
    ("in place", KERNEL): _in_place_by_kernel,
    ("in place", AUTOGRAD): _in_place_by_autograd,
    ("in place", DEFINITION): _in_place_by_definition,
    ("in place", TRACED): _in_place_traced,
    ("out", KERNEL): _out_by_kernel,
    ("out", AUTOGRAD): _out_by_autograd,
    ("out", DEFINITION): _out_by_definition,
    ("out", TRACED): _out_traced,
}


# --- shared by the cells --------------------------------------------------------------------------


def _launch(operator: Operator, q: torch.Tensor, k: torch.Tensor | None, packed: Packed) -> Results:
    """Call the operator below autograd: its gradient formula in Python would only cost time here."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.for_(packed)(q, k, *packed)  # type: ignore[no-any-return]


def _launch_in_place(q: torch.Tensor, k: torch.Tensor | None, packed: Packed) -> None:
    if q.is_inference() or (k is not None and k.is_inference()):
        memory.refuse_frozen(present(q, k))
    _launch(IN_PLACE, q, k, packed)
    torch.autograd.graph.increment_version(q if k is None else (q, k))


def _overwrite(xs: Results, ys: Results) -> Results:
    """Copy each result into its destination, visibly to autograd and transforms."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)
    return xs


def _check_in_place(calls: Sequence[Call], needs_grad: bool) -> None:
    names = [name for call in calls for name in call.names]
    xs = [x for call in calls for x in call.xs()]
    memory.check_in_place(names, xs)
    if needs_grad:
        memory.check_in_place_grad(names, xs)


def _check_out_grad(call: Call, way: Way) -> None:
    if not way.needs_grad:
        return
    found, without = wanted(call), "use torch.no_grad(), or omit out"
    lost = "a result written to out has no gradient"
    if found:
        raise bad_value(f"{lost}, but {found[0]} require one; {without}")
    for name, x, out in zip(call.names, call.xs(), call.outs):
        if x.requires_grad or out.requires_grad:
            rule = f"{lost}, but {name} or out requires one; {without}"
            raise bad_value(rule, **{name: x, "out": out})


def _check_out_memory(calls: Sequence[Call]) -> None:
    xs = [x for call in calls for x in call.xs()]
    memory.check_out_memory(xs, [out for call in calls for out in call.outs])
