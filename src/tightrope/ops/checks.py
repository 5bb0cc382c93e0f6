"""Checks at the public edge: everything that a user can get wrong, worded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._errors import (
    OPERATION,
    OUT_OF_PLACE,
    Refusal,
    bad_type,
    bad_value,
    check_dense,
    check_local,
    describe,
    integer,
)
from .._tracing import broadcasts
from ..positions import PositionsLike, as_positions
from ..spec import PreparedRotation, RopeSpec, SeqLen
from .layouts import BY_NAME, Layout

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def layout_named(name: str) -> Layout:
    """The layout of that name, or a ValueError that lists all of them."""
    layout = BY_NAME.get(name) if isinstance(name, str) else None
    if layout is None:
        raise bad_value(f"layout must be one of {', '.join(BY_NAME)} but got {name!r}")
    return layout


def prepare(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    seq_len: SeqLen,
    layout: Layout,
    wider: bool = False,
) -> PreparedRotation:
    """Check tensors, spec and positions against each other.

    Args:
        names: what the user knows the tensors by.
        xs: the tensors, which share their angles.
        wider: whether they may have more channels than the spec.

    Returns:
        The rotation on the device of the tensors, fit for them.
    """
    x = xs[0]
    shape = shape_of(names[0], x, layout)
    rotation = _rotation(x, spec, positions, seq_len).for_tokens(shape[layout.token])
    width = rotation.channels.head_dim
    if shape[-1] != width and not (wider and shape[-1] > width):
        raise _wrong_width(names[0], x, width)
    for name, other in zip(names[1:], xs[1:]):
        other_shape = shape_of(name, other, layout)
        if other_shape[-1] != shape[-1]:
            raise _wrong_width(name, other, width)
        check_partner(names[0], name, x, other, layout)
    check_rotation(names, xs, rotation, layout)
    return rotation


def check_rotation(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    rotation: PreparedRotation,
    layout: Layout,
    said: tuple[str, str, str] = ("spec", "positions", "seq_len"),
) -> None:
    """Refuse a rotation whose rows, tokens, heads or lengths are not those of what it turns.

    Args:
        said: what the user calls the spec, the positions and the lengths of it.
    """
    spec, positions, seq_len = said
    x = xs[0]
    if rotation.ids is not None:
        _check_fit(names[0], x, rotation.ids, rotation.ramp, layout, positions)
    heads = rotation.words.shape[2]
    if heads != 1:
        check_heads(spec, heads, names, xs, layout)
    if rotation.rows != 1:
        _check_rows(names[0], x, rotation.rows, layout, seq_len)
    if rotation.said is not None:
        rotation.check_passed(x.shape[layout.token], seq_len)


def _check_rows(name: str, x: torch.Tensor, rows: int, layout: Layout, seq_len: str) -> None:
    own = 1 if layout.row is None else x.shape[layout.row]
    if rows != own:
        fits = f", or one for each of {own} rows," if layout.row is not None else ""
        without = "" if layout.row is not None else f" (layout {layout.name!r} has no rows)"
        raise bad_value(f"{seq_len} must be one length{fits} but is {rows}{without}", **{name: x})


def _rotation(
    x: torch.Tensor,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
    seq_len: SeqLen,
) -> PreparedRotation:
    if isinstance(spec, PreparedRotation):
        if seq_len is not None:
            raise bad_value(
                "seq_len must be None with a prepared rotation, which brings its own; call "
                "spec.at(positions, seq_len=…)"
            )
        if positions is not None:
            raise bad_value(
                "positions must be None with a prepared rotation, which brings its own; "
                "call spec.at(positions)"
            )
        if spec.device != x.device:
            raise bad_value(
                f"the prepared rotation is on {spec.device} but x is on {x.device}; call "
                f"spec.at(positions, device={str(x.device)!r})"
            )
        if spec.is_stale:
            raise bad_value(
                "positions must not change after spec.at read the lengths of their rows from them, "
                "on which the frequencies depend; call spec.at again",
                positions=spec.ids,
            )
        return spec
    if isinstance(spec, RopeSpec):
        return spec.on(as_positions(positions), x.device, seq_len)
    raise bad_type(
        f"spec must be a RopeSpec or what RopeSpec.at returns but got {type(spec).__name__}"
    )


def check_flag(name: str, value: object) -> None:
    """Refuse what only counts as true or false, such as the string "false"."""
    if not isinstance(value, bool):
        raise bad_type(f"{name} must be a bool but got {describe(value)}")


def check_dtype(dtype: object) -> None:
    """Refuse what is no dtype of parameters; None is the default one."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise bad_type(f"dtype must be floating but got {describe(dtype)}")


def check_count(name: str, value: object) -> None:
    """Refuse what is no positive int."""
    if integer(name, value, tensors=True) < 1:
        raise bad_value(f"{name} must be positive but got {value}")


_IF_NESTED = (
    "; for one of layout jagged rotate {name}.values() with positions.packed({name}.offsets()) and "
    "layout='thd'"
)


def check_floating(name: str, x: object) -> None:
    """Refuse what is no dense tensor of a dtype that can rotate."""
    if not isinstance(x, torch.Tensor):
        raise bad_type(f"{name} must be a tensor but got {describe(x)}")
    check_dense(name, x, _IF_NESTED)
    if type(x).__name__ == "DTensor":
        raise bad_type(
            f"{name} must be a local tensor but got a DTensor; rotate {name}.to_local(), with the "
            "positions of this rank's tokens where tokens are sharded (positions.shard), and make "
            "a DTensor of the result (DTensor.from_local)"
        )
    if x.dtype not in DTYPES:
        raise bad_type(
            f"{name} must be float32, float64, bfloat16 or float16 but got "
            f"{str(x.dtype).removeprefix('torch.')}",
            **{name: x},
        )


def shape_of(name: str, x: torch.Tensor, layout: Layout) -> torch.Size:
    """The shape of a tensor that can rotate in that layout."""
    check_floating(name, x)
    shape = x.shape
    if len(shape) != layout.dims:
        fits = ", ".join(repr(key) for key, other in BY_NAME.items() if other.dims == len(shape))
        raise bad_value(
            f"{name} must have {layout.dims} dimensions for layout {layout.name!r} but got "
            f"{len(shape)}" + (f"; layouts of that rank: {fits}" if fits else ""),
            **{name: x},
        )
    return shape


def _wrong_width(name: str, x: torch.Tensor, width: int) -> Refusal:
    return bad_value(
        f"{name} must have head_dim {width} in its last dimension but got {x.shape[-1]}",
        **{name: x},
    )


def check_partner(
    q_name: str, k_name: str, q: torch.Tensor, k: torch.Tensor, layout: Layout
) -> None:
    """Refuse two tensors that cannot share their angles, with the first reason why."""
    one, other = q.shape, k.shape
    if (
        other[layout.token] == one[layout.token]
        and (layout.row is None or other[layout.row] == one[layout.row])
        and other[-1] == one[-1]
        and k.dtype == q.dtype
        and k.device == q.device
    ):
        return
    alone = "; rotate them one by one"
    about = {q_name: q, k_name: k}
    for axis, dim in (("rows", layout.row), ("tokens", layout.token)):
        if dim is not None and q.shape[dim] != k.shape[dim]:
            rule = f"{q_name} and {k_name} must have the same number of {axis}"
            found = f" but got {q.shape[dim]} and {k.shape[dim]}"
            raise bad_value(rule + found + alone, **about)
    if q.shape[-1] != k.shape[-1]:
        rule = f"{q_name} and {k_name} must have the same number of channels"
        found = f" but got {q.shape[-1]} and {k.shape[-1]}"
        raise bad_value(rule + found + alone, **about)
    rule = f"{q_name} and {k_name} must share dtype and device"
    found = f" but got {q.dtype} on {q.device} and {k.dtype} on {k.device}"
    raise bad_value(rule + found + alone, **about)


def check_heads(
    what: str,
    heads: int,
    names: Sequence[str],
    xs: Sequence[torch.Tensor | None],
    layout: Layout,
) -> None:
    """Refuse angles per head that do not fit the heads of what they turn."""
    for name, x in zip(names, xs):
        own = 1 if x is None or layout.head is None else x.shape[layout.head]
        if x is not None and not broadcasts(heads, own):
            alone = "; rotate q and k one by one, each with its own" if len(names) > 1 else ""
            raise bad_value(
                f"{what} must be for 1 or {own} heads of {name} but is for {heads}{alone}",
                **{name: x},
            )


def _check_fit(
    name: str,
    x: torch.Tensor,
    ids: torch.Tensor,
    ramp: bool,
    layout: Layout,
    positions: str,
) -> None:
    tokens = x.shape[layout.token]
    if not ramp and ids.shape[2] != tokens:
        raise bad_value(
            f"{positions} must say one position for each of {tokens} tokens but got "
            f"{ids.shape[2]} (layout {layout.name!r} has its tokens in dimension "
            f"{layout.token})",
            **{name: x, positions: ids},
        )
    rows = 1 if layout.row is None else x.shape[layout.row]
    if not broadcasts(ids.shape[1], rows):
        raise bad_value(
            f"{positions} must have 1 or {rows} rows but got {ids.shape[1]}"
            + ("" if layout.row is not None else f" (layout {layout.name!r} has no rows)"),
            **{name: x, positions: ids},
        )


def check_in_place(names: Sequence[str], xs: Sequence[torch.Tensor]) -> None:
    """Refuse tensors in which two elements share memory: they would be rotated twice.

    Kernels refuse them too, before they change anything; this says so to the user.
    """
    for name, x in zip(names, xs, strict=True):
        _check_not_frozen(name, x)
        if x.is_neg():
            raise bad_value(
                f"{name} is a negated view (of a conjugate's imaginary part); call "
                f"{name}.resolve_neg() first",
                **{name: x},
            )
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


def check_out(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    wanted: Sequence[str],
) -> None:
    """Refuse memory that does not fit what goes there, or that autograd would have to follow.

    Args:
        wanted: what else wants a gradient.
    """
    if wanted and torch.is_grad_enabled():
        raise bad_value(
            f"out has no gradient, and {wanted[0]} require one; call it under "
            "torch.no_grad(), or without out"
        )
    if len(outs) != len(xs):
        raise bad_value(f"out must hold one tensor for each of {', '.join(names)}, got {len(outs)}")
    for name, x, out in zip(names, xs, outs, strict=True):
        if not isinstance(out, torch.Tensor):
            raise bad_type(f"out must be a tensor for {name} but got {describe(out)}")
        check_local("out", out)
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            raise bad_value(
                f"out must have the shape, dtype and device of {name}", **{name: x, "out": out}
            )
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            raise bad_value(
                f"out has no gradient, and {name} or out requires one; call it under "
                "torch.no_grad(), or without out",
                **{name: x, "out": out},
            )


def check_out_memory(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Say of memory that kernels refuse why they do."""
    for out in outs:
        _check_not_frozen("out", out)
    if shares_memory(outs, xs):
        raise bad_value(
            "out must not overlap itself or what is rotated in memory; to rotate in place call "
            f"{OPERATION}_",
            **{f"out[{i}]": out for i, out in enumerate(outs)},
        )


def is_frozen(x: torch.Tensor) -> bool:
    """Whether torch lets nothing change a tensor: one of inference mode, outside of it."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


def _check_not_frozen(name: str, x: torch.Tensor) -> None:
    if is_frozen(x):
        raise bad_value(
            f"{name} is an inference tensor, which cannot change outside of inference mode; give a "
            "clone of it",
            **{name: x},
        )


def shares_memory(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor] = ()) -> bool:
    """Whether a tensor that is written may overlap itself, another such, or one that is read."""
    return (
        any(map(may_overlap_itself, written))
        or any(may_overlap(a, b) for i, a in enumerate(written) for b in written[:i])
        or any(may_overlap(a, b) for a in written for b in read)
    )


def check_in_place_grad(names: Sequence[str], xs: Sequence[torch.Tensor]) -> None:
    """Refuse what autograd cannot follow, before anything is changed."""
    for name, x in zip(names, xs, strict=True):
        base = x._base
        if x.requires_grad and (x.is_leaf or (base is not None and base.is_leaf)):
            raise bad_value(
                f"{name} is a leaf that requires grad, or a view of one, and cannot change in "
                f"place; call {OUT_OF_PLACE}",
                **{name: x},
            )
        if base is None:
            continue
        made = torch._C._autograd._get_creation_meta(x)
        if made == torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE:
            raise bad_value(
                f"{name} comes from chunk, split or unbind, whose views autograd does not let "
                f"change in place; slice instead (qkv[..., :n]), or call {OUT_OF_PLACE}",
                **{name: x},
            )
        if made != torch._C._autograd.CreationMeta.DEFAULT:
            raise bad_value(
                f"{name} is a view made under no_grad, in inference mode or by a custom "
                f"function, which autograd does not let change in place; call {OUT_OF_PLACE}",
                **{name: x},
            )


def _extent(x: torch.Tensor) -> int:
    """Elements from the first to one past the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def is_written(x: torch.Tensor, outs: Sequence[torch.Tensor]) -> bool:
    """Whether a call that writes ``outs`` may write where x is, which it still reads."""
    return any(
        torch._C._is_alias_of(out, x)  # type: ignore[attr-defined]
        and (out.element_size() != x.element_size() or may_overlap(out, x))
        for out in outs
    )


def copied_before(
    arguments: tuple[Any, ...], written: Sequence[torch.Tensor] | None
) -> tuple[Any, ...]:
    """Arguments of a call, with copies in place of tensors that are about to change.

    Args:
        arguments: what follows q and k in the schema.
        written: what changes; None where nobody knows whose memory is whose, as behind a transform
            and while compiling.
    """

    def own(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple([own(one) for one in value])
        if isinstance(value, torch.Tensor) and (written is None or is_written(value, written)):
            return value.clone()
        return value

    # Where nobody knows, words and turns at least are the library's own: calls of tables are one.
    kept = 2 if written is None else 0
    return (*arguments[:kept], *map(own, arguments[kept:]))


def may_overlap_itself(x: torch.Tensor) -> bool:
    """True unless every dimension steps over all that the faster ones cover."""
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
    """False where two tensors certainly share no element.

    Slices of one fused projection interleave in memory. Modulo a stride that divides all slower
    ones, each covers one run of elements, and the runs of disjoint slices do not touch.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    size = a.element_size()
    a_start, b_start = a.data_ptr(), b.data_ptr()
    if a_start + _extent(a) * size <= b_start or b_start + _extent(b) * size <= a_start:
        return False
    gap, rest = divmod(b_start - a_start, size)
    return rest != 0 or not any(
        _run(a, period) <= gap % period and gap % period + _run(b, period) <= period
        for period in (*a.stride(), *b.stride())
        if period > 1
    )


def _run(x: torch.Tensor, period: int) -> int:
    """Elements from the first to one past the last, of those dimensions that `period` does not
    divide."""
    return 1 + sum(
        (size - 1) * stride
        for size, stride in zip(x.shape, x.stride(), strict=True)
        if stride % period
    )
