"""Run calls of the Triton kernels, and compare their results with the definition in float64."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.support import oracle
from tests.support.tolerances import value
from tests.support.triton.cases import Made
from tightrope.activations import RMS_NORM
from tightrope.backends.reference import compose
from tightrope.ops.schema import options_of

PLAIN: dict[str, Any] = {
    "dtype": torch.float32,
    "interleaved": False,
    "channels": (16, 0, 16),
    "layout": "bhsd",
    "strides": "contiguous",
    "positions": "none",
    "angles": "shared",
    "act": "none",
    "gate": 0,
    "gate shape": "full",
    "direction": 0,
    "where": "new",
    "k": "fewer heads",
    "amplitude": 1.0,
}


def operators() -> Any:
    from tightrope.backends.triton import operators

    return operators


def run(made: Made) -> list[torch.Tensor]:
    """Return the results of a call, wherever they are written."""
    if made.where == "new":
        return list(operators().rotate(made.q, made.k, *made.arguments))
    if made.where == "in place":
        operators().rotate_(made.q, made.k, *made.arguments)
        return made.xs
    outs = [torch.full_like(x, math.nan) for x in made.xs]
    operators().rotate_into(made.q, made.k, *[*outs, None][:2], *made.arguments)
    return outs


def assert_as_definition(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, wide: torch.Tensor
) -> None:
    """Assert that a result is near `want`, which is in float64.

    Args:
        dtype: dtype of the inputs, which selects the relative bound.
        wide: the size that the bound is relative to, such as the largest channel of each head; broadcasts.
    """
    assert got.shape == want.shape
    bound = value("triton, float64" if dtype == torch.float64 else "triton, float32") * wide
    if got.dtype in oracle.FORMATS:
        bound = bound + oracle.step_sizes(want, got.dtype) / 2
    error = (got.detach().cpu().double() - want).abs()
    assert bool((error <= bound).all()), (
        f"the error is {(error / bound).max().item():.3g} × the bound"
    )


def scale_of(want: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each head vector, expanded to the shape of `want`."""
    return want.abs().amax(-1, keepdim=True).expand_as(want)


def check(made: Made) -> None:
    want = compose(made.wide().q, made.wide().k, *made.wide().arguments)
    options = options_of(made.arguments[4])
    dtype = made.q.dtype
    gain = 1.0
    if options.act and options.direction == 1:
        # f' of softmax and rms_norm takes differences of the rotated gradients.
        plain = options._replace(act=0)
        extras = (
            []
            if options.gate == 0
            else made.wide().arguments[6][len(made.xs) * (options.act == RMS_NORM) :][
                : len(made.xs)
            ]
        )
        arguments = list(made.wide().arguments)
        arguments[4], arguments[6], arguments[7] = plain.pack(), extras, 0.0
        through = compose(made.wide().q, made.wide().k, *arguments)
    else:
        through = want[: len(made.xs)]
    got = run(made)
    for index, (one, other) in enumerate(zip(got, want, strict=made.where == "new")):
        if index < len(made.xs):
            wide = torch.maximum(scale_of(other), gain * scale_of(through[index]))
        else:
            wide = other.abs().amax().expand_as(other) + 1
        assert_as_definition(one, other, dtype, wide)
