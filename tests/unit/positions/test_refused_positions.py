"""The errors for invalid positions."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.helpers import refusals
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


zigzag = partial(shard, None, 0, 2, kind="zigzag")
NUMBERS = "pass torch.as_tensor(positions), if they are numbers."
SPAN = "span must be (low, high), or one such pair for each of 2 axes, but got"
KINDS = "ints and tuples (t, h, w) or (t, h, w, time_step) but got"
STEP = "time_step must not be negative, and t · time_step below 2^63, but got"
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
test_makers = refusals(
    TypeError={
        "[per_row] offsets must be a tensor but got 7.": lambda: per_row(7),
        "[packed] cu_seqlens must be int32 or int64 but got [0, 3, 5].": lambda: packed([0, 3, 5]),
        "…cu_seqlens must be int32 or int64 but got float32[3].": lambda: packed(ENDS / 1),
        "[packed] total must be an int but got 5.0.": lambda: packed(ENDS, total=5.0),
        "offsets must be int32, int64, float32 or float64": lambda: packed(ENDS, ENDS[1:] > 3),
        "…Positions; pass the tensor itself.": lambda: packed(ENDS, per_row(ENDS[1:])),
        "…one offset for each sequence but got a bool.": lambda: packed(ENDS, True),
        "attention_mask must be bool or integers": lambda: left_padded(torch.ones(2, 3)),
        "pass each as an int: grid(*sizes) of a tuple": [
            lambda: grid((4, 2)),
            lambda: grid(torch.tensor(4)),
        ],
        "[grid] step must be an int or a float but got '1'.": lambda: grid(4, 3, step="1"),
        f"[grid] {SPAN} 2.0.": lambda: grid(4, 3, span=2.0),
        "[grid] an end of span must be an int or a float": lambda: grid(4, span=(None, 1)),
        f"[mrope] segments must be an iterable of {KINDS} 5.": lambda: mrope(5),
        "[mrope] a number of text tokens must be an int but got 2.5.": lambda: mrope([2.5]),
        "[mrope] start must be an int but got 0.5.": lambda: mrope([2], start=0.5),
        "…parts must be a sequence of positions but got int64[3].": lambda: concatenate(ENDS),
    },
    ValueError={
        "offsets must have shape (rows,)": lambda: per_row(ENDS[None]),
        "ids must have shape (heads, tokens) or (rows, heads, tokens)": lambda: per_head(ENDS),
        "ids must have shape (axes, tokens) or (axes, rows, tokens)": [
            partial(multi_axis, torch.ones(shape)) for shape in ((), (3,), (1, 2, 3, 4))
        ],
        "cu_seqlens must have shape (sequences + 1,) with at least one sequence": [
            lambda: packed(ENDS[None]),
            lambda: packed(ENDS[:1]),
        ],
        "cu_seqlens must start with 0 and never decrease": [
            lambda: packed(ENDS + 1),
            lambda: packed(torch.tensor([0, 5, 3])),
        ],
        "…cu_seqlens must end with the number of tokens 6 but got 5.": lambda: packed(ENDS, total=6),
        "[packed] total must not be negative but got -1.": lambda: packed(ENDS, total=-1),
        "[packed] total must be given if reading": lambda: packed(ENDS.to("meta")),
        "offsets must have shape (2,), one for each sequence": lambda: packed(ENDS, ENDS),
        "on the device of cu_seqlens": lambda: packed(ENDS, ENDS[1:].to("meta")),
        "attention_mask must have shape (rows, tokens)": lambda: left_padded(ENDS > 3),
        "hold only 0 and 1 but goes from 1 to 2": lambda: left_padded(torch.tensor([[1, 1, 2]])),
        "[text] positions must have 1 axis but got 2": lambda: text(grid(2, 2), axes=3),
        "[text] axes must not be negative but got -1.": lambda: text(axes=-1),
        "[text] axes must be at least 1 but got 0.": lambda: text(3, axes=0),
        "[grid] a grid must have at least one size but got none.": lambda: grid(),
        "[grid] a size must not be negative but got -1.": lambda: grid(4, -1),
        "…got (4, 3) and (2, 2).": lambda: grid(4, 3, merge=2),
        "sizes must be multiples of merge": lambda: grid(4, 3, merge=0),
        "start must be one number, or one for each of 2": lambda: grid(4, 3, start=(1, 2, 3)),
        "span must be None if start or step is given": lambda: grid(4, 3, span=(-1, 1), step=2),
        f"[grid] {SPAN} ((0, 1),).": lambda: grid(4, 3, span=((0, 1),)),
        f"[grid] {SPAN} (0, 1, 2).": lambda: grid(4, 3, span=(0, 1, 2)),
        "[grid] start must fit in 64 bits": lambda: grid(2, start=2**70),
        "[grid] step must fit in 64 bits": lambda: grid(2, step=-(2**70), start=0.5),
        f"[mrope] segments must be {KINDS} (4, 4).": lambda: mrope([2, (4, 4)]),
        "[mrope] a number of text tokens must not be negative": lambda: mrope([-2]),
        "[mrope] t, h and w must be positive but got (1, 0, 4).": lambda: mrope([(1, 0, 4)]),
        f"[mrope_next] {STEP} -1.0.": lambda: mrope_next([(2, 2, 4, -1.0)]),
        f"[mrope] {STEP} nan.": lambda: mrope([(2, 2, 4, math.nan)]),
        f"[mrope] {STEP} 1e+39.": lambda: mrope([(2, 1, 1, 1e39)]),
        "[mrope] start must fit in 64 bits": lambda: mrope([2], start=2**63),
        "the position after the last must fit": lambda: mrope([(1, 1, 2), 3], start=2**63 - 5),
        "…next_from must be 'all' or 'space' but got 'time'.": lambda: mrope([2], next_from="time"),
    },
)
test_rewriting = refusals(
    ValueError={
        "[explicit] tokens must be given for positions without": lambda: explicit(5),
        "[explicit] positions must hold one position for each of 4": lambda: explicit(ENDS, 4),
        "[concatenate] parts must have at least one element": lambda: concatenate([]),
        "…along must be 'tokens' or 'rows' but got 'heads'.": partial(
            concatenate, [ENDS], along="heads"
        ),
        WRITTEN: [lambda: concatenate([ENDS, 5]), lambda: concatenate([per_row(ENDS)])],
        "the same numbers of axes and rows; positions.text(part, axes=2) gives a part": (
            lambda: concatenate([grid(2, 2), ENDS])
        ),
        "the same numbers of axes and rows (one": lambda: concatenate([X[..., 0], ids(3, 5) / 1]),
        "the same numbers of axes and rows and heads": lambda: concatenate([HEADS, ids(2, 5)]),
        "pad = positions.multi_axis(torch.zeros(2, 2, dtype=torch.int64))": (
            lambda: concatenate([grid(2, 2), grid(2, 3)], along="rows")
        ),
        "[shard] rank must lie in [0, 2) for size 2 but got 2.": lambda: shard(ENDS, 2, 2),
        "[shard] size must be at least 1 but got 0.": lambda: shard(ENDS, 0, 0),
        "kind must be 'contiguous' or 'zigzag'": lambda: shard(ENDS, 0, 1, kind="striped"),
        "[shard] tokens must be given for positions without": lambda: shard(None, 0, 2),
        "…a multiple of 2 for 2 contiguous shards but got 3.": lambda: shard(ENDS, 0, 2),
        "…a multiple of 4 for 2 zigzag shards but got 6.": lambda: zigzag(tokens=6),
        "None for kind 'contiguous'": lambda: shard(None, 0, 1, tokens=5, cu_seqlens=ENDS),
        "every sequence must have a multiple of 4 tokens for 2 zigzag shards": (
            lambda: zigzag(tokens=8, cu_seqlens=torch.tensor([0, 6, 8]))
        ),
        "…end with the number of tokens 8 but got 5.": lambda: zigzag(tokens=8, cu_seqlens=ENDS),
    },
)


def test_padding_at_either_end_makes_rows_equally_long() -> None:
    pad = multi_axis(ids(2, 2))
    for parts in ([grid(2, 2), pad], [pad, grid(2, 2)]):
        both = concatenate([concatenate(parts), grid(2, 3)], along="rows")
        assert both.ids is not None
        assert both.ids.shape == (2, 2, 6)
        assert both.ids.dtype == torch.int64
