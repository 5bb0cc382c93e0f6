"""From one rotation to another: the difference of two angles, as one rotation.

Phases of several axes add up before any cosine is taken. So the new angle minus the old one is a
rotation with twice the axes: the new frequencies at the new positions, and the old ones at the old
positions with their sign changed. It is exact modulo a turn, like each of the two.
"""

from __future__ import annotations

import torch

from .. import positions as positions_
from .._errors import sentence
from ..positions import Positions, PositionsLike
from ..spec import PreparedRotation, RopeSpec, SeqLen
from .checks import shape_of
from .layouts import Layout


def prepared(
    operation: str,
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
    tokens = shape_of(operation, "k", k, layout)[layout.token]
    _check_specs(operation, from_spec, to_spec)
    old = positions_.canonical(positions, operation)
    new = old if new_positions is None else positions_.canonical(new_positions, operation)
    before, after = (
        spec.on(where, k.device, operation, seq_len).for_tokens(tokens)
        for spec, where, seq_len in ((from_spec, old, from_seq_len), (to_spec, new, to_seq_len))
    )
    words, turns = _side_by_side(operation, after, before)
    ids = _ids(operation, _explicit(new, tokens, k.device), _explicit(old, tokens, k.device))
    amplitude = after.amplitude / before.amplitude
    return PreparedRotation(
        to_spec.channels, words, turns, ids, 0, False, k.device, amplitude.hex()
    )


def _check_specs(operation: str, from_spec: RopeSpec, to_spec: RopeSpec) -> None:
    for name, spec in (("from_spec", from_spec), ("to_spec", to_spec)):
        if not isinstance(spec, RopeSpec):
            raise TypeError(
                sentence(operation, f"{name} must be a RopeSpec but got {type(spec).__name__}")
            )
    for field in ("head_dim", "start", "rotary_dim", "interleaved"):
        one, other = getattr(from_spec, field), getattr(to_spec, field)
        if one != other:
            raise ValueError(
                sentence(
                    operation,
                    f"from_spec and to_spec must have the same {field} but have {one} and {other}; "
                    "rotate with inverse=True by the one and then by the other",
                )
            )


def _side_by_side(
    operation: str, after: PreparedRotation, before: PreparedRotation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Words and turns of both, one after the other along the axes."""
    shape = []
    for dim, what in ((1, "rows"), (2, "heads")):
        one, other = after.words.shape[dim], before.words.shape[dim]
        if one != other and 1 not in (one, other):
            raise ValueError(
                sentence(
                    operation,
                    f"from_spec and to_spec must have angles for the same {what} but have them for "
                    f"{other} and {one}",
                )
            )
        shape.append(max(one, other))

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.expand(-1, *shape, -1)

    words = torch.cat((whole(after.words), whole(before.words)))
    if after.turns is None and before.turns is None:
        return words, None
    both = (
        torch.zeros_like(each.words) if each.turns is None else each.turns
        for each in (after, before)
    )
    return words, torch.cat([whole(each) for each in both])


def _explicit(where: Positions, tokens: int, device: torch.device) -> torch.Tensor:
    ids = positions_.explicit(where, tokens, device=device).ids
    if ids is None:
        raise RuntimeError("explicit positions have ids")
    return ids.to(device)


def _ids(operation: str, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """New positions and the negative of the old ones, ``[axes of both, rows|1, tokens]``."""
    if new.shape[2] != old.shape[2] or (
        new.shape[1] != old.shape[1] and 1 not in (new.shape[1], old.shape[1])
    ):
        raise ValueError(
            sentence(
                operation,
                "positions and new_positions must be for the same rows and tokens",
                positions=old,
                new_positions=new,
            )
        )
    if new.is_floating_point() or old.is_floating_point():
        new, old = new.to(torch.float64), old.to(torch.float64)
    else:
        new, old = new.to(torch.int64), old.to(torch.int64)
    rows = max(new.shape[1], old.shape[1])
    return torch.cat((new.expand(-1, rows, -1), -old.expand(-1, rows, -1)))
