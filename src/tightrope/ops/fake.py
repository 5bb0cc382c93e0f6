"""Fake kernels: shapes, dtypes and strides of the results without data; also used for meta tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import gradients, schema
from .call import tensors_of, unpack
from .layouts import BY_CODE
from .schema import PHASES, TRANSPOSE, new_like, options_of, present


def _rotate(*arguments: Any) -> list[torch.Tensor]:
    call = unpack(*arguments)
    check_devices("rotate", *call.tensors())
    outs = [new_like(x, call.options) for x in call.xs()]
    if call.options.direction == TRANSPOSE:
        dtype = gradients.value_dtype(call.q)
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


def _angle_gradients(y: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices("angle_gradients", y, *others)
    words, _, positions, _, packed, by_positions, by_frequencies = others[3:]
    options = options_of(packed)
    layout = BY_CODE[options.layout]
    # The first dimension of phases is not that of axes but of rows.
    axes, *shape = words.shape
    rows = 1 if layout.row is None else y.shape[layout.row]
    wide = gradients.sum_dtype(words.device)
    phases = options.source == PHASES
    heads = () if positions is None or phases else positions.shape[3:]
    of_positions = (axes if by_positions else 0, rows, y.shape[layout.token], *heads)
    return (
        words.new_empty(of_positions, dtype=wide),
        words.new_empty(
            (axes if by_frequencies else 0, *shape),
            dtype=gradients.value_dtype(y) if phases else wide,
        ),
    )


def _gate_gradients(y: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    check_devices("gate_gradients", y, *others)
    gates = present(*others[3:5])
    return [gate.new_empty(gate.shape, dtype=gradients.value_dtype(y)) for gate in gates]


def register() -> None:
    """Register the fake kernels; called once, at import."""
    for operators, kernel in (
        (schema.NEW, _rotate),
        (schema.IN_PLACE, partial(check_devices, "rotate_")),
        (schema.OUT, partial(check_devices, "rotate_into")),
        (schema.SLOTS, partial(check_devices, "rotate_slots")),
        ((schema.rotate_slots_,), partial(check_devices, "rotate_slots_")),
        ((schema.angle_gradients,), _angle_gradients),
        ((schema.gate_gradients,), _gate_gradients),
    ):
        for operator in operators:
            torch.library.register_fake(operator, kernel)
