"""Every way to say where tokens are, and the sentences for what says nothing."""

import dataclasses

import numpy
import pytest
import torch

from tightrope import positions
from tightrope.positions import Positions, canonical, multi_axis, per_row

ALLOWED = [torch.int32, torch.int64, torch.float32, torch.float64]
REFUSED = [torch.bool, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]


def resolve(where: Positions, rows: int, tokens: int) -> list[list[list[float]]]:
    """The positions [axes, rows, tokens] that a canonical form stands for, number by number."""
    axes = 1 if where.ids is None else where.ids.shape[0]
    result = []
    for axis in range(axes):
        result.append([])
        for row in range(rows):
            line = []
            for token in range(tokens):
                position = where.offset + (token if where.ramp else 0)
                if where.ids is not None:
                    own_row = row if where.ids.shape[1] > 1 else 0
                    position += where.ids[axis, own_row, 0 if where.ramp else token].item()
                line.append(position)
            result[axis].append(line)
    return result


def test_none_counts_from_zero() -> None:
    assert resolve(canonical(None), 1, 3) == [[[0, 1, 2]]]
    assert canonical(None).ids is None


@pytest.mark.parametrize("offset", [0, 7, -3, 2**31, 2**63 - 1, -(2**63)])
def test_an_int_is_an_offset(offset: int) -> None:
    where = canonical(offset)
    assert where.ids is None
    assert resolve(where, 1, 2) == [[[offset, offset + 1]]]


def test_an_index_of_another_library_is_an_offset() -> None:
    assert canonical(numpy.int32(7)).offset == 7


@pytest.mark.parametrize("dtype", ALLOWED)
def test_ids(dtype: torch.dtype) -> None:
    one = torch.tensor([3, 1, -4]).to(dtype)
    assert resolve(canonical(one), 2, 3) == [[[3, 1, -4], [3, 1, -4]]]
    two = torch.tensor([[3, 1, 4], [1, 5, 9]]).to(dtype)
    where = canonical(two)
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
    assert canonical(where) is where
    assert canonical(positions.ZERO) is positions.ZERO
    with pytest.raises(dataclasses.FrozenInstanceError):
        where.offset = 3  # type: ignore[misc]


def test_empty_ids_are_ids() -> None:
    where = canonical(torch.zeros(0, dtype=torch.int64))
    assert where.ids is not None
    assert where.ids.shape == (1, 1, 0)


# --- sentences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", REFUSED)
def test_dtypes_that_cannot_count_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    ids = torch.zeros(3, dtype=dtype)
    rule = r"positions must be int32, int64, float32 or float64"
    with pytest.raises(TypeError, match=rf"^\[rotate\] {rule} \(positions: {name}\[3\]\)\.$"):
        canonical(ids, "rotate")
    with pytest.raises(TypeError, match=rf"^\[per_row\] {rule} \(positions: {name}\[3\]\)\.$"):
        per_row(ids)
    with pytest.raises(
        TypeError, match=rf"^\[multi_axis\] {rule} \(positions: {name}\[3, 1\]\)\.$"
    ):
        multi_axis(ids[:, None])


@pytest.mark.parametrize(
    "shape, hint", [((), "; an int says one offset"), ((2, 3, 4), "; see positions.multi_axis")]
)
def test_ids_of_another_rank_are_refused(shape: tuple[int, ...], hint: str) -> None:
    sizes = ", ".join(map(str, shape))
    rule = rf"positions must have shape \(tokens,\) or \(rows, tokens\){hint}"
    with pytest.raises(ValueError, match=rf"^\[rotate\] {rule} \(positions: int64\[{sizes}\]\)\.$"):
        canonical(torch.zeros(shape, dtype=torch.int64), "rotate")


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_no_offset(value: bool) -> None:
    with pytest.raises(
        TypeError, match=rf"^\[at\] positions must not be a bool but got {value}\.$"
    ):
        canonical(value, "at")


@pytest.mark.parametrize("value, name", [(1.0, "float"), ("1", "str"), ([0, 1], "list")])
def test_other_types_are_refused(value: object, name: str) -> None:
    rule = "positions must be None, an int offset, a tensor of ids or a Positions but got"
    with pytest.raises(TypeError, match=rf"^\[at\] {rule} {name}\.$"):
        canonical(value, "at")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_offset_of_more_than_64_bits_is_refused(value: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^\[at\] an offset must fit in 64 bits but got {value}\.$"
    ):
        canonical(value, "at")


def test_per_row_takes_one_dimension() -> None:
    rule = r"^\[per_row\] offsets must have shape \(rows,\) \(offsets: int64\[2, 1\]\)\.$"
    with pytest.raises(ValueError, match=rule):
        per_row(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^\[per_row\] positions must be a tensor but got 7\.$"):
        per_row(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3, 4)])
def test_multi_axis_takes_two_or_three_dimensions(shape: tuple[int, ...]) -> None:
    sizes = ", ".join(map(str, shape))
    rule = r"ids must have shape \(axes, tokens\) or \(axes, rows, tokens\)"
    with pytest.raises(ValueError, match=rf"^\[multi_axis\] {rule} \(ids: int64\[{sizes}\]\)\.$"):
        multi_axis(torch.zeros(shape, dtype=torch.int64))
