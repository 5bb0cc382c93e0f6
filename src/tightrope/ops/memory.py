"""Aliasing of the tensors that a call writes: refuse it, or copy the tensors that are still read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._errors import OPERATION, OUT_OF_PLACE, bad_value
from .._tracing import handles_operators
from .call import KEYS, VALUES, Call, Slots


def check_in_place(names: Sequence[str], xs: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that cannot be rotated in place.

    For example, elements that share memory would be rotated twice.

    Kernels also refuse shared memory before they write anything; this check raises the readable error.
    """
    check_not_frozen(names, xs)
    for name, x in zip(names, xs, strict=True):
        check_not_negated(name, x)
        if may_overlap_itself(x):
            raise bad_value(
                f"{name} must not overlap itself in memory (an expanded tensor?); rotate a "
                f"clone of it",
                **{name: x},
            )
    if len(xs) == 2 and may_overlap(xs[0], xs[1]):
        raise bad_value(
            f"{names[0]} and {names[1]} must not share memory; rotate one of them out of place",
            **dict(zip(names, xs, strict=True)),
        )


def check_not_negated(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor that torch would resolve to a copy, and write that."""
    if not torch.compiler.is_compiling() and x.is_neg():
        raise bad_value(
            f"{name} must not be a negated view (such as the imaginary part of a conjugate); call "
            f"{name}.resolve_neg() first",
            **{name: x},
        )


def check_out(
    xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], slots: Slots | None = None
) -> None:
    """Refuse ``out`` tensors whose memory kernels would refuse; this check raises the readable error."""
    if slots is not None:
        caches = [outs[-1], *slots.written()]
        check_not_frozen(["out"] * len(outs), outs[:-1])
        check_not_frozen([KEYS, VALUES], caches)
        if shares_slots(xs, outs, slots):
            raise bad_value(
                "the caches, out, q, k and v must not overlap in memory, nor a cache itself",
                **dict(zip((KEYS, VALUES), caches)),
            )
        return
    check_not_frozen(["out"] * len(outs), outs)
    if shares_memory(outs, xs):
        raise bad_value(
            "out must not overlap itself or the input in memory; to rotate in place call "
            f"{OPERATION}_",
            **{f"out[{i}]": out for i, out in enumerate(outs)},
        )


def shares_slots(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], slots: Slots) -> bool:
    """Return whether memory overlaps in a call with slots; q may be its own ``out``, and without an index k and v
    their own caches."""
    own = None if slots.slot is None else len(outs) - 1
    return shares_memory([*outs, *slots.written()], [*xs, *slots.read()], own)


def share_storage(x: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Return whether x has the storage of one of the others."""
    return any(torch._C._is_alias_of(x, other) for other in others)  # type: ignore[attr-defined]


def check_not_frozen(names: Sequence[str], written: Sequence[torch.Tensor]) -> None:
    """Refuse inference tensors outside inference mode, which must not be changed.

    torch's own check runs in a dispatch key that this library skips.
    """
    for name, x in zip(names, written):
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise bad_value(
                f"{name} is an inference tensor, which cannot be changed outside inference mode; "
                "give a clone of it",
                **{name: x},
            )


def shares_memory(
    written: Sequence[torch.Tensor], read: Sequence[torch.Tensor] = (), own: int | None = None
) -> bool:
    """Return whether a written tensor may overlap itself, another written one, or a read one.

    The first ``own`` written tensors, or all, may each be exactly the read one of the same index.
    """
    own = len(written) if own is None else own
    return (
        any(map(may_overlap_itself, written))
        or any(may_overlap(a, b) for i, a in enumerate(written) for b in written[:i])
        or any(
            may_overlap(a, b)
            for i, a in enumerate(written)
            for j, b in enumerate(read)
            if i != j or i >= own or not _is_same(a, b)
        )
    )


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether each element of a tensor has the memory of that of another one."""
    return (
        _start(a) == _start(b) and a.stride() == b.stride() and a.element_size() == b.element_size()
    )


def check_in_place_grad(names: Sequence[str], xs: Sequence[torch.Tensor]) -> None:
    """Refuse in-place changes that autograd cannot record, before anything is written."""
    for name, x in zip(names, xs, strict=True):
        base = x._base
        if x.requires_grad and (x.is_leaf or (base is not None and base.is_leaf)):
            raise bad_value(
                f"{name} is a leaf that requires grad, or a view of one, and cannot be changed in "
                f"place; call {OUT_OF_PLACE}",
                **{name: x},
            )
        if base is None:
            continue
        made = torch._C._autograd._get_creation_meta(x)
        if made == torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE:
            raise bad_value(
                f"{name} comes from chunk, split or unbind, whose views autograd does not allow "
                f"to change in place; slice instead (qkv[..., :n]), or call {OUT_OF_PLACE}",
                **{name: x},
            )
        if made != torch._C._autograd.CreationMeta.DEFAULT:
            raise bad_value(
                f"{name} is a view made under no_grad, in inference mode or by a custom function, "
                f"which autograd does not allow to change in place; call {OUT_OF_PLACE}",
                **{name: x},
            )


def is_written(x: torch.Tensor, outs: Sequence[torch.Tensor]) -> bool:
    """Return whether writing ``outs`` may overwrite x."""
    return any(
        torch._C._is_alias_of(out, x)  # type: ignore[attr-defined]
        and (out.element_size() != x.element_size() or may_overlap(out, x))
        for out in outs
    )


def copied_before(call: Call, written: Sequence[torch.Tensor] | None) -> Call:
    """Return the call with copies of its tensors, other than q and k, that are about to be overwritten.

    Args:
        written: the tensors that change; None if data pointers are meaningless: in a transform or
            while compiling.
    """

    def kept(x: torch.Tensor | None) -> torch.Tensor | None:
        return x.clone() if x is not None and (written is None or is_written(x, written)) else x

    q, k, primary, secondary, *others = call.tensors()
    if written is not None:
        # If `written` is None, phase words are not copied: they belong to the library.
        primary, secondary = kept(primary), kept(secondary)
    return call.with_tensors((q, k, primary, secondary, *map(kept, others)))


def may_overlap_itself(x: torch.Tensor) -> bool:
    """Return False only if no two elements share memory.

    That is certain if each stride is at least the extent of all dimensions with smaller strides.
    """
    if x.numel() == 0:
        return False
    covered = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < covered:
                return True
            covered += (size - 1) * stride
    return False


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return False only if two tensors certainly share no element.

    Slices of one fused projection interleave in memory. Modulo a stride that divides all larger
    ones, each slice covers one run of elements, and the runs of disjoint slices do not overlap.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    if not (_has_memory(a) and _has_memory(b)) and not torch._C._is_alias_of(a, b):  # type: ignore[attr-defined]
        return False
    size = a.element_size()
    a_start, b_start = _start(a), _start(b)
    if a_start + _run(a) * size <= b_start or b_start + _run(b) * b.element_size() <= a_start:
        return False
    if size != b.element_size():
        return True
    gap, rest = divmod(b_start - a_start, size)
    return rest != 0 or not any(
        _run(a, period) <= gap % period and gap % period + _run(b, period) <= period
        for period in (*a.stride(), *b.stride())
        if period > 1
    )


def _has_memory(x: torch.Tensor) -> bool:
    """Return False for meta and fake tensors, and for those that wrap others: they have no address."""
    return not (x.is_meta or handles_operators(x))


def _start(x: torch.Tensor) -> int:
    """Return the address of the first element, in bytes; without memory, its distance from the storage's."""
    return x.data_ptr() if _has_memory(x) else int(x.storage_offset()) * x.element_size()


def _run(x: torch.Tensor, period: int = 0) -> int:
    """Return the extent in memory, in elements, of the dimensions whose stride is no multiple of `period`;
    of all dimensions if it is 0."""
    return 1 + sum(
        (size - 1) * stride
        for size, stride in zip(x.shape, x.stride(), strict=True)
        if period == 0 or stride % period
    )
