"""Every way to specify positions, and the errors for invalid ones.

Each kind is compared with positions that an independent loop computes number by number.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate, rotate_qk_
from tightrope.positions import (
    Positions,
    as_positions,
    concatenate,
    explicit,
    grid,
    left_padded,
    mrope,
    mrope_next,
    multi_axis,
    packed,
    per_row,
    shard,
    text,
)

ALLOWED = [torch.int32, torch.int64, torch.float32, torch.float64]
REFUSED = [torch.bool, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]


def resolve(where: Positions, rows: int, tokens: int) -> list[list[list[float]]]:
    """Expand a canonical form to positions [axes, rows, tokens], number by number."""
    axes = 1 if where.ids is None else where.ids.shape[0]
    result = []
    for axis in range(axes):
        result.append([])
        for row in range(rows):
            line = []
            for token in range(tokens):
                position = where.offset + (token if where.add_index else 0)
                if where.ids is not None:
                    own_row = row if where.ids.shape[1] > 1 else 0
                    position += where.ids[axis, own_row, 0 if where.add_index else token].item()
                line.append(position)
            result[axis].append(line)
    return result


def test_none_counts_from_zero() -> None:
    assert resolve(as_positions(None), 1, 3) == [[[0, 1, 2]]]
    assert as_positions(None).ids is None


@pytest.mark.parametrize("offset", [0, 7, -3, 2**31, 2**63 - 1, -(2**63)])
def test_an_int_is_an_offset(offset: int) -> None:
    where = as_positions(offset)
    assert where.ids is None
    assert resolve(where, 1, 2) == [[[offset, offset + 1]]]


def test_an_index_of_another_library_is_an_offset() -> None:
    assert as_positions(numpy.int32(7)).offset == 7


@pytest.mark.parametrize("dtype", ALLOWED)
def test_ids(dtype: torch.dtype) -> None:
    one = torch.tensor([3, 1, -4]).to(dtype)
    assert resolve(as_positions(one), 2, 3) == [[[3, 1, -4], [3, 1, -4]]]
    two = torch.tensor([[3, 1, 4], [1, 5, 9]]).to(dtype)
    where = as_positions(two)
    assert resolve(where, 2, 3) == [[[3, 1, 4], [1, 5, 9]]]
    assert where.ids is not None
    assert where.ids.dtype == dtype
    assert where.ids.data_ptr() == two.data_ptr()  # nothing is copied


@pytest.mark.parametrize("dtype", ALLOWED)
def test_per_row(dtype: torch.dtype) -> None:
    assert resolve(per_row(torch.tensor([0, 100]).to(dtype)), 2, 3) == [
        [[0, 1, 2], [100, 101, 102]]
    ]


@pytest.mark.parametrize("dtype", ALLOWED)
def test_multi_axis(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 0, 1], [0, 1, 0]]).to(dtype)
    wanted = [[[0, 0, 1]], [[0, 1, 0]]]
    assert resolve(multi_axis(ids), 1, 3) == wanted
    assert resolve(multi_axis(ids[:, None]), 1, 3) == wanted
    per_row_too = torch.stack((ids, ids + 1), 1)
    assert resolve(multi_axis(per_row_too), 2, 3)[1] == [[0, 1, 0], [1, 2, 1]]


def test_canonical_form_passes_through() -> None:
    where = per_row(torch.tensor([1, 2]))
    assert as_positions(where) is where
    assert as_positions(positions.ZERO) is positions.ZERO
    with pytest.raises(dataclasses.FrozenInstanceError):
        where.offset = 3  # type: ignore[misc]


def test_empty_ids_are_ids() -> None:
    where = as_positions(torch.zeros(0, dtype=torch.int64))
    assert where.ids is not None
    assert where.ids.shape == (1, 1, 0)


# --- packed ---------------------------------------------------------------------------------------

PROFILE = settings(derandomize=True, database=None, deadline=None)
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def ends_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


@PROFILE
@given(LENGTHS, st.sampled_from([torch.int32, torch.int64]), st.integers(-9, 9), st.booleans())
def test_packed_positions_restart(
    lengths: list[int], dtype: torch.dtype, offset: int, with_total: bool
) -> None:
    wanted = [offset + token for length in lengths for token in range(length)]
    total = sum(lengths) if with_total else None
    where = packed(ends_of(lengths, dtype), offset, total)
    assert resolve(where, 1, len(wanted)) == [[wanted]]
    assert where.ids is not None
    assert where.ids.dtype == dtype


@PROFILE
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(-(2**40), 2**40)), min_size=1, max_size=6))
def test_packed_with_an_offset_for_each_sequence(sequences: list[tuple[int, int]]) -> None:
    wanted = [offset + token for length, offset in sequences for token in range(length)]
    cu_seqlens = ends_of([length for length, _ in sequences], torch.int32)
    where = packed(cu_seqlens, torch.tensor([offset for _, offset in sequences]))
    assert resolve(where, 1, len(wanted)) == [[wanted]]


def test_packed_with_fractional_offsets() -> None:
    offsets = torch.tensor([0.1, -2.5], requires_grad=True)
    where = packed(torch.tensor([0, 3, 5]), offsets)
    exact = torch.tensor([0.1, -2.5]).double().tolist()
    assert resolve(where, 1, 5) == [
        [[exact[0], exact[0] + 1, exact[0] + 2, exact[1], exact[1] + 1]]
    ]
    assert where.ids is not None
    (grad,) = torch.autograd.grad(where.ids.sum(), offsets)
    assert grad.tolist() == [3, 2]


def test_packed_int32_offsets_do_not_overflow() -> None:
    top = 2**31 - 1
    where = packed(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([top], dtype=torch.int32))
    assert resolve(where, 1, 3) == [[[top, top + 1, top + 2]]]


def test_tokens_past_an_unreadable_end_continue() -> None:
    # A graph cannot compare `total` with the end of cu_seqlens. An eager call on the CPU raises an
    # error if they differ.
    function = torch.compile(
        lambda cu_seqlens: packed(cu_seqlens, total=6).ids, fullgraph=True, backend="eager"
    )
    assert function(torch.tensor([0, 3, 5])).tolist() == [[[0, 1, 2, 0, 1, 2]]]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_is_each_sequence_alone_bit_for_bit(backend: str, dtype: torch.dtype) -> None:
    lengths, starts = [3, 0, 1, 13], [5, 8, 100_000, -2]
    spec = RopeSpec(24, rotary_dim=16, start=3)
    x = torch.randn(sum(lengths), 3, 24).to(dtype).requires_grad_()
    weight = torch.randn(x.shape).to(dtype)
    where = packed(ends_of(lengths, torch.int32), torch.tensor(starts))
    y = rotate(x, spec, where, layout="thd", backend=backend)
    (grad,) = torch.autograd.grad((y * weight).sum(), x)
    begin = 0
    for length, start in zip(lengths, starts, strict=True):
        own = slice(begin, begin + length)
        alone = x[own].detach().requires_grad_()
        wanted = rotate(alone, spec, start, layout="thd", backend=backend)
        assert_same_bits(y[own], wanted)
        (wanted_grad,) = torch.autograd.grad((wanted * weight[own]).sum(), alone)
        assert_same_bits(grad[own], wanted_grad)
        begin += length


# --- left padding ---------------------------------------------------------------------------------


@PROFILE
@given(
    st.integers(0, 6).flatmap(
        lambda tokens: st.lists(
            st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens), min_size=1, max_size=4
        )
    ),
    st.sampled_from([torch.bool, torch.int64, torch.int32, torch.uint8]),
)
def test_masked_tokens_do_not_count(rows: list[list[int]], dtype: torch.dtype) -> None:
    wanted = [[sum(row[:token]) if real else 0 for token, real in enumerate(row)] for row in rows]
    where = left_padded(torch.tensor(rows, dtype=dtype))
    assert resolve(where, len(rows), len(rows[0])) == [wanted]


@PROFILE
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 3))
def test_lengths_and_masks_agree_on_real_tokens(lengths: list[int], more: int) -> None:
    total = max(lengths) + more
    by_length = per_row(torch.tensor(lengths, dtype=torch.int32) - total)
    assert by_length.ids is not None
    assert by_length.ids.numel() == len(lengths)
    rows = [[False] * (total - n) + [True] * n for n in lengths]
    mask = torch.tensor(rows, dtype=torch.bool)
    one = torch.tensor(resolve(by_length, len(lengths), total)).reshape(len(lengths), total)
    other = torch.tensor(resolve(left_padded(mask), len(lengths), total)).reshape(one.shape)
    assert torch.equal(one[mask], other[mask])
    assert one[~mask].lt(0).all()
    for row, length in enumerate(lengths):
        assert one[row, total - length :].tolist() == list(range(length))


def test_a_padded_row_attends_as_it_does_alone() -> None:
    spec, lengths, total = RopeSpec(16), [3, 7], 7
    q, k, v = torch.randn(3, 2, 2, total, 16, dtype=torch.float64)
    mask = torch.tensor([[0] * (total - n) + [1] * n for n in lengths], dtype=torch.bool)
    for where in (left_padded(mask), per_row(torch.tensor(lengths) - total)):
        turned = rotate_qk_(q.clone(), k.clone(), spec, where)
        see = mask[:, None, None, :] & mask[:, None, :, None]
        see = see | torch.eye(total, dtype=torch.bool)  # a row that attends to nothing would be NaN
        y = torch.nn.functional.scaled_dot_product_attention(*turned, v, attn_mask=see)
        for row, length in enumerate(lengths):
            own = (slice(row, row + 1), slice(None), slice(total - length, total))
            alone = rotate_qk_(q[own].clone(), k[own].clone(), spec)
            wanted = torch.nn.functional.scaled_dot_product_attention(*alone, v[own])
            torch.testing.assert_close(y[own], wanted)


# --- grids ----------------------------------------------------------------------------------------

GRIDS = st.lists(st.integers(0, 4), min_size=1, max_size=3)


def flat(where: Positions) -> list[list[float]]:
    """Return positions of one row as [axes, tokens]."""
    return [axis[0] for axis in resolve(where, 1, 0 if where.ids is None else where.ids.shape[2])]


def columns(tokens: list[tuple[Any, ...]], axes: int) -> list[list[Any]]:
    return [[token[axis] for token in tokens] for axis in range(axes)]


@PROFILE
@given(GRIDS, st.integers(-5, 5), st.integers(-3, 3))
def test_a_grid_is_row_major(sizes: list[int], start: int, step: int) -> None:
    cells = itertools.product(*[[start + step * i for i in range(size)] for size in sizes])
    where = grid(*sizes, start=start, step=step)
    assert flat(where) == columns(list(cells), len(sizes))
    assert where.ids is not None
    assert where.ids.dtype == torch.int64


def test_a_grid_with_its_own_start_and_step_on_each_axis() -> None:
    where = grid(2, 1, 2, start=(10, 20, 30), step=[1, 5, 0.5])
    assert flat(where) == [[10, 10, 11, 11], [20, 20, 20, 20], [30, 30.5, 30, 30.5]]
    assert where.ids is not None
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
    where = grid(numpy.int64(2), 2, step=numpy.float32(0.5), start=numpy.int32(1))  # type: ignore[arg-type]
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


# --- explicit, concatenate, shard ------------------------------------------------------------------


class Kind(NamedTuple):
    """A description of positions, with their values ``[axes][rows][tokens]``."""

    where: positions.PositionsLike
    wanted: list[list[list[float]]]

    @property
    def tokens(self) -> int:
        return len(self.wanted[0][0])


def line(start: float, tokens: int = 8) -> list[float]:
    return [start + token for token in range(tokens)]


FOUR_BY_TWO = [[0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4]
KINDS: dict[str, Kind] = {
    "none": Kind(None, [[line(0)]]),
    "offset": Kind(70_000, [[line(70_000)]]),
    "negative offset": Kind(-3, [[line(-3)]]),
    "ids": Kind(torch.tensor([5, 3, 3, 9, -1, 0, 2, 7]), [[[5, 3, 3, 9, -1, 0, 2, 7]]]),
    "ids per row": Kind(
        torch.tensor([line(4), line(-9)], dtype=torch.int32), [[line(4), line(-9)]]
    ),
    "fractional ids": Kind(torch.tensor(line(0.25)), [[line(0.25)]]),
    "offset per row": Kind(per_row(torch.tensor([100, -4])), [[line(100), line(-4)]]),
    # Not 0.5: half a phase word may be rounded either way, which can change the last bit of float64.
    "fractional offset per row": Kind(
        per_row(torch.tensor([0.25, -4.25])), [[line(0.25), line(-4.25)]]
    ),
    "packed": Kind(packed(torch.tensor([0, 3, 3, 8])), [[[0, 1, 2, 0, 1, 2, 3, 4]]]),
    "packed with an offset": Kind(
        packed(torch.tensor([0, 3, 8]), 7), [[[7, 8, 9, 7, 8, 9, 10, 11]]]
    ),
    "packed with offsets": Kind(
        packed(torch.tensor([0, 3, 8]), torch.tensor([7, -1])), [[[7, 8, 9, -1, 0, 1, 2, 3]]]
    ),
    "packed with fractional offsets": Kind(
        packed(torch.tensor([0, 3, 8]), torch.tensor([0.5, -1.0])),
        [[[0.5, 1.5, 2.5, -1, 0, 1, 2, 3]]],
    ),
    "left padded": Kind(
        left_padded(torch.tensor([[0] * 5 + [1] * 3, [1] * 8])), [[[0] * 5 + [0, 1, 2], line(0)]]
    ),
    "two axes": Kind(multi_axis(torch.tensor([line(0), line(9)])), [[line(0)], [line(9)]]),
    "two axes per row": Kind(
        multi_axis(torch.tensor([[line(0), line(1)], [line(2), line(3)]])),
        [[line(0), line(1)], [line(2), line(3)]],
    ),
    "text": Kind(text(6, axes=2), [[line(6)], [line(6)]]),
    "text per row": Kind(text(per_row(torch.tensor([6, 2])), axes=3), [[line(6), line(2)]] * 3),
    "text with ids": Kind(text(torch.tensor(line(2)), axes=2), [[line(2)]] * 2),
    "grid": Kind(grid(4, 2), [[axis] for axis in FOUR_BY_TWO]),
    "normalised grid": Kind(
        grid(4, 2, span=(-1, 1)),
        [[[-0.75] * 2 + [-0.25] * 2 + [0.25] * 2 + [0.75] * 2], [[-0.5, 0.5] * 4]],
    ),
    "video": Kind(
        grid(2, 2, 2),
        [[[0, 0, 0, 0, 1, 1, 1, 1]], [[0, 0, 1, 1, 0, 0, 1, 1]], [[0, 1, 0, 1, 0, 1, 0, 1]]],
    ),
    "mixed": Kind(
        mrope([3, (1, 2, 2), 1]),
        [
            [[0, 1, 2, 3, 3, 3, 3, 5]],
            [[0, 1, 2, 3, 3, 4, 4, 5]],
            [[0, 1, 2, 3, 4, 3, 4, 5]],
        ],
    ),
    "images of several sizes": Kind(
        concatenate([grid(1, 4), grid(2, 2)]),
        [[[0, 0, 0, 0, 0, 0, 1, 1]], [[0, 1, 2, 3, 0, 1, 0, 1]]],
    ),
    "shard": Kind(shard(5, 1, 2, tokens=16), [[line(13)]]),
    "zigzag shard": Kind(
        shard(per_row(torch.tensor([0, 40])), 1, 3, kind="zigzag", tokens=24),
        [[[4, 5, 6, 7, 16, 17, 18, 19], [44, 45, 46, 47, 56, 57, 58, 59]]],
    ),
}


def spec_for(axes: int) -> RopeSpec:
    if axes == 1:
        return RopeSpec(20, rotary_dim=12, start=3)
    return RopeSpec(20, rotary_dim=12, start=3, axes=Axes.blocks((6 // axes,) * axes))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_its_positions(name: str) -> None:
    kind = KINDS[name]
    rows = len(kind.wanted[0])
    assert resolve(as_positions(kind.where), rows, kind.tokens) == kind.wanted


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_equals_its_ids_bit_for_bit(name: str, dtype: torch.dtype, backend: str) -> None:
    kind = KINDS[name]
    ids = torch.tensor(kind.wanted, dtype=torch.float64)
    if (ids == ids.round()).all():
        ids = ids.to(torch.int64)
    spec = spec_for(len(kind.wanted))
    x = torch.randn(2, 3, kind.tokens, 20).to(dtype).requires_grad_()
    weight = torch.randn(x.shape).to(dtype)
    got = rotate(x, spec, kind.where, backend=backend)
    wanted = rotate(x, spec, Positions(ids, add_index=False), backend=backend)
    assert_same_bits(got, wanted)
    assert_same_bits(rotate(x, spec.at(kind.where), backend=backend), wanted)
    (grad,) = torch.autograd.grad((got * weight).sum(), x)
    (wanted_grad,) = torch.autograd.grad((wanted * weight).sum(), x)
    assert_same_bits(grad, wanted_grad)


FLOATING: dict[str, Callable[[torch.Tensor], positions.PositionsLike]] = {
    "ids": lambda p: p[0],
    "ids per row": lambda p: p[:2],
    "offset per row": lambda p: per_row(p[:2, 0]),
    "packed": lambda p: packed(torch.tensor([0, 3, 8]), p[0, :2]),
    "axes": lambda p: multi_axis(p[:2]),
    "text": lambda p: text(p[0], axes=2),
    "several": lambda p: concatenate([multi_axis(p[:2, :5]), grid(1, 3)]),
    "shard": lambda p: shard(multi_axis(torch.cat((p[:2], p[2:]), 1)), 0, 2, kind="zigzag"),
    "explicit": lambda p: explicit(per_row(p[:2, 0]), 8),
}


@pytest.mark.one_in(3)
@every_backend
@pytest.mark.parametrize("name", FLOATING)
def test_gradients_reach_fractional_positions(name: str, backend: str) -> None:
    p = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    axes = as_positions(FLOATING[name](p)).axes
    spec = spec_for(axes)
    x = torch.randn(2, 1, 8, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, p: rotate(x, spec, FLOATING[name](p), backend=backend), (x, p)
    )


@PROFILE
@given(st.integers(-(2**40), 2**40), st.integers(0, 9))
def test_explicit_offsets(offset: int, tokens: int) -> None:
    where = explicit(offset, tokens)
    assert (where.offset, where.add_index) == (0, False)
    assert flat(where) == [[offset + token for token in range(tokens)]]


@pytest.mark.parametrize("name", KINDS)
def test_explicit(name: str) -> None:
    kind = KINDS[name]
    where = explicit(kind.where, kind.tokens)
    assert (where.offset, where.add_index) == (0, False)
    assert where.ids is not None
    assert where.ids.dtype in (torch.int64, torch.float64)
    assert resolve(where, len(kind.wanted[0]), kind.tokens) == kind.wanted


def test_explicit_keeps_float32_ids_exact() -> None:
    p = torch.tensor([0.1])
    assert flat(explicit(per_row(p), 3)) == [[p.item(), p.item() + 1, p.item() + 2]]


@PROFILE
@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=4))
def test_concatenate_along_tokens(parts: list[list[int]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.int64) for part in parts]
    assert flat(concatenate(tensors)) == [list(itertools.chain(*parts))]


def test_concatenate_brings_parts_to_one_form() -> None:
    where = concatenate(
        [
            torch.tensor([1, 2], dtype=torch.int32),
            torch.tensor([[0.5], [7.0]]),
            Positions(torch.tensor([[[3]]]), offset=4, add_index=False),
        ]
    )
    assert resolve(where, 2, 4) == [[[1, 2, 0.5, 7], [1, 2, 7, 7]]]
    assert where.ids is not None
    assert where.ids.dtype == torch.float64
    narrow = concatenate([torch.tensor([1], dtype=torch.int32)] * 2)
    assert narrow.ids is not None
    assert narrow.ids.dtype == torch.int32


def test_concatenate_along_rows() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 6]])]
    assert resolve(concatenate(rows, along="rows"), 3, 2) == [[[1, 2], [3, 4], [5, 6]]]


# --- context parallelism --------------------------------------------------------------------------


def held(tokens: int, rank: int, size: int, kind: str) -> list[int]:
    """Return the indices of the tokens of a rank."""
    if kind == "contiguous":
        chunks, mine = size, [rank]
    else:
        chunks, mine = 2 * size, [rank, 2 * size - 1 - rank]
    length = tokens // chunks
    return [chunk * length + i for chunk in mine for i in range(length)]


@PROFILE
@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.sampled_from(["contiguous", "zigzag"]))
def test_a_shard_is_its_part_of_the_whole(
    data: st.DataObject, size: int, each: int, kind: str
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    tokens = each * size * (1 if kind == "contiguous" else 2)
    numbers = torch.randint(-50, 50, (2, 2, tokens))
    wholes: list[positions.PositionsLike] = [
        None,
        data.draw(st.integers(-9, 9)),
        numbers[0, 0],
        numbers[0].to(torch.int32),
        per_row(torch.tensor([3, -8])),
        per_row(torch.tensor([0.5, 2.0])),
        multi_axis(numbers.double() / 4),
        text(per_row(torch.tensor([3, -8])), axes=2),
        Positions(numbers, offset=5, add_index=False),
    ]
    mine = held(tokens, rank, size, kind)
    for whole in wholes:
        where = shard(whole, rank, size, kind=kind, tokens=tokens)
        wanted = [
            [[row[i] for i in mine] for row in axis]
            for axis in resolve(as_positions(whole), 2, tokens)
        ]
        assert resolve(where, 2, len(mine)) == wanted


def test_zigzag_keeps_float32_offsets_exact() -> None:
    p = torch.tensor([0.1])
    where = shard(per_row(p), 1, 2, kind="zigzag", tokens=16)
    assert flat(where) == [[p.item() + token for token in range(4, 12)]]


def test_contiguous_shards_allocate_nothing() -> None:
    where = shard(7, 3, 4, tokens=8)
    assert (where.ids, where.offset, where.add_index) == (None, 13, True)
    offsets = torch.tensor([1, 2])
    of_rows = shard(per_row(offsets), 1, 2, tokens=8)
    assert of_rows.ids is not None
    assert of_rows.ids.data_ptr() == offsets.data_ptr()
    ids = torch.arange(8)
    of_ids = shard(ids, 1, 2)
    assert of_ids.ids is not None
    assert of_ids.ids.data_ptr() == ids[4:].data_ptr()


@PROFILE
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_zigzag_of_packed_sequences_cuts_each(
    each: list[int], size: int, dtype: torch.dtype
) -> None:
    lengths = [2 * size * n for n in each]
    cu_seqlens = ends_of(lengths, dtype)
    numbers = torch.randperm(sum(lengths))
    for rank in range(size):
        mine, begin = [], 0
        for length in lengths:
            mine += [begin + i for i in held(length, rank, size, "zigzag")]
            begin += length
        where = shard(packed(cu_seqlens), rank, size, kind="zigzag", cu_seqlens=cu_seqlens)
        assert flat(where) == [[flat(packed(cu_seqlens))[0][i] for i in mine]]
        of_numbers = shard(numbers, rank, size, kind="zigzag", cu_seqlens=cu_seqlens)
        assert flat(of_numbers) == [numbers[mine].tolist()]
        of_all = shard(9, rank, size, kind="zigzag", cu_seqlens=cu_seqlens, tokens=sum(lengths))
        assert flat(of_all) == [[9 + i for i in mine]]


@every_backend
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_shards_rotate_as_the_whole_does(kind: str, backend: str) -> None:
    spec, x = RopeSpec(8), torch.randn(2, 3, 24, 8)
    whole = per_row(torch.tensor([0, 1000]))
    wanted = rotate(x, spec, whole, backend=backend)
    for rank in range(3):
        mine = held(24, rank, 3, kind)
        where = shard(whole, rank, 3, kind=kind, tokens=24)
        got = rotate(x[:, :, mine], spec, where, backend=backend)
        assert_same_bits(got, wanted[:, :, mine])


# --- compiled, fake and elsewhere -----------------------------------------------------------------


class Inputs(NamedTuple):
    ends: torch.Tensor
    mask: torch.Tensor


MADE: dict[str, Callable[[Inputs], Positions]] = {
    "per_row": lambda g: per_row(g.ends[1:]),
    "packed": lambda g: packed(g.ends, total=g.mask.shape[1]),
    "packed with an offset": lambda g: packed(g.ends, 4, total=g.mask.shape[1]),
    "packed with offsets": lambda g: packed(g.ends, g.ends[1:], total=g.mask.shape[1]),
    "left_padded": lambda g: left_padded(g.mask),
    "text": lambda g: text(g.mask.to(torch.int64), axes=3),
    "text offset": lambda g: text(3, axes=3, device=g.ends.device),
    "grid": lambda g: grid(2, g.mask.shape[1] // 2, device=g.ends.device),
    "normalised grid": lambda g: grid(2, 4, span=(-1, 1), device=g.ends.device),
    "merged grid": lambda g: grid(2, 4, merge=2, device=g.ends.device),
    "mrope": lambda g: mrope([2, (1, 2, 2), 2], device=g.ends.device),
    "mrope with time steps": lambda g: mrope([(2, 2, 2, 1.5)], device=g.ends.device),
    "concatenate": lambda g: concatenate([g.ends, g.ends, g.mask[0].to(torch.int32)[:2]]),
    "explicit": lambda g: explicit(per_row(g.ends[1:]), g.mask.shape[1]),
    "shard": lambda g: shard(per_row(g.ends[1:]), 1, 2, tokens=2 * g.mask.shape[1]),
    "zigzag shard": lambda g: shard(
        per_row(g.ends[1:]), 1, 2, kind="zigzag", tokens=2 * g.mask.shape[1]
    ),
    "packed zigzag shard": lambda g: shard(
        packed(g.ends, total=g.mask.shape[1]), 1, 2, kind="zigzag", cu_seqlens=g.ends
    ),
}


def example_inputs() -> Inputs:
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8], dtype=torch.bool)
    return Inputs(torch.tensor([0, 4, 8], dtype=torch.int32), mask)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MADE)
def test_made_in_a_compiled_function(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    make, g = MADE[name], example_inputs()
    where = make(g)
    spec = spec_for(where.axes)
    tokens = 8 if where.ids is None or where.add_index else where.ids.shape[2]
    x = torch.randn(2, 3, tokens, 20)

    def function(x: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, make(Inputs(ends, mask)))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same_bits(compiled(x, *g), function(x, *g))


@pytest.mark.parametrize("steps", [(1.5, 0.29, 0.7), (2, 3, 5)], ids=["floats", "ints"])
def test_a_time_step_may_be_an_argument_of_a_compiled_function(steps: Sequence[float]) -> None:
    """From its second value on, the compiler passes a symbol in place of the number."""
    torch._dynamo.reset()

    def ids(x: torch.Tensor, step: float) -> torch.Tensor:
        return x + mrope([(101, 1, 1, step), 1]).ids + mrope_next([(101, 1, 1, step)])

    compiled = torch.compile(ids, fullgraph=True, backend="aot_eager")
    x = torch.zeros(1, dtype=torch.int64)
    for step in steps:
        assert torch.equal(compiled(x, step), ids(x, step))


@pytest.mark.parametrize("name", MADE)
def test_made_on_the_meta_device_and_of_fake_tensors(name: str) -> None:
    make, g = MADE[name], example_inputs()
    wanted = make(g)
    assert wanted.ids is not None
    meta = make(Inputs(*(tensor.to("meta") for tensor in g)))
    assert meta.ids is not None
    assert meta.ids.device.type == "meta"
    with FakeTensorMode() as mode:
        fake = make(Inputs(*map(mode.from_tensor, g)))
    assert fake.ids is not None
    for ids in (meta.ids, fake.ids):
        assert (ids.shape, ids.dtype) == (wanted.ids.shape, wanted.ids.dtype)
    assert (meta.offset, meta.add_index) == (wanted.offset, wanted.add_index)


LOOKS = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "numpy")


@pytest.mark.parametrize("name", MADE)
def test_nothing_reads_from_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a device, reading a value would synchronise.
    g = Inputs(*(tensor.to("meta") for tensor in example_inputs()))
    looked = []
    for method in LOOKS:
        monkeypatch.setattr(torch.Tensor, method, lambda *_, method=method: looked.append(method))
    MADE[name](g)
    assert looked == []


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", REFUSED)
def test_dtypes_that_cannot_count_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    ids = torch.zeros(3, dtype=dtype)
    rule = r"must be int32, int64, float32 or float64"
    with pytest.raises(
        TypeError, match=rf"^\[rotate\] positions {rule} \(positions: {name}\[3\]\)\.$"
    ):
        rotate(torch.zeros(1, 1, 3, 8), RopeSpec(8), ids)
    with pytest.raises(
        TypeError, match=rf"^\[per_row\] offsets {rule} \(offsets: {name}\[3\]\)\.$"
    ):
        per_row(ids)
    with pytest.raises(TypeError, match=rf"^\[multi_axis\] ids {rule} \(ids: {name}\[3, 1\]\)\.$"):
        multi_axis(ids[:, None])


@pytest.mark.parametrize(
    "shape, hint",
    [
        ((), "; pass one offset as an int, or a tensor x of one as positions.per_row(x[None])"),
        ((2, 3, 4), "; see positions.multi_axis"),
    ],
)
def test_ids_of_another_rank_are_refused(shape: tuple[int, ...], hint: str) -> None:
    sizes = ", ".join(map(str, shape))
    rule = rf"positions must have shape \(tokens,\) or \(rows, tokens\){re.escape(hint)}"
    with pytest.raises(ValueError, match=rf"^\[rotate\] {rule} \(positions: int64\[{sizes}\]\)\.$"):
        rotate(torch.zeros(1, 1, 3, 8), RopeSpec(8), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_not_an_offset(value: bool) -> None:
    with pytest.raises(
        TypeError, match=rf"^\[at\] positions must not be a bool but got {value}\.$"
    ):
        RopeSpec(8).at(value)


@pytest.mark.parametrize("value, name", [(1.0, "float"), ("1", "str"), ([0, 1], "list")])
def test_other_types_are_refused(value: object, name: str) -> None:
    rule = "positions must be None, an int offset, a tensor of ids or a Positions but got"
    with pytest.raises(TypeError, match=rf"^\[at\] {rule} {name}\.$"):
        RopeSpec(8).at(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_offset_of_more_than_64_bits_is_refused(value: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^\[at\] an offset must fit in 64 bits but got {value}\.$"
    ):
        RopeSpec(8).at(value)


def test_per_row_takes_one_dimension() -> None:
    rule = r"^\[per_row\] offsets must have shape \(rows,\) \(offsets: int64\[2, 1\]\)\.$"
    with pytest.raises(ValueError, match=rule):
        per_row(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^\[per_row\] offsets must be a tensor but got 7\.$"):
        per_row(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3, 4)])
def test_multi_axis_takes_two_or_three_dimensions(shape: tuple[int, ...]) -> None:
    sizes = ", ".join(map(str, shape))
    rule = r"ids must have shape \(axes, tokens\) or \(axes, rows, tokens\)"
    with pytest.raises(ValueError, match=rf"^\[multi_axis\] {rule} \(ids: int64\[{sizes}\]\)\.$"):
        multi_axis(torch.zeros(shape, dtype=torch.int64))


# --- errors of the other kinds -----------------------------------------------------------------

ENDS = torch.tensor([0, 3, 5])
MASK = torch.ones(2, 3)
TWO = RopeSpec(8, axes=Axes.blocks((2, 2)))
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: packed([0, 3, 5]),  # type: ignore[arg-type]
        TypeError,
        "[packed] cu_seqlens must be int32 or int64 but got [0, 3, 5].",
    ),
    (
        lambda: packed(ENDS.float()),
        TypeError,
        "[packed] cu_seqlens must be int32 or int64 but got float32[3].",
    ),
    (
        lambda: packed(ENDS[None]),
        ValueError,
        "[packed] cu_seqlens must have shape (sequences + 1,) with at least one sequence "
        "(cu_seqlens: int64[1, 3]).",
    ),
    (
        lambda: packed(ENDS[:1]),
        ValueError,
        "[packed] cu_seqlens must have shape (sequences + 1,) with at least one sequence "
        "(cu_seqlens: int64[1]).",
    ),
    (
        lambda: packed(ENDS + 1),
        ValueError,
        "[packed] cu_seqlens must start with 0 and never decrease but got [1, 4, 6].",
    ),
    (
        lambda: packed(torch.tensor([0, 5, 3])),
        ValueError,
        "[packed] cu_seqlens must start with 0 and never decrease but got [0, 5, 3].",
    ),
    (
        lambda: packed(ENDS, total=6),
        ValueError,
        "[packed] cu_seqlens must end with the number of tokens 6 but got 5.",
    ),
    (
        lambda: packed(ENDS, total=-1),
        ValueError,
        "[packed] total must not be negative but got -1.",
    ),
    (
        lambda: packed(ENDS, total=5.0),  # type: ignore[arg-type]
        TypeError,
        "[packed] total must be an int but got 5.0.",
    ),
    (
        lambda: packed(ENDS.to("meta")),
        ValueError,
        "[packed] total must be given if reading cu_seqlens would wait for a device or break a "
        "graph (cu_seqlens: int64[3]).",
    ),
    (
        lambda: packed(ENDS, torch.tensor([1, 2, 3])),
        ValueError,
        "[packed] offsets must have shape (2,), one for each sequence, on the device of cu_seqlens "
        "(offsets: int64[3], cu_seqlens: int64[3]).",
    ),
    (
        lambda: packed(ENDS, torch.tensor([1, 2], device="meta")),
        ValueError,
        "[packed] offsets must have shape (2,), one for each sequence, on the device of cu_seqlens "
        "(offsets: int64[2], cu_seqlens: int64[3]).",
    ),
    (
        lambda: packed(ENDS, torch.tensor([True, False])),
        TypeError,
        "[packed] offsets must be int32, int64, float32 or float64 (offsets: bool[2]).",
    ),
    (
        lambda: packed(ENDS, per_row(ENDS[1:])),  # type: ignore[arg-type]
        TypeError,
        "[packed] offsets must be None, an int or a tensor with one offset for each sequence "
        "but got a Positions; pass the tensor itself.",
    ),
    (
        lambda: packed(ENDS, True),
        TypeError,
        "[packed] offsets must be None, an int or a tensor with one offset for each sequence "
        "but got a bool.",
    ),
    (
        lambda: left_padded(MASK),
        TypeError,
        "[left_padded] attention_mask must be bool or integers but got float32[2, 3].",
    ),
    (
        lambda: left_padded(MASK[0].bool()),
        ValueError,
        "[left_padded] attention_mask must have shape (rows, tokens) (attention_mask: bool[3]).",
    ),
    (
        lambda: left_padded(torch.tensor([[1, 1, 2]])),
        ValueError,
        "[left_padded] attention_mask must hold only 0 and 1 but goes from 1 to 2; if it numbers "
        "packed sequences, call positions.packed.",
    ),
    (
        lambda: text(multi_axis(torch.zeros(2, 9)), axes=3),
        ValueError,
        "[text] positions must have 1 axis but got 2 (positions: float32[2, 1, 9]).",
    ),
    (lambda: text(axes=-1), ValueError, "[text] axes must not be negative but got -1."),
    (
        lambda: text(0.5, axes=3),  # type: ignore[arg-type]
        TypeError,
        "[text] positions must be None, an int offset, a tensor of ids or a Positions but got float.",
    ),
    (lambda: grid(), ValueError, "[grid] a grid must have at least one size but got none."),
    (lambda: grid(4, -1), ValueError, "[grid] a size must not be negative but got -1."),
    (
        lambda: grid((4, 2)),  # type: ignore[arg-type]
        TypeError,
        "[grid] a size must be an int but got (4, 2).",
    ),
    (
        lambda: grid(torch.tensor(4)),  # type: ignore[arg-type]
        TypeError,
        "[grid] a size must be an int but got int64[].",
    ),
    (
        lambda: grid(4, 3, merge=2),
        ValueError,
        "[grid] sizes must be multiples of merge but got (4, 3) and (2, 2).",
    ),
    (
        lambda: grid(4, 3, merge=0),
        ValueError,
        "[grid] sizes must be multiples of merge but got (4, 3) and (0, 0).",
    ),
    (
        lambda: grid(4, 3, start=(1, 2, 3)),
        ValueError,
        "[grid] start must be one number, or one for each of 2 axes, but got (1, 2, 3).",
    ),
    (
        lambda: grid(4, 3, step="1"),  # type: ignore[arg-type]
        TypeError,
        "[grid] step must be an int or a float but got '1'.",
    ),
    (
        lambda: grid(4, 3, span=(-1, 1), step=2),
        ValueError,
        "[grid] span must be None if start or step is given but got (-1, 1).",
    ),
    (
        lambda: grid(4, 3, span=2.0),  # type: ignore[arg-type]
        TypeError,
        "[grid] span must be (low, high), or one such pair for each of 2 axes, but got 2.0.",
    ),
    (
        lambda: grid(4, 3, span=((0, 1),)),
        ValueError,
        "[grid] span must be (low, high), or one such pair for each of 2 axes, but got ((0, 1),).",
    ),
    (
        lambda: grid(4, 3, span=(0, 1, 2)),  # type: ignore[arg-type]
        ValueError,
        "[grid] span must be (low, high), or one such pair for each of 2 axes, but got (0, 1, 2).",
    ),
    (
        lambda: grid(4, span=(None, 1)),  # type: ignore[arg-type]
        TypeError,
        "[grid] an end of span must be an int or a float but got None.",
    ),
    (
        lambda: mrope(5),  # type: ignore[arg-type]
        TypeError,
        "[mrope] segments must be an iterable of ints and tuples (t, h, w) or (t, h, w, time_step) but got 5.",
    ),
    (
        lambda: mrope([2, (4, 4)]),  # type: ignore[list-item]
        ValueError,
        "[mrope] segments must be ints and tuples (t, h, w) or (t, h, w, time_step) but got (4, 4).",
    ),
    (
        lambda: mrope([-2]),
        ValueError,
        "[mrope] a number of text tokens must not be negative but got -2.",
    ),
    (
        lambda: mrope([2.5]),  # type: ignore[list-item]
        TypeError,
        "[mrope] a number of text tokens must be an int but got 2.5.",
    ),
    (
        lambda: mrope([(1, 0, 4)]),
        ValueError,
        "[mrope] t, h and w must be positive but got (1, 0, 4).",
    ),
    (
        lambda: mrope_next([(2, 2, 4, -1.0)]),
        ValueError,
        "[mrope_next] time_step must not be negative, and t · time_step below 2^63, but got -1.0.",
    ),
    (
        lambda: mrope([(2, 2, 4, math.nan)]),
        ValueError,
        "[mrope] time_step must not be negative, and t · time_step below 2^63, but got nan.",
    ),
    (
        lambda: mrope([(2, 1, 1, 1e39)]),
        ValueError,
        "[mrope] time_step must not be negative, and t · time_step below 2^63, but got 1e+39.",
    ),
    (
        lambda: mrope([2], start=2**63),
        ValueError,
        "[mrope] start must fit in 64 bits but got 9223372036854775808.",
    ),
    (
        lambda: mrope([(1, 1, 2), 3], start=2**63 - 5),
        ValueError,
        "[mrope] the position after the last must fit in 64 bits but got 9223372036854775808.",
    ),
    (
        lambda: grid(2, start=2**70),
        ValueError,
        "[grid] start must fit in 64 bits but got 1180591620717411303424.",
    ),
    (
        lambda: grid(2, step=-(2**70), start=0.5),
        ValueError,
        "[grid] step must fit in 64 bits but got -1180591620717411303424.",
    ),
    (
        lambda: mrope([2], next_from="time"),
        ValueError,
        "[mrope] next_from must be 'all' or 'space' but got 'time'.",
    ),
    (lambda: mrope([2], start=0.5), TypeError, "[mrope] start must be an int but got 0.5."),  # type: ignore[arg-type]
    (
        lambda: explicit(5),
        ValueError,
        "[explicit] tokens must be given for positions without an id per token.",
    ),
    (
        lambda: explicit(ENDS, 4),
        ValueError,
        "[explicit] positions must hold one position for each of 4 tokens but got 3 "
        "(positions: int64[1, 1, 3]).",
    ),
    (
        lambda: concatenate([]),
        ValueError,
        "[concatenate] parts must have at least one element but got none.",
    ),
    (
        lambda: concatenate(ENDS),  # type: ignore[arg-type]
        TypeError,
        "[concatenate] parts must be a sequence of positions but got int64[3].",
    ),
    (
        lambda: concatenate([ENDS], along="heads"),
        ValueError,
        "[concatenate] along must be 'tokens' or 'rows' but got 'heads'.",
    ),
    (
        lambda: concatenate([ENDS, 5]),
        ValueError,
        "[concatenate] parts must have an id for each token; call positions.explicit(part, tokens) "
        "(part: 5).",
    ),
    (
        lambda: concatenate([per_row(ENDS)]),
        ValueError,
        "[concatenate] parts must have an id for each token; call positions.explicit(part, tokens) "
        "(part: int64[1, 3, 1]).",
    ),
    (
        lambda: concatenate([grid(2, 2), ENDS]),
        ValueError,
        "[concatenate] parts must have the same numbers of axes and rows "
        "(one: int64[2, 1, 4], other: int64[1, 1, 3]).",
    ),
    (
        lambda: concatenate([grid(2, 2), grid(2, 3)], along="rows"),
        ValueError,
        "[concatenate] parts must have the same numbers of axes and tokens "
        "(one: int64[2, 1, 4], other: int64[2, 1, 6]).",
    ),
    (
        lambda: shard(None, 2, 2, tokens=8),
        ValueError,
        "[shard] rank must lie in [0, 2) for size 2 but got 2.",
    ),
    (
        lambda: shard(None, 0, 0, tokens=8),
        ValueError,
        "[shard] size must be at least 1 but got 0.",
    ),
    (
        lambda: shard(None, 0, 2, tokens=8, kind="striped"),
        ValueError,
        "[shard] kind must be 'contiguous' or 'zigzag' but got 'striped'.",
    ),
    (
        lambda: shard(None, 0, 2),
        ValueError,
        "[shard] tokens must be given for positions without an id per token.",
    ),
    (
        lambda: shard(ENDS, 0, 2),
        ValueError,
        "[shard] tokens must be a multiple of 2 for 2 contiguous shards but got 3.",
    ),
    (
        lambda: shard(None, 0, 2, tokens=6, kind="zigzag"),
        ValueError,
        "[shard] tokens must be a multiple of 4 for 2 zigzag shards but got 6.",
    ),
    (
        lambda: shard(None, 0, 1, tokens=5, cu_seqlens=ENDS),
        ValueError,
        "[shard] cu_seqlens must be None for kind 'contiguous', which cuts the whole row "
        "(cu_seqlens: int64[3]).",
    ),
    (
        lambda: shard(None, 0, 2, tokens=8, kind="zigzag", cu_seqlens=torch.tensor([0, 3, 8])),
        ValueError,
        "[shard] every sequence must have a multiple of 4 tokens for 2 zigzag shards but got "
        "cu_seqlens [0, 3, 8].",
    ),
    (
        lambda: shard(None, 0, 2, tokens=8, kind="zigzag", cu_seqlens=torch.tensor([0, 4])),
        ValueError,
        "[shard] cu_seqlens must end with the number of tokens 8 but got 4.",
    ),
    # A spec refuses positions with another number of axes.
    (
        lambda: TWO.at(torch.zeros(2, 5)),
        ValueError,
        "[at] positions must have 2 axes for this spec but got 1; call positions.multi_axis with ids "
        "(2, tokens) or (2, rows, tokens), or positions.text(…, axes=2) if all coordinates of a "
        "token are equal (positions: float32[2, 5]).",
    ),
    (
        lambda: rotate(torch.ones(2, 5, 8), TWO, torch.zeros(5), layout="bsd"),
        ValueError,
        "[rotate] positions must have 2 axes for this spec but got 1; call positions.multi_axis with "
        "ids (2, tokens) or (2, rows, tokens), or positions.text(…, axes=2) if all coordinates of "
        "a token are equal (positions: float32[1, 5]).",
    ),
    (
        lambda: rotate(torch.ones(2, 5, 8), TWO, layout="bsd"),
        ValueError,
        "[rotate] positions must have 2 axes for this spec but got 1; call positions.multi_axis with "
        "ids (2, tokens) or (2, rows, tokens), or positions.text(…, axes=2) if all coordinates of "
        "a token are equal (positions: None).",
    ),
    (
        lambda: rotate(torch.ones(2, 5, 8), TWO, multi_axis(torch.zeros(3, 5)), layout="bsd"),
        ValueError,
        "[rotate] positions must have 2 axes for this spec but got 3; call positions.multi_axis with "
        "ids (2, tokens) or (2, rows, tokens), or positions.text(…, axes=2) if all coordinates of "
        "a token are equal (positions: float32[3, 1, 5]).",
    ),
    (
        lambda: text(3, axes=0),
        ValueError,
        "[text] axes must be at least 1 but got 0.",
    ),
    (
        lambda: RopeSpec(8).at(grid(2, 2)),
        ValueError,
        "[at] positions must have 1 axis for this spec but got 2; pass axes= to RopeSpec, such as "
        "Axes.blocks(…) for 2 coordinates (positions: int64[2, 1, 4]).",
    ),
]


@pytest.mark.parametrize("call, error, text", WRONG, ids=range(len(WRONG)))
def test_invalid_positions_are_refused(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
