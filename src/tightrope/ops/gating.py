"""Lower gates to tensors of the operator, given the rotation's channels and token positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import gates as gates_
from .._errors import bad_value
from ..gates import Gate, Slope, XPos
from ..positions import explicit
from ..spec import PreparedRotation
from .layouts import BY_NAME
from .schema import FACTOR, LOG, NO_GATE, SLOPE


def lower(
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    gates: Sequence[Sequence[Gate]],
    rotation: PreparedRotation,
) -> list[tuple[int, torch.Tensor | None]]:
    """Lower the gates of each tensor to the form that the operator takes.

    Args:
        names: names of the tensors in error messages.
        xs: the tensors, ``(rows, heads, tokens, channels)`` each.
        gates: any number of gates for each tensor; their factors multiply.
        rotation: the rotation of all tensors.

    Returns:
        For each tensor, the gate's code in the schema and the gate's tensor; (NO_GATE, None) if it has
        no gate.

    Raises:
        ValueError: a gate does not fit its tensor, or depends on positions that have several axes.
        TypeError: a gate holds a DTensor.
    """
    channels = rotation.channels
    where: torch.Tensor | None = None
    found: list[tuple[int, torch.Tensor | None]] = []
    for name, x, own in zip(names, xs, gates):
        if any(gate.by_position for gate in own) and where is None:
            where = _token_positions(rotation, x.shape[2], x.device)
        signed, total = any(gate.signed for gate in own), None
        code = FACTOR if signed else LOG if own else NO_GATE
        for gate in own:
            gates_.check_own(name, x, gate)
            if len(own) == 1 and type(gate) is Slope and not _needs_log(rotation):
                code, one = SLOPE, gate.rates(channels, x.dtype).to(x.device)
                gates_.check_fit(name, x, gate, (1, one.shape[0], 1))
            else:
                one = gates_.on(gate, x, channels, where, signed)
                gates_.check_fit(name, x, gate, one.shape)
            total = one if total is None else total * one if signed else total + one
        found.append((code, total))
    return found


def lower_quickly(
    gates: Sequence[Sequence[Gate]], x: torch.Tensor, rotation: PreparedRotation, layout: str
) -> tuple[int, list[torch.Tensor]] | None:
    """Lower gates like :func:`lower`, but without the checks that the kernel repeats.

    Args:
        gates: the gates of each tensor.
        x: the first tensor, in its layout.
        rotation: the rotation of all tensors.
        layout: name of the layout.

    Returns:
        The gate's code in the schema and one tensor for each of q and k; None if
        :func:`lower` is needed.
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
        found = _lower_one_quickly(gate, x, rotation, layout)
        if found is None or (before is not None and found[0] != code):
            return None
        code, log = found
        logs.append(log)
        before = gate
    return code, logs


def _lower_one_quickly(
    gate: Gate, x: torch.Tensor, rotation: PreparedRotation, layout: str
) -> tuple[int, torch.Tensor] | None:
    channels = rotation.channels
    if gate.signed:
        return FACTOR, gates_.on(gate, x, channels, signed=True)
    if not gate.by_position:
        return LOG, gates_.on(gate, x, channels)
    if _needs_log(rotation):
        return None
    if type(gate) is Slope:
        return SLOPE, gate.rates(channels, x.dtype)
    where = BY_NAME[layout]
    if not isinstance(gate, XPos) or rotation.angles.words.shape[0] != 1 or x.dim() != where.dims:
        return None
    tokens = x.shape[where.token]

    def make() -> torch.Tensor:
        return gates_.on(gate, x, channels, _token_positions(rotation, tokens, x.device))

    # Unless ids are on a device, all layers share the logarithm.
    return LOG, rotation.kept.find((gate, x.dtype, tokens), rotation.ids, x.device, make)


def _needs_log(rotation: PreparedRotation) -> bool:
    """Return whether kernels cannot multiply slopes by the positions: they need a gradient or have heads."""
    return rotation.ids is not None and (rotation.ids.requires_grad or rotation.ids.dim() == 4)


def _token_positions(rotation: PreparedRotation, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the position of each token, ``[rows|1, tokens]`` or ``[rows|1, tokens, heads]``."""
    written = explicit(rotation.where, tokens, device=device).ids
    if written is None or written.shape[0] != 1:
        axes = 0 if written is None else written.shape[0]
        raise bad_value(
            f"positions must have 1 axis for a gate that depends on them but got {axes}; give its "
            "values per token with gates.Given"
        )
    return written[0].to(device)
