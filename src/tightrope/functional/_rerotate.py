"""Move rotated keys to new positions or frequencies: rotate once, by the difference of the angles.

The phases of all axes are added before any cosine is computed. So a rotation by the new angle minus
the old one is a rotation with twice the axes: the new frequencies at the new positions, and the old
frequencies at the negated old positions. Like the two rotations alone, it is exact modulo a turn.

If both rotations have the same frequencies and integer positions, as in a context shift, the move is
a rotation by the difference of the positions, or by an offset if that difference is constant.
"""

from __future__ import annotations

from typing import cast

import torch

from .. import positions as positions_
from .._errors import bad_type, bad_value, is_dtensor, public
from .._rounding import ONCE
from ..ops.build import Request
from ..ops.checks import Operands, check_rotation, layout_named, rotation_at, shape_of
from ..ops.layouts import WITH_ROWS
from ..ops.memory import share_storage
from ..ops.run import run_entries
from ..ops.sharded import perform
from ..ops.slots import check_entries, stand_in
from ..positions import Positions, PositionsLike
from ..spec import Angles, PreparedRotation, Rope, RopeSpec


@public("rerotate")
def rerotate(
    k: torch.Tensor,
    old: Rope | None,
    new: Rope | None,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move rotated keys to other positions, other frequencies or both, in one pass.

    For key caches: context shifts, merged caches, and rules that depend on the length when the length
    changes (dynamic NTK, LongRoPE). Each pair rotates by the new angle minus the old one, exact at any
    position, so keys are rounded only once. If nothing changes, finite keys keep their bits (a zero
    may lose its sign). See docs/rerotate.md.

    Args:
        k: rotated keys, like x of :func:`rotate`.
        old: the rotation that they have: a spec, or one at its positions, by :meth:`tightrope.RopeSpec.at`. A rule
            that depends on the length needs ``spec.at(positions, seq_len=…)``, the length of the whole sequence,
            because keys may be a part of a cache. None for keys that are not rotated yet.
        new: the rotation that they get, with the same channels and pairing; None to undo the old one. If both are
            given, neither may have a stack, ``inv_freq``, phases or a rounding.
        positions: the current positions if ``old`` is a spec, see :func:`rotate`.
        new_positions: the new positions if ``new`` is a spec; by default they do not change.
        layout, out: see :func:`rotate`.

    Returns:
        ``out`` if given, else a new tensor. Differentiable with respect to k and floating positions.

    Raises:
        TypeError, ValueError: invalid arguments, or a missing length; the message names the argument.
        NotImplementedError: see :func:`rotate`.

    >>> from tightrope import RopeSpec, rotate
    >>> spec, k = RopeSpec(64), torch.randn(1, 2, 16, 64)
    >>> moved = rerotate(rotate(k, spec, 1000), spec, spec, 1000, 0)
    >>> torch.allclose(moved, rotate(k, spec), atol=1e-5)
    True
    """
    move, inverse = _move(k, layout, old, new, positions, new_positions)
    verb, outs = ("new", ()) if out is None else ("out", (out,))
    request = Request(("k",), verb, k, None, move, None, layout, inverse, outs=outs)
    return perform(request)[0]


@public("rerotate_")
def rerotate_(
    k: torch.Tensor,
    old: Rope | None,
    new: Rope | None,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move rotated keys in place: :func:`rerotate` for a key cache, a slice of one, or some of its entries.

    Args: see :func:`rerotate`; k like x of :func:`rotate_`.
        slots: the entries of a cache k that move, laid out as in :func:`write_kv`: int32 or int64 ``(rows, tokens)``, or
            ``(tokens,)`` for one row. The positions are those of the tokens in the slots. -1 skips a token; no entry
            may be named twice (a ValueError on the CPU, in compiled code a RuntimeError). There is no gradient.

    Returns:
        k itself.

    >>> from tightrope import RopeSpec
    >>> spec, cache = RopeSpec(64), torch.randn(1, 2, 100, 64)
    >>> kept = rerotate_(cache[:, :, 50:], spec, spec, 50, 0)
    """
    shaped = k
    if slots is not None:
        order = layout_named(layout)
        check_entries(slots, "k", k, order)
        shaped = stand_in(k, slots, order)
    move, inverse = _move(shaped, layout, old, new, positions, new_positions)
    request = Request(("k",), "in place", k, None, move, None, layout, inverse)
    if slots is None:
        perform(request)
    else:
        run_entries(request, slots)
    return k


def _move(
    k: torch.Tensor,
    layout: str,
    old: Rope | None,
    new: Rope | None,
    positions: PositionsLike,
    new_positions: PositionsLike,
) -> tuple[PreparedRotation, bool]:
    """Return the rotation by the new angles minus the old ones, and whether to take its inverse."""
    order = layout_named(layout)
    operands = Operands(("k",), (k,), order, sharded=is_dtensor(k))
    tokens = shape_of("k", k, order, operands.sharded)[order.token]
    with_rows = WITH_ROWS.get(layout)
    before, later = None, "new_positions"
    if old is None and new is None:
        raise bad_type("old or new must be a rotation but both are None")
    if old is None:
        if positions is not None and new_positions is not None:
            raise bad_value("positions and new_positions must not both be given without old")
        if new_positions is None:
            new_positions, later = positions, "positions"
    else:
        before = _at("old", "positions", old, positions, k)
        stays = new_positions is None or new_positions is positions
        if stays and isinstance(new, RopeSpec) and before is not None:
            new_positions = before.where
    after = _at("new", later, new, new_positions, k)
    if before is not None:
        before = before.for_tokens(tokens, with_rows)
        check_rotation(operands, before, ("old", "positions", "seq_len of old"))
    if after is not None:
        after = after.for_tokens(tokens, with_rows)
        check_rotation(operands, after, ("new", later, "seq_len of new"))
    if before is not None and after is not None:
        for name, one in (("old", before), ("new", after)):
            _check_exact(name, one)
        _check_alike(before, after)
        return _difference_of(before, after, tokens, operands.sharded, k.device), False
    return before or after, after is None  # type: ignore[return-value]


def _at(
    name: str, where: str, rope: object, positions: PositionsLike, k: torch.Tensor
) -> PreparedRotation | None:
    """Return one of the two rotations at its positions; None for keys that are not rotated."""
    if rope is None:
        if positions is not None:
            raise bad_value(f"{where} must be None if {name} is")
        return None
    if isinstance(rope, RopeSpec) and rope.by_length:
        raise bad_value(
            f"{name} must be given as spec.at(positions, seq_len=…), as the frequencies of "
            f"{type(rope.scaling).__name__} depend on the length of the whole sequence, of which these keys may be a "
            "part; state the lengths before and after the move, and move all keys of the cache if its frequencies "
            "change"
        )
    found = rotation_at("k", k, rope, positions, (name, where))
    if found.source is not None and found.stated is None:
        raise bad_value(f"{name} must state its length: spec.at(positions, seq_len=…)")
    return found


def _check_exact(name: str, rope: PreparedRotation) -> None:
    """Refuse a rotation that no difference of angles can replace."""
    special = rope.stack, rope.inv_freq, rope.phases
    if any(one is not None for one in special) or rope.rounding != ONCE:
        raise bad_value(
            f"{name} must be a rotation by the exact frequencies of its spec, without a stack, inv_freq, phases or "
            "rounding; rotate by the inverse of the old one, then by the new one"
        )


def _check_alike(before: PreparedRotation, after: PreparedRotation) -> None:
    for field in ("head_dim", "start", "rotary_dim", "interleaved"):
        one, other = getattr(before.channels, field), getattr(after.channels, field)
        if one != other:
            raise bad_value(
                f"old and new must have the same {field} but have {one} and {other}; "
                "rotate by old with inverse=True, then by new"
            )


def _difference_of(
    before: PreparedRotation,
    after: PreparedRotation,
    tokens: int,
    sharded: bool,
    device: torch.device,
) -> PreparedRotation:
    """Return the rotation by the angles of one rotation minus those of another."""
    part = before.where.part if sharded else None
    if sharded and after.where.part != part:
        raise bad_value("positions and new_positions must be those of the tokens of the same rank")
    if part is not None:
        tokens //= part[1]
    amplitude = (after.amplitude / before.amplitude).hex()
    moves = not _same_place(after.where, before.where)
    if _same_frequencies(after, before) and not (
        moves and (_is_fractional(after) or _is_fractional(before))
    ):
        words, turns = after.angles[:2]
        ids, offset = _shift(after, before, tokens)
    else:
        words, turns = _side_by_side(after, before)
        ids, offset = _difference(_explicit(after, tokens), _explicit(before, tokens)), 0
    move_by = Positions(ids, offset, False, part=part)
    return PreparedRotation(after.channels, Angles(words, turns, amplitude), move_by, device)


def _same_place(one: Positions, other: Positions) -> bool:
    if one is other:
        return True
    same = one.offset == other.offset and one.add_index == other.add_index
    return same and _same_ids(one.ids, other.ids)


def _same_ids(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether ids are the same, or views of the same memory that :meth:`RopeSpec.at` made of one tensor."""
    if one is other:
        return True
    if torch.compiler.is_compiling() or type(one) is not torch.Tensor:
        return False
    if type(other) is not torch.Tensor or one.dtype != other.dtype or one.shape != other.shape:
        return False
    views = one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    return views and share_storage(one, [other])


def _same_frequencies(one: PreparedRotation, other: PreparedRotation) -> bool:
    if one.angles.words is other.angles.words:
        return True
    equal = one.spec == other.spec  # Dynamo of torch 2.13 cannot compare symbols by !=
    if one.spec is None or not equal:
        return False
    if not one.spec.by_length:
        return True
    lengths = [None if rope.stated is None else rope.stated.lengths for rope in (one, other)]
    return lengths[0] is lengths[1] or (isinstance(lengths[0], tuple) and lengths[0] == lengths[1])


def _is_fractional(rotation: PreparedRotation) -> bool:
    return rotation.ids is not None and rotation.ids.is_floating_point()


def _shift(
    after: PreparedRotation, before: PreparedRotation, tokens: int
) -> tuple[torch.Tensor | None, int]:
    """Return the distance that each token moves: ids or None, and an offset."""
    both_add_index = after.where.add_index and before.where.add_index
    if both_add_index and after.ids is None and before.ids is None:
        offset = after.where.offset - before.where.offset
        if not torch.compiler.is_compiling():
            # An offset must fit in 64 bits; adding 2^64 to it does not change the angles.
            offset = (offset + 2**63) % 2**64 - 2**63
        return None, offset
    # If both add the token index, it cancels: the first token of each row suffices.
    new, old = (_explicit(each, 1 if both_add_index else tokens) for each in (after, before))
    new, old = _alike(new, old)
    moved = new - old
    return moved.expand(-1, -1, tokens, *moved.shape[3:]), 0


def _side_by_side(
    after: PreparedRotation, before: PreparedRotation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenate the phase words and turns of both rotations along the axes."""
    both = (after.angles, before.angles)
    shape = torch.broadcast_shapes(*(each.words.shape[1:] for each in both))
    words = torch.cat([each.words.expand(-1, *shape) for each in both])
    if all(each.turns is None for each in both):
        return words, None
    turns = (torch.zeros_like(each.words) if each.turns is None else each.turns for each in both)
    return words, torch.cat([each.expand(-1, *shape) for each in turns])


def _explicit(rotation: PreparedRotation, tokens: int) -> torch.Tensor:
    """Return 64-bit positions, one for each token."""
    return cast(
        torch.Tensor, positions_.explicit(rotation.where, tokens, device=rotation.device).ids
    )


def _difference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Concatenate the new positions and the negated old ones along their axes."""
    if new.is_floating_point() or old.is_floating_point():
        new, old = new.to(torch.float64), old.to(torch.float64)
    new, old = _alike(new, old)
    shape = torch.broadcast_shapes(new.shape[1:], old.shape[1:])
    return torch.cat((new.expand(-1, *shape), -old.expand(-1, *shape)))


def _alike(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with a dimension of heads if one of them has it."""
    if new.dim() == old.dim():
        return new, old
    return tuple(each if each.dim() == 4 else each[..., None] for each in (new, old))  # type: ignore[return-value]
