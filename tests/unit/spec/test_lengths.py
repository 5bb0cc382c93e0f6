"""Frequency rules that depend on the length: each row of a batch is rotated as if it were alone."""

from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import torch

from tests.support import oracle, oracle_frequencies as truth
from tests.support.by_length import (
    RULES,
    TRAINED,
    UNEQUAL,
    amplitude,
    assert_exact,
    every_rule,
    exact,
    rule_of,
    spec_of,
)
from tests.support.helpers import refused
from tests.support.matrix import every_backend
from tests.support.tolerances import (
    Result,
    assert_near,
    assert_rotated,
    assert_rotations,
    assert_same_bits,
)
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Rule, YaRN
from tightrope.functional import rerotate, rotate, rotate_, rotate_qk_

# --- rows of 3,000 and 6,000 tokens ---------------------------------------------------------------

LENGTHS = (3000, 6000)
OWN = torch.tensor(LENGTHS)
TAIL = 1
LAST = OWN[:, None] - TAIL + torch.arange(TAIL)  # the last positions of each row
TOTAL = 6001  # so that both rows can have padding
PADDED = torch.arange(TOTAL) - (TOTAL - OWN[:, None])

# Ways to give the positions of a batch, as (positions, seq_len). In all of them the last TAIL tokens of
# each row are at its last positions.
WAYS: dict[str, Callable[[], tuple[positions.PositionsLike, object]]] = {
    "ids per row": lambda: (LAST, None),
    "narrow ids": lambda: (LAST.int(), None),
    "floating ids": lambda: (LAST.double(), None),
    "narrow floating ids": lambda: (LAST.float(), None),
    "offsets per row": lambda: (positions.per_row(OWN - TAIL), None),
    "padded by lengths": lambda: (positions.per_row(OWN - TOTAL), None),
    "padded by a mask": lambda: (positions.left_padded(PADDED >= 0), None),
    "padded with ones": lambda: (PADDED.masked_fill(PADDED < 0, 1), None),
    "a list": lambda: (positions.explicit(positions.per_row(OWN - TAIL), TAIL), [3000, 6000]),
    "a tensor": lambda: (positions.per_row(OWN - TAIL), OWN),
    "a fractional tensor": lambda: (positions.per_row(OWN - TAIL), OWN.double() - 0.5),
    "numbers of numpy": lambda: (LAST, list(numpy.array(LENGTHS))),
    "an iterator": lambda: (LAST, iter(LENGTHS)),
}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("way", WAYS)
@every_rule
def test_each_row_gets_what_it_would_get_alone(rule: str, way: str, prepared: bool) -> None:
    spec, fresh = spec_of(rule), spec_of(rule)
    where, seq_len = WAYS[way]()
    x = torch.randn(2, 2, TOTAL if "padded" in way else TAIL, 12, dtype=torch.float64)
    if prepared:
        y = rotate(x, spec.at(where, seq_len=seq_len))
    else:
        y = rotate(x, spec, where, seq_len=seq_len)
    for row, length in enumerate(LENGTHS):
        tail = x[row : row + 1, :, -TAIL:]
        assert_same_bits(y[row : row + 1, :, -TAIL:], rotate(tail, fresh, length - TAIL))
        assert_exact(y[row, :, -TAIL:], tail[0], spec, LAST[row].tolist(), length)


@every_rule
def test_earlier_calls_change_nothing(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 1, 12)
    first = {offset: rotate(x, spec_of(rule), offset) for offset in (2995, 5995, 4095, 4096, 0)}
    for offset in (5995, 2995, 0, 4096, 4095, 5995, 2995):
        assert_same_bits(rotate(x, spec, offset), first[offset])
    rotation = spec.at(-5)
    for tokens in (10, 6000, 1, 10):
        y = torch.randn(1, 1, tokens, 12)
        assert_same_bits(rotate(y, rotation), rotate(y, spec_of(rule), -5))


@every_rule
def test_rows_of_every_layout(rule: str) -> None:
    spec, where = spec_of(rule), positions.per_row(OWN - TAIL)
    x = torch.randn(2, 4, TAIL, 12)
    wanted = rotate(x, spec, where)
    for layout, dims in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        y = rotate(x.permute(dims), spec, where, layout=layout)
        assert_same_bits(y, wanted.permute(dims))


# --- the switch at the original length ------------------------------------------------------------


@every_rule
def test_the_original_length_is_short_and_one_more_is_long(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 12, dtype=torch.float64)
    for last, length in ((TRAINED - 1, TRAINED), (TRAINED, TRAINED + 1)):
        stated = rotate(x, spec, last, layout="sd", seq_len=length)
        assert_exact(stated, x, spec, [float(last)], length)
        own = torch.tensor(length)
        for where, seq_len in ((last, None), (torch.tensor([last]), None), (last, own)):
            assert_same_bits(rotate(x[None], spec, where, layout="bsd", seq_len=seq_len)[0], stated)


@every_rule
def test_fractions_count_as_the_next_whole_length(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(2, 12, dtype=torch.float64)
    for last, length in ((TRAINED - 1.0, TRAINED), (TRAINED - 0.75, TRAINED + 1)):
        ids = torch.tensor([0.5, last], dtype=torch.float64)
        y = rotate(x[None], spec, ids, layout="bsd")[0]
        assert_exact(y, x, spec, ids.tolist(), length)
        assert_same_bits(y, rotate(x, spec, ids, layout="sd", seq_len=length))


@every_rule
def test_negative_positions_are_short(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(2, 1, 2, 12, dtype=torch.float64)
    for where in (-9000, torch.tensor([-9000, -8999]), positions.per_row(torch.tensor([-9000]))):
        y = rotate(x, spec, where)
        assert_exact(y[0, 0], x[0, 0], spec, [-9000, -8999], 0)
    y = rotate(x, spec, torch.tensor([[-9000, 5], [-9000, 5000]]))
    assert_exact(y[0, 0], x[0, 0], spec, [-9000, 5], 6)
    assert_exact(y[1, 0], x[1, 0], spec, [-9000, 5000], 5001)


@every_rule
def test_lost_positions_spoil_nothing_but_their_token(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 4, 12)
    for lost in (float("nan"), float("inf"), -float("inf")):
        y = rotate(x, spec, torch.tensor([[0.0, lost, 5000.0, 5001.0]]))
        wanted = rotate(x, spec, torch.tensor([[0.0, 4999.0, 5000.0, 5001.0]]))
        assert y[:, :, 1, 2:10].isnan().all()
        keep = [0, 2, 3]
        assert_same_bits(y[:, :, keep], wanted[:, :, keep])


@every_rule
def test_last_positions_are_taken_in_64_bits(rule: str) -> None:
    """The length, last position + 1, does not overflow int32 and is not rounded to float32."""
    spec = RopeSpec(8, scaling=rule_of(rule, 2**24))
    short = RopeSpec(8, scaling=rule_of(rule, 2**31))
    x = torch.randn(1, 1, 1, 8)
    for ids in (torch.tensor([[2.0**24]]), torch.tensor([[2**31 - 1]], dtype=torch.int32)):
        last = int(ids)
        wanted = rotate(x, spec, last, seq_len=last + 1)
        assert not torch.equal(wanted, rotate(x, short, last))
        assert_same_bits(rotate(x, spec, ids), wanted)
        assert_same_bits(rotate(x, spec, positions.per_row(ids[0])), wanted)
    far = positions.Positions(torch.tensor([[[2**31 - 1]]], dtype=torch.int32), 10, add_index=False)
    last = 2**31 + 9
    assert_same_bits(rotate(x, spec, far), rotate(x, spec, last, seq_len=last + 1))


@every_rule
def test_nothing_to_rotate(rule: str) -> None:
    spec = spec_of(rule)
    for shape, where in (
        ((0, 1, 3, 12), torch.zeros(0, 3, dtype=torch.int64)),
        ((0, 1, 3, 12), positions.per_row(torch.zeros(0, dtype=torch.int64))),
        ((0, 1, 1, 12), 5000),
        ((2, 1, 0, 12), None),
        ((2, 1, 0, 12), torch.zeros(2, 0)),
        ((2, 1, 0, 12), positions.per_row(OWN)),
        ((2, 0, 1, 12), 5000),
    ):
        assert rotate(torch.zeros(shape), spec, where).shape == shape  # type: ignore[arg-type]
    assert rotate(torch.zeros(0, 1, 3, 12), spec, seq_len=[]).shape == (0, 1, 3, 12)
    still = RopeSpec(8, rotary_dim=0, scaling=DynamicNTK(2.0, TRAINED))
    x = torch.randn(1, 8)
    assert_same_bits(rotate(x, still, 9000, layout="sd"), x)


# --- several axes ---------------------------------------------------------------------------------


@every_rule
def test_the_largest_coordinate_is_the_last_position(rule: str) -> None:
    spec = RopeSpec(8, scaling=RULES[rule], axes=Axes.sections((2, 1, 1)))
    assert spec.axis_count == 3
    x = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 1], [5000, 5999], [7, 8]])
    y = rotate(x, spec, positions.multi_axis(ids))
    rates = truth.of(spec.scaling, 8, 10000.0, 6000)
    still = oracle.MP.mpf(0)
    per_axis = [
        [rate if owner == axis else still for rate, (owner, _, _) in zip(rates, spec.axes.pairs)]  # type: ignore[union-attr]
        for axis in range(3)
    ]
    wanted = oracle.rotate(x, ids[:, None], per_axis) * amplitude(spec.scaling, 6000)
    lengths = oracle.pair_lengths(x, 8) * amplitude(spec.scaling, 6000)
    assert_rotated([Result(y, wanted, lengths, 3 * 6000.0)])
    offset = positions.text(positions.per_row(torch.tensor([5999])), axes=3)
    text = positions.text(torch.tensor([5999]), axes=3)
    assert_same_bits(rotate(x[:, :, :1], spec, offset), rotate(x[:, :, :1], spec, text))


def test_coordinates_of_an_image_start_no_new_sequence() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 16), axes=Axes.sections((2, 1, 1)))
    where = positions.mrope([10, (1, 4, 6), 5])
    tokens = where.ids.shape[2]  # type: ignore[union-attr]
    x = torch.randn(1, 1, tokens, 8)
    last = int(where.ids.max())  # type: ignore[union-attr]
    assert last > 16
    assert_same_bits(rotate(x, spec, where), rotate(x, spec, where, seq_len=last + 1))
    twice = positions.concatenate([where, where])
    with pytest.raises(ValueError, match="start again"):
        rotate(torch.cat((x, x), 2), spec, twice)


# --- packed sequences -----------------------------------------------------------------------------

AGAIN = (
    "positions must not start again within a row (packed sequences?) because the frequencies of "
    "DynamicNTK depend on the length; pass one seq_len for all sequences, or rotate them separately"
)

NO_ROWS = (
    "seq_len must be given with ids of tokens without rows, as the frequencies of DynamicNTK depend on it, and the "
    "tokens may be of several sequences; if they are, give each sequence a row: x.unsqueeze(1), layout='bshd' and ids "
    "(rows, 1) for one token each"
)


PAIR = positions.packed(torch.tensor([0, 1, 2]), torch.tensor([30, 600]))
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


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    where = positions.as_positions(PACKED[name])
    tokens = where.ids.shape[2]
    x = torch.randn(tokens, 1, 8)
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 100))
    without_rows = NO_ROWS if where.packed is None else AGAIN
    for operation, sentence, call in (
        ("rotate", without_rows, lambda: rotate(x, spec, where, layout="thd")),
        ("at", AGAIN, lambda: spec.at(where)),
        ("rotate", AGAIN, lambda: rotate(x[None], spec, where, layout="bshd")),
        (
            "rotate_qk_",
            without_rows,
            lambda: rotate_qk_(x.clone(), x.clone(), spec, where, layout="thd"),
        ),
    ):
        with refused(ValueError, f"[{operation}] {sentence} (positions: int64[{tokens}])."):
            call()
    # With one length for all sequences, each token is rotated as it would be alone.
    stated = rotate(x, spec, where, layout="thd", seq_len=700)
    flat = (where.ids + where.offset).flatten()
    for token in (0, tokens - 1):
        alone = rotate(x[token : token + 1], spec, int(flat[token]), layout="thd", seq_len=700)
        assert_same_bits(stated[token : token + 1], alone)
    # If all sequences are short, they have the same frequencies.
    short = rotate(x, RopeSpec(8, scaling=DynamicNTK(2.0, 9999)), where, layout="thd")
    assert_same_bits(short, rotate(x, RopeSpec(8), where, layout="thd"))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ids", [None, 30, torch.arange(8) + 600], ids=["none", "offset", "ids"])
def test_the_positions_of_one_rank_do_not_tell_the_length(
    kind: str, ids: positions.PositionsLike
) -> None:
    spec, x = RopeSpec(8, scaling=DynamicNTK(2.0, 100)), torch.randn(1, 1, 4, 8)
    where = positions.explicit(positions.shard(ids, 1, 2, kind=kind, tokens=8), 4)
    text = (
        "seq_len must be given with the positions of one rank's tokens, as the frequencies depend on "
        "the length of the whole sequence (positions: int64[4])."
    )
    with refused(ValueError, f"[rotate] {text}"):
        rotate(x, spec, where)
    with refused(ValueError, f"[at] {text}"):
        spec.at(where, stack="transformers")
    own = rotate(x, spec, where, seq_len=700)
    each = where.ids.flatten().tolist()
    for token, at in enumerate(each):
        alone = rotate(x[:, :, token : token + 1], spec, at, seq_len=700)
        assert_same_bits(own[:, :, token : token + 1], alone)


def test_one_sequence_is_no_pack() -> None:
    spec, x = RopeSpec(8, scaling=DynamicNTK(2.0, 100)), torch.randn(120, 1, 8)
    for where in (
        positions.packed(torch.tensor([0, 120])),
        positions.explicit(None, 120),
        positions.left_padded(torch.ones(1, 120, dtype=torch.bool)),
        positions.grid(120),
        positions.shard(None, 0, 1, kind="zigzag", tokens=120),
    ):
        assert_same_bits(rotate(x, spec, where, layout="thd"), rotate(x, spec, layout="thd"))


@pytest.mark.parametrize("ids", [[15, 110], [109, 110], [110, 15]], ids=str)
@pytest.mark.parametrize("rule", ["dynamic", "longrope", "unequal"])
def test_tokens_without_rows_may_be_of_several_sequences(rule: str, ids: list[int]) -> None:
    """Decoding of several requests: each has the frequencies of its own length, or an error is raised."""
    spec = RopeSpec(8, scaling=UNEQUAL if rule == "unequal" else RULES[rule])
    x, where = torch.randn(2, 3, 8), torch.tensor(ids) + TRAINED
    with pytest.raises(ValueError, match=r"^\[rotate\] seq_len must be given with ids"):
        rotate(x, spec, where, layout="thd")
    with pytest.raises(ValueError, match="seq_len must be given with several tokens"):
        spec.at(where)  # without a layout
    if rule == "unequal":
        return  # its rows must have one factor, which is tested below
    each = rotate(x.unsqueeze(1), spec, where[:, None], layout="bshd").squeeze(1)
    key = rotate(x[:, 0].unsqueeze(1), spec, where[:, None], layout="bsd").squeeze(1)
    assert_same_bits(key, each[:, 0])
    with pytest.raises(ValueError, match="layout='bsd'"):
        rotate(x[:, 0], spec, where, layout="sd")
    for row, position in enumerate(where.tolist()):
        assert_same_bits(
            each[row : row + 1], rotate(x[row : row + 1], spec, position, layout="thd")
        )


def test_sequences_of_the_original_length_may_start_again() -> None:
    spec, plain = RopeSpec(8, scaling=DynamicNTK(2.0, 100)), RopeSpec(8)
    x, again = torch.randn(2, 1, 105, 8), torch.cat((torch.arange(5), torch.arange(100)))
    for where in (again, positions.packed(torch.tensor([0, 5, 105]))):
        assert_same_bits(rotate(x, spec, where), rotate(x, plain, where))
    beside_a_longer_row = torch.stack((torch.arange(105) * 2, again))
    assert_same_bits(rotate(x, spec, beside_a_longer_row)[1:], rotate(x[1:], plain, again))


def test_packed_positions_that_cannot_be_read_are_refused() -> None:
    """Several sequences packed on a device need seq_len, as their lengths are not read there."""
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 100))
    x = torch.empty(6, 1, 8, device="meta")
    where = positions.packed(torch.tensor([0, 3, 6], device="meta"), total=6)
    with refused(ValueError, f"[rotate] {AGAIN} (positions: int64[6])."):
        rotate(x, spec, where, layout="thd")
    assert rotate(x, spec, where, layout="thd", seq_len=700).shape == x.shape
    with refused(ValueError, f"[rotate] {NO_ROWS} (positions: int64[6])."):
        rotate(x, spec, where.ids[0, 0], layout="thd")
    one = positions.packed(torch.tensor([0, 6], device="meta"), total=6)
    assert rotate(x, spec, one, layout="thd").shape == x.shape


# --- parts of a sequence --------------------------------------------------------------------------

PARTS: dict[str, Callable[[int, int], positions.PositionsLike]] = {
    "an offset": lambda first, _: first,
    "an offset per row": lambda first, _: positions.per_row(torch.tensor([first, 0])),
    "ids": lambda first, end: torch.arange(first, end),
    "ids of rows": lambda first, end: torch.arange(first, end).expand(2, -1),
    "floating ids": lambda first, end: torch.arange(first, end).double(),
    "one sequence": lambda first, end: positions.packed(torch.tensor([0, end - first]), first),
}


@pytest.mark.parametrize("way", PARTS)
@every_rule
def test_a_prompt_in_chunks_needs_its_length(rule: str, way: str) -> None:
    """With `seq_len`, chunks have the bits of one call; without it they are refused, at the latest in the last."""
    total, size = TRAINED + 1000, 1024
    spec, x = spec_of(rule), torch.randn(2, 1, total, 12)
    whole = rotate(x, spec)
    ends = [(first, min(first + size, total)) for first in range(0, total, size)]
    for first, end in ends:
        part, where = x[:, :, first:end], PARTS[way](first, end)
        wanted = whole[:, :, first:end]
        rows = slice(0, 1) if way == "an offset per row" else slice(None)
        for y in (
            rotate(part, spec, where, seq_len=total),
            rotate_(part.clone(), spec.at(where, seq_len=total)),
        ):
            assert_same_bits(y[rows], wanted[rows])
        if first > 0 and ("offset" in way or end > TRAINED):
            with pytest.raises(ValueError, match=r"^\[rotate\] seq_len must be given with several"):
                rotate(part, spec, where)
            with pytest.raises(ValueError, match="seq_len must be given with several tokens"):
                rotate_(part.clone(), spec.at(where))


@every_rule
def test_tokens_that_are_no_part_need_no_length(rule: str) -> None:
    """A single token is the newest of its row, and a row that begins at 0 or is short is no chunk."""
    spec, x = spec_of(rule), torch.randn(2, 1, 3, 12)
    for where, tokens in (
        (TRAINED, 1),
        (positions.per_row(torch.tensor([5, 9000])), 1),
        (torch.tensor([[5], [9000]]), 1),
        (-TRAINED, 3),
        (torch.tensor([0, 8, TRAINED]), 3),
        (torch.tensor([7, 8, 9]), 3),
        (torch.tensor([[1, 1, 1], [0, 8, TRAINED]]), 3),  # a row of padding
        (positions.left_padded(torch.tensor([[0, 1, 1], [1, 1, 1]])), 3),
    ):
        rotate(x[:, :, :tokens], spec, where)


@every_rule
@pytest.mark.parametrize(
    "where",
    [
        torch.tensor([7, 8, TRAINED]),
        torch.arange(TRAINED, TRAINED + 6, 2),  # of one rank of several
        torch.tensor([TRAINED, TRAINED + 1, TRAINED + 1]),  # drafts
        torch.tensor([7, 9000, 9500]),  # one token of each of three requests
        positions.per_head(torch.tensor([[[5, 6, 9000], [7, 8, 9000]]])),
        positions.multi_axis(torch.tensor([[5, 5, 9000], [5, 6, 9000], [6, 5, 9000]])),
    ],
    ids=str,
)
def test_tokens_with_gaps_between_them_may_be_a_part(rule: str, where: object) -> None:
    spec = spec_of(rule)
    if isinstance(where, positions.Positions) and where.axes == 3:
        spec = replace(spec, axes=Axes.sections((2, 1, 1)))
    with pytest.raises(ValueError, match="seq_len must be given with several tokens"):
        rotate(torch.randn(1, 2, 3, 12), spec, where)
    with pytest.raises(ValueError, match=r"\[cos_sin\] seq_len must be given with several tokens"):
        spec.cos_sin(where)


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
    spec = spec_of(rule, interleaved)
    assert spec.attention_scaling(length) == amplitude(rule, length) != 1.0
    x = torch.randn(2, 3, 1, 12, dtype=torch.float64)
    where, ids = length - 1, [length - 1.0]
    still = [0, 1, 10, 11]
    y = rotate(x, spec, where, backend=backend)
    assert_exact(y, x, spec, ids, length)
    assert_same_bits(y[..., still], x[..., still])
    assert_same_bits(rotate_(x.clone(), spec, where, backend=backend), y)
    assert_same_bits(rotate(x, spec, where, out=torch.empty_like(x), backend=backend), y)
    assert_same_bits(rotate(x, spec.at(where), backend=backend), y)
    back = rotate(x, spec, where, inverse=True, backend=backend)
    assert_exact(back, x, spec, ids, length, inverse=True)
    assert_same_bits(rotate_(x.clone(), spec, where, inverse=True, backend=backend), back)
    assert_near(rotate(y, spec, where, inverse=True, backend=backend), x, "float64 ways")


def test_rows_of_unequal_factors_are_refused_together() -> None:
    spec, x = spec_of(UNEQUAL), torch.randn(2, 1, 1, 12)
    text = (
        "[RopeSpec] all rows of one call must have one attention scaling but got 1.25, 1.5; rotate "
        "short and long rows separately."
    )
    for where, seq_len in (
        (positions.per_row(torch.tensor([0, 5000])), None),
        (torch.tensor([[3], [4096]]), None),
        (0, [4096, 4097]),
        (0, torch.tensor([4096, 4097])),
    ):
        with refused(NotImplementedError, text):
            rotate(x, spec, where, seq_len=seq_len)
    # Rows that are all short, or all long, can share a call.
    y = rotate(x, spec, positions.per_row(torch.tensor([4999, 5000])))
    assert_same_bits(y[1:], rotate(x[1:], spec, 5000))


@every_rule
def test_decoding_step_by_step(rule: str) -> None:
    """A new token is rotated for the length that includes it; cached keys are rotated again for that length."""
    trained = 6
    spec = spec_of(rule_of(rule, trained))
    tokens = 12
    k = torch.randn(1, 1, tokens, 12, dtype=torch.float64)
    cache = torch.zeros_like(k)
    for step in range(tokens):
        new = k[:, :, step : step + 1]
        turned = rotate(new, spec, step)
        assert_exact(turned[0, 0], new[0, 0], spec, [float(step)], step + 1)
        held = cache[:, :, :step]
        # The keys in the cache were rotated for the length before this token.
        moved = rerotate(held, spec, spec, from_seq_len=step, to_seq_len=step + 1)
        cache[:, :, : step + 1] = torch.cat((moved, turned), 2)
        if step < trained:
            assert_same_bits(moved, held)
    wanted, lengths = exact(k[0, 0], spec, [float(at) for at in range(tokens)], tokens)
    assert_rotations(cache[0, 0], wanted, lengths, tokens, float(tokens))
    stale = torch.cat([rotate(k[:, :, at : at + 1], spec, at) for at in range(tokens)], 2)
    assert (stale - cache).abs().max() > 0.01  # without re-rotation the keys differ


def test_frequencies_of_a_shorter_sequence_on_purpose() -> None:
    spec, x = spec_of("dynamic"), torch.randn(1, 1, 3, 12)
    kept = spec_of(Given.of(spec.frequencies(6000).inv_freq))
    y = rotate(x, kept, 9000)
    wanted = oracle.rotate(x, [9000, 9001, 9002], truth.of(spec.scaling, 8, 10000.0, 6000), start=2)
    assert_rotated([Result(y, wanted, oracle.pair_lengths(x, 8, start=2), 9002.0)])
