"""The extra tensors of f and P, prepared for the rotation kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ops.call import Extras
from ...ops.schema import SLOPE, Options
from .arguments import require, views_of
from .groups import Steps
from .views import View, broadcast_strides, steps_of, vector_of


class Read(NamedTuple):
    """Strides of the tensors of f and P of a call.

    Attributes:
        norms: for q and for k, 1 if each head has its own norm weights, 0 if they share them;
            empty if the call has none.
        gates, inputs: strides for q and for k; empty if the call has none.
        gate_vector, input_vector: elements per 16-byte access; 0 if such accesses are impossible.
    """

    norms: Sequence[int]
    gates: Sequence[Steps]
    inputs: Sequence[Steps]
    gate_vector: int
    input_vector: int

    def steps(self, which: int) -> dict[str, Any]:
        """Return the fields of :class:`OperandSteps` for the tensors of q (0) or k (1), by name."""
        every = {"norm": self.norms, "gate": self.gates, "input": self.inputs}
        return {name: found[which] for name, found in every.items() if found}


def read(
    options: Options, parts: Extras, views: Sequence[View], axes: int, device: torch.device
) -> Read:
    """Check the extra tensors of a call against q and k, and describe them for the kernel.

    Args:
        options, parts: the options and the extra tensors of the call.
        views: views of q and k.
        axes: number of position axes.
        device: device of q.
    """
    for part in (parts.weights, parts.gates, parts.inputs):
        require(
            not part or (len(part) == len(views) and all(x.device == device for x in part)),
            "extras must hold one tensor for each of q and k, on their device",
        )
    norms = _weights(parts.weights, views)
    gates, gate_vector = _gates(options, parts.gates, views, axes)
    inputs, input_vector = _inputs(options, parts.inputs, views)
    return Read(norms, gates, inputs, gate_vector, input_vector)


def _weights(weights: Sequence[torch.Tensor], views: Sequence[View]) -> list[int]:
    for weight, view in zip(weights, views):
        require(
            weight.dim() == 2
            and weight.shape[0] in (1, view.heads)
            and weight.shape[1] == view.channels
            and weight.is_floating_point(),
            "weights must be [heads|1, channels]",
        )
    # 1 if each head has its own weights, 0 if they share them. The kernel gets contiguous weights.
    return [int(weight.shape[0] != 1) for weight in weights]


def _gates(
    options: Options, gates: Sequence[torch.Tensor], views: Sequence[View], axes: int
) -> tuple[list[Steps], int]:
    require(
        not gates or options.gate != SLOPE or axes == 1,
        "a gate of slopes must have positions of 1 axis",
    )
    every: list[tuple[int, ...]] = []
    for gate, view in zip(gates, views):
        whole = (view.heads, view.channels) if options.gate == SLOPE else view.sizes
        require(
            gate.dim() == len(whole)
            and all(size in (1, full) for size, full in zip(gate.shape, whole))
            and gate.is_floating_point(),
            "gates must be [rows|1, heads|1, tokens|1, channels|1], slopes [heads|1, channels|1]",
        )
        steps = broadcast_strides(gate)
        every.append((0, steps[0], 0, steps[1]) if options.gate == SLOPE else steps)
    return _read(gates, every)


def _inputs(
    options: Options, inputs: Sequence[torch.Tensor], views: Sequence[View]
) -> tuple[list[Steps], int]:
    every: list[tuple[int, ...]] = []
    for x, view in zip(inputs, views):
        (seen,) = views_of([x], options)
        require(seen.sizes == view.sizes, "inputs must have the shapes of q and k")
        every.append(seen[4:])
    return _read(inputs, every)


def _read(
    tensors: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]
) -> tuple[list[Steps], int]:
    """Return the strides, and the elements per 16-byte access, or 0."""
    one_size = len({x.element_size() for x in tensors}) == 1
    return list(map(steps_of, strides)), vector_of(tensors, strides) if one_size else 0
