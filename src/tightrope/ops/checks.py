"""Input checks of the public functions, which raise the errors that users see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .._errors import (
    Refusal,
    as_passed,
    bad_type,
    bad_value,
    check_dense,
    check_local,
    check_tensor,
    describe,
    integer,
    one_or,
)
from .._tracing import broadcasts
from ..positions import PositionsLike, as_positions, check_axes
from ..spec import PreparedRotation, Rope, RopeSpec, prepared
from .call import KEYS
from .layouts import BY_NAME, WITH_ROWS, Layout
from .memory import check_not_negated


def layout_named(name: str) -> Layout:
    """Return the layout of that name, or raise a ValueError that lists all names."""
    layout = BY_NAME.get(name) if isinstance(name, str) else None
    if layout is None:
        raise bad_value(f"layout must be one of {', '.join(BY_NAME)} but got {name!r}")
    return layout


class Operands(NamedTuple):
    """Tensors that are rotated by the same angles, and their layout.

    Attributes:
        names: their names in error messages.
        xs: the tensors.
        layout: the order of their dimensions.
        sharded: whether the tensors are DTensors; positions may then be one too, or those of one part
            of the tokens.
    """

    names: Sequence[str]
    xs: Sequence[torch.Tensor]
    layout: Layout
    sharded: bool = False


def prepare(
    operands: Operands, rope: Rope, positions: PositionsLike, wider: bool = False
) -> PreparedRotation:
    """Check tensors, rotation and positions against each other.

    Args:
        wider: whether the tensors may have more channels than the spec.

    Returns:
        A rotation that fits the shapes of the tensors and is on their device.
    """
    names, xs, layout, sharded = operands
    x = xs[0]
    shape = shape_of(names[0], x, layout, sharded)
    rotation = rotation_at(names[0], x, rope, positions)
    rotation = rotation.for_tokens(shape[layout.token], WITH_ROWS.get(layout.name))
    width = rotation.channels.head_dim
    if shape[-1] != width and not (wider and shape[-1] > width):
        hint = ""
        if shape[-1] > width:
            part, whole = rotation.channels.rotary_dim, shape[-1]
            hint = (
                f"; to rotate {part} of {whole} channels, make the spec with head_dim={whole} and "
                f"rotary_dim={part}"
            )
        raise _wrong_width(names[0], x, width, hint)
    for name, other in zip(names[1:], xs[1:]):
        other_shape = shape_of(name, other, layout, sharded)
        if other_shape[-1] != shape[-1]:
            raise _wrong_width(name, other, width)
        check_partner(names[0], name, x, other, layout)
    check_rotation(operands, rotation)
    return rotation


def check_rotation(
    operands: Operands,
    rotation: PreparedRotation,
    arguments: tuple[str, str, str] = ("rope", "positions", "seq_len"),
) -> None:
    """Refuse a rotation whose rows, tokens, heads or lengths do not fit the tensors.

    Args:
        arguments: names of the spec, positions and sequence lengths in error messages.
    """
    names, xs, layout, sharded = operands
    spec, positions, seq_len = arguments
    x, name = xs[0], names[0]
    tokens = x.shape[layout.token]
    rows = 1 if layout.row is None else x.shape[layout.row]
    no_rows = f" (layout {layout.name!r} has no rows)" if layout.row is None else ""
    where, own, ids = rotation.where, rotation.angles, rotation.ids
    if where.part is not None:
        _, ranks, whole = where.part
        if sharded:
            tokens //= ranks
        elif tokens * ranks != whole:
            raise bad_value(
                f"{positions} must be those of the {tokens} tokens of this rank but are of {whole // ranks}: tokens= of "
                f"positions.shard is their number on all {ranks} ranks",
                **{name: x},
            )
    if ids is not None:
        if not sharded:
            check_local(positions, ids)
        if not where.add_index and ids.shape[2] != tokens:
            hint = ""
            if ids.shape[0] == 1 and ids.shape[1:] in ((1, rows), (rows, 1)):
                hint = (
                    f"; for one offset per row pass positions.per_row(ids), ids of shape ({rows},)"
                )
            elif layout.row is None and ids.shape[2] > 1:
                hint = (
                    "; for sequences packed one after the other pass positions.packed(cu_seqlens)"
                )
            raise bad_value(
                f"{positions} must hold one position for each of {tokens} tokens but got "
                f"{ids.shape[2]} (layout {layout.name!r} has its tokens in dimension "
                f"{layout.token}){hint}",
                **{name: x, positions: _as_passed(ids)},
            )
        if not broadcasts(ids.shape[1], rows):
            raise bad_value(
                f"{positions} must have {one_or(rows, 'row')} but got {ids.shape[1]}{no_rows}",
                **{name: x, positions: _as_passed(ids)},
            )
        if where.heads is not None:
            check_heads(positions, where.heads, names, xs, layout)
    if own.words.shape[2] != 1:
        check_heads(spec, own.words.shape[2], names, xs, layout)
    if not broadcasts(own.rows, rows):
        fits = "" if no_rows else f", or one for each of {rows} rows,"
        rule = f"{seq_len} must be one length{fits} but got {own.rows}{no_rows}"
        raise bad_value(rule, **{name: x})
    if rotation.stated is not None:
        rotation.check_passed(tokens, seq_len)


def rotation_at(
    name: str,
    x: torch.Tensor,
    rope: object,
    positions: PositionsLike,
    arguments: Sequence[str] = ("rope", "positions"),
) -> PreparedRotation:
    """Return the rotation that a caller gave, at its positions and on the device of x.

    Args:
        name: name of x in error messages.
        arguments: names of the rotation and of the positions in error messages.
    """
    own, where = arguments
    if isinstance(rope, RopeSpec):
        given = as_positions(positions, sharded=True)
        check_axes(given, rope.axis_count, where)
        return prepared(rope, given, x.device)
    if not isinstance(rope, PreparedRotation):
        raise bad_type(
            f"{own} must be a RopeSpec or a prepared rotation (RopeSpec.at), before the positions, but got "
            f"{describe(rope)}{_which_of(rope)}"
        )
    if positions is not None:
        raise bad_value(
            f"{where} must be None with a prepared rotation, which has its own; call spec.at(positions)"
        )
    if rope.device != x.device:
        raise bad_value(
            f"{own} is on {rope.device} but {name} is on {x.device}; call "
            f"spec.at(positions, device={str(x.device)!r})"
        )
    return rope


def _which_of(rope: object) -> str:
    """Name the spec to take, if there are several."""
    if isinstance(rope, Mapping):
        keys = [key for key, one in rope.items() if isinstance(one, RopeSpec)]
        if keys:
            return f"; take the spec of the layer's type, such as specs[{keys[0]!r}]"
    return ""


def check_dtype(dtype: object) -> None:
    """Refuse anything but a floating dtype or None (the default dtype) for parameters."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise bad_type(f"dtype must be floating but got {describe(dtype)}")


def check_count(name: str, value: object) -> None:
    """Refuse anything but a positive integer."""
    if integer(name, value, tensors=True) < 1:
        raise bad_value(f"{name} must be positive but got {value}")


# The layout of the values of a jagged tensor, by their number of dimensions and the one of tokens.
_OF_JAGGED = {
    (3, 0): ("values()", "thd"),
    (3, 1): ("values().transpose(0, 1)", "thd"),
    (2, 0): ("values()", "sd"),
}


def _if_nested(name: str, x: torch.Tensor) -> str:
    """Name the call that rotates a nested tensor, if there is one."""
    if x.layout is not torch.jagged or x.lengths() is not None:  # type: ignore[attr-defined]
        return ""
    found = _OF_JAGGED.get((x.dim() - 1, x._ragged_idx - 1))  # type: ignore[attr-defined]
    if found is None:
        return ""
    values, layout = found
    return (
        f"; call tightrope.functional.rotate on {name}.{values} with positions.packed({name}.offsets()) "
        f"and layout={layout!r}"
    )


def check_floating(name: str, x: torch.Tensor, sharded: bool = False) -> None:
    """Refuse anything but a dense tensor of a supported dtype; a DTensor too, unless ``sharded``."""
    maybe_ids = name == "k" and isinstance(x, torch.Tensor) and not x.is_floating_point()
    hint = "; pass ids as positions=" * maybe_ids
    check_tensor(name, x, "float32, float64, bfloat16 or float16", sharded=sharded, hint=hint)


def shape_of(name: str, x: torch.Tensor, layout: Layout, sharded: bool = False) -> torch.Size:
    """Check the dtype and rank of a tensor for a layout and return its shape.

    Args:
        sharded: whether x may be a DTensor.
    """
    if isinstance(x, torch.Tensor) and x.is_nested:
        check_dense(name, x, _if_nested(name, x))
    check_floating(name, x, sharded)
    shape = x.shape
    if len(shape) != layout.dims:
        fits = ", ".join(repr(key) for key, other in BY_NAME.items() if other.dims == len(shape))
        raise bad_value(
            f"{name} must have {layout.dims} dimensions for layout {layout.name!r} but got "
            f"{len(shape)}" + (f"; layouts with {len(shape)} dimensions: {fits}" if fits else ""),
            **{name: x},
        )
    return shape


def _wrong_width(name: str, x: torch.Tensor, width: int, hint: str = "") -> Refusal:
    return bad_value(
        f"{name} must have head_dim {width} in its last dimension but got {x.shape[-1]}{hint}",
        **{name: x},
    )


def check_partner(
    q_name: str, k_name: str, q: torch.Tensor, k: torch.Tensor, layout: Layout
) -> None:
    """Refuse two tensors that cannot share their angles; the error names the first difference."""
    both, about = f"{q_name} and {k_name}", {q_name: q, k_name: k}
    for axis, dim in (("rows", layout.row), ("tokens", layout.token), ("channels", -1)):
        if dim is not None and q.shape[dim] != k.shape[dim]:
            other_way = _swapped(q, k, layout) if axis == "tokens" else ""
            raise bad_value(
                f"{both} must have the same number of {axis} but got {q.shape[dim]} and "
                f"{k.shape[dim]}; rotate them one by one{other_way}",
                **about,
            )
    if q.dtype != k.dtype or q.device != k.device:
        raise bad_value(
            f"{both} must share dtype and device but got {q.dtype} on {q.device} and {k.dtype} on "
            f"{k.device}; rotate them one by one, or pass {k_name}.to({q_name})",
            **about,
        )


def _swapped(q: torch.Tensor, k: torch.Tensor, layout: Layout) -> str:
    """Name the layout with heads and tokens exchanged, if q and k agree in it."""
    head = layout.head
    if head is None or layout.row is None or q.shape[head] != k.shape[head]:
        return ""
    return "".join(
        f", or pass layout={name!r} if their tokens are in dimension {head}"
        for name, other in BY_NAME.items()
        if (other.dims, other.row, other.token) == (layout.dims, layout.row, head)
    )


def check_heads(
    what: str,
    heads: int,
    names: Sequence[str],
    xs: Sequence[torch.Tensor | None],
    layout: Layout,
) -> None:
    """Refuse per-head angles whose number of heads does not broadcast to that of the tensors."""
    for name, x in zip(names, xs):
        own = 1 if x is None or layout.head is None else x.shape[layout.head]
        if x is not None and not broadcasts(heads, own):
            alone = (
                f"; rotate q and k one by one, each with its own {what}" if len(names) > 1 else ""
            )
            raise bad_value(
                f"{what} must have {one_or(own, 'head')} for {name} but got {heads}{alone}",
                **{name: x},
            )


def _as_passed(ids: torch.Tensor) -> torch.Tensor:
    """Return ids in the dimensions of the caller's tensor, which has heads before tokens."""
    return ids[0].transpose(1, 2) if ids.dim() == 4 else as_passed(ids)


def for_float8(dtype: torch.dtype) -> str:
    """The advice for a result in float8, or in bytes that stand for it, without a scale."""
    if dtype == torch.uint8:
        return "; to write float8, pass a view such as cache.view(torch.float8_e4m3fn) to write_kv, and cache_scale="
    is_float8 = dtype.is_floating_point and dtype.itemsize == 1
    return "; to write float8, call write_kv with cache_scale=" if is_float8 else ""


def check_outs(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cache: bool = False,
) -> None:
    """Refuse ``out`` tensors that do not match the tensors to rotate.

    Args:
        cache: whether the last one is a cache, whose shape :mod:`.slots` checks.
    """
    if len(outs) != len(xs):
        raise bad_value(
            f"out must hold one tensor for each of {', '.join(names)} but got {len(outs)}"
        )
    for name, x, out in zip(names, xs, outs, strict=True):
        what = KEYS if cache and out is outs[-1] else "out"
        if not isinstance(out, torch.Tensor):
            raise bad_type(f"{what} must be a tensor for {name} but got {describe(out)}")
        check_dense(what, out)
        check_not_negated(what, out)
        check_local(what, out)
        if what == KEYS:
            continue
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            devices = f" but is on {out.device}, not {x.device}" if out.device != x.device else ""
            raise bad_value(
                f"out must have the shape, dtype and device of {name}{devices}{for_float8(out.dtype)}",
                **{name: x, "out": out},
            )
