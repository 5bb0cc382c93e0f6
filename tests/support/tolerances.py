"""Tolerances of the tests, each with its unit and reason, and the assertions that apply them.

Most tests refer to an entry by name; a few state a bound of their own. No entry depends on the
machine, the backend, the instruction set or the number of threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import oracle


class Tolerance(NamedTuple):
    value: float
    unit: str
    reason: str


#: The rows of tolerances.jsonl by their names. A value is a number, or an expression of π.
ROWS = Path(__file__).with_name("tolerances.jsonl").read_text(encoding="utf-8").splitlines()
TABLE = {
    row["name"]: Tolerance(
        float(eval(str(row["value"]), {"pi": math.pi})), row["unit"], row["reason"]
    )
    for row in map(json.loads, ROWS)
}

# Number of elements for which a share of 99.9 % is meaningful: 10 misses are allowed, and the rate is
# about 2 in 10,000 (float16), so that chance does not decide.
ENOUGH = 10_000


def value(name: str) -> float:
    return TABLE[name].value


def assert_near(got: Any, want: Any, name: str) -> None:
    """Assert equal shapes and dtypes, and values within the entry `name`, which is rtol and atol.

    Of two tensors, or of each pair of two sequences.
    """
    bound = value(name)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def angle_bound(
    dtype: torch.dtype, reach: float, fractional_axes: int = 0, turns: float = 0.0
) -> float:
    """Return the largest allowed error of a cosine or sine in `dtype`.

    Args:
        reach: Σ |position| over the axes. In float32 the bound includes the error of phase words for
            all positions that it covers, |position| < 2^31.
        fractional_axes: number of axes with fractional positions.
        turns: the largest ω / 2π, if positions are fractional.
    """
    if dtype == torch.float32:
        return value("float32 angle")
    return (
        reach * value("word")
        + fractional_axes * (1 + turns) * value("fraction")
        + value("float64 rounding")
    )


def assert_angles(
    got: torch.Tensor,
    exact: torch.Tensor,
    reach: float,
    fractional_axes: int = 0,
    turns: float = 0.0,
) -> None:
    """Assert that float32 or float64 cosines or sines are near exact ones; see :func:`angle_bound`."""
    assert got.dtype in (torch.float32, torch.float64)
    assert got.shape == exact.shape
    bound = angle_bound(got.dtype, reach, fractional_axes, turns)
    error = (got.double() - exact).abs()
    # Written so that NaN fails.
    assert bool((error <= bound).all()), f"off by {error.max().item():.3g}, bound {bound:.3g}"


def rotation_bound(dtype: torch.dtype, reach: float, rotations: int = 1) -> float:
    """Return the largest allowed error of a channel after some rotations, in units of |pair|.

    Args:
        reach: the largest |position|, which matters only in float64.
    """
    if dtype == torch.float64:
        angle = reach * value("word") + value("fraction")
        once = math.sqrt(2) * angle + value("float64 rotation")
    else:
        once = value("float32 rotation")
    # Both channels of a pair may be off, and the next rotation mixes them.
    return once if rotations == 1 else rotations * math.sqrt(2) * once


class Result(NamedTuple):
    """A result and its exact value, for :func:`assert_rotated`."""

    got: torch.Tensor
    exact: torch.Tensor
    # Length of the pair of each element; 0 for an element that does not rotate.
    lengths: torch.Tensor
    reach: float = 0.0  # the largest |position|
    drift: float = 0.0  # the relative error of the frequencies


def dynamic_drift(factor: float, trained: int, length: int) -> float:
    """Return the relative error that the frequencies of dynamic NTK may have at a length."""
    scale = 1 + factor * max(length - trained, 0) / trained
    return value("dynamic float64") * (4 + 2 * math.log(scale)) if length > trained else 0.0


def assert_rotated(cases: Iterable[Result]) -> None:
    """Assert that finite results of one dtype are within the bounds of rotations.

    Pass many 16-bit cases together, :data:`ENOUGH` elements or more: the share of correctly rounded
    elements is taken over all of them, all other bounds over each case.
    """
    total = missed = 0
    for got, exact, lengths, reach, drift in cases:
        assert got.shape == exact.shape
        if got.dtype in (torch.float32, torch.float64):
            _assert_close(got, exact, lengths, reach, drift=drift)
            continue
        apart = oracle.steps_apart(got, oracle.rounded(exact, got.dtype))
        total += apart.numel()
        missed += int((apart != 0).sum())
        far = apart > value("16-bit ulp")
        if far.any():
            _assert_close(got[far], exact[far], lengths[far], reach)
    if total:
        assert total >= ENOUGH, f"{total} elements are too few: the share needs {ENOUGH}"
        allowed = total * (1 - value("16-bit share"))
        assert missed <= allowed, f"{missed} of {total} elements are not correctly rounded"


def assert_rotations(
    got: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, rotations: int, reach: float
) -> None:
    """Assert that two float32 or float64 results agree after ``rotations`` rotations in total."""
    assert got.dtype in (torch.float32, torch.float64)
    assert got.shape == wanted.shape
    _assert_close(got, wanted.double(), lengths, reach, rotations)


def assert_same_bits(
    got: torch.Tensor | Sequence[torch.Tensor], wanted: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    """Assert the same dtype, shape and bits, including signs of zeros and NaN payloads.

    Of two tensors, or of each pair of two sequences.
    """
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        for one, other in zip(got, wanted, strict=True):
            assert_same_bits(one, other)
        return
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    a, b = (x.detach().contiguous().view(integers) for x in (got, wanted))
    differ = a != b
    assert not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()} elements differ in their bits"
    )


def assert_each(
    check: Callable[..., object], got: Iterable[Any], wanted: Iterable[Any], *others: Any
) -> None:
    """Check each of several results, such as with `assert_same_bits` or `torch.equal`; none may lack."""
    for one, other in zip(got, wanted, strict=True):
        found = check(one, other, *others)
        assert found is None or found


def assert_angle_sums(
    got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> None:
    """Assert that angle sums of the raw operator match a plain formula, with NaN in the same places.

    Args:
        scale: the same sums over the moduli of the products.
        dtype: dtype of the outputs.
    """
    assert got.dtype == torch.float64
    assert got.shape == exact.shape == scale.shape
    bound = value("angle sums, float64" if dtype == torch.float64 else "angle sums, float32")
    assert torch.equal(got.isnan(), exact.isnan())
    error = (got - exact).abs()
    fits = (error <= bound * scale) | exact.isnan()
    assert bool(fits.all()), (
        f"the error is {(error / scale).nan_to_num().max().item():.3g} × the moduli, bound {bound:.3g}"
    )


def _assert_close(
    got: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    reach: float,
    rotations: int = 1,
    drift: float = 0.0,
) -> None:
    width = "float64" if got.dtype == torch.float64 else "float32"
    floor = rotations * value(f"{width} subnormal")
    # Add half a step of a 16-bit dtype: the bound is for the value before it is stored.
    stored = (
        0.0
        if got.dtype in (torch.float32, torch.float64)
        else oracle.step_sizes(exact, got.dtype) / 2
    )
    # No frequency is above 1 radian per position.
    bound = (rotation_bound(got.dtype, reach, rotations) + drift * reach) * lengths + floor + stored
    error = (got.double() - exact).abs()
    worst = (error - bound).max().item() if error.numel() else 0.0
    # Written so that NaN fails.
    assert bool((error <= bound).all()), f"off by {worst:.3g} more than the bound"
