"""The operators in Triton; calls that the kernels do not support run the definition."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...ops import gradients, phases as of_phases
from ...ops.call import Slots
from ...ops.schema import TRANSPOSE, Arguments, new_like, options_of, present
from .. import reference as definition
from . import phases
from .arguments import require
from .rotation import GIVEN, IN_PLACE, NEW, run
from .sums import angle_sums, gate_sums

#: Unpacking options takes as long as launching a kernel.
_options_of = lru_cache(maxsize=1024)(options_of)


def rotate(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any) -> list[torch.Tensor]:
    """Implement ``rotate``; see :mod:`tightrope.ops.schema`."""
    given = Arguments(*arguments)
    options = _options_of(given.options)
    outs = [new_like(x, options) for x in present(q, k)]
    sums = run(q, k, outs, NEW, given)
    if sums is None:
        return definition.rotate(q, k, *arguments)
    return outs + sums if sums else outs


def rotate_(q: torch.Tensor, k: torch.Tensor | None, *arguments: Any) -> None:
    """Implement ``rotate_`` of the schema."""
    outs = [q] if k is None else [q, k]
    if run(q, k, outs, IN_PLACE, Arguments(*arguments)) is None:
        definition.rotate_(q, k, *arguments)


def rotate_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    *arguments: Any,
) -> None:
    """Implement ``rotate_into`` of the schema."""
    require((k is None) == (out_k is None), "one out for each of q and k")
    if run(q, k, present(out_q, out_k), GIVEN, Arguments(*arguments)) is None:
        definition.rotate_into(q, k, out_q, out_k, *arguments)


def rotate_slots(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    index: torch.Tensor,
    *arguments: Any,
) -> None:
    """Implement ``rotate_slots`` of the schema."""
    rotate_slots_extras(q, k, None, out_q, out_k, None, index, None, None, *arguments)


def rotate_slots_extras(
    q: torch.Tensor,
    k: torch.Tensor | None,
    values: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    out_values: torch.Tensor | None,
    index: torch.Tensor,
    *arguments: Any,
) -> None:
    """Implement ``rotate_slots.extras`` of the schema."""
    scale, values_scale, *others = arguments
    require((k is None) == (out_k is None), "one out for each of q and k")
    require((values is None) == (out_values is None), "values must come with their cache")
    require(scale is None and values_scale is None, "scales are not supported yet")
    given, slots = Arguments(*others), Slots(index, values, out_values)
    require(_options_of(given.options).direction != TRANSPOSE, "slots have no gradient")
    if run(q, k, present(out_q, out_k), GIVEN, given, slots) is None:
        definition.rotate_slots_extras(q, k, values, out_q, out_k, out_values, index, *arguments)


def rotate_slots_(cache: torch.Tensor, index: torch.Tensor, *arguments: Any) -> None:
    """Implement ``rotate_slots_`` of the schema."""
    given = Arguments(*arguments)
    require(_options_of(given.options).direction != TRANSPOSE, "slots have no gradient")
    if run(cache, None, [cache], IN_PLACE, given, Slots(index)) is None:
        definition.rotate_slots_(cache, index, *arguments)


def angle_gradients(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``angle_gradients`` of the schema."""
    found = angle_sums(*arguments)
    return gradients.angle_gradients(*arguments) if found is None else found


def gate_gradients(*arguments: Any) -> list[torch.Tensor]:
    """Implement ``gate_gradients`` of the schema."""
    found = gate_sums(*arguments)
    return gradients.gate_gradients(*arguments) if found is None else found


def phase_words(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``phase_words`` of the schema."""
    found = phases.phase_words(*arguments)
    return of_phases.phase_words(*arguments) if found is None else found


def phase_sums(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``phase_sums`` of the schema."""
    found = phases.phase_sums(*arguments)
    return of_phases.phase_sums(*arguments) if found is None else found
