"""Caches: where the last result of a call goes, the rotated keys, and the values that go there too.

A cache has blocks of entries. Slot s is entry ``s % entries`` of block ``s // entries``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._errors import bad_index, bad_type, bad_value, check_tensor
from .call import KEYS, VALUES, Slots
from .checks import check_floating, for_float8
from .layouts import BY_NAME, WITH_ROWS, Layout
from .memory import check_not_negated
from .scaled import check_formats


def names_of(outs: Sequence[torch.Tensor], slots: Slots | None) -> list[str]:
    """Return the names of all tensors that a call with given destinations writes."""
    names = ["out"] * len(outs)
    if slots is not None:
        names[-1:] = [KEYS, VALUES]
    return names


def layout_of_cache(layout: Layout, dims: int) -> Layout:
    """Return the layout of a cache for keys in a layout: the same, or with blocks if it has one dimension more."""
    more = WITH_ROWS.get(layout.name)
    return layout if more is None or dims == layout.dims else BY_NAME[more]


def check_slots(
    slots: Slots, name: str, x: torch.Tensor, out: torch.Tensor, layout: Layout
) -> None:
    """Check shapes, dtypes and devices of a cache for keys x, of slots, and of values and their cache."""
    index, values, cache, scales = slots
    eight = scales is not None  # caches of another dtype than keys and values
    if scales is not None:
        check_formats(slots, out)
    rows, tokens = 1 if layout.row is None else x.shape[layout.row], x.shape[layout.token]
    for one, tensor in (("slots", index), ("v", values), (VALUES, cache)):
        if tensor is not None:
            check_tensor(one, tensor)
    if cache is not None:
        check_not_negated(VALUES, cache)
    if index is None:
        _check_same(KEYS, out, name, x, eight)
        if values is not None and cache is not None:
            _check_same(VALUES, cache, "v", values, eight)
            if not _fits(values, x, eight):
                both = _own(eight).removeprefix("and ")
                raise bad_value(f"v must have the {both} of {name}", v=values)
        return
    _check_index(index, name, x)
    if index.shape != (rows, tokens) and not (rows == 1 and index.shape == (tokens,)):
        fits = f"({rows}, {tokens})" + (f" or ({tokens},)" if rows == 1 else "")
        raise bad_value(
            f"slots must have shape {fits}, one for each token", **{name: x, "slots": index}
        )
    _check_cache(KEYS, name, x, out, layout, eight)
    if values is None or cache is None:
        return
    own = 1 if layout.row is None or values.dim() != layout.dims else values.shape[layout.row]
    if (
        values.dim() != layout.dims
        or (own, values.shape[layout.token]) != (rows, tokens)
        or not _fits(values, x, eight)
    ):
        raise bad_value(
            f"v must have the rows, tokens, layout, {_own(eight)} of {name}",
            **{name: x, "v": values},
        )
    _check_cache(VALUES, "v", values, cache, layout, eight)
    if _blocks(cache, layout) != _blocks(out, layout):
        raise bad_value(
            f"{VALUES} must have the blocks and entries of {KEYS}", **{KEYS: out, VALUES: cache}
        )


def _fits(a: torch.Tensor, b: torch.Tensor, eight: bool) -> bool:
    """Return whether two tensors have one device, and unless one may be in 8 bits, one dtype."""
    return a.device == b.device and (eight or a.dtype == b.dtype)


def _own(eight: bool) -> str:
    """Return the end of a list, what :func:`_fits` compares."""
    return "and device" if eight else "dtype and device"


def _check_same(what: str, cache: torch.Tensor, name: str, x: torch.Tensor, eight: bool) -> None:
    """Refuse a part of a contiguous cache that is not like the tensor that goes there."""
    if cache.shape != x.shape or not _fits(cache, x, eight):
        hint = "" if eight or cache.dtype == x.dtype else for_float8(cache.dtype)
        both = "shape and device" if eight else "shape, dtype and device"
        raise bad_value(
            f"{what} must have the {both} of {name} without slots{hint}",
            **{name: x, what: cache},
        )


def _check_index(index: torch.Tensor, name: str, x: torch.Tensor) -> None:
    if index.dtype not in (torch.int32, torch.int64) or index.device != x.device:
        raise bad_type(
            f"slots must be int32 or int64 on the device of {name} but got "
            f"{str(index.dtype).removeprefix('torch.')} on {index.device}"
        )


def _blocks(cache: torch.Tensor, layout: Layout) -> tuple[int, int]:
    """Return the number of blocks, and of entries in each."""
    own = layout_of_cache(layout, cache.dim())
    return 1 if own.row is None else cache.shape[own.row], cache.shape[own.token]


def _check_cache(
    what: str, name: str, x: torch.Tensor, cache: torch.Tensor, layout: Layout, eight: bool
) -> None:
    own = layout_of_cache(layout, cache.dim())
    heads = 1 if layout.head is None else x.shape[layout.head]
    if (
        cache.dim() != own.dims
        or cache.shape[-1] != x.shape[-1]
        or (own.head is not None and cache.shape[own.head] != heads)
        or not _fits(cache, x, eight)
    ):
        hint = "" if eight or cache.dtype == x.dtype else for_float8(cache.dtype)
        raise bad_value(
            f"{what} must be a cache {_shapes(layout)} with the heads, channels, {_own(eight)} of "
            f"{name} (layout {layout.name!r}){hint}",
            **{name: x, what: cache},
        )


def _shapes(layout: Layout) -> str:
    """Describe the shapes of a cache for keys in a layout."""
    more = WITH_ROWS.get(layout.name)
    return " or ".join(_words(one) for one in (layout, *([BY_NAME[more]] if more else [])))


def _words(layout: Layout) -> str:
    names = {
        layout.row: "blocks",
        layout.head: "heads",
        layout.token: "entries",
        layout.dims - 1: "channels",
    }
    return "(" + ", ".join(names[d] for d in range(layout.dims)) + ")"


def check_range(slots: Slots, cache: torch.Tensor, layout: Layout, name: str = KEYS) -> None:
    """Refuse slots on the CPU that are neither -1 nor an entry of the cache."""
    index = slots.slot
    if index is None or not index.is_cpu or torch.compiler.is_compiling():
        return
    blocks, entries = _blocks(cache, layout)
    bad = (index < -1) | (index >= blocks * entries)
    if bool(bad.any()):
        raise bad_index(
            f"slots must be -1 or lie in [0, {blocks * entries}) but got {int(index[bad][0])}",
            **{"slots": index, name: cache},
        )


def check_distinct(index: torch.Tensor) -> None:
    """Refuse slots on the CPU of which two tokens have the same."""
    if not index.is_cpu or torch.compiler.is_compiling():
        return
    kept = index[index >= 0]
    if kept.unique().numel() != kept.numel():
        raise bad_value(
            "slots must differ, because an entry can rotate only once in a call", slots=index
        )


def check_entries(index: torch.Tensor, name: str, cache: torch.Tensor, layout: Layout) -> None:
    """Check a cache whose entries rotate in place, and their slots."""
    check_floating(name, cache)
    check_tensor("slots", index)
    _check_index(index, name, cache)
    own = layout_of_cache(layout, cache.dim())
    if cache.dim() != own.dims:
        raise bad_value(
            f"{name} must be a cache {_shapes(layout)} for layout {layout.name!r}", **{name: cache}
        )
    shape = index.shape
    if len(shape) not in (1, 2) or (layout.row is None and len(shape) == 2 and shape[0] != 1):
        fits = f"(tokens,) or ({'1' if layout.row is None else 'rows'}, tokens)"
        raise bad_value(f"slots must have shape {fits} for layout {layout.name!r}", slots=index)


def stand_in(cache: torch.Tensor, index: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor without memory of its own, in the shape of the entries of a cache."""
    own = layout_of_cache(layout, cache.dim())
    sizes = {layout.token: index.shape[-1], layout.dims - 1: cache.shape[-1]}
    if layout.row is not None:
        sizes[layout.row] = index.shape[0] if index.dim() == 2 else 1
    if layout.head is not None and own.head is not None:
        sizes[layout.head] = cache.shape[own.head]
    return cache.new_empty(()).expand([sizes[d] for d in range(layout.dims)])


def gather(cache: torch.Tensor, index: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the entries of a cache, in the layout of keys; any values for slots outside it."""
    of = _as_entries(cache, layout)
    blocks, entries, heads, width = of.shape
    rows = index.shape[0] if index.dim() == 2 else 1
    if blocks * entries == 0:
        found = cache.new_zeros(rows, index.shape[-1], heads, width)
    else:
        slot = index.reshape(rows, -1).long().clamp(0, blocks * entries - 1)
        found = of[slot // entries, slot % entries]
    return layout.from_bhsd(found.transpose(1, 2))


def _as_entries(cache: torch.Tensor, layout: Layout) -> torch.Tensor:
    """View a cache as [blocks, entries, heads, channels]."""
    return layout_of_cache(layout, cache.dim()).to_bhsd(cache).transpose(1, 2)


def write(x: torch.Tensor, cache: torch.Tensor, index: torch.Tensor, layout: Layout) -> None:
    """Write rotated keys, or values, to their slots, in plain torch.

    Slots outside the cache are skipped, without waiting for a device: such a token writes what the first token
    with a slot writes, once more.
    """
    to = _as_entries(cache, layout)
    new = layout.to_bhsd(x).transpose(1, 2).flatten(0, 1)  # tokens of all rows, heads, channels
    blocks, entries = to.shape[:2]
    flat = index.reshape(-1).long()
    if 0 in (*new.shape, blocks, entries):
        return
    there = (flat >= 0) & (flat < blocks * entries)
    source = torch.where(
        there, torch.arange(len(flat), device=flat.device), there.to(torch.int8).argmax()
    )
    slot = torch.where(there.any(), flat[source], 0)
    block, entry = slot // entries, slot % entries
    to.index_put_((block, entry), torch.where(there.any(), new[source], to[block, entry]))


def write_all(
    ys: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], slots: Slots, layout: Layout
) -> None:
    """Copy results to ``outs``, the last one and the values to their slots."""
    for y, out in zip(ys[:-1], outs[:-1]):
        out.copy_(y)
    for x, cache in ((ys[-1], outs[-1]), (slots.values, slots.cache)):
        if x is None or cache is None:
            continue
        if slots.slot is None:
            cache.copy_(x)
        else:
            write(x, cache, slots.slot, layout)
