"""The errors for invalid positions."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.functional import rerotate, rerotate_, rotate
from tightrope.positions import (
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

ENDS = torch.tensor([0, 3, 5])
X = torch.ones(2, 5, 8)
ONE, TWO = RopeSpec(8), RopeSpec(8, axes=Axes.blocks((2, 2)))
THREE = RopeSpec(12, axes=Axes.blocks((2, 2, 2)))
DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_cannot_count_are_refused(dtype: torch.dtype) -> None:
    ids = torch.zeros(5, dtype=dtype)
    for name, call in {
        "[rotate] positions": lambda: rotate(X, ONE, ids, layout="bsd"),
        "[per_row] offsets": lambda: per_row(ids),
        "[multi_axis] ids": lambda: multi_axis(ids[None]),
    }.items():
        with pytest.raises(TypeError, match="must be int32, int64, float32 or float64") as caught:
            call()
        assert str(caught.value).startswith(name)


OFFSETS = "offsets must be None, an int or a tensor with one offset for each sequence but got a"
PLACE = "offsets must have shape (2,), one for each sequence, on the device of cu_seqlens"
SPAN = "span must be (low, high), or one such pair for each of 2 axes, but got"
KINDS = "ints and tuples (t, h, w) or (t, h, w, time_step) but got"
STEP = "time_step must not be negative, and t · time_step below 2^63, but got"
WRITTEN = "parts must have an id for each token; call positions.explicit(part, tokens)"
AXES = (
    "call positions.multi_axis with ids (2, tokens) or (2, rows, tokens), or "
    "positions.text(…, axes=2) if all coordinates of a token are equal"
)
DROP = "if row 0 of ids (4, rows, tokens) holds the text's, drop it: positions.multi_axis(ids[1:])"
EACH = "; pass each as an int: grid(*sizes) of a tuple, or of sizes.tolist()"
TYPES: dict[str, Callable[[], object]] = {
    "[at] positions must not be a bool but got False.": lambda: ONE.at(False),
    **{
        "[at] positions must be None, an int offset, a tensor of ids or a Positions but got "
        f"{type(value).__name__}; pass {way}.": lambda value=value: ONE.at(value)
        for value, way in (
            (1.5, "torch.tensor([1.5]), for one token"),
            ("1", "torch.as_tensor(positions), if they are numbers"),
            ([0, 1], "torch.as_tensor(positions), if they are numbers"),
        )
    },
    "[per_row] offsets must be a tensor but got 7.": lambda: per_row(7),
    "[packed] cu_seqlens must be int32 or int64 but got [0, 3, 5].": lambda: packed([0, 3, 5]),
    "[packed] cu_seqlens must be int32 or int64 but got float32[3].": lambda: packed(ENDS / 1),
    "[packed] total must be an int but got 5.0.": lambda: packed(ENDS, total=5.0),
    "[packed] offsets must be int32, int64, float32 or float64 (offsets: bool[2]).": (
        lambda: packed(ENDS, ENDS[1:] > 3)
    ),
    f"[packed] {OFFSETS} Positions; pass the tensor itself.": (
        lambda: packed(ENDS, per_row(ENDS[1:]))
    ),
    f"[packed] {OFFSETS} bool.": lambda: packed(ENDS, True),
    "[left_padded] attention_mask must be bool or integers but got float32[2, 3].": (
        lambda: left_padded(torch.ones(2, 3))
    ),
    f"[grid] a size must be an int but got (4, 2){EACH}.": lambda: grid((4, 2)),
    f"[grid] a size must be an int but got int64[]{EACH}.": lambda: grid(torch.tensor(4)),
    "[grid] step must be an int or a float but got '1'.": lambda: grid(4, 3, step="1"),
    f"[grid] {SPAN} 2.0.": lambda: grid(4, 3, span=2.0),
    "[grid] an end of span must be an int or a float but got None.": (
        lambda: grid(4, span=(None, 1))
    ),
    f"[mrope] segments must be an iterable of {KINDS} 5.": lambda: mrope(5),
    "[mrope] a number of text tokens must be an int but got 2.5.": lambda: mrope([2.5]),
    "[mrope] start must be an int but got 0.5.": lambda: mrope([2], start=0.5),
    "[concatenate] parts must be a sequence of positions but got int64[3].": (
        lambda: concatenate(ENDS)
    ),
}
VALUES: dict[str, Callable[[], object]] = {
    **{
        f"[at] an offset must fit in 64 bits but got {value}.": lambda value=value: ONE.at(value)
        for value in (2**63, -(2**63) - 1)
    },
    "[at] positions must have shape (tokens,) or (rows, tokens); pass one offset as an int, or a "
    "tensor x of one as positions.per_row(x[None]) (positions: int64[]).": (
        lambda: ONE.at(ENDS[0])
    ),
    "[at] positions must have shape (tokens,) or (rows, tokens); coordinates on several axes are positions.multi_axis(ids) "
    "(positions: int64[1, 1, 3]).": lambda: ONE.at(ENDS[None, None]),
    "[per_row] offsets must have shape (rows,) (offsets: int64[1, 3]).": (
        lambda: per_row(ENDS[None])
    ),
    **{
        "[multi_axis] ids must have shape (axes, tokens) or (axes, rows, tokens) (ids: "
        f"float32{list(shape)}).": lambda shape=shape: multi_axis(torch.ones(shape))
        for shape in ((), (3,), (1, 2, 3, 4))
    },
    **{
        "[packed] cu_seqlens must have shape (sequences + 1,) with at least one sequence "
        f"(cu_seqlens: int64{list(ends.shape)}).": lambda ends=ends: packed(ends)
        for ends in (ENDS[None], ENDS[:1])
    },
    **{
        f"[packed] cu_seqlens must start with 0 and never decrease but got {ends}; of lengths pass "
        "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).": (
            lambda ends=ends: packed(torch.tensor(ends))
        )
        for ends in ([1, 4, 6], [0, 5, 3])
    },
    "[packed] cu_seqlens must end with the number of tokens 6 but got 5.": (
        lambda: packed(ENDS, total=6)
    ),
    "[packed] total must not be negative but got -1.": lambda: packed(ENDS, total=-1),
    "[packed] total must be given if reading cu_seqlens would wait for a device or break a graph "
    "(cu_seqlens: int64[3]).": lambda: packed(ENDS.to("meta")),
    f"[packed] {PLACE} (offsets: int64[3], cu_seqlens: int64[3]).": lambda: packed(ENDS, ENDS),
    f"[packed] {PLACE} (offsets: int64[2], cu_seqlens: int64[3]).": (
        lambda: packed(ENDS, ENDS[1:].to("meta"))
    ),
    "[left_padded] attention_mask must have shape (rows, tokens) (attention_mask: bool[3]).": (
        lambda: left_padded(ENDS > 3)
    ),
    "[left_padded] attention_mask must hold only 0 and 1 but goes from 1 to 2; if it numbers "
    "packed sequences, call positions.packed.": lambda: left_padded(torch.tensor([[1, 1, 2]])),
    "[text] positions must have 1 axis but got 2 (positions: int64[2, 1, 4]).": (
        lambda: text(grid(2, 2), axes=3)
    ),
    "[text] axes must not be negative but got -1.": lambda: text(axes=-1),
    "[text] axes must be at least 1 but got 0.": lambda: text(3, axes=0),
    "[grid] a grid must have at least one size but got none.": lambda: grid(),
    "[grid] a size must not be negative but got -1.": lambda: grid(4, -1),
    **{
        f"[grid] sizes must be multiples of merge but got (4, 3) and ({merge}, {merge}).": (
            lambda merge=merge: grid(4, 3, merge=merge)
        )
        for merge in (2, 0)
    },
    "[grid] start must be one number, or one for each of 2 axes, but got (1, 2, 3).": (
        lambda: grid(4, 3, start=(1, 2, 3))
    ),
    "[grid] span must be None if start or step is given but got (-1, 1).": (
        lambda: grid(4, 3, span=(-1, 1), step=2)
    ),
    f"[grid] {SPAN} ((0, 1),).": lambda: grid(4, 3, span=((0, 1),)),
    f"[grid] {SPAN} (0, 1, 2).": lambda: grid(4, 3, span=(0, 1, 2)),
    f"[grid] start must fit in 64 bits but got {2**70}.": lambda: grid(2, start=2**70),
    f"[grid] step must fit in 64 bits but got {-(2**70)}.": (
        lambda: grid(2, step=-(2**70), start=0.5)
    ),
    f"[mrope] segments must be {KINDS} (4, 4).": lambda: mrope([2, (4, 4)]),
    "[mrope] a number of text tokens must not be negative but got -2.": lambda: mrope([-2]),
    "[mrope] t, h and w must be positive but got (1, 0, 4).": lambda: mrope([(1, 0, 4)]),
    f"[mrope_next] {STEP} -1.0.": lambda: mrope_next([(2, 2, 4, -1.0)]),
    f"[mrope] {STEP} nan.": lambda: mrope([(2, 2, 4, math.nan)]),
    f"[mrope] {STEP} 1e+39.": lambda: mrope([(2, 1, 1, 1e39)]),
    f"[mrope] start must fit in 64 bits but got {2**63}.": lambda: mrope([2], start=2**63),
    f"[mrope] the position after the last must fit in 64 bits but got {2**63}.": (
        lambda: mrope([(1, 1, 2), 3], start=2**63 - 5)
    ),
    "[mrope] next_from must be 'all' or 'space' but got 'time'.": (
        lambda: mrope([2], next_from="time")
    ),
    "[explicit] tokens must be given for positions without an id per token.": lambda: explicit(5),
    "[explicit] positions must hold one position for each of 4 tokens but got 3 (positions: "
    "int64[1, 1, 3]).": lambda: explicit(ENDS, 4),
    "[concatenate] parts must have at least one element but got none.": lambda: concatenate([]),
    "[concatenate] along must be 'tokens' or 'rows' but got 'heads'.": (
        lambda: concatenate([ENDS], along="heads")
    ),
    f"[concatenate] {WRITTEN} (part: 5).": lambda: concatenate([ENDS, 5]),
    f"[concatenate] {WRITTEN} (part: int64[1, 3, 1]).": lambda: concatenate([per_row(ENDS)]),
    "[concatenate] parts must have the same numbers of axes and rows; positions.text(part, axes=2) gives a part "
    "equal coordinates on all axes (one: int64[2, 1, 4], other: "
    "int64[1, 1, 3]).": lambda: concatenate([grid(2, 2), ENDS]),
    "[concatenate] parts must have the same numbers of axes and rows (one: float32[1, 2, 5], other: "
    "float32[1, 3, 5]).": lambda: concatenate([torch.ones(2, 5), torch.ones(3, 5)]),
    "[concatenate] parts must have the same numbers of axes and tokens; with pad = "
    "positions.multi_axis(torch.zeros(2, 2, dtype=torch.int64)), pass positions.concatenate([part, pad]) in place of "
    "the shorter part if its row is padded on the right, and positions.concatenate([pad, part]) if on the left (one: "
    "int64[2, 1, 4], other: int64[2, 1, 6]).": lambda: concatenate(
        [grid(2, 2), grid(2, 3)], along="rows"
    ),
    "[rotate] positions must be those of the 5 tokens of this rank but are of 4: tokens= of positions.shard is their "
    "number on all 2 ranks (x: float32[2, 5, 8]).": (
        lambda: rotate(X, ONE, shard(None, 1, 2, tokens=8), layout="bsd")
    ),
    "[shard] rank must lie in [0, 2) for size 2 but got 2.": lambda: shard(None, 2, 2, tokens=8),
    "[shard] size must be at least 1 but got 0.": lambda: shard(None, 0, 0, tokens=8),
    "[shard] kind must be 'contiguous' or 'zigzag' but got 'striped'.": (
        lambda: shard(None, 0, 2, tokens=8, kind="striped")
    ),
    "[shard] tokens must be given for positions without an id per token.": (
        lambda: shard(None, 0, 2)
    ),
    "[shard] tokens must be a multiple of 2 for 2 contiguous shards but got 3.": (
        lambda: shard(ENDS, 0, 2)
    ),
    "[shard] tokens must be a multiple of 4 for 2 zigzag shards but got 6.": (
        lambda: shard(None, 0, 2, tokens=6, kind="zigzag")
    ),
    "[shard] cu_seqlens must be None for kind 'contiguous', which cuts the whole row (cu_seqlens: "
    "int64[3]).": lambda: shard(None, 0, 1, tokens=5, cu_seqlens=ENDS),
    "[shard] every sequence must have a multiple of 4 tokens for 2 zigzag shards but got "
    "cu_seqlens [0, 6, 8].": (
        lambda: shard(None, 0, 2, tokens=8, kind="zigzag", cu_seqlens=torch.tensor([0, 6, 8]))
    ),
    "[shard] cu_seqlens must end with the number of tokens 8 but got 5.": (
        lambda: shard(None, 0, 2, tokens=8, kind="zigzag", cu_seqlens=ENDS)
    ),
    # A spec refuses positions with another number of axes.
    f"[rotate] positions must have 2 axes for this spec but got 1; {AXES.replace('…', 'None')} (positions: "
    "None).": lambda: rotate(X, TWO, layout="bsd"),
    **{
        f"[{call.__name__}] {name} must have 2 axes for this spec but got 1; {AXES.replace('…', '7')} ({name}: "
        "7).": lambda call=call, more=more: call(X, *more, layout="bsd")
        for call, name, more in (
            (rotate, "positions", (TWO, 7)),
            (rerotate_, "positions", (TWO, TWO, 7, grid(1, 5))),
            (rerotate_, "new_positions", (TWO, TWO, grid(1, 5), 7)),
            (rerotate, "new_positions", (ONE, TWO, 0, 7)),
        )
    },
    f"[at] positions must have 3 axes for this spec but got 4; {AXES.replace('2', '3')}; {DROP} (positions: int64[4, "
    "2, 5]).": lambda: THREE.at(multi_axis(torch.zeros(4, 2, 5, dtype=torch.int64))),
    "[at] positions must have 3 axes for this spec but got 4; ids (tokens, axes) must be transposed: "
    f"positions.multi_axis(ids.T); {DROP} (positions: int64[4, 1, 3]).": (
        lambda: THREE.at(multi_axis(torch.zeros(4, 1, 3, dtype=torch.int64)))
    ),
    "[at] positions must have shape (tokens,) or (rows, tokens); coordinates on several axes are "
    f"positions.multi_axis(ids); {DROP} (positions: int64[4, 2, 5]).": (
        lambda: THREE.at(torch.zeros(4, 2, 5, dtype=torch.int64))
    ),
    f"[at] positions must have 2 axes for this spec but got 1; {AXES} (positions: float32[2, 5]).": (
        lambda: TWO.at(X[..., 0])
    ),
    f"[at] positions must have 2 axes for this spec but got 3; {AXES} (positions: int64[3, 1, 8]).": (
        lambda: TWO.at(grid(2, 2, 2))
    ),
    "[at] positions must have 1 axis for this spec but got 2; pass axes= to RopeSpec, such as "
    "Axes.blocks(…) for 2 coordinates (positions: int64[2, 1, 4]).": lambda: ONE.at(grid(2, 2)),
}


def test_padding_at_either_end_makes_rows_equally_long() -> None:
    pad = multi_axis(torch.zeros(2, 2, dtype=torch.int64))
    for parts in ([grid(2, 2), pad], [pad, grid(2, 2)]):
        both = concatenate([concatenate(parts), grid(2, 3)], along="rows")
        assert both.ids is not None
        assert both.ids.shape == (2, 2, 6)
        assert both.ids.dtype == torch.int64


test_invalid_positions = refusals(TypeError=TYPES, ValueError=VALUES)
