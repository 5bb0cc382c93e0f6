"""Positions with several coordinates: grids of patches, and text among images and videos."""

import itertools
from fractions import Fraction
from typing import Any

import numpy
import torch
from hypothesis import given, settings, strategies as st

from tests.support.resolved import columns, flat, resolve
from tightrope.positions import concatenate, grid, mrope, mrope_next, multi_axis

PROFILE = settings(derandomize=True, database=None, deadline=None)
GRIDS = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@PROFILE
@given(GRIDS, st.integers(-5, 5), st.integers(-3, 3))
def test_a_grid_is_row_major(sizes: list[int], start: int, step: int) -> None:
    cells = itertools.product(*[[start + step * i for i in range(size)] for size in sizes])
    where = grid(*sizes, start=start, step=step)
    assert flat(where) == columns(list(cells), len(sizes))
    assert where.ids.dtype == torch.int64


def test_a_grid_with_its_own_start_and_step_on_each_axis() -> None:
    where = grid(2, 1, 2, start=(10, 20, 30), step=[1, 5, 0.5])
    assert flat(where) == [[10, 10, 11, 11], [20, 20, 20, 20], [30, 30.5, 30, 30.5]]
    assert where.ids.dtype == torch.float64


@PROFILE
@given(GRIDS, st.floats(-4, 4), st.floats(-4, 4))
def test_a_span_is_cut_into_equal_parts(sizes: list[int], low: float, high: float) -> None:
    got = flat(grid(*sizes, span=(low, high)))
    lines = []
    for size in sizes:
        width = Fraction(high) - Fraction(low)
        lines.append([Fraction(low) + width * (2 * i + 1) / (2 * size) for i in range(size)])
    wanted = columns(list(itertools.product(*lines)), len(sizes))
    for axis, exact in zip(got, wanted, strict=True):
        for one, other in zip(axis, exact, strict=True):
            # Three roundings of numbers below 16.
            assert abs(Fraction(one) - other) <= Fraction(3 * 16, 2**53)


def test_numbers_of_other_libraries_are_numbers() -> None:
    where = grid(numpy.int64(2), 2, step=numpy.float32(0.5), start=numpy.int32(1))
    assert flat(where) == [[1, 1, 1.5, 1.5], [1, 1.5, 1, 1.5]]


def test_a_span_of_each_axis() -> None:
    got = torch.tensor(flat(grid(4, 2, span=[(-1, 1), (0, 4)])))
    assert got[0, ::2].tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert got[1, :2].tolist() == [1, 3]


@PROFILE
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3))
def test_merged_blocks_are_consecutive(axes: list[tuple[int, int]]) -> None:
    sizes, merges = [n * m for n, m in axes], [m for _, m in axes]
    wanted = []
    for block in itertools.product(*[range(n) for n, _ in axes]):
        for inside in itertools.product(*[range(m) for m in merges]):
            wanted.append(tuple(b * m + i for b, m, i in zip(block, merges, inside, strict=True)))
    assert flat(grid(*sizes, merge=merges)) == columns(wanted, len(axes))


# --- text among images ----------------------------------------------------------------------------

CELLS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
SEGMENTS = st.lists(st.one_of(st.integers(0, 4), CELLS), max_size=5)


@PROFILE
@given(SEGMENTS, st.integers(-3, 9), st.sampled_from(["all", "space"]))
def test_mrope(segments: list[Any], start: int, next_from: str) -> None:
    tokens: list[tuple[int, ...]] = []
    begin = start
    for segment in segments:
        if isinstance(segment, int):
            tokens += [(begin + i,) * 3 for i in range(segment)]
            begin += segment
        else:
            cells = [
                tuple(begin + i for i in cell) for cell in itertools.product(*map(range, segment))
            ]
            tokens += cells
            last = max(max(cell if next_from == "all" else cell[1:]) for cell in cells)
            begin = last + 1
    where = mrope(segments, start=start, next_from=next_from)
    assert flat(where) == columns(tokens, 3)
    largest = max((max(token) for token in tokens), default=start - 1)
    assert mrope_next(segments, start=start, next_from=next_from) == largest + 1
    if next_from == "all":
        assert begin == largest + 1


def test_mrope_with_time_steps() -> None:
    # The example of the Qwen2.5-VL code: steps in time are 50 positions apart.
    segments = [(3, 2, 2, 50), 2]
    time, height, width = flat(mrope(segments))
    assert time == [0] * 4 + [50] * 4 + [100] * 4 + [101, 102]
    assert height == [0, 0, 1, 1] * 3 + [101, 102]
    assert width == [0, 1, 0, 1] * 3 + [101, 102]
    assert mrope_next(segments) == 103
    # Times are rounded to float32, then down: 100 · 0.29 is 29 in float32 and just below 29 in
    # float64.
    assert flat(mrope([(4, 1, 1, 0.5)]))[0] == [0, 0, 1, 1]
    assert int(100 * 0.29) == 28
    assert flat(mrope([(101, 1, 1, 0.29), 1]))[0][-2:] == [29, 30]
    assert mrope_next([(101, 1, 1, 0.29)]) == 30


def test_rows_of_mrope_positions_with_padding() -> None:
    rows = [[2, (1, 2, 2), 1], [3]]
    padding = multi_axis(torch.zeros(3, 4, dtype=torch.int64))
    where = concatenate([mrope(rows[0]), concatenate([padding, mrope(rows[1])])], along="rows")
    assert resolve(where, 2, 7)[1] == [[0, 1, 2, 2, 3, 3, 4], [0, 0, 0, 0, 0, 1, 2]]
