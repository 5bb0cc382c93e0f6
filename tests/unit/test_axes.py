"""Axes: the assignment of pairs to coordinates, compared with many digits and with the published slices as data.

tests/coverage/test_rows.py compares those of families with what their own code rotates.
"""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle
from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import Result, assert_rotated
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate

# --- rotations ------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "axes",
    [
        Axes.sections((4, 3, 5)),
        Axes.sections((5, 4, 3), interleaved=True),
        Axes.blocks((6, 4, 2)),
        Axes.strided(3, pairs=12),
    ],
    ids=repr,
)
def test_against_many_digits(axes: Axes, dtype: torch.dtype, backend: str) -> None:
    omegas = [
        [oracle.frequencies(5e5, dim)[index] * (owner == axis) for owner, index, dim in axes.pairs]
        for axis in range(axes.count)
    ]
    far = torch.tensor([[[0, 1, 70_001]], [[1_000_003, 2, 17]], [[5, 131_072, 999_999]]])
    x = noise(2, 2, 3, 30).to(dtype)
    for ids in (far, far.double() + 0.375):
        spec = RopeSpec(30, base=5e5, rotary_dim=24, start=3, axes=axes)
        got = on(backend, rotate, x, spec, positions.multi_axis(ids))
        exact = oracle.rotate(x, ids.expand(-1, 2, -1), omegas, start=3)
        lengths = oracle.pair_lengths(x, 24, start=3)
        assert_rotated([Result(got, exact, lengths, reach=float(ids.max()))])


# --- the assignments as data ----------------------------------------------------------------------

PROFILE = settings(derandomize=True, database=None, deadline=None)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@PROFILE
@given(SIZES)
def test_sections_and_blocks_give_every_axis_its_pairs(sizes: list[int]) -> None:
    owners, total = [axis for axis, size in enumerate(sizes) for _ in range(size)], sum(sizes)
    wanted = [(axis, k, 2 * total) for k, axis in enumerate(owners)]
    assert list(Axes.sections(sizes).pairs) == wanted
    assert Axes.sections(sizes).rotary_dim == 2 * total
    # Blocks are small embeddings side by side.
    wanted = [(axis, j, 2 * size) for axis, size in enumerate(sizes) for j in range(size)]
    assert list(Axes.blocks(sizes).pairs) == wanted


@PROFILE
@given(SIZES)
def test_interleaved_sections_follow_the_published_slices(sizes: list[int]) -> None:
    count, total = len(sizes), sum(sizes)
    owner = torch.zeros(total, dtype=torch.int64)
    for axis in range(1, count):
        owner[slice(axis, sizes[axis] * count, count)] = axis
    if any(int((owner == axis).sum()) != size for axis, size in enumerate(sizes)):
        with pytest.raises(ValueError, match=r"sizes must fit pairs 0 to \d+ when interleaved"):
            Axes.sections(sizes, interleaved=True)
        return
    wanted = [(axis, k, 2 * total) for k, axis in enumerate(owner.tolist())]
    assert list(Axes.sections(sizes, interleaved=True).pairs) == wanted


@PROFILE
@given(st.integers(1, 5), st.integers(0, 9))
def test_strides_use_every_frequency_once(count: int, each: int) -> None:
    total = count * each
    wanted = [(axis, k, 2 * total) for axis in range(count) for k in range(axis, total, count)]
    assert list(Axes.strided(count, total).pairs) == wanted


def test_equal_assignments_are_equal() -> None:
    assert Axes.sections((8,)) == Axes.blocks((8,)) == Axes.strided(1, 8)
    assert Axes(2, [[1, 0, 4], [0, 0, 4]]) == Axes(2, ((1, 0, 4), (0, 0, 4)))  # type: ignore[arg-type]
