"""The errors for invalid positions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import refusals
from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.functional import rerotate, rerotate_, rotate, rotate_qk
from tightrope.positions import (
    concatenate,
    explicit,
    grid,
    left_padded,
    mrope,
    mrope_next,
    multi_axis,
    packed,
    per_head,
    per_row,
    shard,
    text,
)

ENDS = torch.tensor([0, 3, 5])
X, Q = torch.ones(2, 5, 8), torch.ones(2, 6, 5, 8)
ONE, TWO = RopeSpec(8), RopeSpec(8, axes=Axes.blocks((2, 2)))
THREE = RopeSpec(12, axes=Axes.blocks((2, 2, 2)))
DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]
HEADS = per_head(torch.zeros(2, 3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_cannot_count_are_refused(dtype: torch.dtype) -> None:
    ids = torch.zeros(5, dtype=dtype)
    for name, call in {
        "[rotate] positions": lambda: rotate(X, ONE, ids, layout="bsd"),
        "[per_row] offsets": lambda: per_row(ids),
        "[per_head] ids": lambda: per_head(ids[None]),
        "[multi_axis] ids": lambda: multi_axis(ids[None]),
    }.items():
        with pytest.raises(TypeError, match="must be int32, int64, float32 or float64") as caught:
            call()
        assert str(caught.value).startswith(name)


def at(spec: RopeSpec, *where: Any) -> Callable[[], object]:
    return partial(spec.at, *where)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def turn(x: torch.Tensor, *rope: Any, by: Callable[..., object] = rotate) -> Callable[[], object]:
    return partial(by, x, *rope, layout={4: "bhsd", 3: "bsd"}[x.dim()])


NUMBERS = "pass torch.as_tensor(positions), if they are numbers."
WRITTEN = "parts must have an id for each token; call positions.explicit(part, tokens)"
NEED = "axes for this spec but got"
DROP = "if row 0 of ids (4, rows, tokens) holds the text's, drop it: positions.multi_axis(ids[1:])"

test_positions = refusals(
    "at",
    TypeError={
        "positions must not be a bool but got False.": at(ONE, False),
        "…a Positions but got float; pass torch.tensor([1.5]), for one token.": at(ONE, 1.5),
        f"…but got str; {NUMBERS}": at(ONE, "1"),
        f"…but got list; {NUMBERS}": at(ONE, [0, 1]),
    },
    ValueError={
        "an offset must fit in 64 bits but got": [at(ONE, 2**63), at(ONE, -(2**63) - 1)],
        "pass one offset as an int, or a tensor x of one as positions.per_row": at(ONE, ENDS[0]),
        "on several axes are positions.multi_axis(ids)": at(ONE, ENDS[None, None]),
        f"3 {NEED} 4; call positions.multi_axis": at(THREE, multi_axis(ids(4, 2, 5))),
        "must be transposed: positions.multi_axis(ids.T)": at(THREE, multi_axis(ids(4, 1, 3))),
        DROP: [
            at(THREE, given)
            for given in (multi_axis(ids(4, 2, 5)), multi_axis(ids(4, 1, 3)), ids(4, 2, 5))
        ],
        f"2 {NEED} 1; call positions.multi_axis with ids (2, tokens) or": at(TWO, X[..., 0]),
        f"2 {NEED} 3": at(TWO, grid(2, 2, 2)),
        "have 1 axis for this spec but got 2; pass axes= to RopeSpec": at(ONE, grid(2, 2)),
        "positions must be those of all heads with a stack": partial(
            ONE.at, HEADS, stack="transformers"
        ),
    },
)
test_rotations = refusals(
    ValueError={
        f"positions must have 2 {NEED} 1": turn(X, TWO),
        "or positions.text(None, axes=2) if": turn(X, TWO),
        "or positions.text(7, axes=2) if": turn(X, TWO, 7),
        "[rerotate_] positions must have 2 axes…": turn(X, TWO, TWO, 7, grid(1, 5), by=rerotate_),
        "[rerotate_] new_positions must have 2…": turn(X, TWO, TWO, grid(1, 5), 7, by=rerotate_),
        "[rerotate] new_positions must have 2 axes…": turn(X, ONE, TWO, 0, 7, by=rerotate),
        "on all 2 ranks": turn(X, ONE, shard(None, 1, 2, tokens=8)),
        "positions must have 1 or 6 heads for x but got 3": turn(Q, ONE, HEADS),
        "positions must have 1 head for x but got 3": turn(X, ONE, HEADS),
        "1 or 6 heads for q but got 3; rotate q and k one by one": turn(
            Q, Q[:, :3], ONE, HEADS, by=rotate_qk
        ),
        "one position for each of 5 tokens but got 4": turn(Q[:, :3], ONE, per_head(ids(2, 3, 4))),
        "positions must have 1 or 2 rows but got 4": turn(Q[:, :3], ONE, per_head(ids(4, 3, 5))),
    },
)
MAKERS = (
    *(concatenate, explicit, grid, left_padded, mrope, mrope_next, multi_axis, packed, per_head),
    *(per_row, shard, text),
)
test_makers = refused_calls(
    Path(__file__).with_name("refused_calls.jsonl"), {make.__name__: make for make in MAKERS}
)
test_parts_that_do_not_fit = refusals(
    TypeError={"…Positions; pass the tensor itself.": lambda: packed(ENDS, per_row(ENDS[1:]))},
    ValueError={
        "[text] positions must have 1 axis but got 2": lambda: text(grid(2, 2), axes=3),
        WRITTEN: lambda: concatenate([per_row(ENDS)]),
        "positions.text(part, axes=2) gives a part": lambda: concatenate([grid(2, 2), ENDS]),
        "the same numbers of axes and rows and heads": lambda: concatenate([HEADS, ids(2, 5)]),
        "pad = positions.multi_axis(torch.zeros(2, 2, dtype=torch.int64))": (
            lambda: concatenate([grid(2, 2), grid(2, 3)], along="rows")
        ),
    },
)


def test_padding_at_either_end_makes_rows_equally_long() -> None:
    pad = multi_axis(ids(2, 2))
    for parts in ([grid(2, 2), pad], [pad, grid(2, 2)]):
        both = concatenate([concatenate(parts), grid(2, 3)], along="rows")
        assert both.ids is not None
        assert both.ids.shape == (2, 2, 6)
        assert both.ids.dtype == torch.int64
