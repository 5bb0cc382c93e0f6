"""Move rotated keys to new positions or frequencies: rotate once, by the difference of the angles.

The phases of all axes are added before any cosine is computed. So a rotation by the new angle minus
the old one is a rotation with twice the axes: the new frequencies at the new positions, and the old
frequencies at the negated old positions. Like the two rotations alone, it is exact modulo a turn.

If both rotations have the same frequencies and integer positions, as in a context shift, the move is
a rotation by the difference of the positions, or by an offset if that difference is constant.
"""

from __future__ import annotations

import torch

from .. import positions as positions_
from .._errors import bad_type, bad_value, is_dtensor, public
from ..ops.build import Request
from ..ops.checks import Operands, check_rotation, layout_named, shape_of
from ..ops.layouts import WITH_ROWS
from ..ops.run import run_entries
from ..ops.sharded import perform
from ..ops.slots import check_entries, slots_of, stand_in
from ..positions import Positions, PositionsLike
from ..spec import Angles, PreparedRotation, RopeSpec, SeqLen, prepared


@public("rerotate")
def rerotate(  # noqa: PLR0913  (one argument for each option)
    k: torch.Tensor,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    from_seq_len: SeqLen = None,
    to_seq_len: SeqLen = None,
    layout: str = "bhsd",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Move rotated keys to other positions, other frequencies or both, in one pass.

    For key caches: context shifts, merged caches, and rules that depend on the length when the length
    changes (dynamic NTK, LongRoPE). Each pair rotates by the new angle minus the old one, exact at any
    position, so keys are rounded only once. If nothing changes, finite keys keep their bits (a zero
    may lose its sign). See docs/rerotate.md.

    Args:
        k: rotated keys, like x of :func:`rotate`.
        from_spec: the spec that rotated them.
        to_spec: the new spec, with the same channels and pairing.
        positions: the current positions, see :func:`rotate`.
        new_positions: the new positions; unchanged if None.
        from_seq_len, to_seq_len: the length of the whole sequence that each spec is for, see
            :meth:`RopeSpec.at`: the one that the keys were rotated with, and that of the queries to come.
            Needed for a rule that depends on the length, because keys may be a part of a cache.
        layout, out, backend: see :func:`rotate`.

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
    move = _prepared(
        k, layout, from_spec, to_spec, positions, new_positions, from_seq_len, to_seq_len
    )
    verb, outs = ("new", ()) if out is None else ("out", (out,))
    (y,) = perform(
        Request(("k",), k, None, move, layout=layout, verb=verb, outs=outs, backend=backend)
    )
    return y


@public("rerotate_")
def rerotate_(  # noqa: PLR0913  (one argument for each option)
    k: torch.Tensor,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    from_seq_len: SeqLen = None,
    to_seq_len: SeqLen = None,
    layout: str = "bhsd",
    slots: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Move rotated keys in place: :func:`rerotate` for a key cache or a slice of one.

    Args: see :func:`rerotate`; k like x of :func:`rotate_`. With ``slots``, only these entries of a paged cache k move,
    as in :func:`rotate_`, and the positions are those of the tokens in the slots.

    Returns:
        k itself.

    >>> from tightrope import RopeSpec
    >>> spec, cache = RopeSpec(64), torch.randn(1, 2, 100, 64)
    >>> kept = rerotate_(cache[:, :, 50:], spec, spec, 50, 0)
    """
    to, shaped = slots_of(slots, None, k), k
    if to is not None:
        order = layout_named(layout)
        check_entries(to, "k", k, order)
        shaped = stand_in(k, to.slot, order)
    move = _prepared(
        shaped, layout, from_spec, to_spec, positions, new_positions, from_seq_len, to_seq_len
    )
    request = Request(("k",), k, None, move, layout=layout, verb="in place", backend=backend)
    if to is None:
        perform(request)
    else:
        run_entries(request, to)
    return k


def _prepared(
    k: torch.Tensor,
    layout: str,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike,
    new_positions: PositionsLike,
    from_seq_len: SeqLen,
    to_seq_len: SeqLen,
) -> PreparedRotation:
    """Prepare the rotation by the new angles minus the old ones; arguments as in :func:`rerotate`."""
    order = layout_named(layout)
    operands = Operands(("k",), (k,), order, sharded=is_dtensor(k))
    tokens = shape_of("k", k, order, operands.sharded)[order.token]
    _check_specs(from_spec, to_spec)
    for spec, name, seq_len in (
        (from_spec, "from_seq_len", from_seq_len),
        (to_spec, "to_seq_len", to_seq_len),
    ):
        if spec.by_length and seq_len is None:
            raise bad_value(
                f"{name} must be given, as the frequencies of {type(spec.scaling).__name__} depend on the length of "
                "the whole sequence, of which these keys may be a part; pass from_seq_len= and to_seq_len=, the "
                "lengths before and after the move, and move all keys of the cache if its frequencies change"
            )
    old = positions_.as_positions(positions)
    stays = new_positions is None or new_positions is positions
    new = old if stays else positions_.as_positions(new_positions)
    where = "positions" if stays else "new_positions"
    positions_.check_axes(old, from_spec.axis_count)
    positions_.check_axes(new, to_spec.axis_count, where)
    part = old.part if operands.sharded else None
    if operands.sharded and new.part != part:
        raise bad_value("positions and new_positions must be those of the tokens of the same rank")
    with_rows = WITH_ROWS.get(layout)
    before = prepared(from_spec, old, k.device, from_seq_len).for_tokens(tokens, with_rows)
    after = prepared(to_spec, new, k.device, to_seq_len).for_tokens(tokens, with_rows)
    check_rotation(operands, before, ("from_spec", "positions", "from_seq_len"))
    check_rotation(operands, after, ("to_spec", where, "to_seq_len"))
    if part is not None:
        tokens //= part[1]
    amplitude = (after.amplitude / before.amplitude).hex()
    same = after.angles.words is before.angles.words or (
        from_spec == to_spec and (from_seq_len is to_seq_len or not to_spec.by_length)
    )
    if same and (stays or not (_is_fractional(after) or _is_fractional(before))):
        words, turns = after.angles[:2]
        ids, offset = _shift(after, before, tokens)
    else:
        words, turns = _side_by_side(after, before)
        ids, offset = _difference(_explicit(after, tokens), _explicit(before, tokens)), 0
    move_by = Positions(ids, offset, False, part=part)
    return PreparedRotation(to_spec.channels, Angles(words, turns, amplitude), move_by, k.device)


def _check_specs(from_spec: RopeSpec, to_spec: RopeSpec) -> None:
    for name, spec in (("from_spec", from_spec), ("to_spec", to_spec)):
        if not isinstance(spec, RopeSpec):
            hint = ""
            if isinstance(spec, PreparedRotation):
                where = "positions" if name == "from_spec" else "new_positions"
                hint = f"; pass the spec that it was made from, and its positions as {where}="
            raise bad_type(f"{name} must be a RopeSpec but got {type(spec).__name__}{hint}")
    for field in ("head_dim", "start", "rotary_dim", "interleaved"):
        one, other = getattr(from_spec, field), getattr(to_spec, field)
        if one != other:
            raise bad_value(
                f"from_spec and to_spec must have the same {field} but have {one} and {other}; "
                "rotate by from_spec with inverse=True, then by to_spec"
            )


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
    ids = positions_.explicit(rotation.where, tokens, device=rotation.device).ids
    if ids is None:
        raise RuntimeError("explicit positions must have ids")
    return ids


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
