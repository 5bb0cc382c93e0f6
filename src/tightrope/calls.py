"""How a call reaches the operator: what is checked, which way is the shortest, and who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import forward_ad

from ._errors import sentence
from .backends import BY_NAME, cpu, reference
from .ops import autograd, learned, schema
from .ops.checks import (
    check_in_place,
    check_in_place_grad,
    check_out,
    check_out_memory,
    layout_named,
    prepare,
)
from .ops.layouts import Layout
from .positions import PositionsLike
from .spec import PreparedRotation, RopeSpec, SeqLen


def out_of_place(
    operation: str,
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
) -> Sequence[torch.Tensor]:
    """A call that makes new tensors, or writes into those it is given.

    Args:
        operation, names: what the user called, and knows the tensors by.
        outs: where results go; None for new tensors.
        wider: whether q may have more channels than the spec; they are copied.
        the rest: as of :func:`tightrope.functional.rotate_qk`.
    """
    plain = backend is None and positions is None and inv_freq is None and seq_len is None
    ready = _ready(q, k, spec, layout, inverse) if plain and outs is None else None
    if ready is not None:
        # On an error the long way says what is wrong.
        with suppress(RuntimeError):
            return autograd.raw(q, k, ready)
    arguments = _arguments(
        operation, names, q, k, spec, positions, layout, inverse, inv_freq, seq_len, wider
    )
    if outs is None:
        return run(operation, q, k, arguments, backend)
    by_angles = torch.is_grad_enabled() and autograd.needs_angles(arguments)
    check_out(operation, names, schema.present(q, k), outs, by_angles)
    _run_into(operation, q, k, outs, arguments, backend)
    return outs


def run(
    operation: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    arguments: tuple[Any, ...],
    backend: str | None,
) -> Sequence[torch.Tensor]:
    """The operator, once its arguments are checked: ``arguments`` is what follows q and k in the schema."""
    if backend is not None:
        _insist(operation, backend, q)
    if backend == "reference" or _has_tangents(q, k, arguments):
        return reference.compose(q, k, *arguments)
    return autograd.differentiable(q, k, arguments)


def _run_into(
    operation: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    outs: list[torch.Tensor],
    arguments: tuple[Any, ...],
    backend: str | None,
) -> None:
    if backend is not None:
        _insist(operation, backend, q)
    if torch.compiler.is_compiling():
        schema.rotate_into(q, k, *autograd.pair(outs), *arguments)
    elif autograd.in_functorch():
        autograd.overwrite(outs, run(operation, q, k, arguments, backend))
    elif backend == "reference" or _has_tangents(q, k, arguments):
        check_out_memory(operation, schema.present(q, k), outs)
        autograd.overwrite(outs, reference.compose(q, k, *arguments))
    else:
        try:
            autograd.into(q, k, outs, arguments)
        except RuntimeError:
            # Kernels refuse overlapping memory before they write.
            check_out_memory(operation, schema.present(q, k), outs)
            raise


def in_place(
    operation: str,
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
) -> None:
    """A call that changes its tensors; arguments as of :func:`out_of_place`."""
    plain = backend is None and positions is None and inv_freq is None and seq_len is None
    ready = _ready(q, k, spec, layout, inverse) if plain else None
    if ready is not None:
        # On an error the long way says what is wrong.
        with suppress(RuntimeError):
            autograd.raw_in_place(q, k, ready)
            return
    arguments = _arguments(
        operation, names, q, k, spec, positions, layout, inverse, inv_freq, seq_len
    )
    run_in_place(operation, names, q, k, arguments, backend)


def _ready(
    q: torch.Tensor,
    k: torch.Tensor | None,
    rotation: RopeSpec | PreparedRotation,
    layout: str,
    inverse: bool,
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
        or type(q) is not torch.Tensor
        or (k is not None and type(k) is not torch.Tensor)
        or cpu.why_not(q) is not None  # the definition takes more than it should
        or q.shape[-1] != rotation.channels.head_dim
        or autograd.needs_grad(q, k, call)
        or autograd.in_functorch()
        or forward_ad._current_level >= 0
    ):
        return None
    return call


def run_in_place(
    operation: str,
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    arguments: tuple[Any, ...],
    backend: str | None,
) -> None:
    """:func:`run` for a call that changes its tensors."""
    if backend is not None:
        _insist(operation, backend, q)
    xs = schema.present(q, k)
    if torch.compiler.is_compiling():
        # Whoever traces sees to memory. Without gradients the raw operator stays in place.
        if autograd.needs_grad(q, k, arguments):
            autograd.overwrite(xs, schema.rotate(q, k, *arguments))
        else:
            schema.rotate_(q, k, *arguments)
    elif backend == "reference" or _has_tangents(q, k, arguments):
        # Behind a transform memory is not what it seems; the transform sees to it.
        if not autograd.in_functorch():
            check_in_place(operation, names, xs)
            if autograd.needs_grad(q, k, arguments):
                check_in_place_grad(operation, names, xs)
        # Gradients by angles need what this overwrites.
        autograd.overwrite(xs, reference.compose(*autograd.copies(q, k), *arguments))
    elif autograd.in_functorch():
        autograd.overwrite(xs, autograd.differentiable(*autograd.copies(q, k), arguments))
    else:
        try:
            autograd.in_place(operation, names, q, k, arguments)
        except RuntimeError:
            # Kernels refuse overlapping memory before they change anything.
            check_in_place(operation, names, xs)
            raise


def _arguments(
    operation: str,
    names: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    layout: str,
    inverse: bool,
    inv_freq: torch.Tensor | None,
    seq_len: SeqLen,
    wider: bool = False,
) -> tuple[Any, ...]:
    """Check everything against everything else.

    Returns:
        What follows q and k in the schema.
    """
    where = layout_named(operation, layout)
    xs = schema.present(q, k)
    rotation = prepare(operation, names, xs, spec, positions, seq_len, where, wider)
    if inv_freq is not None:
        source = learned.source(operation, names, q, k, inv_freq, rotation, where)
        _, _, ids, offset, form, amplitude, _ = _call(rotation, where, inverse, learned=True)
        return *source[:2], ids, offset, form, amplitude, source[2]
    if torch.compiler.is_compiling():
        return _call(rotation, where, inverse)
    call = rotation.calls.get((layout, inverse))
    if call is None:
        call = rotation.calls[layout, inverse] = _call(rotation, where, inverse)
    return call


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
        *(form.pack(), rotation.amplitude, None),
    )


def _has_tangents(q: torch.Tensor, k: torch.Tensor | None, arguments: tuple[Any, ...]) -> bool:
    """Whether forward-mode differentiation is under way, which a registered operator would ignore.

    The level is one for all threads, so outside a transform it is the tensors that tell.
    """
    if forward_ad._current_level < 0:
        return False
    *rest, carried = arguments
    return autograd.in_functorch() or any(
        isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None
        for t in (q, k, *rest, *(carried or ()))
    )


def _insist(operation: str, backend: str, x: torch.Tensor) -> None:
    if not isinstance(backend, str) or backend not in BY_NAME:
        raise ValueError(
            sentence(operation, f"backend must be one of {', '.join(BY_NAME)} but got {backend!r}")
        )
    reason = BY_NAME[backend].why_not(x)
    if reason is not None:
        raise NotImplementedError(
            sentence(operation, f"backend {backend!r} cannot run: {reason}", x=x)
        )
