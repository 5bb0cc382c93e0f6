"""What f and P of a call are made of, as the rotation kernel takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ops.call import Carried
from ...ops.schema import LOG, SLOPE, Form
from .forms import require, views_of
from .views import View, broadcast_strides, vector_of


def carried_values(
    form: Form, parts: Carried, views: Sequence[View], axes: int, device: torch.device
) -> dict[str, Any]:
    """The parameters of what a call carries, checked against what it turns.

    Args:
        form, parts: of the call.
        views: of q and k.
        axes: of positions.
        device: of q.
    """
    for part in (parts.weights, parts.gates, parts.inputs):
        require(
            not part or (len(part) == len(views) and all(x.device == device for x in part)),
            "carried must hold one tensor for each of q and k",
        )
    return {
        **_weights(parts.weights, views),
        **_gates(form, parts.gates, views, axes),
        **_inputs(form, parts.inputs, views),
    }


def _weights(weights: Sequence[torch.Tensor], views: Sequence[View]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, weight, view in zip("qk", weights, views):
        require(
            weight.dim() == 2
            and weight.shape[0] in (1, view.heads)
            and weight.shape[1] == view.channels
            and weight.is_floating_point(),
            "weights must be [heads|1, channels]",
        )
        # Whether heads have weights of their own, which are handed over contiguous.
        values |= {f"norm_{name}": weight.dtype, f"norm_{name}_head": int(weight.shape[0] != 1)}
    return values


def _gates(
    form: Form, gates: Sequence[torch.Tensor], views: Sequence[View], axes: int
) -> dict[str, Any]:
    require(
        not gates or form.gate != SLOPE or axes == 1,
        "a gate of slopes must have positions of 1 axis",
    )
    every: list[tuple[int, ...]] = []
    for gate, view in zip(gates, views):
        whole = view.sizes if form.gate == LOG else (view.heads, view.channels)
        require(
            gate.dim() == len(whole)
            and all(size in (1, full) for size, full in zip(gate.shape, whole))
            and gate.is_floating_point(),
            "gates must be [rows|1, heads|1, tokens|1, channels|1], slopes [heads|1, channels|1]",
        )
        steps = broadcast_strides(gate)
        every.append(steps if form.gate == LOG else (0, steps[0], 0, steps[1]))
    values: dict[str, Any] = {"GATE_VECTOR": _vector(gates, every)}
    return values | _strided("gate", gates, every, values["GATE_VECTOR"])


def _inputs(form: Form, inputs: Sequence[torch.Tensor], views: Sequence[View]) -> dict[str, Any]:
    every: list[tuple[int, ...]] = []
    for x, view in zip(inputs, views):
        (seen,) = views_of([x], form)
        require(seen.sizes == view.sizes, "inputs must have the shapes of q and k")
        every.append(seen.scaled(1))
    values: dict[str, Any] = {"INPUT_VECTOR": _vector(inputs, every)}
    return values | _strided("input", inputs, every, values["INPUT_VECTOR"])


def _vector(tensors: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]) -> int:
    one_size = len({x.element_size() for x in tensors}) == 1
    return vector_of(tensors, strides) if one_size else 0


def _strided(
    kind: str, tensors: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]], vector: int
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    unit = vector or 1
    for name, x, (row, head, token, channel) in zip("qk", tensors, strides):
        values |= {f"{kind}_{name}": x.dtype, f"{kind}_{name}_row": row // unit}
        values |= {f"{kind}_{name}_head": head // unit, f"{kind}_{name}_token": token // unit}
        values |= {f"{kind}_{name}_channel": channel}
    return values
