"""Rotation by the caller's tables of cosines and sines, in all common shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from .._errors import (
    as_passed,
    bad_index,
    bad_value,
    check_flag,
    check_place,
    check_tensor,
    check_type,
    integer,
    is_dtensor,
    one_or,
    public,
)
from .._memo import TensorMemo
from .._rounding import ROUNDINGS, RoundingLike, codes_of, rounding_pair
from .._tracing import broadcasts, is_readable, outside_modes
from ..channels import split_pairs
from ..ops import registry, schema, sharded
from ..ops.build import forced_for
from ..ops.call import Call, Extras
from ..ops.checks import (
    check_floating,
    check_heads,
    check_partner,
    shape_of,
)
from ..ops.layouts import BY_NAME, Layout
from ..ops.registry import takes_on
from ..ops.route import is_plain, is_plain_eager
from ..ops.run import launch_quick, run

# The type of k: a tensor or None; the function returns the same type.
_K = TypeVar("_K", bound=torch.Tensor | None)


@public("apply_rotary_pos_emb")
def apply_rotary_pos_emb(  # noqa: PLR0913  (one argument for each option)
    q: torch.Tensor,
    k: _K,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    tables: str = "cat",
    start: int = 0,
    inverse: bool = False,
    position_ids: torch.Tensor | None = None,
    rounding: RoundingLike = "once",
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys by tables, in half pairs by default, with the signature of transformers.

    For code that already has tables. :func:`rotate_qk` needs none and is exact at any position.

    Args:
        q, k: floating, see :func:`rotate_qk`; four dimensions, or three without a batch or heads.
            k may be None.
        cos, sin: float32, float64, bfloat16 or float16, on the device of q: ``(tokens, width)``,
            ``(rows, tokens, width)``, or with as many dimensions as q. Channels that the tables do
            not cover are copied.
        unsqueeze_dim: the heads dimension of q: 1 for (batch, heads, seq, dim) and (seq, heads,
            dim), 2 for (batch, seq, heads, dim), 0 for (heads, seq, dim); also 0 if
            q is (batch, seq, dim).
        interleaved: pair channels (0, 1), (2, 3), … instead of halves.
        tables: the format of the last dimension: "half", one entry per pair; "cat", all these
            entries and then all again; "repeat", each entry twice in a row; "full", one entry per
            channel, in the order of the channels; the two of a pair may differ. For "cat" and
            "repeat" only the first of two duplicates is read; tables whose last row contradicts the
            format raise an error, unless they require grad, are on a GPU or are being traced. A tensor is
            checked again after it has changed, but not if it is an inference tensor or changed through
            ``.data``.
        start: the first channel that rotates.
        inverse: rotate by the negative angles. If the tables also scale, the result is scaled as in
            the forward rotation. Not with "full" tables, which need not be rotations.
        position_ids: the table row of each token, int32 or int64 ``(tokens,)`` or ``(rows, tokens)``;
            the tables may then have any length. By default token t uses row t.
        rounding: see :meth:`tightrope.RopeSpec.at`. Even "each" reads the tables as they are, without rounding them to
            the dtype of q.

    Returns:
        Rotated q and k; None for k if k is None. Differentiable with respect to q, k, cos and sin.

    Raises:
        IndexError: ids outside the tables, on the CPU. On a GPU, where the check would synchronise,
            and in compiled code, such tokens become NaN.
        TypeError, ValueError: invalid arguments; the message names the argument.

    Source: the formula of Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    >>> angle = torch.arange(16.0)[:, None] * torch.ones(64)
    >>> q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    """
    given = Tables(
        cos, sin, unsqueeze_dim, interleaved, tables, start, inverse, position_ids, rounding
    )
    ys = rotate_by(q, k, given)
    return ys[0], None if k is None else ys[1]  # type: ignore[return-value]


@public("apply_rotary_pos_emb_")
def apply_rotary_pos_emb_(  # noqa: PLR0913  (one argument for each option)
    q: torch.Tensor,
    k: _K,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    tables: str = "cat",
    start: int = 0,
    inverse: bool = False,
    position_ids: torch.Tensor | None = None,
    rounding: RoundingLike = "once",
) -> tuple[torch.Tensor, _K]:
    """Rotate in place, in half pairs by default: :func:`apply_rotary_pos_emb` without new tensors.

    Args: see :func:`apply_rotary_pos_emb`; for q and k, :func:`rotate_qk_`.

    Returns:
        q and k themselves.

    >>> q, angle = torch.randn(1, 8, 16, 64), torch.zeros(16, 64)
    >>> apply_rotary_pos_emb_(q, None, angle.cos(), angle.sin())[0] is q
    True
    """
    given = Tables(
        cos, sin, unsqueeze_dim, interleaved, tables, start, inverse, position_ids, rounding
    )
    rotate_by(q, k, given, "in place")
    return q, k


@public("rotary_apply")
def rotary_apply(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = True,
    rounding: RoundingLike = "once",
) -> torch.Tensor:
    """Rotate by tables that broadcast against x, in interleaved pairs by default.

    Args:
        x: floating ``(..., d)``, d even: ``(batch, heads, seq, d)`` usually.
        cos, sin: floating, of the same shape, which broadcasts against ``(..., d / 2)``, such as
            ``(seq, d / 2)`` or ``(1, 1, seq, d / 2)``.
        interleaved: pair channels (0, 1), (2, 3), … if true, and the first half with the second if
            false.
        rounding: see :func:`apply_rotary_pos_emb`.

    Returns:
        A new tensor of the broadcast shape and the dtype of x. Differentiable with respect to x, cos
        and sin.

    Raises:
        TypeError, ValueError: invalid tensors; the message names them.

    Source: the formula of Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> from tightrope.functional import build_freqs_cis
    >>> x = torch.randn(2, 8, 16, 64)
    >>> rotary_apply(x, *build_freqs_cis(16, 64)).shape
    torch.Size([2, 8, 16, 64])
    """
    x, cos, sin, shape = _broadcast(x, cos, sin)
    given = Tables(cos, sin, interleaved=interleaved, tables="half", rounding=rounding)
    (y,) = rotate_by(x, None, given)
    return y.reshape(shape)


def _broadcast(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    """Broadcast x and its tables to four dimensions.

    Returns:
        x, cos and sin, each with four dimensions, and the shape of the result.
    """
    for name, value in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(name, value, sharded=is_dtensor(x))
    width = x.shape[-1] if x.dim() else 1
    if width % 2:
        raise bad_value(f"x must have an even last dimension but got {width}", x=x)
    lead: torch.Size | None = None
    if cos.dim() and cos.shape == sin.shape and cos.shape[-1] == width // 2:
        try:
            lead = torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1])
        except RuntimeError:
            pass
    if lead is None:
        raise bad_value(
            f"cos and sin must share a shape that broadcasts against x, with {width // 2} "
            "entries in the last dimension, one for each pair",
            x=x,
            cos=cos,
            sin=sin,
        )
    shape = torch.Size((*lead, width))
    tokens = lead[-1] if lead else 1

    def to_4d(value: torch.Tensor, full: bool) -> torch.Tensor:
        # Add leading dimensions of size 1, then merge those beyond four into rows.
        missing = max(len(lead), 3) + 1 - value.dim()
        value = value[(None,) * missing]
        front = lead[:-3] if len(lead) > 3 else ()
        if len(front) and (full or any(size != 1 for size in value.shape[: len(front) + 1])):
            value = value.expand(*lead[:-2], *value.shape[-3:])
        value = value.flatten(0, value.dim() - 4)
        return value.expand(*value.shape[:2], tokens, value.shape[3])

    if len(lead) <= 3:
        x = x.expand(shape)
    return to_4d(x, True), to_4d(cos, False), to_4d(sin, False), shape


_IDS_HINT = "; pass ids as position_ids="

# (Rank of q, its heads dimension) -> layout.
_LAYOUTS = {(4, 1): "bhsd", (4, 2): "bshd", (3, 1): "thd", (3, 0): "bsd"}


class Tables(NamedTuple):
    """The caller's tables and their format; see :func:`apply_rotary_pos_emb`.

    Attributes:
        dense: whether results are contiguous, rather than strided like q and k; and whether the
            gradients of q and k are, rather than strided like the gradients of the results.
        layout: the layout of q if unsqueeze_dim cannot tell it; the tables then have its rank.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    unsqueeze_dim: int = 1
    interleaved: bool = False
    tables: str = "cat"
    start: int = 0
    inverse: bool = False
    position_ids: torch.Tensor | None = None
    rounding: RoundingLike = "once"
    dense: tuple[bool, bool] = (False, False)
    layout: str | None = None


def rotate_by(
    q: torch.Tensor,
    k: torch.Tensor | None,
    given: Tables,
    verb: str = "new",
) -> Sequence[torch.Tensor]:
    """Rotate q and k by tables; all public functions of this module that rotate call this one."""
    packed = _packed(q, k, given, verb)
    if packed is not None:
        names, build = ("q", "k"), partial(_build, q, k, given, verb)
        return launch_quick(names, verb, q, k, packed, build)
    if is_dtensor(q) or is_dtensor(k):
        return _rotate_shards(q, k, given, verb)
    return run(_build(q, k, given, verb))


def _packed(
    q: torch.Tensor, k: torch.Tensor | None, given: Tables, verb: str
) -> schema.Packed | None:
    """Return the arguments of the operator if the kernel for CPUs may be called directly; see :func:`route_quick`.

    It reads tables without the dimensions that they lack, and refuses every invalid input that is not
    checked here.
    """
    cos, sin, axis, interleaved, tables, start, inverse, position_ids, rounding = given[:9]
    if position_ids is not None or not is_plain_eager() or registry.forced is not None:
        return None
    types = type(axis), type(interleaved), type(tables), type(start), type(inverse), type(rounding)
    if types != _TYPES or not (is_plain(cos) and is_plain(sin)):
        return None
    new = verb == "new"
    if not (is_plain(q, new) and (k is None or is_plain(k, new)) and takes_on(q.device)):
        return None
    if tables not in schema.TABLES or rounding not in ROUNDINGS:
        return None
    known = tables in {"half", "full"} or (
        _checked.knows(cos, tables) and _checked.knows(sin, tables)
    )
    if not known:
        return None
    dims, own = q.dim(), cos.dim()
    name = given.layout or _LAYOUTS.get((dims, axis))
    # Other tables have a row dimension, or a heads dimension at another place.
    fits = own == 2 or (own == 3 and dims == 4) or (own == 4 and name == "bhsd")
    if name is None or not fits or not 0 <= start <= q.shape[-1]:
        return None
    layout = BY_NAME[name]
    if cos.shape[-2] != q.shape[layout.token]:
        return None
    options = pack(layout, start, interleaved, inverse, True, tables, rounding, given.dense)
    return cos, sin, None, 0, options, 1.0


# The types of the options of a call, for the fast path.
_TYPES = int, bool, str, int, bool, str


def _options(
    layout: Layout,
    start: int,
    interleaved: bool,
    inverse: bool,
    add_index: bool,
    tables: str,
    rounding: RoundingLike,
    dense: tuple[bool, bool],
) -> schema.Options:
    forward, back = codes_of(rounding_pair(rounding))
    return schema.Options(
        layout.code,
        start,
        interleaved,
        schema.INVERSE if inverse else schema.FORWARD,
        add_index,
        schema.SOURCES.index(tables),
        rounding=forward,
        back=back,
        dense=dense[0],
        dense_back=dense[1],
    )


@lru_cache(maxsize=256)
def pack(*options: Any) -> int:
    """Return the packed options of a call that is not compiled."""
    return _options(*options).pack()


def _rotate_shards(
    q: torch.Tensor, k: torch.Tensor | None, given: Tables, verb: str
) -> Sequence[torch.Tensor]:
    """Rotate DTensors: the local tensors of this process, by its part of the tables."""
    given = given._replace(unsqueeze_dim=integer("unsqueeze_dim", given.unsqueeze_dim, _IDS_HINT))
    layout = BY_NAME[given.layout] if given.layout else _layout(q, given.unsqueeze_dim)
    xs = schema.present(q, k)
    parts = sharded.parts_of(("q", "k")[: len(xs)], xs, layout)
    axes, take = sharded.axes_of(layout), parts[0].take
    if given.position_ids is not None:
        axes[layout.token] = None  # tables have rows for positions then
    if isinstance(given.cos, torch.Tensor) and given.cos.dim() < layout.dims:
        del axes[given.unsqueeze_dim]
    local = given._replace(
        cos=take("cos", given.cos, axes),
        sin=take("sin", given.sin, axes),
        position_ids=take("position_ids", given.position_ids, ("row", "token")),
    )
    q, k = schema.pair([sharded.local_of(x) for x in xs])
    watched = sharded.dtensors_of(given.cos, given.sin, given.position_ids)
    return sharded.run_local(_build(q, k, local, verb), xs, watched)


def _build(
    q: torch.Tensor,
    k: torch.Tensor | None,
    given: Tables,
    verb: str,
) -> list[Call]:
    """Check the arguments against each other and build the call."""
    cos, sin, unsqueeze_dim, interleaved, tables, start, inverse, position_ids, rounding = given[:9]
    check_flag("interleaved", interleaved)
    check_flag("inverse", inverse)
    unsqueeze_dim = integer("unsqueeze_dim", unsqueeze_dim, _IDS_HINT)
    layout = BY_NAME[given.layout] if given.layout else _layout(q, unsqueeze_dim)
    shape = shape_of("q", q, layout)
    if k is not None:
        shape_of("k", k, layout)
        check_partner("q", "k", q, k, layout)
    if tables not in schema.TABLES:
        raise bad_value(f"tables must be one of {', '.join(schema.TABLES)} but got {tables!r}")
    if inverse and tables == "full":
        raise bad_value("inverse must be False with tables='full', which need not be rotations")
    start = integer("start", start)
    _check_tables(q, cos, sin, tables, start)
    c = _canonical(cos, q, unsqueeze_dim, layout)
    s = _canonical(sin, q, unsqueeze_dim, layout)
    xs, names = schema.present(q, k), ("q",) if k is None else ("q", "k")
    rows = 1 if layout.row is None else shape[layout.row]
    if not broadcasts(c.shape[0], rows):
        raise bad_value(
            f"cos and sin must have {one_or(rows, 'row')} but got {c.shape[0]}", q=q, cos=cos
        )
    check_heads("cos and sin", c.shape[1], names, xs, layout)
    length, tokens = c.shape[2], shape[layout.token]
    ids = None
    if position_ids is not None:
        ids = _ids(position_ids, length, tokens, q, layout)
    elif length != tokens:
        raise bad_value(
            f"cos and sin must have one row for each of {tokens} tokens but got {length}; "
            "give position_ids to select rows",
            q=q,
            cos=cos,
        )
    learned = cos.requires_grad or sin.requires_grad
    if tables in ("cat", "repeat") and not learned and is_readable(cos):
        for name, table, view in (("cos", cos, c), ("sin", sin, s)):
            if not _checked.knows(table, tables):
                with outside_modes():
                    _check_duplicates(name, view, tables)
                _checked.learn(table, tables)
    options = _options(
        layout, start, interleaved, inverse, ids is None, tables, rounding, given.dense
    )
    return [Call(q, k, c, s, ids, 0, options, 1.0, Extras(), 0.0, names, verb, (), forced_for(q))]


def _layout(q: torch.Tensor, unsqueeze_dim: int) -> Layout:
    check_type("q", q)
    dims = q.dim()
    name = _LAYOUTS.get((dims, unsqueeze_dim + dims if unsqueeze_dim < 0 else unsqueeze_dim))
    if name is None:
        raise bad_value(
            "unsqueeze_dim must be the heads dimension of q: 1 or 2 if q has four dimensions, 0 or 1 "
            f"if it has three, but got {unsqueeze_dim}",
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
    check_floating("cos", cos)
    check_floating("sin", sin)
    shape = cos.shape
    if shape != sin.shape or cos.dtype != sin.dtype or cos.device != sin.device:
        raise bad_value("cos and sin must share shape, dtype and device", cos=cos, sin=sin)
    check_place("cos", cos, "q is", q.device)
    width = shape[-1] if shape else 0
    if tables != "half" and width % 2:
        raise bad_value(f"tables {tables!r} must have an even width but got {width}", cos=cos)
    rotated, channels = 2 * width if tables == "half" else width, q.shape[-1]
    if rotated > channels:
        raise bad_value(
            f"tables {tables!r} of width {width} rotate {rotated} channels but q has {channels}",
            q=q,
            cos=cos,
        )
    if start and not 0 <= start <= channels - rotated:
        raise bad_value(
            f"start must lie between 0 and {channels - rotated}, because tables {tables!r} of width "
            f"{width} rotate {rotated} channels, but got {start}",
            q=q,
            cos=cos,
        )


def _canonical(
    table: torch.Tensor, q: torch.Tensor, unsqueeze_dim: int, layout: Layout
) -> torch.Tensor:
    """Return a view of the table, [rows|1, heads|1, length, width]."""
    dims, own, view = q.dim(), table.dim(), table
    if own == 2 and dims == 4:
        own, view = 3, view[None]
    if own == dims - 1:
        view = view.unsqueeze(unsqueeze_dim)
    elif own != dims:
        raise bad_value(
            f"cos and sin must have {'2, 3 or 4' if dims == 4 else '2 or 3'} dimensions for a q of {dims} "
            f"but got {own}",
            q=q,
            cos=table,
        )
    return layout.to_bhsd(view)


# The layers of a model share their tables, so each table is checked only once.
_checked = TensorMemo()


def _check_duplicates(name: str, table: torch.Tensor, tables: str) -> None:
    """Raise if a table contradicts its format: pairs would rotate by the angles of other pairs.

    Only the last token of each row of the batch is checked: its angles are the largest, so there the
    formats differ most. The caller skips tables whose data cannot be read, and learned tables: only
    one of two duplicates is read, so only that one learns and they drift apart.
    """
    if not table.numel():
        return
    one, other = split_pairs(table[:, :, -1], tables == "repeat")
    if torch.equal(one, other):
        return
    # Two ways to compute a cosine may differ in the last bit; NaN is not a difference.
    gap = float((one - other).abs().nan_to_num(0.0, 0.0, 0.0).amax())
    size = float(one.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    if gap > 0.01 * max(size, 1e-3):
        held = "halves" if tables == "cat" else "neighbours"
        others = " or ".join(repr(kind) for kind in schema.TABLES if kind != tables)
        raise bad_value(
            f"{name} must hold every number twice, as equal {held}, for tables={tables!r}, but its "
            f"last row does not; for another format pass tables={others}",
            **{name: as_passed(table)},
        )


def _ids(
    position_ids: torch.Tensor,
    length: int,
    tokens: int,
    q: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    check_tensor("position_ids", position_ids, "int32 or int64")
    rows = 1 if layout.row is None else q.shape[layout.row]
    *lead, last = position_ids.shape or (-1,)
    # Each is compared by itself: in compiled code, sizes may be symbols, which a tuple of tuples does not compare.
    fits = last == tokens and len(lead) < 2 and (not lead or lead[0] == 1 or lead[0] == rows)
    if not fits:
        raise bad_value(
            f"position_ids must have shape ({tokens},) or ({rows}, {tokens})",
            q=q,
            position_ids=position_ids,
        )
    check_place("position_ids", position_ids, "q is", q.device)
    _check_inside(position_ids, length)
    return position_ids[None, None] if position_ids.dim() == 1 else position_ids[None]


def _check_inside(ids: torch.Tensor, length: int) -> None:
    """Check ids if reading them needs no synchronisation; elsewhere bad ids give NaN."""
    if ids.numel() == 0 or not is_readable(ids):
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= length:
        raise bad_index(
            f"position_ids must lie in [0, {length}), the rows of cos and sin, but go from "
            f"{low} to {high}"
        )
