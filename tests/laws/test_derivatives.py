"""First and second derivatives of the public functions.

For rotate, rotate_qk and their in-place forms, the cases contain every valid pair of values of any
two options; those of other functions are in tests/support/functions.py. Derivatives are compared with
finite differences of the function itself in float64, so this file contains no derivative formula.
Gradients in narrower dtypes are compared with those of the float64 call on the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support import tolerances
from tests.support.calls import CASES, REACH, Call
from tests.support.functions import FUNCTIONS


def check(call: Callable[..., Any], leaves: Mapping[str, torch.Tensor]) -> None:
    """Check first and second derivatives of a function of named tensors by finite differences.

    The tensors are converted to float64. Derivatives are compared along random directions; first
    derivatives in reverse mode and forward mode, each batched too.
    """
    names = list(leaves)
    tensors = [leaves[name].detach().double().requires_grad_() for name in names]

    def by_place(*values: torch.Tensor) -> Any:
        return call(**dict(zip(names, values)))

    modes = ("check_batched_grad", "check_forward_ad", "check_batched_forward_grad")
    assert gradcheck(by_place, tensors, fast_mode=True, **dict.fromkeys(modes, True))
    assert gradgradcheck(by_place, tensors, fast_mode=True)
    # For several results at once: `gradcheck` takes one at a time, so it misses a share that only all together lose.
    results = by_place(*tensors)
    if isinstance(results, tuple) and len(results) > 1:
        assert gradcheck(
            lambda *xs: torch.cat([y.flatten() for y in by_place(*xs)]), tensors, fast_mode=True
        )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_axes(number: int) -> None:
    case = CASES[number]
    call, truth = Call(case), Call({**case, "dtype": torch.float64})
    check(truth, {name: truth.leaves[name] for name in truth.learned()})
    if case["dtype"] == torch.float64:
        return
    wide = {name: t.double() for name, t in call.leaves.items()}
    wanted = truth.derivatives(True, wide)
    norms = [(y.detach().double().norm(), g.detach().double().norm()) for y, g in zip(*wanted[:2])]
    size = sum(float(y * g) for y, g in norms)
    bound = tolerances.value(f"f and P, {str(case['dtype'])[6:]}")
    again = call.derivatives(True)
    for found in (call.derivatives().first, again.first):
        for name, slope in found.items():
            assert slope.dtype == call.leaves[name].dtype
            # Gradients of other tensors sum products of results, their gradients and at most REACH.
            reach = float(wanted.first[name].abs().max()) if name in ("q", "k") else REACH * size
            assert (slope.double() - wanted.first[name]).abs().max() <= bound * reach, (name, case)
    largest = max(float(one.abs().max()) for one in wanted.second.values())
    for name, one in again.second.items():
        # The second derivative rounds, and so did the first one.
        off = (one.double() - wanted.second[name]).abs().max()
        assert off <= 2 * bound * largest, (name, case)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_functions(name: str) -> None:
    call = FUNCTIONS[name]
    check(call, {name: call.leaves[name] for name in call.learned()})
