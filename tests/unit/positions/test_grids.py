"""Positions with several coordinates: grids of patches, and text among images and videos."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy
import torch
from hypothesis import given, settings, strategies as st

from tests.support.resolved import columns, flat, resolve
from tightrope.positions import concatenate, grid, mrope, mrope_next, multi_axis

PROFILE = settings(derandomize=True, database=None, deadline=None)

ints = st.integers(-5, 5)
numbers = st.one_of(ints, ints.map(numpy.int32), ints.map(lambda i: numpy.float32(i / 2)))
#: Blocks of cells, cells of a block, start and step of an axis.
AXES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3), numbers, numbers), min_size=1, max_size=3
)


@PROFILE
@given(AXES, st.booleans())
def test_a_grid_is_row_major_by_blocks(axes: list[tuple[Any, ...]], shared: bool) -> None:
    """With one start, step and size of blocks for all axes, or with those of each."""
    if shared:
        axes = [(blocks, *axes[0][1:]) for blocks, *_ in axes]
    blocks, merge, start, step = (list(each) for each in zip(*axes, strict=True))
    sizes = [numpy.int64(n * m) for n, m in zip(blocks, merge, strict=True)]
    cells = [
        tuple(
            float(first + each * (b * m + i))
            for first, each, b, m, i in zip(start, step, block, merge, cell, strict=True)
        )
        for block in itertools.product(*map(range, blocks))
        for cell in itertools.product(*map(range, merge))
    ]
    options = {"merge": merge, "start": start, "step": step}
    if shared:
        options = {name: values[0] for name, values in options.items()}
    where = grid(*sizes, **options)
    assert flat(where) == columns(cells, len(axes))
    floating = any(isinstance(number, numpy.float32) for number in (*start, *step))
    assert where.ids.dtype == (torch.float64 if floating else torch.int64)


ENDS = st.tuples(st.floats(-4, 4), st.floats(-4, 4))


@PROFILE
@given(st.lists(st.tuples(st.integers(0, 4), ENDS), min_size=1, max_size=3), st.booleans())
def test_a_span_is_cut_into_equal_parts(axes: list[tuple[int, Any]], shared: bool) -> None:
    """One for all axes, or one for each."""
    sizes, spans = (list(each) for each in zip(*axes, strict=True))
    if shared:
        spans = spans[:1] * len(sizes)
    found = flat(grid(*sizes, span=spans[0] if shared else spans))
    lines = []
    for size, (low, high) in zip(sizes, spans, strict=True):
        width = Fraction(high) - Fraction(low)
        lines.append([Fraction(low) + width * (2 * i + 1) / (2 * size) for i in range(size)])
    wanted = columns(list(itertools.product(*lines)), len(sizes))
    for one, exact in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        # Three roundings of numbers below 16.
        assert abs(Fraction(one) - exact) <= Fraction(3 * 16, 2**53)


# --- text among images ----------------------------------------------------------------------------

CELLS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
SEGMENTS = st.lists(st.one_of(st.integers(0, 4), CELLS), max_size=5)


@PROFILE
@given(SEGMENTS, st.integers(-3, 9), st.sampled_from(["all", "space"]))
def test_mrope(segments: Sequence[Any], start: int, next_from: str) -> None:
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
            begin = max(max(cell if next_from == "all" else cell[1:]) for cell in cells) + 1
    assert flat(mrope(segments, start=start, next_from=next_from)) == columns(tokens, 3)
    largest = max((max(token) for token in tokens), default=start - 1)
    assert mrope_next(segments, start=start, next_from=next_from) == largest + 1


def test_mrope_with_time_steps() -> None:
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
