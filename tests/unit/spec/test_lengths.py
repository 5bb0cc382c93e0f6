"""Frequency rules that depend on the length: the frequencies of a row are a function of its own length alone.

The length is the one that the caller states, else the largest position of the row plus 1. Neither other rows nor
earlier calls change it, and positions that do not tell it are refused.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from tests.support import stated
from tests.support.by_length import (
    RULES,
    TRAINED,
    UNEQUAL,
    amplitude,
    assert_exact,
    every_rule,
    spec_of,
)
from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Rule, YaRN
from tightrope.functional import rotate, rotate_, rotate_qk_

SHORT = RopeSpec(8, scaling=DynamicNTK(2.0, 100))

# --- the law --------------------------------------------------------------------------------------

# One spec for all tests of a rule, so that each comes after other calls.
USED = {rule: spec_of(rule) for rule in RULES}
PAIRS = {"apart": (3000, 6000), "at the switch": (TRAINED, TRAINED + 1)}


def ways(lengths: tuple[int, int]) -> dict[str, tuple[positions.PositionsLike, Any]]:
    """Return (positions, seq_len) by which the last tokens of two rows are those of these lengths."""
    own = torch.tensor(lengths)
    last, total = own[:, None] - 1, max(lengths) + 1
    padded = torch.arange(total) - (total - own[:, None])
    starts = positions.per_row(own - 1)
    return {
        "ids": (last, None),
        "int32 ids": (last.int(), None),
        "float64 ids": (last.double(), None),
        "float32 ids": (last.float(), None),
        "offsets": (starts, None),
        "padded by lengths": (positions.per_row(own - total), None),
        "padded by a mask": (positions.left_padded(padded >= 0), None),
        "padded with ones": (padded.masked_fill(padded < 0, 1), None),
        "a list": (positions.explicit(starts, 1), list(lengths)),
        "a tensor": (starts, own),
        "a fractional tensor": (starts, own.double() - 0.5),
        "numbers of numpy": (last, list(numpy.array(lengths))),
        "an iterator": (last, iter(lengths)),
    }


@pytest.mark.parametrize("lengths", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("way", ways((1, 1)))
@every_rule
def test_each_row_gets_what_it_would_get_alone(
    rule: str, way: str, lengths: tuple[int, int]
) -> None:
    spec, fresh = USED[rule], spec_of(rule)
    x = noise(2, 2, max(lengths) + 1 if "padded" in way else 1, 12)
    for prepared in (False, True):
        where, seq_len = ways(lengths)[way]
        if not prepared and seq_len is not None:
            continue  # a length is stated in a prepared rotation
        y = rotate(x, spec.at(where, seq_len=seq_len)) if prepared else rotate(x, spec, where)
        for row, length in enumerate(lengths):
            last = x[row : row + 1, :, -1:]
            assert_same_bits(y[row : row + 1, :, -1:], rotate(last, fresh, length - 1))
            assert_exact(y[row, :, -1:], last[0], spec, [length - 1], length)
    for layout, dims in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        where, seq_len = ways(lengths)[way]
        moved = rotate(x.permute(dims), spec.at(where, seq_len=seq_len), layout=layout)
        assert_same_bits(moved, y.permute(dims))


@every_rule
def test_one_rotation_serves_calls_of_any_length(rule: str) -> None:
    rotation = spec_of(rule).at(-5)
    for tokens in (10, 6000, 1, 4101, 4102, 10):
        x = noise(1, 1, tokens, 12)
        assert_same_bits(rotate(x, rotation), rotate(x, spec_of(rule), -5))


def ids(*numbers: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


TOP = torch.tensor([2**31 - 1], dtype=torch.int32)
# Positions of one row, its tokens, and its length.
OF_POSITIONS: list[tuple[positions.PositionsLike, int, int]] = [
    (None, 7, 7),
    (8, 1, 9),
    (-5, 10, 5),
    (torch.tensor([0, 8]), 2, 9),
    (positions.per_row(torch.tensor([8])), 1, 9),
    (ids(0.5, 9.0), 2, 10),
    (ids(0.5, 8.25), 2, 10),
    (ids(2.0**24, dtype=torch.float32), 1, 2**24 + 1),
    (TOP, 1, 2**31),
    (positions.per_row(TOP), 1, 2**31),
    (positions.Positions(TOP[None, None], 10, add_index=False), 1, 2**31 + 10),
    (-9000, 2, 0),
    (torch.tensor([-9000, -8999]), 2, 0),
    (positions.per_row(torch.tensor([-9000])), 2, 0),
]


def trained_on(rule: str, length: int) -> RopeSpec:
    """Return a spec whose rule has this original length, on which only frequencies depend."""
    fields: dict[str, Any] = {} if rule == "dynamic" else {"attention_factor": 1.0}
    return spec_of(replace(RULES[rule], original_max_position=length, **fields))


@pytest.mark.parametrize("where, tokens, length", OF_POSITIONS)
@every_rule
def test_the_length_is_the_largest_position_plus_1(
    rule: str, where: positions.PositionsLike, tokens: int, length: int
) -> None:
    """Rounded up, and computed in 64 bits: the row is short for a rule of this length, and long for one below."""
    x, limit = noise(1, 1, tokens, 12), 2**31
    within = rotate(x, trained_on(rule, limit), where)
    if length <= limit:
        assert_same_bits(rotate(x, trained_on(rule, max(length, 2)), where), within)
    if length > 2:
        spec = trained_on(rule, min(length - 1, limit))
        y = rotate(x, spec, where)
        assert_same_bits(y, rotate(x, spec.at(where, seq_len=length)))
        assert length > limit or not torch.equal(y, within)


@every_rule
def test_a_lost_position_spoils_its_token_alone(rule: str) -> None:
    spec, x = spec_of(rule), noise(1, 1, 4, 12)
    wanted = rotate(x, spec, torch.tensor([[0.0, 4999.0, 5000.0, 5001.0]]))
    for lost in (math.nan, math.inf, -math.inf):
        y = rotate(x, spec, torch.tensor([[0.0, lost, 5000.0, 5001.0]]))
        assert y[:, :, 1, 2:10].isnan().all()
        assert_same_bits(y[:, :, [0, 2, 3]], wanted[:, :, [0, 2, 3]])


@every_rule
def test_nothing_to_rotate(rule: str) -> None:
    spec, zeros = spec_of(rule), torch.zeros(0, dtype=torch.int64)
    for shape, where, seq_len in (
        ((0, 1, 3, 12), torch.zeros(0, 3, dtype=torch.int64), None),
        ((0, 1, 3, 12), positions.per_row(zeros), None),
        ((0, 1, 3, 12), torch.zeros(0, 3, dtype=torch.int64), 0),
        ((0, 1, 1, 12), 5000, None),
        ((0, 1, 3, 12), None, []),
        ((2, 1, 0, 12), None, None),
        ((2, 1, 0, 12), torch.zeros(2, 0), None),
        ((2, 1, 0, 12), positions.per_row(torch.tensor([5, 6000])), None),
        ((2, 1, 0, 12), 9, 2),
        ((2, 1, 0, 12), zeros, 0),
        ((2, 0, 1, 12), 5000, None),
    ):
        assert rotate(torch.zeros(shape), spec.at(where, seq_len=seq_len)).shape == shape  # type: ignore[arg-type]
    x, still = noise(1, 8), RopeSpec(8, rotary_dim=0, scaling=DynamicNTK(2.0, TRAINED))
    assert_same_bits(rotate(x, still, 9000, layout="sd"), x)


@every_rule
def test_the_largest_coordinate_on_any_axis_is_the_last_position(rule: str) -> None:
    spec, x = RopeSpec(8, scaling=RULES[rule], axes=Axes.sections((2, 1, 1))), noise(1, 1, 2, 8)
    where = positions.multi_axis(torch.tensor([[0, 1], [5000, 5999], [7, 8]]))
    assert_same_bits(rotate(x, spec, where), rotate(x, spec.at(where, seq_len=6000)))
    offset = positions.text(positions.per_row(torch.tensor([5999])), axes=3)
    text = positions.text(torch.tensor([5999]), axes=3)
    assert_same_bits(rotate(x[:, :, :1], spec, offset), rotate(x[:, :, :1], spec, text))


# --- positions that do not tell the length ------------------------------------------------------------

PAIR = positions.packed(torch.tensor([0, 1, 2]), torch.tensor([30, 600]))
AGAIN = "positions must not start again within a row"
NO_ROWS = "seq_len must be given with ids of tokens without rows"
SEVERAL = "seq_len must be given with several tokens that begin after position 0"
# Sequences packed in one row, one of them longer than 100.
PACKED: dict[str, positions.PositionsLike] = {
    "two": positions.packed(torch.tensor([0, 5, 125])),
    "decoding, one token each": PAIR,
    "one and many": positions.packed(torch.tensor([0, 1, 121])),
    "an offset": positions.packed(torch.tensor([0, 3, 6]), 120),
    "written out": positions.explicit(PAIR),
    "joined": positions.concatenate([PAIR, torch.tensor([601])]),
    "a share": positions.shard(PAIR, 0, 1),
    "ids": torch.cat((torch.arange(5), torch.arange(120))),
    "ids, two tokens first": torch.cat((torch.arange(2), torch.arange(120))),
    "ids, backwards": torch.arange(120).flip(0),
}


def assert_tokens_alone(y: torch.Tensor, x: torch.Tensor, spec: RopeSpec, at: torch.Tensor) -> None:
    """Assert that the first and the last token [tokens, heads, channels] are rotated as in a sequence of 700."""
    for token in (0, len(x) - 1):
        one = slice(token, token + 1) if token else slice(0, 1)
        alone = rotate(x[one], spec.at(int(at.flatten()[token]), seq_len=700), layout="thd")
        assert_same_bits(y[one], alone)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_need_one_length_for_all(name: str) -> None:
    where = positions.as_positions(PACKED[name])
    x = noise(where.ids.shape[2], 1, 8)
    without_rows = NO_ROWS if where.packed is None else AGAIN
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("rotate", without_rows, lambda: rotate(x, SHORT, where, layout="thd")),
        ("at", AGAIN, lambda: SHORT.at(where)),
        ("rotate", AGAIN, lambda: rotate(x[None], SHORT, where, layout="bshd")),
        ("rotate_qk_", without_rows, lambda: rotate_qk_(x.clone(), x, SHORT, where, layout="thd")),
    ]
    for operation, phrase, call in calls:
        with pytest.raises(ValueError, match=rf"^\[{operation}\] {phrase}"):
            call()
    stated = rotate(x, SHORT.at(where, seq_len=700), layout="thd")
    assert_tokens_alone(stated, x, SHORT, where.ids + where.offset)
    # If all sequences are short, they have the same frequencies.
    short = rotate(x, RopeSpec(8, scaling=DynamicNTK(2.0, 9999)), where, layout="thd")
    assert_same_bits(short, rotate(x, RopeSpec(8), where, layout="thd"))


def test_packed_sequences_on_a_device_need_a_length() -> None:
    x = torch.empty(6, 1, 8, device="meta")
    where = positions.packed(torch.tensor([0, 3, 6], device="meta"), total=6)
    with pytest.raises(ValueError, match=AGAIN):
        rotate(x, SHORT, where, layout="thd")
    with pytest.raises(ValueError, match=NO_ROWS):
        rotate(x, SHORT, where.ids[0, 0], layout="thd")  # type: ignore[index]
    assert rotate(x, SHORT.at(where, seq_len=700), layout="thd").shape == x.shape
    one = positions.packed(torch.tensor([0, 6], device="meta"), total=6)
    assert rotate(x, SHORT, one, layout="thd").shape == x.shape


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ids", [None, 30, torch.arange(8) + 600], ids=["none", "offset", "ids"])
def test_the_positions_of_one_rank_do_not_tell_the_length(
    kind: str, ids: positions.PositionsLike
) -> None:
    where = positions.explicit(positions.shard(ids, 1, 2, kind=kind, tokens=8), 4)
    x, phrase = noise(4, 1, 8), "seq_len must be given with the positions of one rank's tokens"
    with pytest.raises(ValueError, match=rf"^\[rotate\] {phrase}"):
        rotate(x, SHORT, where, layout="thd")
    with pytest.raises(ValueError, match=rf"^\[at\] {phrase}"):
        SHORT.at(where, stack="transformers")
    y = rotate(x, SHORT.at(where, seq_len=700), layout="thd")
    assert_tokens_alone(y, x, SHORT, where.ids)


@pytest.mark.parametrize("ids", [[15, 110], [109, 110], [110, 15]], ids=str)
@pytest.mark.parametrize("rule", [*RULES.values(), UNEQUAL], ids=[*RULES, "unequal"])
def test_tokens_without_rows_may_be_of_several_sequences(rule: Rule, ids: list[int]) -> None:
    """Decoding of several requests: with a row for each, they have the frequencies of their own lengths."""
    spec, x, where = RopeSpec(8, scaling=rule), noise(2, 3, 8), torch.tensor(ids) + TRAINED
    with pytest.raises(ValueError, match=rf"^\[rotate\] {NO_ROWS}.*layout='bshd'"):
        rotate(x, spec, where, layout="thd")
    with pytest.raises(ValueError, match="layout='bsd'"):
        rotate(x[:, 0], spec, where, layout="sd")
    with pytest.raises(ValueError, match=SEVERAL):
        spec.at(where)  # without a layout
    if rule is UNEQUAL:
        return  # its rows must have one factor, see below
    each = rotate(x.unsqueeze(1), spec, where[:, None], layout="bshd").squeeze(1)
    key = rotate(x[:, 0].unsqueeze(1), spec, where[:, None], layout="bsd").squeeze(1)
    assert_same_bits(key, each[:, 0])
    for row, position in enumerate(where.tolist()):
        alone = rotate(x[row : row + 1], spec, position, layout="thd")
        assert_same_bits(each[row : row + 1], alone)


# Tokens that may be a part of a longer sequence, as (positions, number of tokens).
PARTS: dict[str, tuple[positions.PositionsLike, int]] = {
    "an offset": (7, 3),
    "an offset per row": (positions.per_row(torch.tensor([9, 0])), 3),
    "ids": (torch.arange(TRAINED - 2, TRAINED + 1), 3),
    "floating ids": (torch.arange(TRAINED - 2, TRAINED + 1).double(), 3),
    "a pack of one": (positions.packed(torch.tensor([0, 3]), TRAINED - 2), 3),
    "a gap": (torch.tensor([7, 8, TRAINED]), 3),
    "every other token": (torch.arange(TRAINED, TRAINED + 6, 2), 3),
    "drafts": (torch.tensor([TRAINED, TRAINED + 1, TRAINED + 1]), 3),
    "per head": (positions.per_head(torch.tensor([[[5, 6, 9000], [7, 8, 9000]]])), 3),
    "an image": (positions.multi_axis(torch.tensor([[5, 5, 9000], [5, 6, 1], [6, 5, 2]])), 3),
}
# Tokens that are no such part.
WHOLE: dict[str, tuple[positions.PositionsLike, int]] = {
    "a token": (TRAINED, 1),
    "tokens of rows": (positions.per_row(torch.tensor([5, 9000])), 1),
    "ids of rows": (torch.tensor([[5], [9000]]), 1),
    "an end before 0": (-TRAINED, 3),
    "from 0": (torch.tensor([0, 8, TRAINED]), 3),
    "short": (torch.tensor([7, 8, 9]), 3),
    "a row of padding": (torch.tensor([[1, 1, 1], [0, 8, TRAINED]]), 3),
    "padded": (positions.left_padded(torch.tensor([[0, 1, 1], [1, 1, 1]])), 3),
}


@pytest.mark.parametrize("name", [*PARTS, *WHOLE])
@every_rule
def test_a_part_of_a_sequence_needs_its_length(rule: str, name: str) -> None:
    where, tokens = (PARTS | WHOLE)[name]
    spec, x = spec_of(rule), noise(2, 2, tokens, 12)
    if isinstance(where, positions.Positions) and where.axes == 3:
        spec = replace(spec, axes=Axes.sections((2, 1, 1)))
    if name in WHOLE:
        rotate(x, spec, where)
        rotate(x, spec.at(where))
        return
    for call in (lambda: rotate(x, spec, where), lambda: rotate_(x.clone(), spec.at(where))):
        with pytest.raises(ValueError, match=SEVERAL):
            call()
    if name in ("ids", "a gap", "per head", "an image"):
        with pytest.raises(ValueError, match=rf"^\[cos_sin\] {SEVERAL}"):
            spec.cos_sin(where)


@every_rule
def test_a_prompt_in_chunks_with_its_length_is_the_whole(rule: str) -> None:
    total, size = TRAINED + 1000, 1024
    spec, x = spec_of(rule), noise(2, 1, total, 12)
    whole = rotate(x, spec)
    for first in range(0, total, size):
        end = min(first + size, total)
        for where in (first, torch.arange(first, end), torch.arange(first, end).expand(2, -1)):
            part = x[:, :, first:end].clone()
            assert_same_bits(rotate(part, spec.at(where, seq_len=total)), whole[:, :, first:end])
            rotate_(part, spec.at(where, seq_len=total))
            assert_same_bits(part, whole[:, :, first:end])


def test_what_is_one_sequence_needs_no_length() -> None:
    x = noise(120, 1, 8)
    for where in (
        positions.packed(torch.tensor([0, 120])),
        positions.explicit(None, 120),
        positions.left_padded(torch.ones(1, 120, dtype=torch.bool)),
        positions.grid(120),
        positions.shard(None, 0, 1, kind="zigzag", tokens=120),
    ):
        assert_same_bits(rotate(x, SHORT, where, layout="thd"), rotate(x, SHORT, layout="thd"))
    # Coordinates of an image do not start again; a second image after the text does.
    spec = replace(SHORT, scaling=DynamicNTK(2.0, 16), axes=Axes.sections((2, 1, 1)))
    image = positions.mrope([10, (1, 4, 6), 5])
    x, length = noise(1, 1, image.ids.shape[2], 8), int(image.ids.max()) + 1  # type: ignore[union-attr]
    assert length > 16
    assert_same_bits(rotate(x, spec, image), rotate(x, spec.at(image, seq_len=length)))
    with pytest.raises(ValueError, match="start again"):
        rotate(torch.cat((x, x), 2), spec, positions.concatenate([image, image]))


def test_sequences_of_the_original_length_may_start_again() -> None:
    """Also beside a longer row."""
    x, again = noise(2, 1, 105, 8), torch.cat((torch.arange(5), torch.arange(100)))
    wanted = rotate(x, RopeSpec(8), again)
    for where in (again, positions.packed(torch.tensor([0, 5, 105]))):
        assert_same_bits(rotate(x, SHORT, where), wanted)
    beside = torch.stack((torch.arange(105) * 2, again))
    assert_same_bits(rotate(x, SHORT, beside)[1:], wanted[1:])


# --- attention scaling ----------------------------------------------------------------------------

SCALED: dict[str, tuple[Rule, int]] = {
    "yarn": (YaRN(4.0, TRAINED), 12),
    "yarn, given": (YaRN(4.0, TRAINED, attention_factor=0.7), 12),
    "longrope": (RULES["longrope"], 12),
    "unequal, short": (UNEQUAL, 4096),
    "unequal, long": (UNEQUAL, 4097),
}


@every_backend
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_the_rotated_channels_are_scaled(name: str, interleaved: bool, backend: str) -> None:
    rule, length = SCALED[name]
    spec, x, where = spec_of(rule, interleaved), noise(2, 3, 1, 12), length - 1
    assert spec.attention_scaling(length) == amplitude(rule, length) != 1.0
    turned = {}
    for inverse in (False, True):
        options: dict[str, Any] = {"inverse": inverse, "backend": backend}
        y = turned[inverse] = stated.call(rotate, x, spec, where, **options)
        assert_exact(y, x, spec, [where], length, inverse=inverse)
        assert_same_bits(y[..., [0, 1, 10, 11]], x[..., [0, 1, 10, 11]])
        assert_same_bits(stated.call(rotate_, x.clone(), spec, where, **options), y)
        assert_same_bits(stated.call(rotate, x, spec, where, out=torch.empty_like(x), **options), y)
        assert_same_bits(stated.call(rotate, x, spec.at(where), **options), y)
    back = on(backend, rotate, turned[False], spec, where, inverse=True)
    assert_near(back, x, "float64 ways")


def test_rows_of_unequal_factors_are_refused_together() -> None:
    spec, x = spec_of(UNEQUAL), noise(2, 1, 1, 12)
    for where, seq_len in (
        (positions.per_row(torch.tensor([0, 5000])), None),
        (torch.tensor([[3], [4096]]), None),
        (0, [4096, 4097]),
        (0, torch.tensor([4096, 4097])),
    ):
        with pytest.raises(NotImplementedError, match=r"one attention scaling but got 1\.25, 1\.5"):
            rotate(x, spec.at(where, seq_len=seq_len))
    y = rotate(x, spec, positions.per_row(torch.tensor([4999, 5000])))
    assert_same_bits(y[1:], rotate(x[1:], spec, 5000))
