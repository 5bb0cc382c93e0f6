"""Axes: the assignment of pairs to coordinates, compared with the published code of each family.

The families' own modules (transformers 5.23), see axes.jsonl, compute cosines and sines, or rotate, at coordinates
that differ from axis to axis.
"""

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle
from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import Result, assert_near, assert_rotated
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate, rotate_qk

# --- published code -------------------------------------------------------------------------------

ROWS = Path(__file__).with_name("axes.jsonl").read_text(encoding="utf-8").splitlines()
FAMILIES = {row["family"]: row for row in map(json.loads, ROWS)}
AXES: dict[str, Callable[..., Axes]] = {
    **{name: getattr(Axes, name) for name in ("sections", "blocks", "strided")},
    "ernie": lambda: Axes(3, tuple((1 + k % 2 if k < 44 else 0, k, 128) for k in range(64))),
}
# Time, height and width of a token all differ, and all tokens differ.
THW = torch.tensor([[3, 50, 0, 17, 41], [31, 2, 9, 0, 23], [7, 19, 44, 5, 1]])
# Middles of 3 rows and 5 columns, from -1 to 1.
ROW, COLUMN = torch.arange(15).double() // 5, torch.arange(15).double() % 5
PATCHES = 2 * math.pi * torch.stack((2 * (ROW + 0.5) / 3 - 1, 2 * (COLUMN + 0.5) / 5 - 1))
# Rows and columns count from 1; the class token comes last and does not rotate.
CELLS = torch.stack((torch.arange(25) % 5, torch.arange(25) // 5)) + 1
CELLS = torch.nn.functional.pad(CELLS, (0, 1))
ANY, IMAGE = torch.zeros(1), torch.zeros(1, 3, 48, 80)
# Coordinates [axes, tokens], and what a family's module takes for them.
AT: dict[str, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {
    "text": (THW, (ANY, THW[:, None])),
    "image": (THW[1:], (ANY, THW[1:].T)),
    "patches": (PATCHES, (IMAGE,)),
    "cells": (CELLS, (ANY,)),
}


def code(family: str) -> Any:
    name = FAMILIES[family]["module"]
    return import_module(f"transformers.models.{name}.modeling_{name}")


def published(family: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines that a family's own module computes."""
    row = FAMILIES[family]
    ((config, fields),) = row["config"].items()
    module = getattr(code(family), row["rotary"])(getattr(code(family), config)(**fields))
    made = module.eval()(*inputs)
    return (made.real.squeeze(1), made.imag.squeeze(1)) if isinstance(made, torch.Tensor) else made


def axes_of(family: str) -> Axes:
    ((name, sizes),) = FAMILIES[family]["axes"].items()
    return AXES[name](**sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_cosines_and_sines(family: str) -> None:
    """The expected ones are float64 products of a coordinate and base^(−2·index/dim), as an assignment defines them."""
    at, inputs = AT[FAMILIES[family]["at"]]
    base = FAMILIES[family]["base"]
    rows = [at[axis].double() * base ** (-2 * k / dim) for axis, k, dim in axes_of(family).pairs]
    angle = torch.stack(rows, -1)
    for found, wanted in zip(published(family, *inputs), (angle.cos(), angle.sin()), strict=True):
        table = found.double().squeeze(0)
        if table.shape != wanted.shape:  # each value twice, in halves or side by side
            halves = torch.equal(*table.chunk(2, -1))
            wanted = wanted.repeat(1, 2) if halves else wanted.repeat_interleave(2, -1)
        assert_near(table, wanted, "float32 ways")


def test_glm4v_turns_the_first_half_in_pairs_of_neighbours() -> None:
    q, k = noise(1, 4, 10, 128).float(), noise(1, 2, 10, 128, seed=1).float()
    where = positions.mrope([3, (1, 2, 3), 1])
    spec = RopeSpec(128, rotary_dim=64, interleaved=True, axes=axes_of("GLM-4.1V"))
    tables = published("GLM-4.1V", q, where.ids)  # type: ignore[arg-type]
    wanted = code("GLM-4.1V").apply_rotary_pos_emb(q, k, *tables)
    assert_near(rotate_qk(q, k, spec, where), wanted, "float32 ways")


def test_dinov3_leaves_class_and_register_tokens() -> None:
    q, k = noise(2, 8, 5 + 15, 64).float(), noise(2, 8, 5 + 15, 64, seed=1).float()
    wanted = code("DINOv3").apply_rotary_pos_emb(q, k, *published("DINOv3", IMAGE))
    still = positions.multi_axis(torch.zeros(2, 5))
    patches = positions.grid(3, 5, span=(-2 * math.pi, 2 * math.pi))
    spec = RopeSpec(64, base=100.0, axes=axes_of("DINOv3"))
    got = rotate_qk(q, k, spec, positions.concatenate([still, patches]))
    assert_near(got, wanted, "float32 ways")
    assert torch.equal(got[0][:, :, :5], wanted[0][:, :, :5])


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
