"""Tables that a caller brings: every shape that the field uses, brought to the operator's."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._errors import bad_index, bad_type, bad_value, check_local, describe, integer
from .._tracing import broadcasts, is_readable
from . import schema
from .checks import check_flag, check_floating, check_partner, shape_of
from .layouts import BY_NAME, Layout

# Rank of q and which of its dimensions is heads -> layout.
_LAYOUTS = {(4, 1): "bhsd", (4, 2): "bshd", (3, 1): "thd", (3, 0): "bsd"}


def arguments(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    tables: str,
    start: int = 0,
    inverse: bool = False,
) -> tuple[Any, ...]:
    """Check everything against everything else.

    Returns:
        What follows q and k in the schema, up to ``carried``.
    """
    check_flag("interleaved", interleaved)
    check_flag("inverse", inverse)
    hint = "; ids go into position_ids="
    unsqueeze_dim = integer("unsqueeze_dim", unsqueeze_dim, hint)
    layout = _layout(q, unsqueeze_dim)
    shape = shape_of("q", q, layout)
    if k is not None:
        shape_of("k", k, layout)
        check_partner("q", "k", q, k, layout)
    if tables not in schema.TABLES:
        raise bad_value(f"tables must be one of {', '.join(schema.TABLES)} but got {tables!r}")
    start = integer("start", start)
    _check_tables(q, cos, sin, tables, start)
    c, s = (_canonical(table, q, unsqueeze_dim, layout) for table in (cos, sin))
    _check_fit(c, q, k, cos, layout)
    length, tokens = c.shape[2], shape[layout.token]
    ids = None
    if position_ids is not None:
        ids = _ids(position_ids, length, tokens, q, layout)
    elif length != tokens:
        raise bad_value(
            f"cos and sin must have one row for each of {tokens} tokens but got {length}; "
            "give position_ids to say which rows",
            q=q,
            cos=cos,
        )
    learned = cos.requires_grad or sin.requires_grad
    if tables != "half" and not learned and is_readable(cos):
        for name, table, whole in (("cos", cos, c), ("sin", sin, s)):
            if not _was_checked(name, table, tables):
                _check_duplicates(name, whole, tables)
                _checked[name] = (weakref.ref(table), _version(table), tables)
    form = schema.Form(
        layout=layout.code,
        start=start,
        interleaved=interleaved,
        direction=schema.INVERSE if inverse else schema.FORWARD,
        ramp=ids is None,
        source=schema.SOURCES.index(tables),
    )
    return c, s, ids, 0, form.pack(), 1.0


def _layout(q: torch.Tensor, unsqueeze_dim: int) -> Layout:
    if not isinstance(q, torch.Tensor):
        raise bad_type(f"q must be a tensor but got {describe(q)}")
    dims = q.dim()
    name = _LAYOUTS.get((dims, unsqueeze_dim + dims if unsqueeze_dim < 0 else unsqueeze_dim))
    if name is None:
        raise bad_value(
            "unsqueeze_dim must name the heads of q: 1 or 2 of four dimensions, 0 or 1 of "
            f"three, but got {unsqueeze_dim}",
            q=q,
        )
    return BY_NAME[name]


def _check_tables(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tables: str,
    start: int,
) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        check_floating(name, table)
    if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.device != sin.device:
        raise bad_value("cos and sin must share shape, dtype and device", cos=cos, sin=sin)
    if cos.device != q.device:
        raise bad_value(f"cos and sin are on {cos.device} but q is on {q.device}", cos=cos)
    width = cos.shape[-1] if cos.dim() else 0
    if tables != "half" and width % 2:
        raise bad_value(f"tables {tables!r} must have an even width but got {width}", cos=cos)
    rotated = 2 * width if tables == "half" else width
    if rotated > q.shape[-1]:
        raise bad_value(
            f"tables {tables!r} of width {width} rotate {rotated} channels but q has {q.shape[-1]}",
            q=q,
            cos=cos,
        )
    if start and not 0 <= start <= q.shape[-1] - rotated:
        raise bad_value(
            f"start must lie between 0 and {q.shape[-1] - rotated}, as tables {tables!r} of width "
            f"{width} rotate {rotated} channels, but got {start}",
            q=q,
            cos=cos,
        )


def _canonical(
    table: torch.Tensor, q: torch.Tensor, unsqueeze_dim: int, layout: Layout
) -> torch.Tensor:
    """A view [rows|1, heads|1, length, width]."""
    dims = q.dim()
    view = table
    if view.dim() == 2 and dims == 4:
        view = view[None]
    if view.dim() == dims - 1:
        view = view.unsqueeze(unsqueeze_dim)
    if view.dim() != dims:
        raise bad_value(
            f"cos and sin must have {dims - 1} or {dims} dimensions"
            + (", or 2," if dims == 4 else "")
            + f" for a q of {dims} but got {table.dim()}",
            q=q,
            cos=table,
        )
    return layout.to_bhsd(view)


def _check_fit(
    c: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    layout: Layout,
) -> None:
    rows = 1 if layout.row is None else q.shape[layout.row]
    if not broadcasts(c.shape[0], rows):
        raise bad_value(
            f"cos and sin must have 1 or {rows} rows but got {c.shape[0]}", q=q, cos=cos
        )
    for name, x in (("q", q), ("k", k)):
        heads = 1 if x is None or layout.head is None else x.shape[layout.head]
        if x is not None and not broadcasts(c.shape[1], heads):
            raise bad_value(
                f"cos and sin must have 1 or {heads} heads for {name} but got {c.shape[1]}",
                **{name: x, "cos": cos},
            )


# The last tables that were looked at, by name: all layers of a forward pass share theirs.
_checked: dict[str, tuple[weakref.ref[torch.Tensor], int, str]] = {}


def _was_checked(name: str, table: torch.Tensor, tables: str) -> bool:
    found = _checked.get(name)
    return (
        found is not None
        and found[0]() is table
        and found[1] == _version(table)
        and found[2] == tables
    )


def _version(table: torch.Tensor) -> int:
    # Nobody counts the changes of tensors of inference mode; hardly one is another format.
    return 0 if table.is_inference() else table._version


def _check_duplicates(name: str, table: torch.Tensor, tables: str) -> None:
    """Refuse tables of another format than is said: they would turn pairs by each other's angles.

    Of every row of the batch the last token is looked at: its angles are the largest, so formats differ
    most. Callers leave out what nothing may read, and learned tables: of duplicates one is read, so only
    that one learns.
    """
    if not table.numel():
        return
    last = table[:, :, -1]
    half = last.shape[-1] // 2
    if tables == "cat":
        one, other = last[..., :half], last[..., half:]
    else:
        one, other = last[..., 0::2], last[..., 1::2]
    if torch.equal(one, other):
        return
    # Two ways to compute one cosine may differ in a last bit; NaN is no difference.
    gap = float((one - other).abs().nan_to_num(0.0, 0.0, 0.0).amax())
    size = float(one.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    if gap > 0.01 * max(size, 1e-3):
        held = "halves" if tables == "cat" else "neighbours"
        others = " or ".join(repr(kind) for kind in schema.TABLES if kind != tables)
        raise bad_value(
            f"{name} must hold every number twice, as equal {held}, for tables={tables!r}, but its "
            f"last row does not; tables={others} would say another format",
            **{name: table},
        )


def _ids(
    position_ids: torch.Tensor,
    length: int,
    tokens: int,
    q: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    if not isinstance(position_ids, torch.Tensor) or position_ids.dtype not in (
        torch.int64,
        torch.int32,
    ):
        raise bad_type(f"position_ids must be int32 or int64 but got {describe(position_ids)}")
    check_local("position_ids", position_ids)
    rows = 1 if layout.row is None else q.shape[layout.row]
    fits = ((tokens,), (1, tokens), (rows, tokens))
    if tuple(position_ids.shape) not in fits:
        raise bad_value(
            f"position_ids must have shape ({tokens},) or ({rows}, {tokens})",
            q=q,
            position_ids=position_ids,
        )
    if position_ids.device != q.device:
        raise bad_value(f"position_ids are on {position_ids.device} but q is on {q.device}")
    _check_inside(position_ids, length)
    return position_ids[None, None] if position_ids.dim() == 1 else position_ids[None]


def _check_inside(ids: torch.Tensor, length: int) -> None:
    """Where a look costs no synchronisation; elsewhere such rows become NaN."""
    if ids.numel() == 0 or not is_readable(ids):
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= length:
        raise bad_index(
            f"position_ids must lie in [0, {length}), the rows of cos and sin, but go from "
            f"{low} to {high}"
        )
