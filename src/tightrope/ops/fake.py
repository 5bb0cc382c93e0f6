"""Fake kernels: shapes, dtypes and strides of the results without data; also used for meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from . import gradients, schema
from .call import tensors_of, unpack
from .layouts import BY_CODE
from .schema import PHASES, TRANSPOSE, new_like, options_of, present


def _rotate(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    call = unpack(*arguments, **named)
    check_devices("rotate", *call.tensors())
    outs = [new_like(x, call.options) for x in call.xs()]
    if call.options.direction == TRANSPOSE:
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        outs += [w.new_empty(w.shape, dtype=dtype) for w in call.extras.weights]
    return outs


def check_devices(operator: str, *arguments: object) -> None:
    """Refuse mixed devices: one meta tensor suffices for the dispatcher to call a fake kernel."""
    devices = {x.device for x in tensors_of(arguments)}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"tightrope::{operator}: all tensors must be on one device but got {found}"
        )


def _in_place(*arguments: object, **named: object) -> None:
    check_devices("rotate_", *arguments)


def _into(*arguments: object, **named: object) -> None:
    check_devices("rotate_into", *arguments)


def _angle_gradients(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
    by_positions: bool,
    by_frequencies: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices("angle_gradients", y, z, grad_y, grad_z, words, turns, positions)
    unpacked = options_of(options)
    layout = BY_CODE[unpacked.layout]
    # The first dimension of phases is not that of axes but of rows.
    axes, *shape = words.shape
    rows = 1 if layout.row is None else y.shape[layout.row]
    dtype = of_phases = gradients.sum_dtype(words.device)
    if unpacked.source == PHASES:
        of_phases = torch.float64 if y.dtype == torch.float64 else torch.float32
    return (
        words.new_empty((axes if by_positions else 0, rows, y.shape[layout.token]), dtype=dtype),
        words.new_empty((axes if by_frequencies else 0, *shape), dtype=of_phases),
    )


def _gate_gradients(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    y: torch.Tensor,
    z: torch.Tensor | None,
    grad_y: torch.Tensor,
    grad_z: torch.Tensor | None,
    gate_q: torch.Tensor,
    gate_k: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
) -> list[torch.Tensor]:
    check_devices("gate_gradients", y, z, grad_y, grad_z, gate_q, gate_k, positions)
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    return [g.new_empty(g.shape, dtype=dtype) for g in present(gate_q, gate_k)]


def register() -> None:
    """Register the fake kernels; called once, at import."""
    for operator, kernel in (
        (schema.rotate, _rotate),
        (schema.rotate_extras, _rotate),
        (schema.rotate_, _in_place),
        (schema.rotate_extras_, _in_place),
        (schema.rotate_into, _into),
        (schema.rotate_extras_into, _into),
        (schema.angle_gradients, _angle_gradients),
        (schema.gate_gradients, _gate_gradients),
    ):
        torch.library.register_fake(operator, kernel)
