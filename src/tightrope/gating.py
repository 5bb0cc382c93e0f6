"""Gates meet rotated queries and keys: which channels are pairs, and where the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import gates as gates_
from ._errors import sentence
from .gates import Channels, Gate
from .positions import Positions, PositionsLike, explicit
from .spec import Channels as SpecChannels, PreparedRotation, RopeSpec


def channels_of(spec: RopeSpec | SpecChannels) -> Channels:
    """What gates need of a spec, or of its channels.

    >>> channels_of(RopeSpec(8, start=2))
    Channels(head_dim=8, start=2, rotary_dim=6, interleaved=False)
    """
    return Channels(spec.head_dim, spec.start, spec.rotary_dim, spec.interleaved)


def apply(
    operation: str,
    q: torch.Tensor,
    k: torch.Tensor,
    for_q: Sequence[Gate | None],
    for_k: Sequence[Gate | None],
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply rotated queries and keys by their gates.

    Args:
        operation: named in errors.
        q, k: ``(rows, heads, tokens, channels)``.
        for_q, for_k: any number of gates, whose factors multiply; None is 1.
        spec, positions: what q and k were rotated by.

    Raises:
        ValueError: a gate that does not fit; one by position under a spec of several axes.
    """
    ours, theirs = ([gate for gate in gates if gate is not None] for gates in (for_q, for_k))
    if not ours and not theirs:
        return q, k
    where = None
    if any(gate.by_position for gate in (*ours, *theirs)):
        where = _where(operation, spec, positions, q)
    channels = channels_of(spec.channels if isinstance(spec, PreparedRotation) else spec)
    return (
        gates_.apply(operation, "q", q, ours, channels, where),
        gates_.apply(operation, "k", k, theirs, channels, where),
    )


def _where(
    operation: str, spec: RopeSpec | PreparedRotation, positions: PositionsLike, x: torch.Tensor
) -> torch.Tensor:
    """The position of each token, ``[rows|1, tokens]``."""
    if isinstance(spec, PreparedRotation):
        positions = Positions(spec.ids, spec.offset, spec.ramp)
    written = explicit(positions, x.shape[2], device=x.device).ids
    if written is None or written.shape[0] != 1:
        axes = 0 if written is None else written.shape[0]
        raise ValueError(
            sentence(
                operation,
                f"a gate by position must have positions of 1 axis but got {axes}; give a gate of "
                "the tokens, gates.Given",
            )
        )
    return written[0].to(x.device)
