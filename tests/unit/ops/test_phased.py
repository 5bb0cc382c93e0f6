"""Rotation by phases: angles for each token, in addition to those of the positions (`phases` of `at`).

How phases are made and accumulated is tested in tests/unit/phases/test_phases.py.
"""

import math

import pytest
import torch

from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, phases, positions
from tightrope.axes import Axes
from tightrope.frequencies import Given
from tightrope.functional import polar_scan, rotate, rotate_qk

ROWS, HEADS, TOKENS, DIM, PAIRS = 2, 4, 40, 16, 6


def spec_of(alone: bool = False) -> RopeSpec:
    rule = Given((0.0,) * PAIRS) if alone else None
    return RopeSpec(DIM, rotary_dim=2 * PAIRS, start=2, scaling=rule)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return noise(*shape, seed=seed).requires_grad_()


def angles(*shape: int) -> torch.Tensor:
    return 30 * noise(*shape, seed=9)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 1e30])
def test_an_angle_that_is_no_number_makes_its_pair_nan(
    lost: float, dtype: torch.dtype, backend: str
) -> None:
    x, angle = noise(ROWS, HEADS, TOKENS, DIM, dtype=dtype), angles(ROWS, 1, TOKENS, PAIRS)
    clean = on(backend, rotate, x, spec_of().at(phases=phases.given(angle)))
    angle[1, 0, 3, 4] = lost
    got = on(backend, rotate, x, spec_of().at(phases=phases.given(angle)))
    gone = torch.zeros_like(got, dtype=torch.bool)
    gone[1, :, 3, 2 + 4] = gone[1, :, 3, 2 + 4 + PAIRS] = True
    assert got[gone].isnan().all()
    assert_same_bits(got[~gone], clean[~gone])


@every_backend
def test_a_position_that_is_lost_on_one_axis_loses_its_token(backend: str) -> None:
    at = noise(2, TOKENS)
    at[1, 3] = math.nan
    own = phases.given(angles(1, 1, TOKENS, 4))
    spec, x = RopeSpec(8, axes=Axes.blocks((2, 2))), noise(ROWS, HEADS, TOKENS, 8)
    lost = on(backend, rotate, x, spec.at(positions.multi_axis(at), phases=own)).isnan()
    assert lost[:, :, 3].all()
    assert int(lost.sum()) == ROWS * HEADS * 8


def test_polar_scan_in_chunks_equals_the_scan_of_rotated_tensors() -> None:
    """Both states together continue a sequence, and gradients flow through both."""
    q, k, v = (leaf(1, 2, 12, 8, seed=i) for i in range(3))
    increments = leaf(1, 2, 12, 4, seed=3)
    spec = RopeSpec(8, scaling=Given((0.0,) * 4))
    turned = rotate_qk(q, k, spec.at(phases=phases.running(increments)))
    whole, _ = polar_scan(*turned, v, spec, -0.1)
    state = sums = None
    parts = []
    for i in range(0, 12, 5):
        some = [t[:, :, i : i + 5] for t in (q, k, v, increments)]
        own = phases.running(some[3], sums)
        out, state = polar_scan(*some[:3], spec.at(i, phases=own), -0.1, state=state)
        sums = own.state
        parts.append(out)
    assert_near(torch.cat(parts, 2), whole, "float64 ways")
    inputs, cotangent = (q, k, v, increments), noise(*whole.shape, seed=9)
    found, wanted = (
        torch.autograd.grad(y, inputs, cotangent) for y in (torch.cat(parts, 2), whole)
    )
    assert_near(found, wanted, "float64 ways")
