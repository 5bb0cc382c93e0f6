"""Laws of memory that is given: results go to any view or to a cache, and its entries rotate there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.caches import (
    assert_written,
    check_entries,
    check_keys_and_values,
    copied,
    sevens,
)
from tests.support.calls import CASES, VERBS, Call
from tests.support.helpers import on
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_same_bits


def every_case(test: Callable[..., None]) -> Callable[..., None]:
    numbers = pytest.mark.parametrize("number", range(len(CASES)))
    return needs_kernel(pytest.mark.one_in(3)(numbers(test)))


@every_case
def test_results_go_to_any_memory(number: int) -> None:
    """Every number beside it is what it was, and so are the inputs."""
    case = CASES[number] | {"verb": CASES[number]["verb"].rstrip("_")}
    backend, verb = case["backend"], VERBS[case["verb"]]
    xs, rope, options = Call(case).arguments()
    before = [x.clone() for x in xs]
    wanted = on(backend, verb, *xs, *rope, **options)
    wanted = wanted if len(xs) == 2 else (wanted,)
    outs = [sevens(x.shape, x, number + n) for n, x in enumerate(xs)]
    expected, versions = [copied(out) for out in outs], [out._version for out in outs]
    out = tuple(outs) if len(xs) == 2 else outs[0]
    found = on(backend, verb, *xs, *rope, out=out, **options)
    for got, out, right, y in zip(found if len(xs) == 2 else (found,), outs, expected, wanted):
        assert got is out
        right.copy_(y)
        assert_written(out, right, case)
    assert_same_bits(xs, before)
    assert all(out._version > version for out, version in zip(outs, versions, strict=True))


@every_case
@pytest.mark.parametrize("contiguous", [False, True], ids=["slots", "contiguous"])
def test_keys_and_values_go_to_a_cache(contiguous: bool, number: int) -> None:
    check_keys_and_values(CASES[number], number, contiguous)


@every_case
@pytest.mark.parametrize("undo", [False, True], ids=["rotate", "undo"])
def test_entries_rotate_in_place(undo: bool, number: int) -> None:
    check_entries(CASES[number], number, undo)
