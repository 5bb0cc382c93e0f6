"""Every way to specify positions, compared with those that an independent loop computes number by number."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.helpers import on
from tests.support.matrix import every_backend
from tests.support.rows import read_rows
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate
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

PROFILE = settings(derandomize=True, database=None, deadline=None)


def resolve(where: Positions, rows: int, tokens: int) -> list[list[list[float]]]:
    """Expand a canonical form to positions [axes, rows, tokens], number by number."""

    def position(axis: int, row: int, token: int) -> float:
        counted = where.offset + (token if where.add_index else 0)
        if where.ids is None:
            return counted
        own = row if where.ids.shape[1] > 1 else 0
        return counted + where.ids[axis, own, 0 if where.add_index else token].item()

    axes = range(1 if where.ids is None else where.ids.shape[0])
    return [[[position(a, r, t) for t in range(tokens)] for r in range(rows)] for a in axes]


def flat(where: Positions) -> list[list[float]]:
    """Return positions of one row as [axes, tokens]."""
    return [axis[0] for axis in resolve(where, 1, 0 if where.ids is None else where.ids.shape[2])]


def columns(tokens: list[tuple[Any, ...]], axes: int) -> list[list[Any]]:
    return [[token[axis] for token in tokens] for axis in range(axes)]


# --- every kind -----------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The tensors that positions of 8 tokens are made of."""

    ids: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor


INPUTS = Inputs(
    torch.tensor([5, 3, 3, 9, -1, 0, 2, 7]),
    torch.tensor([0, 4, 8], dtype=torch.int32),
    torch.tensor([100, -4]),
    torch.tensor([[0] * 5 + [1] * 3, [1] * 8], dtype=torch.bool),
)
IDS = INPUTS.ids.tolist()


def line(start: float, tokens: int = 8) -> list[float]:
    return [start + token for token in range(tokens)]


def inside(g: Inputs, offsets: Any = None) -> Positions:
    return packed(g.ends, offsets, total=g.mask.shape[1])


def kind_of(row: dict[str, str]) -> tuple[Callable[[Inputs], Any], list[list[list[float]]]]:
    """Return the maker of positions of a row of kinds.jsonl, a function of Inputs `g`, and the values that it gives."""
    return eval(f"lambda g: {row['make']}", globals()), eval(row["positions"], globals())


# How they are made, and their values [axes][rows][tokens].
KINDS = {
    name: kind_of(row) for name, row in read_rows(Path(__file__).with_name("kinds.jsonl")).items()
}
every_kind = pytest.mark.parametrize("make, wanted", KINDS.values(), ids=KINDS)


def spec_for(axes: int) -> RopeSpec:
    sections = None if axes == 1 else Axes.blocks((6 // axes,) * axes)
    return RopeSpec(20, rotary_dim=12, start=3, axes=sections)


def x_for(wanted: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, len(wanted[0][0]), 20).to(dtype)


@every_kind
def test_every_kind_gives_its_positions(make: Any, wanted: Any) -> None:
    where, size = as_positions(make(INPUTS)), (len(wanted[0]), len(wanted[0][0]))
    assert resolve(where, *size) == wanted
    written = explicit(where, size[1])
    assert (written.offset, written.add_index) == (0, False)
    assert written.ids.dtype in (torch.int64, torch.float64)
    assert resolve(written, *size) == wanted


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_kind
def test_every_kind_equals_its_ids_bit_for_bit(
    make: Any, wanted: Any, dtype: torch.dtype, backend: str
) -> None:
    ids = torch.tensor(wanted, dtype=torch.float64)
    if (ids == ids.round()).all():
        ids = ids.to(torch.int64)
    spec, x, where = spec_for(len(wanted)), x_for(wanted, dtype).requires_grad_(), make(INPUTS)
    weight, results = torch.randn(x.shape).to(dtype), []
    for rope, at in ((spec, where), (spec.at(where), None), (spec, Positions(ids, 0, False))):
        y = on(backend, rotate, x, rope, at)
        results.append((y, *torch.autograd.grad(y, x, weight)))
    for made in results[:2]:
        assert_same_bits(made, results[2])


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "make, wanted, dynamic",
    [(*kind, n % 2 == 0) for n, kind in enumerate(KINDS.values())],
    ids=KINDS,
)
def test_made_in_a_compiled_function(
    make: Any, wanted: Any, dynamic: bool, fresh_compiler: None
) -> None:
    spec, x = spec_for(len(wanted)), x_for(wanted)

    def function(x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, make(Inputs(*inputs)))

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
    assert_same_bits(compiled(x, *INPUTS), function(x, *INPUTS))


@every_kind
def test_made_on_the_meta_device_and_of_fake_tensors(make: Any, wanted: Any) -> None:
    """Meta tensors stand for those of a device: reading one is an error."""
    right = as_positions(make(INPUTS))
    if right.ids is None:
        return
    meta = as_positions(make(Inputs(*(tensor.to("meta") for tensor in INPUTS))))
    assert meta.ids.device.type == "meta"
    with FakeTensorMode() as mode:
        fake = as_positions(make(Inputs(*map(mode.from_tensor, INPUTS))))
    for ids in (meta.ids, fake.ids):
        assert (ids.shape, ids.dtype) == (right.ids.shape, right.ids.dtype)
    assert (meta.offset, meta.add_index) == (right.offset, right.add_index)


# --- the canonical form ---------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 7, -3, 2**31, 2**63 - 1, -(2**63), numpy.int32(7)])
def test_an_int_is_an_offset(offset: int) -> None:
    where = as_positions(offset)
    assert where.ids is None
    assert resolve(where, 1, 2) == [[[offset, int(offset) + 1]]]


def test_canonical_form_passes_through() -> None:
    where = per_row(torch.tensor([1, 2]))
    assert as_positions(where) is where
    assert as_positions(positions.ZERO) is positions.ZERO
    with pytest.raises(dataclasses.FrozenInstanceError):
        where.offset = 3  # type: ignore[misc]
    assert as_positions(torch.zeros(0, dtype=torch.int64)).ids.shape == (1, 1, 0)
    ids = torch.zeros(2, 3)
    assert as_positions(ids).ids.data_ptr() == ids.data_ptr()  # nothing is copied


def test_float32_numbers_are_added_to_exactly() -> None:
    p, tenth = torch.tensor([0.1]), torch.tensor([0.1]).item()
    assert flat(explicit(per_row(p), 3)) == [line(tenth, 3)]
    where = shard(per_row(p), 1, 2, kind="zigzag", tokens=16)
    assert flat(where) == [[tenth + token for token in range(4, 12)]]


# --- packed and padded rows -----------------------------------------------------------------------


def ends_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


@PROFILE
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(-(2**40), 2**40)), min_size=1, max_size=6),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.booleans(),
)
def test_packed_positions_restart(
    sequences: list[tuple[int, int]], dtype: torch.dtype, shared: bool, with_total: bool
) -> None:
    """At one offset for all sequences, or at one for each."""
    lengths, offsets = zip(*sequences, strict=True)
    if shared:
        offsets = offsets[:1] * len(lengths)
    wanted = [at + token for length, at in zip(lengths, offsets) for token in range(length)]
    given_offsets = offsets[0] if shared else torch.tensor(offsets)
    where = packed(ends_of(lengths, dtype), given_offsets, sum(lengths) if with_total else None)
    assert resolve(where, 1, len(wanted)) == [[wanted]]
    assert where.ids.dtype == (dtype if shared else torch.int64)


def test_packed_int32_offsets_do_not_overflow() -> None:
    top = torch.tensor([2**31 - 1], dtype=torch.int32)
    where = packed(torch.tensor([0, 3], dtype=torch.int32), top)
    assert resolve(where, 1, 3) == [[line(top.item(), 3)]]


def test_tokens_past_an_unreadable_end_continue() -> None:
    """A graph cannot compare `total` with the end of cu_seqlens; an eager call refuses another end."""
    make = torch.compile(lambda ends: packed(ends, total=6).ids, fullgraph=True, backend="eager")
    assert make(torch.tensor([0, 3, 5])).tolist() == [[[0, 1, 2, 0, 1, 2]]]


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


# --- concatenate ----------------------------------------------------------------------------------


def test_concatenate_brings_parts_to_one_form() -> None:
    one = torch.tensor([1, 2], dtype=torch.int32)
    rest = torch.tensor([[0.5], [7.0]]), Positions(torch.tensor([[[3]]]), offset=4, add_index=False)
    where = concatenate([one, *rest])
    assert resolve(where, 2, 4) == [[[1, 2, 0.5, 7], [1, 2, 7, 7]]]
    assert where.ids.dtype == torch.float64
    assert concatenate([one] * 2).ids.dtype == torch.int64
    rows = [torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 6]])]
    assert resolve(concatenate(rows, along="rows"), 3, 2) == [[[1, 2], [3, 4], [5, 6]]]


@pytest.mark.parametrize("steps", [(1.5, 0.29, 0.7), (2, 3, 5)], ids=["floats", "ints"])
def test_a_time_step_may_be_an_argument_of_a_compiled_function(
    steps: Sequence[float], fresh_compiler: None
) -> None:
    """From its second value on, the compiler passes a symbol in place of the number."""

    def ids(x: torch.Tensor, step: float) -> torch.Tensor:
        return x + mrope([(101, 1, 1, step), 1]).ids + mrope_next([(101, 1, 1, step)])

    compiled = torch.compile(ids, fullgraph=True, backend="aot_eager")
    x = torch.zeros(1, dtype=torch.int64)
    for step in steps:
        assert_same_bits(compiled(x, step), ids(x, step))


# --- context parallelism --------------------------------------------------------------------------


def held(tokens: int, rank: int, size: int, kind: str) -> list[int]:
    """Return the indices of the tokens of a rank."""
    chunks, mine = size, [rank]
    if kind == "zigzag":
        chunks, mine = 2 * size, [rank, 2 * size - 1 - rank]
    length = tokens // chunks
    return [chunk * length + i for chunk in mine for i in range(length)]


@PROFILE
@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.sampled_from(["contiguous", "zigzag"]))
def test_a_shard_is_its_part_of_the_whole(
    data: st.DataObject, size: int, each: int, kind: str
) -> None:
    rank, tokens = data.draw(st.integers(0, size - 1)), each * size * (1 + (kind == "zigzag"))
    numbers, mine = torch.randint(-50, 50, (2, 2, tokens)), held(tokens, rank, size, kind)
    rows = per_row(torch.tensor([3, -8]))
    wholes: list[positions.PositionsLike] = [
        *(None, data.draw(st.integers(-9, 9)), numbers[0, 0], numbers[0].to(torch.int32), rows),
        *(per_row(torch.tensor([0.5, 2.0])), multi_axis(numbers.double() / 4)),
        *(text(rows, axes=2), Positions(numbers, offset=5, add_index=False)),
    ]
    for whole in wholes:
        where = shard(whole, rank, size, kind=kind, tokens=tokens)
        every = resolve(as_positions(whole), 2, tokens)
        wanted = [[[row[i] for i in mine] for row in axis] for axis in every]
        assert resolve(where, 2, len(mine)) == wanted


def test_contiguous_shards_allocate_nothing() -> None:
    where = shard(7, 3, 4, tokens=8)
    assert (where.ids, where.offset, where.add_index) == (None, 13, True)
    offsets = torch.tensor([1, 2])
    assert shard(per_row(offsets), 1, 2, tokens=8).ids.data_ptr() == offsets.data_ptr()


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
    ends, numbers, total = ends_of(lengths, dtype), torch.randperm(sum(lengths)), sum(lengths)
    for rank in range(size):
        mine = [
            begin + i
            for begin, length in zip(ends.tolist(), lengths)
            for i in held(length, rank, size, "zigzag")
        ]
        for whole in (packed(ends), numbers, 9):
            where = shard(whole, rank, size, kind="zigzag", cu_seqlens=ends, tokens=total)
            every = resolve(as_positions(whole), 1, total)[0][0]
            assert flat(where) == [[every[i] for i in mine]]


# --- grids ----------------------------------------------------------------------------------------

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
