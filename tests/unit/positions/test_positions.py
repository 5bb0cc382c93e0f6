"""Every way to specify positions, compared with positions that an independent loop computes number by number."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support.matrix import every_backend
from tests.support.resolved import flat, resolve
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
    multi_axis,
    packed,
    per_row,
    shard,
    text,
)

PROFILE = settings(derandomize=True, database=None, deadline=None)
ALLOWED = [torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("offset", [0, 7, -3, 2**31, 2**63 - 1, -(2**63), numpy.int32(7)])
def test_an_int_is_an_offset(offset: int) -> None:
    where = as_positions(offset)
    assert where.ids is None
    assert resolve(where, 1, 2) == [[[offset, int(offset) + 1]]]


@pytest.mark.parametrize("dtype", ALLOWED)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    one = torch.tensor([3, 1, -4]).to(dtype)
    assert resolve(as_positions(one), 2, 3) == [[[3, 1, -4], [3, 1, -4]]]
    two = torch.tensor([[3, 1, 4], [1, 5, 9]]).to(dtype)
    where = as_positions(two)
    assert resolve(where, 2, 3) == [[[3, 1, 4], [1, 5, 9]]]
    assert where.ids.dtype == dtype
    assert where.ids.data_ptr() == two.data_ptr()  # nothing is copied
    assert resolve(per_row(two[:, 0]), 2, 3) == [[[3, 4, 5], [1, 2, 3]]]
    assert resolve(multi_axis(two), 1, 3) == [[[3, 1, 4]], [[1, 5, 9]]]
    per_row_too = torch.stack((two, two + 1), 1)
    assert resolve(multi_axis(per_row_too), 2, 3)[1] == [[1, 5, 9], [2, 6, 10]]


def test_canonical_form_passes_through() -> None:
    where = per_row(torch.tensor([1, 2]))
    assert as_positions(where) is where
    assert as_positions(positions.ZERO) is positions.ZERO
    with pytest.raises(dataclasses.FrozenInstanceError):
        where.offset = 3  # type: ignore[misc]


def test_empty_ids_are_ids() -> None:
    where = as_positions(torch.zeros(0, dtype=torch.int64))
    assert where.ids.shape == (1, 1, 0)


# --- packed ---------------------------------------------------------------------------------------

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


# --- explicit, concatenate, shard ------------------------------------------------------------------


def line(start: float, tokens: int = 8) -> list[float]:
    return [start + token for token in range(tokens)]


ROWS = torch.tensor([100, -4])
# Positions of 8 tokens, with their values [axes][rows][tokens].
KINDS: dict[str, tuple[positions.PositionsLike, list[list[list[float]]]]] = {
    "none": (None, [[line(0)]]),
    "offset": (70_000, [[line(70_000)]]),
    "ids": (torch.tensor([5, 3, 3, 9, -1, 0, 2, 7]), [[[5, 3, 3, 9, -1, 0, 2, 7]]]),
    "ids per row": (torch.tensor([line(4), line(-9)]).int(), [[line(4), line(-9)]]),
    "fractional ids": (torch.tensor(line(0.25)), [[line(0.25)]]),
    "offset per row": (per_row(ROWS), [[line(100), line(-4)]]),
    # Not 0.5: half a phase word may be rounded either way, which can change the last bit of float64.
    "fractional offset per row": (per_row(ROWS + 0.25), [[line(100.25), line(-3.75)]]),
    "packed": (packed(torch.tensor([0, 3, 3, 8])), [[line(0, 3) + line(0, 5)]]),
    "packed with an offset": (packed(torch.tensor([0, 3, 8]), 7), [[line(7, 3) + line(7, 5)]]),
    "packed with offsets": (packed(torch.tensor([0, 3, 8]), ROWS), [[line(100, 3) + line(-4, 5)]]),
    "packed with fractional offsets": (
        packed(torch.tensor([0, 3, 8]), ROWS / 8),
        [[line(12.5, 3) + line(-0.5, 5)]],
    ),
    "left padded": (
        left_padded(torch.tensor([[0] * 5 + [1] * 3, [1] * 8])),
        [[[0] * 5 + [0, 1, 2], line(0)]],
    ),
    "two axes": (multi_axis(torch.tensor([line(0), line(9)])), [[line(0)], [line(9)]]),
    "two axes per row": (
        multi_axis(torch.tensor([[line(0), line(1)], [line(2), line(3)]])),
        [[line(0), line(1)], [line(2), line(3)]],
    ),
    "text": (text(6, axes=2), [[line(6)]] * 2),
    "text per row": (text(per_row(ROWS), axes=3), [[line(100), line(-4)]] * 3),
    "text with ids": (text(torch.tensor(line(2)), axes=2), [[line(2)]] * 2),
    "grid": (grid(4, 2), [[[0, 0, 1, 1, 2, 2, 3, 3]], [[0, 1] * 4]]),
    "normalised grid": (
        grid(4, 2, span=(-1, 1)),
        [[[-0.75] * 2 + [-0.25] * 2 + [0.25] * 2 + [0.75] * 2], [[-0.5, 0.5] * 4]],
    ),
    "mixed": (
        mrope([3, (1, 2, 2), 1]),
        [[[0, 1, 2, 3, 3, 3, 3, 5]], [[0, 1, 2, 3, 3, 4, 4, 5]], [[0, 1, 2, 3, 4, 3, 4, 5]]],
    ),
    "images of several sizes": (
        concatenate([grid(1, 4), grid(2, 2)]),
        [[[0] * 6 + [1, 1]], [[0, 1, 2, 3, 0, 1, 0, 1]]],
    ),
    "shard": (shard(5, 1, 2, tokens=16), [[line(13)]]),
    "zigzag shard": (
        shard(per_row(ROWS), 1, 3, kind="zigzag", tokens=24),
        [[line(104, 4) + line(116, 4), line(0, 4) + line(12, 4)]],
    ),
}
every_kind = pytest.mark.parametrize("where, wanted", KINDS.values(), ids=KINDS)


def spec_for(axes: int) -> RopeSpec:
    if axes == 1:
        return RopeSpec(20, rotary_dim=12, start=3)
    return RopeSpec(20, rotary_dim=12, start=3, axes=Axes.blocks((6 // axes,) * axes))


@every_kind
def test_every_kind_gives_its_positions(where: positions.PositionsLike, wanted: Any) -> None:
    assert resolve(as_positions(where), len(wanted[0]), 8) == wanted
    written = explicit(where, 8)
    assert (written.offset, written.add_index) == (0, False)
    assert written.ids.dtype in (torch.int64, torch.float64)
    assert resolve(written, len(wanted[0]), 8) == wanted


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_kind
def test_every_kind_equals_its_ids_bit_for_bit(
    where: positions.PositionsLike, wanted: Any, dtype: torch.dtype, backend: str
) -> None:
    ids = torch.tensor(wanted, dtype=torch.float64)
    if (ids == ids.round()).all():
        ids = ids.to(torch.int64)
    spec = spec_for(len(wanted))
    x = torch.randn(2, 3, 8, 20).to(dtype).requires_grad_()
    weight = torch.randn(x.shape).to(dtype)
    results = []
    for rope, at in (
        (spec, where),
        (spec.at(where), None),
        (spec, Positions(ids, add_index=False)),
    ):
        y = rotate(x, rope, at, backend=backend)
        results.append((y, *torch.autograd.grad(y, x, weight)))
    for made in results[:2]:
        assert_same_bits(made[0], results[2][0])
        assert_same_bits(made[1], results[2][1])


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
    assert where.ids.dtype == torch.float64
    narrow = concatenate([torch.tensor([1], dtype=torch.int32)] * 2)
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
    assert of_rows.ids.data_ptr() == offsets.data_ptr()
    ids = torch.arange(8)
    of_ids = shard(ids, 1, 2)
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
