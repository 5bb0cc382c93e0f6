"""Gates meet a rotation: which channels are pairs, and where the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import gates as gates_
from .._errors import bad_value
from .._tracing import may_keep
from ..channels import Channels
from ..gates import Gate, Slope, XPos
from ..positions import Positions, explicit
from ..spec import PreparedRotation
from .layouts import BY_NAME
from .schema import LOG, NO_GATE, SLOPE


def lower(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    gates: Sequence[Sequence[Gate]],
    rotation: PreparedRotation,
) -> list[tuple[int, torch.Tensor | None]]:
    """Gates as the operator takes them.

    Args:
        names: what the user knows the tensors by.
        xs: ``(rows, heads, tokens, channels)`` each.
        gates: of each, any number, whose factors multiply.
        rotation: of all.

    Returns:
        For each, code and tensor of the schema.

    Raises:
        ValueError: a gate that does not fit; one by position under positions of several axes.
    """
    channels = rotation.channels
    where: torch.Tensor | None = None
    found: list[tuple[int, torch.Tensor | None]] = []
    for name, x, own in zip(names, xs, gates):
        if any(gate.by_position for gate in own) and where is None:
            where = _where(rotation, x.shape[2], x.device)
        first = own[0] if len(own) == 1 else None
        if isinstance(first, Slope) and not _moves(rotation):
            gates_.check_own(name, x, first)
            rates = first.rates(channels, x.dtype).to(x.device)
            gates_.check_fit(name, x, first, (1, rates.shape[0], 1))
            found.append((SLOPE, rates))
        else:
            log = gates_.total(name, x, own, channels, where)
            found.append((NO_GATE if log is None else LOG, log))
    return found


def ready(
    gates: Sequence[Sequence[Gate]], x: torch.Tensor, rotation: PreparedRotation, layout: str
) -> tuple[int, list[torch.Tensor]] | None:
    """Gates as :func:`lower` has them, without the checks that a kernel makes too.

    Args:
        gates: of each of what is rotated.
        x: the first of these, in its layout.
        rotation: of all.
        layout: by name.

    Returns:
        The code of the schema, and a tensor for each; None where it takes more than that.
    """
    logs: list[torch.Tensor] = []
    code, before = NO_GATE, None
    for own in gates:
        if len(own) != 1:
            return None
        gate = own[0]
        if gate is before:
            logs.append(logs[0])
            continue
        found = _ready(gate, x, rotation, layout)
        if found is None or (before is not None and found[0] != code):
            return None
        code, log = found
        logs.append(log)
        before = gate
    return code, logs


def _ready(
    gate: Gate, x: torch.Tensor, rotation: PreparedRotation, layout: str
) -> tuple[int, torch.Tensor] | None:
    channels = rotation.channels
    if not gate.by_position:
        return LOG, gate.log_on(x, channels)
    if _moves(rotation):
        return None
    if isinstance(gate, Slope):
        return SLOPE, gate.rates(channels, x.dtype)
    where = BY_NAME[layout]
    if not isinstance(gate, XPos) or rotation.words.shape[0] != 1 or x.dim() != where.dims:
        return None
    return LOG, _of_all_layers(gate, channels, x.shape[where.token], x, rotation)


def _of_all_layers(
    gate: XPos, channels: Channels, tokens: int, x: torch.Tensor, rotation: PreparedRotation
) -> torch.Tensor:
    """The logarithm of a gate that has no tensors, made by the first layer that asks."""
    ids, key = rotation.ids, (gate, x.dtype)
    if ids is not None and not ids.is_cpu:
        # Nothing may look whether they are the same still, and a graph reads them anew each time.
        return gate.log_on(x, channels, _where(rotation, tokens, x.device))
    found = rotation.memo.gate_logs.get(key)
    if found is not None:
        made, of, at = found
        # Whoever wrote other numbers into the ids since has other positions.
        if of == tokens and (ids is None or (at is not None and torch.equal(ids, at))):
            return made
    made = gate.log_on(x, channels, _where(rotation, tokens, x.device))
    if may_keep(x.device):
        rotation.memo.gate_logs[key] = made, tokens, None if ids is None else ids.clone()
    return made


def _moves(rotation: PreparedRotation) -> bool:
    """Whether somebody may differentiate by where tokens are."""
    return rotation.ids is not None and rotation.ids.requires_grad


def _where(rotation: PreparedRotation, tokens: int, device: torch.device) -> torch.Tensor:
    """The position of each token, ``[rows|1, tokens]``."""
    positions = Positions(rotation.ids, rotation.offset, rotation.ramp)
    written = explicit(positions, tokens, device=device).ids
    if written is None or written.shape[0] != 1:
        axes = 0 if written is None else written.shape[0]
        raise bad_value(
            f"a gate by position must have positions of 1 axis but got {axes}; give a gate of "
            "the tokens, gates.Given"
        )
    return written[0].to(device)
