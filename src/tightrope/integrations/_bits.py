"""Where a rotary function rounds, found by comparing bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..forms import Arrangement, Rotation
from ._candidate import Bits
from ._probe import Caller, Probe, equal, permuted

# Torch's own operations never fuse multiply-adds, so no function made of them rounds "once".
_ROUNDINGS = ("each", "wide")


def all_bits(
    caller: Caller, shape: Arrangement, rotation: Rotation, result: str | torch.dtype
) -> tuple[tuple[torch.dtype, torch.dtype, Bits], ...]:
    """``Candidate.bits``: where the function rounds for each pair of dtypes, and its strides."""
    f32, f64, narrow = torch.float32, torch.float64, (torch.bfloat16, torch.float16)
    dtypes = ((f32, f32), *itertools.product((f32, *narrow), narrow), *((x, f32) for x in narrow))
    found: list[tuple[torch.dtype, torch.dtype, Bits]] = []
    if not caller.call.form.narrow:
        dtypes = tuple((x, table) for x in (f32, *narrow) for table in (f32, f64))
    # Results of 16 bits cannot show whether arithmetic is in float64, but those of a float32 x can: the
    # dtypes of the tables for which they are, and for which they are not.
    shown: dict[torch.dtype, bool] = {}
    # The operator reads float64 tables in full only for a float64 x. Results that are always of 16 bits
    # show the roundings of float32 only in one of many thousand entries, and those of float64 never.
    hidden = result in narrow
    for dtype, table_dtype in (*dtypes, *(() if hidden else ((f64, f64), (f64, f32)))):
        if dtype in narrow and table_dtype == f64 and f64 not in shown:
            continue
        casts = ["", "tables"] if dtype != table_dtype else [""]
        if dtype == f32:
            casts.append("float64")
        elif dtype in narrow and shown.get(table_dtype):
            casts = ["float64"]
        width = 32 if rotation.reading == "half" else 64
        # Results may have other strides if channels pass through.
        widths = (width,) if rotation.slice == "whole" else (width, width // 2)
        sizes: dict[str, Any] = {
            "tokens": 4001 if hidden and dtype == f32 else 67,
            "channels": 64,
            "dtype": dtype,
            "table_dtype": table_dtype,
        }
        probes = [Probe(caller, shape, each, **sizes) for each in widths]
        if caller.inside and probes[0].cos.dtype != table_dtype:
            continue
        for cast, by_batch in itertools.product(casts, (False, True)):
            tried = [bits_of(probe, rotation, cast, by_batch) for probe in probes]
            every = [bits for bits in tried if bits is not None]
            # The gradients of tables are sums. In another order they differ in every float32 probe, but only
            # in few entries of 16 bits, which a probe may miss.
            learns = all(bits.tables for bits in (*every, *(known[2] for known in found[:1])))
            alike = {bits._replace(tables=learns) for bits in every}
            if len(every) == len(tried) and len(alike) == 1:
                found.append((dtype, table_dtype, alike.pop()))
                if dtype == f32:
                    shown[table_dtype] = cast == "float64"
                break
        if not found:
            # If float32 differs, equal bits in 16-bit dtypes prove nothing: the more precise
            # arithmetic of the operator changes too few 16-bit results for a probe to notice.
            return ()
    return tuple(found)


AllBits = tuple[tuple[torch.dtype, torch.dtype, Bits], ...]


def alike_bits(one: AllBits, other: AllBits) -> bool:
    """Return whether two results of :func:`all_bits` agree, except about the tables."""
    kept = [
        [(x, table, bits._replace(tables=True, cast="")) for x, table, bits in each]
        for each in (one, other)
    ]
    return kept[0] == kept[1]


def bits_of(
    probe: Probe,
    rotation: Rotation,
    cast: str,
    by_batch: bool,
    pairs: Sequence[tuple[str, str]] = tuple(itertools.product(_ROUNDINGS, _ROUNDINGS)),
) -> Bits | None:
    """The choices with which the operator equals a function on one probe; None if none does.

    Args:
        pairs: the roundings to try, forward and backward.
    """
    probe = probe.copied()
    outer = -3 if by_batch else 0
    xs = [permuted(x, outer).requires_grad_() for x in probe.xs.values()]
    probe.xs = dict(zip(probe.xs, xs))
    tables = [probe.cos.requires_grad_(), probe.sin.requires_grad_()]
    count, nearest = len(xs), None
    with torch.enable_grad():
        ys = [y for y in probe.tried() or [] if y is not None]
        if len(ys) != count:
            return None
        grads = [permuted(torch.randn(y.shape, device="cpu").to(y.dtype), outer) for y in ys]
        wanted = torch.autograd.grad(ys, [*xs, *tables], grads, allow_unused=True)
        dense = tuple(
            (y.is_contiguous(), g is not None and g.is_contiguous()) for y, g in zip(ys, wanted)
        )
        for pair in pairs:
            bits = Bits(pair, dense, cast=cast, by_batch=by_batch)
            mine = [probe.fused(i, rotation, ys[0].dtype, bits) for i in range(count)]
            if not equal(mine, ys) or not all(map(_alike, mine, ys)):
                continue
            found = torch.autograd.grad(
                [y for y in mine if y is not None], [*xs, *tables], grads, allow_unused=True
            )
            bits = bits._replace(tables=equal(found[count:], wanted[count:]))
            both = found[:count], wanted[:count]
            if equal(*both) and all(map(_alike, *both)):
                return bits
            nearest = bits._replace(gradients=False)
        return nearest


def _alike(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same strides, except in dimensions of size 1."""
    if x is None or y is None:
        return x is y
    kept = [dim for dim, size in enumerate(x.shape) if size > 1]
    return [x.stride(dim) for dim in kept] == [y.stride(dim) for dim in kept]
