"""From one rotation to another: the difference of two angles, as one rotation.

Phases of several axes add up before any cosine is taken. So the new angle minus the old one is a
rotation with twice the axes: the new frequencies at the new positions, and the old ones at the old
positions with their sign changed. It is exact modulo a turn, like each of the two.

Where both have the same frequencies and integer positions, as in a context shift, that is a rotation
by the difference of the positions; an offset, if that is what they differ by.
"""

from __future__ import annotations

import torch

from .. import positions as positions_
from .._errors import bad_type, bad_value
from ..positions import Positions, PositionsLike
from ..spec import PreparedRotation, RopeSpec, SeqLen
from .checks import check_rotation, shape_of
from .layouts import Layout


def prepared(
    k: torch.Tensor,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike,
    new_positions: PositionsLike,
    from_seq_len: SeqLen,
    to_seq_len: SeqLen,
    layout: Layout,
) -> PreparedRotation:
    """The rotation that takes what one spec rotated to what another would have.

    Args: as of :func:`tightrope.functional.rerotate`.
    """
    tokens = shape_of("k", k, layout)[layout.token]
    _check_specs(from_spec, to_spec)
    old = positions_.as_positions(positions)
    stays = new_positions is None or new_positions is positions
    new = old if stays else positions_.as_positions(new_positions)
    before = from_spec.on(old, k.device, from_seq_len).for_tokens(tokens)
    after = to_spec.on(new, k.device, to_seq_len).for_tokens(tokens)
    said = ("from_spec", "positions", "from_seq_len")
    check_rotation(("k",), (k,), before, layout, said)
    said = ("to_spec", "positions" if stays else "new_positions", "to_seq_len")
    check_rotation(("k",), (k,), after, layout, said)
    amplitude = (after.amplitude / before.amplitude).hex()
    still = stays and from_seq_len is None and to_seq_len is None
    same = after.words is before.words or (
        from_spec == to_spec and (still or not to_spec.by_length)
    )
    if same and (stays or not (_is_fractional(after) or _is_fractional(before))):
        words, turns = after.words, after.turns
        ids, offset = _moved(after, before, tokens)
    else:
        words, turns = _side_by_side(after, before)
        ids, offset = _opposed(_explicit(after, tokens), _explicit(before, tokens)), 0
    return PreparedRotation(to_spec.channels, words, turns, ids, offset, False, k.device, amplitude)


def _check_specs(from_spec: RopeSpec, to_spec: RopeSpec) -> None:
    for name, spec in (("from_spec", from_spec), ("to_spec", to_spec)):
        if not isinstance(spec, RopeSpec):
            raise bad_type(f"{name} must be a RopeSpec but got {type(spec).__name__}")
    for field in ("head_dim", "start", "rotary_dim", "interleaved"):
        one, other = getattr(from_spec, field), getattr(to_spec, field)
        if one != other:
            raise bad_value(
                f"from_spec and to_spec must have the same {field} but have {one} and {other}; "
                "rotate with inverse=True by the one and then by the other"
            )


def _is_fractional(rotation: PreparedRotation) -> bool:
    return rotation.ids is not None and rotation.ids.is_floating_point()


def _moved(
    after: PreparedRotation, before: PreparedRotation, tokens: int
) -> tuple[torch.Tensor | None, int]:
    """By how much each token moves: ids, or none, and an offset."""
    ramps = after.ramp and before.ramp
    if ramps and after.ids is None and before.ids is None:
        offset = after.offset - before.offset
        if not torch.compiler.is_compiling():
            # Angles are the same modulo 2^64, and an offset has 64 bits.
            offset = (offset + 2**63) % 2**64 - 2**63
        return None, offset
    # What both count from, or each token of each.
    one, other = (_explicit(each, 1 if ramps else tokens) for each in (after, before))
    return (one - other).expand(-1, -1, tokens), 0


def _side_by_side(
    after: PreparedRotation, before: PreparedRotation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Words and turns of both, one after the other along the axes."""
    shape = torch.broadcast_shapes(after.words.shape[1:], before.words.shape[1:])
    both = (after, before)
    words = torch.cat([each.words.expand(-1, *shape) for each in both])
    if after.turns is None and before.turns is None:
        return words, None
    turns = (torch.zeros_like(each.words) if each.turns is None else each.turns for each in both)
    return words, torch.cat([each.expand(-1, *shape) for each in turns])


def _explicit(rotation: PreparedRotation, tokens: int) -> torch.Tensor:
    """Positions in 64 bits, one for each token."""
    where = Positions(rotation.ids, rotation.offset, rotation.ramp)
    ids = positions_.explicit(where, tokens, device=rotation.device).ids
    if ids is None:
        raise RuntimeError("explicit positions have ids")
    return ids


def _opposed(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """New positions and the negative of the old ones, ``[axes of both, rows|1, tokens]``."""
    if new.is_floating_point() or old.is_floating_point():
        new, old = new.to(torch.float64), old.to(torch.float64)
    rows = max(new.shape[1], old.shape[1])
    return torch.cat((new.expand(-1, rows, -1), -old.expand(-1, rows, -1)))
