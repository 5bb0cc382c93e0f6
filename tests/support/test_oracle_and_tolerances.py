"""The assertions of tolerances.py reject wrong results.

An oracle that is wrong disagrees with the library in every test that asks it.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import oracle, oracle_acts, oracle_frequencies, tolerances
from tests.support.tolerances import Result

SIXTEEN = [torch.bfloat16, torch.float16]
PLAIN = [torch.float32, torch.float64]


# --- the oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [oracle, oracle_acts, oracle_frequencies], ids=lambda module: module.__name__
)
def test_oracle_imports_nothing_from_the_library(module: ModuleType) -> None:
    with open(str(module.__file__), encoding="utf-8") as file:
        lines = [line.split("#")[0] for line in file]
    imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
    assert imports
    assert not any("tightrope" in line for line in imports)


# --- the table ------------------------------------------------------------------------------------


def test_the_table_says_what_the_design_promises() -> None:
    promised = {
        "float32 angle": 1.2e-7,
        "float64 angle": 1e-12,
        "float32 rotation": 4e-7,
        "16-bit share": 0.999,
        "16-bit ulp": 1,
    }
    assert {name: tolerances.value(name) for name in promised} == promised
    # Up to position 2^20 the float64 assertion is tighter than the promise.
    assert tolerances.angle_bound(torch.float64, 2.0**20, 2) < tolerances.value("float64 angle")


# --- asserts that must fail -----------------------------------------------------------------------


def rejects(text: str, check: Callable[..., None], *given: Any) -> None:
    """Assert that a check fails with this text."""
    with pytest.raises(AssertionError, match=text or None):
        check(*given)


def changed(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    """Return a copy with other elements in some places."""
    x = x.clone()
    x[at] = value
    return x


@pytest.mark.parametrize("dtype, off", [(torch.float32, 1.4e-7), (torch.float64, 1e-15)])
def test_assert_angles_rejects(dtype: torch.dtype, off: float) -> None:
    exact = torch.linspace(-1, 1, 9, dtype=torch.float64).float().double()
    tolerances.assert_angles(exact.to(dtype), exact, 0)
    for wrong in (off, math.nan):  # at 0, where the cast is exact
        found = changed(exact, 4, exact[4] + wrong).to(dtype)
        rejects("off by", tolerances.assert_angles, found, exact, 0)
    for found in (exact.to(dtype)[:8], exact.bfloat16()):
        rejects("", tolerances.assert_angles, found, exact, 0)


def test_the_reach_of_positions_widens_only_float64() -> None:
    exact = torch.zeros(3, dtype=torch.float64)
    wrong = torch.full((3,), 3e-10, dtype=torch.float64)
    tolerances.assert_angles(wrong, exact, 2.0**31)
    rejects("", tolerances.assert_angles, wrong, exact, 2.0**30)
    assert tolerances.rotation_bound(torch.float32, 2.0**31) == 4e-7


def a_case(dtype: torch.dtype, count: int = tolerances.ENOUGH) -> Result:
    generator = torch.Generator().manual_seed(count)
    exact = torch.randn(count, generator=generator, dtype=torch.float64)
    got = exact.clone() if dtype == torch.float64 else oracle.rounded(exact, dtype)
    return Result(got, exact, exact.abs() * 2)


def with_(case: Result, at: Any, value: Any) -> list[Result]:
    """Return a case with other results in some places."""
    return [case._replace(got=changed(case.got, at, value))]


def step_up(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the representable number that is `steps` further from zero."""
    integers = torch.int16 if x.element_size() == 2 else torch.int32
    return (x.view(integers) + steps).to(integers).view(x.dtype)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_assert_rotated_counts_misses_in_16_bits(dtype: torch.dtype) -> None:
    """One element may be off by two only in a long pair whose terms cancel: float32 arithmetic may have this error."""
    case, check, allowed = a_case(dtype), tolerances.assert_rotated, tolerances.ENOUGH // 1000
    stepped = step_up(case.got, 1)
    for count in (0, allowed):
        check(with_(case, slice(count), stepped[:count]))
    more = with_(case, slice(allowed + 1), stepped[: allowed + 1])
    rejects("11 of 10000 elements are not correctly rounded", check, more)
    twice = with_(case, 7, step_up(case.got[7:8], 2)[0])
    rejects("off by", check, twice)
    check([twice[0]._replace(lengths=changed(case.lengths, 7, 2.0**17))])
    rejects("too few", check, [a_case(dtype, 100)])
    check([a_case(dtype, 100), a_case(dtype, tolerances.ENOUGH - 100)])


@pytest.mark.parametrize("dtype", [*SIXTEEN, *PLAIN])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_assert_rotated_rejects_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    rejects("off by", tolerances.assert_rotated, with_(a_case(dtype), 3, bad))


@pytest.mark.parametrize("dtype, relative", [(torch.float32, 5e-7), (torch.float64, 2e-15)])
def test_assert_rotated_rejects_errors(dtype: torch.dtype, relative: float) -> None:
    """Channels that do not rotate may be off by a few subnormal numbers at most."""
    case = a_case(dtype)
    tolerances.assert_rotated([case])
    (wrong,) = with_(case, 5, case.got[5] + relative * case.lengths[5])
    for found in (wrong, wrong._replace(lengths=torch.zeros_like(case.exact))):
        rejects("off by", tolerances.assert_rotated, [found])
    rejects("", tolerances.assert_rotated, [wrong._replace(got=case.got[:5])])


@pytest.mark.parametrize("dtype", PLAIN)
def test_assert_rotations_allows_for_their_number(dtype: torch.dtype) -> None:
    case, once = a_case(dtype), tolerances.rotation_bound(dtype, 0)
    wrong = changed(case.got, 5, case.got[5] + 2.5 * once * case.lengths[5])
    tolerances.assert_rotations(wrong, case.exact, case.lengths, 2, 0)
    rejects("off by", tolerances.assert_rotations, wrong, case.exact, case.lengths, 1, 0)


def test_assert_same_bits_rejects() -> None:
    x = torch.tensor([0.0, 1.0, math.nan])
    tolerances.assert_same_bits(x, x.clone())
    others = changed(x, 0, -0.0), changed(x, 1, 1.0 + 2.0**-23), changed(x, 2, -math.nan)
    for other in (*others, x[:2], x.double()):
        rejects("", tolerances.assert_same_bits, x, other)


@pytest.mark.parametrize("dtype", [*SIXTEEN, *PLAIN])
def test_assert_angle_sums_rejects(dtype: torch.dtype) -> None:
    exact = torch.tensor([1.0, math.nan, -3.0], dtype=torch.float64)
    scale = torch.tensor([2.0, math.nan, 4.0], dtype=torch.float64)
    wide = "float64" if dtype == torch.float64 else "float32"
    bound = tolerances.value(f"angle sums, {wide}") * scale.nan_to_num()
    tolerances.assert_angle_sums(exact + 0.9 * bound, exact, scale, dtype)
    nan = torch.full_like(exact, math.nan)
    for wrong in (exact + 1.1 * bound, nan, exact.nan_to_num(), exact[:2], exact.float()):
        rejects("", tolerances.assert_angle_sums, wrong, exact, scale, dtype)
