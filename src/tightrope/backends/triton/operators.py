"""The operators by Triton, and by the definition what their kernels do not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ops.schema import present
from ..reference import rotate as definition
from .forms import require
from .rotation import GIVEN, IN_PLACE, NEW, run
from .sums import angle_sums, gate_sums


def rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> list[torch.Tensor]:
    """As ``rotate`` of :mod:`tightrope.ops.schema`."""
    arguments = (primary, secondary, positions, offset, form, amplitude, carried, eps)
    outs = [torch.empty_like(q)] if k is None else [torch.empty_like(q), torch.empty_like(k)]
    sums = run(q, k, outs, NEW, arguments)
    if sums is None:
        return definition.rotate(q, k, *arguments)
    return outs + sums if sums else outs


def rotate_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> None:
    """As ``rotate_`` of the schema."""
    arguments = (primary, secondary, positions, offset, form, amplitude, carried, eps)
    if run(q, k, [q] if k is None else [q, k], IN_PLACE, arguments) is None:
        definition.rotate_(q, k, *arguments)


def rotate_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> None:
    """As ``rotate_into`` of the schema."""
    arguments = (primary, secondary, positions, offset, form, amplitude, carried, eps)
    require((k is None) == (out_k is None), "one out for each of q and k")
    if run(q, k, present(out_q, out_k), GIVEN, arguments) is None:
        definition.rotate_into(q, k, out_q, out_k, *arguments)


def angle_gradients(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``angle_gradients`` of the schema."""
    found = angle_sums(*arguments)
    return definition.angle_gradients(*arguments) if found is None else found


def gate_gradients(*arguments: Any) -> list[torch.Tensor]:
    """As ``gate_gradients`` of the schema."""
    found = gate_sums(*arguments)
    return definition.gate_gradients(*arguments) if found is None else found
