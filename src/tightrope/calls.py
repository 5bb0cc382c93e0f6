"""How a call reaches the operator: what is checked, which way is the shortest, and who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from . import activations, gates as gates_, gating
from ._errors import bad_type, bad_value, unsupported
from .activations import NONE, Act, ActLike, RMSNorm, code_of
from .backends import BY_NAME, reference, takes
from .gates import Gate
from .ops import autograd, learned, schema
from .ops.arguments import Carried
from .ops.checks import (
    check_flag,
    check_in_place,
    check_in_place_grad,
    check_out,
    check_out_memory,
    copied_before,
    layout_named,
    prepare,
)
from .ops.layouts import Layout
from .positions import PositionsLike
from .spec import PreparedRotation, RopeSpec, SeqLen

# Where in what follows q and k in the schema.
_FORM, _AMPLITUDE = 4, 5
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Outer(NamedTuple):
    """f and P of a call, for q and for k.

    Attributes:
        acts: None for the identity.
        gates: any number of them, whose factors multiply.
    """

    acts: tuple[Act, Act]
    gates: tuple[Sequence[Gate], Sequence[Gate]]


def outer(act: ActLike, gate: Any, count: int = 2) -> Outer | None:
    """``act=`` and ``gate=`` of a public function; None where there is neither.

    Args:
        count: of how many tensors: for one there are no pairs.
    """
    if act is None and gate is None:
        return None
    for name, value in (("act", act), ("gate", gate)):
        if count == 1 and isinstance(value, tuple):
            raise bad_type(f"{name} must be one, not a pair, for one tensor")
    acts = activations.pair(act)
    each = gates_.pair(gate)
    if acts == (None, None) and each == (None, None):
        return None
    first, second = ([] if one is None else [one] for one in each)
    return Outer(acts, (first, second))


def out_of_place(
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    layout: str,
    inverse: bool,
    backend: str | None,
    outs: list[torch.Tensor] | None = None,
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    wider: bool = False,
    outer: Outer | None = None,
) -> Sequence[torch.Tensor]:
    """A call that makes new tensors, or writes into those it is given.

    Args:
        names: what the user knows the tensors by.
        outs: where results go; None for new tensors.
        wider: whether q may have more channels than the spec; they are copied.
        outer: f and P; None where both are the identity.
        the rest: as of :func:`tightrope.functional.rotate_qk`.
    """
    plain = backend is None and positions is None and inv_freq is None and seq_len is None
    ready = _ready(q, k, spec, layout, inverse, outer) if plain and outs is None else None
    if ready is not None:
        # On an error the long way says what is wrong.
        with suppress(RuntimeError):
            return autograd.raw(q, k, ready)
    launches = _launches(
        names, q, k, spec, positions, layout, inverse, inv_freq, seq_len, outer, wider
    )
    if outs is not None:
        _check_outs(names, schema.present(q, k), outs, launches)
        for which, some, other, arguments in _apart(launches, outs):
            _run_into(some, other, [outs[i] for i in which], arguments, backend)
        return outs
    if len(launches) == 1:
        return run(q, k, launches[0].arguments, backend)
    return [run(x, None, arguments, backend)[0] for _, x, _, arguments in launches]


def run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    arguments: tuple[Any, ...],
    backend: str | None,
) -> Sequence[torch.Tensor]:
    """The operator, once its arguments are checked: ``arguments`` is what follows q and k in the schema."""
    if backend is not None:
        _insist(backend, q)
    if backend == "reference" or _has_tangents(q, k, arguments):
        return reference.compose(q, k, *arguments)
    return autograd.differentiable(q, k, arguments)


def _run_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: list[torch.Tensor],
    arguments: tuple[Any, ...],
    backend: str | None,
) -> None:
    if backend is not None:
        _insist(backend, q)
    compiling, transformed = torch.compiler.is_compiling(), autograd.in_functorch()
    if compiling and not transformed and backend != "reference":
        schema.rotation_into(arguments)(q, k, *autograd.pair(outs), *arguments)
    elif compiling or transformed:
        autograd.overwrite(outs, run(q, k, arguments, backend))
    elif backend == "reference" or _has_tangents(q, k, arguments):
        check_out_memory(schema.present(q, k), outs)
        autograd.overwrite(outs, reference.compose(q, k, *arguments))
    else:
        try:
            autograd.into(q, k, outs, arguments)
        except RuntimeError:
            # Kernels refuse overlapping memory before they write.
            check_out_memory(schema.present(q, k), outs)
            raise


def in_place(
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    layout: str,
    inverse: bool,
    backend: str | None,
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    outer: Outer | None = None,
) -> None:
    """A call that changes its tensors; arguments as of :func:`out_of_place`."""
    plain = backend is None and positions is None and inv_freq is None and seq_len is None
    ready = _ready(q, k, spec, layout, inverse, outer) if plain else None
    if ready is not None:
        # On an error the long way says what is wrong.
        with suppress(RuntimeError):
            autograd.raw_in_place(q, k, ready)
            return
    launches = _launches(names, q, k, spec, positions, layout, inverse, inv_freq, seq_len, outer)
    if len(launches) > 1 and not torch.compiler.is_compiling() and not autograd.in_functorch():
        # What the second refuses must not find the first done.
        xs = schema.present(q, k)
        check_in_place(names, xs)
        if any(autograd.needs_grad(q, k, launch.arguments) for launch in launches):
            check_in_place_grad(names, xs)
    for which, some, other, arguments in _apart(launches, schema.present(q, k)):
        run_in_place([names[i] for i in which], some, other, arguments, backend)


def _ready(
    q: torch.Tensor,
    k: torch.Tensor | None,
    rotation: RopeSpec | PreparedRotation,
    layout: str,
    inverse: bool,
    outer: Outer | None,
) -> tuple[Any, ...] | None:
    """What a prepared rotation calls the kernel with at once, with one look at each thing that the
    kernel cannot see. A decoded token is a few microseconds of memory, and checks in Python would be
    most of its time. All else that the long way checks the kernel refuses, before it writes.

    Returns:
        None where the long way must be taken: for what it does, or for its sentence about what is
        wrong.
    """
    if type(rotation) is not PreparedRotation or torch.compiler.is_compiling():
        return None
    call = rotation.calls.get((layout, inverse))
    if (
        call is None
        or rotation.rows != 1
        or rotation.is_stale
        or type(q) is not torch.Tensor
        or (k is not None and type(k) is not torch.Tensor)
        or (rotation.said is not None and _passes(rotation, q, layout))
        or not takes(q)  # the definition takes more than it should
        or q.shape[-1] != rotation.channels.head_dim
        or autograd.in_functorch()
        or forward_ad._current_level >= 0
    ):
        return None
    if outer is not None:
        call = _ready_outer(call, q, k, rotation, layout, inverse, outer)
    return None if call is None or autograd.needs_grad(q, k, call) else call


def _passes(rotation: PreparedRotation, q: torch.Tensor, layout: str) -> bool:
    """Whether tokens may lie beyond the length that was said for them."""
    at = layout_named(layout).token
    return q.dim() <= at or rotation.passed(q.shape[at]) is not None


def _ready_outer(
    call: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor | None,
    rotation: PreparedRotation,
    layout: str,
    inverse: bool,
    outer: Outer,
) -> tuple[Any, ...] | None:
    """Arguments of a rotation between f and P; None where that is more than to hand these over.

    Nothing of a tensor is kept: the kernel reads the user's own, of whatever floating dtype, so it
    sees every change of it.
    """
    count = 1 if k is None else 2
    first, eps, act, gate = outer.acts[0], 0.0, NONE, schema.NO_GATE
    carried: list[torch.Tensor] = []
    if first is not None or outer.acts[count - 1] is not None:
        if inverse:
            return None
        for own in outer.acts[:count]:
            if not isinstance(first, RMSNorm):
                if own != first:
                    return None
                continue
            if not isinstance(own, RMSNorm) or own.unit_offset or own.eps != first.eps:
                return None
            if own.weight is None:
                return None
            carried.append(own.weight if own.weight.dim() == 2 else own.weight[None])
            eps = float(first.eps)
        act = code_of(first)
    if outer.gates[0] or outer.gates[1]:
        found = gating.ready(outer.gates[:count], q, rotation, layout)
        if found is None:
            return None
        gate, logs = found
        carried += logs
    device = q.device
    if any(type(t) not in _PLAIN or t.device != device for t in carried):
        return None
    form = _form_with(call[_FORM], act, gate)
    fixed = (*call[:_FORM], form, call[_AMPLITUDE])
    return (*fixed, carried, eps) if carried else fixed


@lru_cache(maxsize=1024)
def _form_with(form: int, act: int, gate: int) -> int:
    return schema.form_of(form)._replace(act=act, gate=gate).pack()


def run_in_place(
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    arguments: tuple[Any, ...],
    backend: str | None,
) -> None:
    """:func:`run` for a call that changes its tensors."""
    if backend is not None:
        _insist(backend, q)
    xs = schema.present(q, k)
    transformed = autograd.in_functorch()
    if torch.compiler.is_compiling() and not transformed:
        # Whoever traces sees to memory. Without gradients the raw operator stays in place.
        if backend == "reference":
            autograd.overwrite(xs, reference.compose(*autograd.copies(q, k), *arguments))
        elif autograd.needs_grad(q, k, arguments):
            before = autograd.copies(q, k) if autograd.keeps_inputs(arguments) else (q, k)
            autograd.overwrite(xs, schema.rotation(arguments)(*before, *arguments))
        else:
            schema.rotation_(arguments)(q, k, *arguments)
    elif backend == "reference" or _has_tangents(q, k, arguments):
        # Behind a transform memory is not what it seems; the transform sees to it.
        if not transformed:
            check_in_place(names, xs)
            if autograd.needs_grad(q, k, arguments):
                check_in_place_grad(names, xs)
        # Gradients by angles need what this overwrites.
        autograd.overwrite(xs, reference.compose(*autograd.copies(q, k), *arguments))
    elif transformed:
        autograd.overwrite(xs, autograd.differentiable(*autograd.copies(q, k), arguments))
    else:
        try:
            autograd.in_place(names, q, k, arguments)
        except RuntimeError:
            # Kernels refuse overlapping memory before they change anything.
            check_in_place(names, xs)
            raise


class _Launch(NamedTuple):
    """One call of the operator.

    Attributes:
        which: of q (0) and k (1).
        q, k: as the operator takes them.
        arguments: what follows them in the schema.
    """

    which: Sequence[int]
    q: torch.Tensor
    k: torch.Tensor | None
    arguments: tuple[Any, ...]


def _launches(
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    layout: str,
    inverse: bool,
    inv_freq: torch.Tensor | None,
    seq_len: SeqLen,
    outer: Outer | None,
    wider: bool = False,
) -> list[_Launch]:
    """Check everything against everything else.

    Returns:
        One launch; or one for each tensor, where they differ in the kind of f or P.
    """
    where = layout_named(layout)
    check_flag("inverse", inverse)
    xs = schema.present(q, k)
    rotation = prepare(names, xs, spec, positions, seq_len, where, wider)
    if inv_freq is not None:
        source = learned.source(names, q, k, inv_freq, rotation, where)
        rest = _call(rotation, where, inverse, learned=True)[2:]
        call: tuple[Any, ...] = (*source[:2], *rest, source[2], 0.0)
    elif torch.compiler.is_compiling():
        call = _call(rotation, where, inverse)
    else:
        found = rotation.calls.get((layout, inverse))
        if found is None:
            found = rotation.calls[layout, inverse] = _call(rotation, where, inverse)
        call = found
    if outer is None:
        return [_Launch(range(len(xs)), q, k, call)]
    return _with_outer(names, xs, where, inverse, rotation, call, outer)


def _with_outer(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    layout: Layout,
    inverse: bool,
    rotation: PreparedRotation,
    call: tuple[Any, ...],
    outer: Outer,
) -> list[_Launch]:
    """The launches of a rotation between f and P."""
    views = [layout.to_bhsd(x) for x in xs]
    kinds: list[tuple[int, int, float]] = []
    weights: list[torch.Tensor | None] = []
    gates = gating.lower(names, views, outer.gates, rotation)
    for name, view, act, (gate, _) in zip(names, views, outer.acts, gates):
        if inverse and act is not None:
            raise bad_value(
                f"inverse must be False with an act, which cannot be undone, but act is {act!r}"
            )
        norm = act if isinstance(act, RMSNorm) else None
        heads = view.shape[1]
        weights.append(None if norm is None else norm.factors(name, view, heads))
        kinds.append((code_of(act), gate, float(norm.eps) if norm else 0.0))
    together = kinds[0] == kinds[-1]
    launches = []
    for which in [range(len(xs))] if together else [(i,) for i in range(len(xs))]:
        code, gate, eps = kinds[which[0]]
        # Lists first: torch 2.11 cannot trace a generator that reads variables of this function.
        some_weights = [weights[i] for i in which]
        some_gates = [gates[i][1] for i in which]
        carried = Carried(
            tuple(schema.carried(call)),
            tuple([w for w in some_weights if w is not None]),
            tuple([g for g in some_gates if g is not None]),
        )
        form = schema.form_of(call[_FORM])._replace(act=code, gate=gate)
        arguments = (*call[:_FORM], form.pack(), call[_AMPLITUDE], *carried.packed(eps))
        some = autograd.pair([xs[i] for i in which])
        launches.append(_Launch(which, *some, arguments))
    return launches


def _apart(launches: list[_Launch], written: Sequence[torch.Tensor]) -> list[_Launch]:
    """Launches of which none reads what one before it has written, but a copy from before."""
    if len(launches) == 1:
        return launches
    blind = torch.compiler.is_compiling() or autograd.in_functorch()
    told = None if blind else written
    first, *later = launches
    return [first, *[it._replace(arguments=copied_before(it.arguments, told)) for it in later]]


def _check_outs(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    outs: list[torch.Tensor],
    launches: Sequence[_Launch],
) -> None:
    wanted = [name for launch in launches for name in autograd.wanted(launch.arguments)]
    check_out(names, xs, outs, wanted)
    if len(launches) > 1 and not torch.compiler.is_compiling():
        # What the second refuses must not find the first done.
        check_out_memory(xs, outs)


def _call(
    rotation: PreparedRotation, layout: Layout, inverse: bool, learned: bool = False
) -> tuple[Any, ...]:
    channels = rotation.channels
    form = schema.Form(
        layout=layout.code,
        start=channels.start,
        interleaved=channels.interleaved,
        direction=schema.INVERSE if inverse else schema.FORWARD,
        ramp=rotation.ramp,
        learned=learned,
    )
    return (
        *(rotation.words, rotation.turns, rotation.ids, rotation.offset),
        *(form.pack(), rotation.amplitude),
    )


def _has_tangents(q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]) -> bool:
    """Whether forward-mode differentiation is under way, which a registered operator would ignore.

    The level is one for all threads, so outside a transform it is the tensors that tell.
    """
    if forward_ad._current_level < 0:
        return False
    return autograd.in_functorch() or any(
        isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None
        for t in (q, k, *arguments, *schema.carried(arguments))
    )


def _insist(backend: str, x: torch.Tensor) -> None:
    if not isinstance(backend, str) or backend not in BY_NAME:
        raise bad_value(f"backend must be one of {', '.join(BY_NAME)} but got {backend!r}")
    reason = BY_NAME[backend].why_not(x)
    if reason is not None:
        raise unsupported(f"backend {backend!r} cannot run: {reason}", x=x)
