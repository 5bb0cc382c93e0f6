"""From one rotation to another: the difference of two angles, as one rotation.

Phases of several axes add up before any cosine is taken. So the new angle minus the old one is a
rotation with twice the axes: the new frequencies at the new positions, and the old ones at the old
positions with their sign changed. It is exact modulo a turn, like each of the two.

Where both have the same frequencies and integer positions, as in a context shift, that is a rotation
by the difference of the positions; an offset, if that is what they differ by.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import positions as positions_
from .._errors import bad_type, bad_value, public
from ..ops.build import Request, build
from ..ops.checks import Place, check_rotation, layout_named, shape_of
from ..ops.layouts import Layout
from ..ops.run import run
from ..positions import Positions, PositionsLike
from ..spec import Memo, PreparedRotation, RopeSpec, SeqLen


@public("rerotate")
def rerotate(  # noqa: PLR0913  (one argument for each axis)
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
    """Move rotated keys to other positions, to other frequencies, or to both, in one pass.

    For caches: a context that shifts, a rule that depends on the length when the length has changed
    (dynamic NTK, LongRoPE), caches that are merged. The angle of each pair is the difference of the
    new and the old one, exact at any position, so one rounding is all that keys lose; where nothing
    changes, finite keys keep their bits (a zero may lose its sign). See docs/rerotate.md.

    Args:
        k: rotated keys, as x of :func:`rotate`.
        from_spec: what they were rotated by.
        to_spec: what they shall be rotated by; the same channels and pairing.
        positions: where they are, as of :func:`rotate`.
        new_positions: where they shall be; where they are if None.
        from_seq_len, to_seq_len: the lengths under which they were rotated and shall be, for rules
            that depend on it, as of :meth:`RopeSpec.at`; by default the last of the positions + 1.
        layout, out, backend: as of :func:`rotate`.

    Returns:
        ``out`` if given, else a new tensor. Differentiable by k and by floating positions.

    Raises:
        TypeError, ValueError: arguments that do not fit, each with its sentence.

    >>> from tightrope import RopeSpec
    >>> from tightrope.functional import rotate
    >>> spec, k = RopeSpec(64), torch.randn(1, 2, 16, 64)
    >>> moved = rerotate(rotate(k, spec, 1000), spec, spec, 1000, 0)
    >>> torch.allclose(moved, rotate(k, spec), atol=1e-5)
    True
    """
    move = _Move(from_spec, to_spec, positions, new_positions, from_seq_len, to_seq_len)
    request = Request(("k",), k, None, _prepared(k, move, layout_named(layout)), layout=layout)
    if out is not None:
        request = request._replace(verb="out", outs=(out,))
    (y,) = run(build(request._replace(backend=backend)))
    return y


@public("rerotate_")
def rerotate_(  # noqa: PLR0913  (one argument for each axis)
    k: torch.Tensor,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    from_seq_len: SeqLen = None,
    to_seq_len: SeqLen = None,
    layout: str = "bhsd",
    backend: str | None = None,
) -> torch.Tensor:
    """:func:`rerotate` in place: the path for a cache, or for a slice of one.

    Args: as of :func:`rerotate`, and k as x of :func:`rotate_`.

    Returns:
        k itself.

    >>> from tightrope import RopeSpec
    >>> spec, cache = RopeSpec(64), torch.randn(1, 2, 100, 64)
    >>> kept = rerotate_(cache[:, :, 50:], spec, spec, 50, 0)
    """
    move = _Move(from_spec, to_spec, positions, new_positions, from_seq_len, to_seq_len)
    request = Request(("k",), k, None, _prepared(k, move, layout_named(layout)), layout=layout)
    run(build(request._replace(verb="in place", backend=backend)))
    return k


class _Move(NamedTuple):
    """What keys are moved by, by the names of :func:`rerotate`."""

    from_spec: RopeSpec
    to_spec: RopeSpec
    positions: PositionsLike
    new_positions: PositionsLike
    from_seq_len: SeqLen
    to_seq_len: SeqLen


def _prepared(k: torch.Tensor, move: _Move, layout: Layout) -> PreparedRotation:
    """The rotation that takes what one spec rotated to what another would have."""
    from_spec, to_spec, positions, new_positions, from_seq_len, to_seq_len = move
    tokens = shape_of("k", k, layout)[layout.token]
    _check_specs(from_spec, to_spec)
    old = positions_.as_positions(positions)
    stays = new_positions is None or new_positions is positions
    new = old if stays else positions_.as_positions(new_positions)
    before = from_spec.on(old, k.device, from_seq_len).for_tokens(tokens)
    after = to_spec.on(new, k.device, to_seq_len).for_tokens(tokens)
    place = Place(("k",), (k,), layout)
    check_rotation(place, before, ("from_spec", "positions", "from_seq_len"))
    where = "positions" if stays else "new_positions"
    check_rotation(place, after, ("to_spec", where, "to_seq_len"))
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
    return PreparedRotation(
        to_spec.channels, words, turns, ids, offset, False, k.device, Memo(), amplitude
    )


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
