"""The operators in Triton; calls that the kernels do not support run the definition."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...ops import gradients, phases as of_phases
from ...ops.call import Slots
from ...ops.schema import TRANSPOSE, new_like, options_of, present
from .. import reference as definition
from . import phases
from .arguments import require
from .rotation import GIVEN, IN_PLACE, NEW, run
from .slots import eight_of
from .sums import angle_sums, gate_sums

#: Unpacking options takes as long as launching a kernel.
_options_of = lru_cache(maxsize=1024)(options_of)


def _define(name: str, *arguments: Any) -> Any:
    """Run a function of the definition below autograd, because a call may come without the dispatcher."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(definition, name)(*arguments)


def rotate(q: torch.Tensor, k: torch.Tensor | None, *given: Any) -> list[torch.Tensor]:
    """Implement ``rotate``; see :mod:`tightrope.ops.schema`."""
    options = _options_of(given[4])
    outs = [new_like(x, options) for x in present(q, k)]
    sums = run(q, k, outs, NEW, given)
    if sums is None:
        return _define("rotate", q, k, *given)  # type: ignore[no-any-return]
    return outs + sums if sums else outs


def rotate_(q: torch.Tensor, k: torch.Tensor | None, *given: Any) -> None:
    """Implement ``rotate_`` of the schema."""
    if run(q, k, [q] if k is None else [q, k], IN_PLACE, given) is None:
        _define("rotate_", q, k, *given)


def rotate_into(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    *given: Any,
) -> None:
    """Implement ``rotate_into`` of the schema."""
    require((k is None) == (out_k is None), "one out for each of q and k")
    if run(q, k, present(out_q, out_k), GIVEN, given) is None:
        _define("rotate_into", q, k, out_q, out_k, *given)


def rotate_slots(
    q: torch.Tensor,
    k: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    index: torch.Tensor,
    *given: Any,
) -> None:
    """Implement ``rotate_slots`` of the schema."""
    rotate_slots_extras(q, k, None, out_q, out_k, None, index, None, None, *given)


def rotate_slots_extras(
    q: torch.Tensor,
    k: torch.Tensor | None,
    values: torch.Tensor | None,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    out_values: torch.Tensor | None,
    index: torch.Tensor | None,
    *arguments: Any,
) -> None:
    """Implement ``rotate_slots.extras`` of the schema."""
    scale, values_scale, *given = arguments
    require((k is None) == (out_k is None), "one out for each of q and k")
    require((values is None) == (out_values is None), "values must come with their cache")
    require(scale is not None or values_scale is None, "keys must have a scale if values have one")
    require(scale is not None or index is not None, "slots must be given without a scale")
    require(_options_of(given[4]).direction != TRANSPOSE, "slots have no gradient")
    outs, eight, cache = present(out_q, out_k), None, out_values
    if scale is not None:
        eight = eight_of(outs[-1], out_values, (scale, values_scale))
        outs[-1] = outs[-1].view(torch.uint8)
        cache = None if out_values is None else out_values.view(torch.uint8)
    if run(q, k, outs, GIVEN, given, Slots(index, values, cache), eight) is None:
        more = out_q, out_k, out_values, index, *arguments
        _define("rotate_slots_extras", q, k, values, *more)


def rotate_slots_(cache: torch.Tensor, index: torch.Tensor, *given: Any) -> None:
    """Implement ``rotate_slots_`` of the schema."""
    require(_options_of(given[4]).direction != TRANSPOSE, "slots have no gradient")
    if run(cache, None, [cache], IN_PLACE, given, Slots(index)) is None:
        _define("rotate_slots_", cache, index, *given)


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
