"""Gates meet a rotation: which channels are pairs, and where the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import gates as gates_
from ._errors import sentence
from .gates import Channels, Gate, Slope
from .ops.schema import LOG, NO_GATE, SLOPE
from .positions import Positions, explicit
from .spec import Channels as SpecChannels, PreparedRotation, RopeSpec


def channels_of(spec: RopeSpec | SpecChannels) -> Channels:
    """What gates need of a spec, or of its channels.

    >>> channels_of(RopeSpec(8, start=2))
    Channels(head_dim=8, start=2, rotary_dim=6, interleaved=False)
    """
    return Channels(spec.head_dim, spec.start, spec.rotary_dim, spec.interleaved)


def lower(
    operation: str,
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    gates: Sequence[Sequence[Gate]],
    rotation: PreparedRotation,
) -> list[tuple[int, torch.Tensor | None]]:
    """Gates as the operator takes them.

    Args:
        operation, names: what the user called, and knows the tensors by.
        xs: ``(rows, heads, tokens, channels)`` each.
        gates: of each, any number, whose factors multiply.
        rotation: of all.

    Returns:
        For each, code and tensor of the schema.

    Raises:
        ValueError: a gate that does not fit; one by position under positions of several axes.
    """
    channels = channels_of(rotation.channels)
    where: torch.Tensor | None = None
    found: list[tuple[int, torch.Tensor | None]] = []
    for name, x, own in zip(names, xs, gates):
        if any(gate.by_position for gate in own) and where is None:
            where = _where(operation, rotation, x)
        first = own[0] if len(own) == 1 else None
        ids = rotation.ids
        if isinstance(first, Slope) and not (ids is not None and ids.requires_grad):
            rates = first.rates(channels, x.dtype).to(x.device)
            gates_.check_fit(operation, name, x, first, (1, rates.shape[0], 1))
            found.append((SLOPE, rates))
        else:
            log = gates_.total(operation, name, x, own, channels, where)
            found.append((NO_GATE if log is None else LOG, log))
    return found


def _where(operation: str, rotation: PreparedRotation, x: torch.Tensor) -> torch.Tensor:
    """The position of each token, ``[rows|1, tokens]``."""
    positions = Positions(rotation.ids, rotation.offset, rotation.ramp)
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
