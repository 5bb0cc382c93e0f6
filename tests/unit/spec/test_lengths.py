"""Frequency rules that depend on the length: the frequencies of a row are a function of its own length alone.

The length is the one that the caller states, else the largest position of the row plus 1. Neither other rows nor
earlier calls change it, and positions that do not tell it, or go beyond a stated one, are refused.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support.by_length import (
    RULES,
    TRAINED,
    UNEQUAL,
    assert_exact,
    every_rule,
    spec_of,
)
from tests.support.helpers import noise
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Rule, YaRN
from tightrope.functional import polar_scan, rerotate, rotate, rotate_, rotate_qk, rotate_qk_

SHORT = RopeSpec(8, scaling=DynamicNTK(2.0, 100))

# --- the law --------------------------------------------------------------------------------------

# One spec for all tests of a rule, so that each comes after other calls.
USED = {rule: spec_of(rule) for rule in RULES}
PAIRS = {"apart": (3000, 6000), "at the switch": (TRAINED, TRAINED + 1)}


def rows_of(table: str, **names: Any) -> dict[str, list[Any]]:
    """Return the rows of a table in lengths.jsonl by name: of each field its value, or that of its expression."""
    names = {**globals(), **names}
    file = Path(__file__).with_name("lengths.jsonl")
    return {
        row["of"]: [eval(x, names) if isinstance(x, str) else x for x in [*row.values()][2:]]
        for row in map(json.loads, file.read_text("utf-8").splitlines())
        if row["table"] == table
    }


def ways(lengths: tuple[int, int]) -> dict[str, list[Any]]:
    """Return (positions, seq_len) by which the last tokens of two rows are those of these lengths."""
    own = torch.tensor(lengths)
    last, total = own[:, None] - 1, max(lengths) + 1
    padded = torch.arange(total) - (total - own[:, None])
    starts = positions.per_row(own - 1)
    return rows_of("WAYS", **locals())


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
FAR = positions.Positions(torch.full((1, 1, 3), 2**31 - 1).int(), 10, add_index=False)
STARTS = positions.packed(torch.tensor([0, 1, 3]), torch.tensor([3, 20]))


# Positions of one row, its tokens, and its length.
OF_POSITIONS = rows_of("OF_POSITIONS")


def trained_on(rule: str, length: int) -> RopeSpec:
    """Return a spec whose rule has this original length, on which only frequencies depend."""
    fields: dict[str, Any] = {} if rule == "dynamic" else {"attention_factor": 1.0}
    return spec_of(replace(RULES[rule], original_max_position=length, **fields))


@pytest.mark.parametrize("where, tokens, length", OF_POSITIONS.values(), ids=OF_POSITIONS)
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
OF_A_RANK = "seq_len must be given with the positions of one rank's tokens"


def share(ids: positions.PositionsLike, kind: str) -> positions.Positions:
    return positions.explicit(positions.shard(ids, 1, 2, kind=kind, tokens=8), 4)


# Sequences packed in one row, one of them longer than 100, and shares of one.
PACKED = {name: where for name, (where,) in rows_of("PACKED").items()}


def assert_tokens_alone(y: torch.Tensor, x: torch.Tensor, spec: RopeSpec, at: torch.Tensor) -> None:
    """Assert that the first and the last token [tokens, heads, channels] are rotated as in a sequence of 700."""
    for token in (0, len(x) - 1):
        one = slice(token, token + 1) if token else slice(0, 1)
        alone = rotate(x[one], spec.at(int(at.flatten()[token]), seq_len=700), layout="thd")
        assert_same_bits(y[one], alone)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_and_shares_need_one_length_for_all(name: str) -> None:
    where = positions.as_positions(PACKED[name])
    x = noise(where.ids.shape[2], 1, 8)
    with_rows = OF_A_RANK if "share of" in name else AGAIN
    without_rows = NO_ROWS if where.packed is None and with_rows is AGAIN else with_rows
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("rotate", without_rows, lambda: rotate(x, SHORT, where, layout="thd")),
        ("at", with_rows, lambda: SHORT.at(where)),
        ("rotate", with_rows, lambda: rotate(x[None], SHORT, where, layout="bshd")),
        ("rotate_qk_", without_rows, lambda: rotate_qk_(x.clone(), x, SHORT, where, layout="thd")),
    ]
    if with_rows is OF_A_RANK:
        calls.append(("at", with_rows, lambda: SHORT.at(where, stack="transformers")))
    for operation, phrase, call in calls:
        with pytest.raises(ValueError, match=rf"^\[{operation}\] {phrase}"):
            call()
    stated = rotate(x, SHORT.at(where, seq_len=700), layout="thd")
    assert_tokens_alone(stated, x, SHORT, where.ids + where.offset)
    if with_rows is AGAIN:  # if all sequences are short, they have the same frequencies
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


# Tokens that are no part of a longer sequence, as (positions, number of tokens).
WHOLE = rows_of("WHOLE")


@pytest.mark.parametrize("where, tokens", WHOLE.values(), ids=WHOLE)
@every_rule
def test_what_is_no_part_of_a_sequence_needs_no_length(
    rule: str, where: positions.PositionsLike, tokens: int
) -> None:
    """Parts are refused: rows of refused_calls.jsonl."""
    spec, x = spec_of(rule), noise(2, 2, tokens, 12)
    assert_same_bits(rotate(x, spec, where), rotate(x, spec.at(where)))


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


def test_rows_of_equal_factors_may_be_together() -> None:
    spec, x = spec_of(UNEQUAL), noise(2, 1, 1, 12)
    y = rotate(x, spec, positions.per_row(torch.tensor([4999, 5000])))
    assert_same_bits(y[1:], rotate(x[1:], spec, 5000))


# --- stated lengths -------------------------------------------------------------------------------

META = torch.device("meta")
PLAIN = {"none": RopeSpec(12, rotary_dim=8, start=2), "yarn": spec_of(YaRN(4.0, TRAINED))}
SPECS = PLAIN | {name: spec_of(name) for name in RULES}


@pytest.mark.parametrize("rule", SPECS)
def test_integers_of_every_library_are_lengths(rule: str) -> None:
    """One for all rows, or one for each; without a rule by length, they change nothing."""
    spec, x = SPECS[rule], noise(2, 2, 3, 12)
    wanted = rotate(x, spec.at(9, seq_len=6000))
    assert torch.equal(wanted, rotate(x, spec.at(9, seq_len=4000))) == (rule in PLAIN)
    for kind in (numpy.array, numpy.int32, numpy.uint64, torch.tensor, lambda n: [n, n], iter):
        if kind is iter:
            kind = lambda n: iter([n] * 2)  # noqa: E731
        for y in (
            rotate(x, spec.at(9, seq_len=kind(6000))),
            rotate_(x.clone(), spec.at(9, seq_len=kind(6000))),
            *rotate_qk(x, x, spec.at(9, seq_len=kind(6000))),
        ):
            assert_same_bits(y, wanted)
        assert spec.attention_scaling(kind(6000)) == spec.attention_scaling(6000)


@pytest.mark.parametrize("seq_len", [numpy.int64(6000), numpy.array([6000, 5000])], ids=repr)
@pytest.mark.parametrize("rule", ["none", "dynamic"])
def test_numbers_of_numpy_compile(rule: str, seq_len: Any) -> None:
    spec, x = SPECS[rule], noise(2, 2, 3, 12, dtype=torch.float32)
    call = torch.compile(
        lambda x, n: rotate(x, spec.at(9, seq_len=n)), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(call(x, seq_len), rotate(x, spec.at(9, seq_len=seq_len)))


# --- positions beyond the stated length -----------------------------------------------------------

# Positions of three tokens in two rows, a length that is too small, the least one, its row, and a
# length that is right. Most lengths are far below the original length of 4096.
PASSED = rows_of("PASSED")


def too_small(least: int, row: int | None = None, of: str = "rotate") -> Any:
    """Expect the error for a length below the least one."""
    of_row = "" if row is None else f" of row {row}"
    rule = (
        rf"seq_len( of old| of new)? must be at least {least}, the largest position{of_row} plus 1"
    )
    return pytest.raises(ValueError, match=rf"^\[{of}\] {rule}")


@pytest.mark.parametrize("case", PASSED)
@every_rule
def test_positions_beyond_the_length_are_refused(rule: str, case: str) -> None:
    where, small, least, row, enough = PASSED[case]
    spec, x = spec_of(rule), noise(2, 1, 3, 12)
    given = positions.as_positions(where)
    explicit = given.ids is not None and not given.add_index
    short, long = (lambda n=n: spec.at(where, seq_len=n) for n in (small, 2**40))
    calls: dict[str, Callable[[], object]] = {
        "rotate": lambda: rotate(x, short()),
        "rotate_": lambda: rotate_(x, short()),
        "rotate_qk": lambda: rotate_qk(x, x, short()),
        "rotate_qk_": lambda: rotate_qk_(x, x.clone(), short()),
        "polar_scan": lambda: polar_scan(x, x, x, short()),
        "rerotate": lambda: rerotate(x, short(), long()),
        "rerotate ": lambda: rerotate(x, long(), short()),
    }
    if given.packed:
        calls.pop("polar_scan")  # takes one sequence in each row
    kept = x.clone()
    for operation, call in calls.items():
        # The tokens of ids are known at once.
        with too_small(least, row, "at" if explicit else operation.strip()):
            call()
    assert_same_bits(x, kept)
    for stated, length in ((spec, enough), (PLAIN["yarn"], small)):  # YaRN takes any length
        assert rotate(x, stated.at(where, seq_len=length)).shape == x.shape
        rotate(x, stated.at(where, seq_len=length))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@every_rule
def test_a_prepared_rotation_checks_every_call(rule: str, layout: str) -> None:
    """Also on the fast path of later calls."""
    rope = spec_of(rule).at(9, seq_len=12)

    def turn(tokens: int) -> torch.Tensor:
        x = noise(2, 1, tokens, 12)
        return rotate_(x.permute(["bhsd".index(axis) for axis in layout]), rope, layout=layout)

    for tokens in (3, 3, 1, 0, 3):
        turn(tokens)
        for many in (4, 400):
            with too_small(9 + many, of="rotate_"):
                turn(many)


@every_rule
def test_ids_that_change_are_compared_again(rule: str) -> None:
    """Whatever changes them: numpy does without a version counter, and a subclass holds its own data."""

    class Ids(torch.Tensor):
        pass

    spec, x = spec_of(rule), noise(2, 1, 3, 12)
    for kind in (torch.Tensor, Ids):
        starts, ids = torch.tensor([0, 9]), torch.tensor([0, 1, 2])
        ropes = [
            spec.at(positions.per_row(starts.as_subclass(kind)), seq_len=12),
            spec.at(ids.as_subclass(kind), seq_len=12),
        ]
        for _ in range(2):
            rotate(x, ropes[0])
            rotate(x, ropes[1])
        starts.numpy()[:] -= 1
        ids.numpy()[:] += 9
        moved = rotate(x, spec.at(positions.per_row(starts), seq_len=12))
        assert_same_bits(rotate(x, ropes[0]), moved)
        assert_same_bits(rotate(x, ropes[1]), rotate(x, spec.at(9, seq_len=12)))
        starts.numpy()[:] += 2
        ids.numpy()[:] += 1
        for rope, row in zip(ropes * 2, (1, None) * 2):
            with too_small(13, row):
                rotate(x, rope)
        with too_small(13, of="at"):
            spec.at(ids.as_subclass(kind), seq_len=12)


@every_rule
def test_lost_and_negative_positions_exceed_no_length(rule: str) -> None:
    spec, x = spec_of(rule), noise(1, 1, 3, 12)
    nan, inf = float("nan"), float("inf")
    for ids, seq_len in (([nan, 4.0, inf], 5), ([nan] * 3, 0), ([-9.0, -inf, 4.0], 5)):
        rotate(x, spec.at(torch.tensor(ids), seq_len=seq_len))
    rotate(x, spec.at(-9, seq_len=0))


@every_rule
def test_checks_do_not_wait_for_a_device(rule: str) -> None:
    """Positions are not compared with seq_len if either is on a device: reading it would wait."""
    spec, x = spec_of(rule), torch.empty(2, 1, 3, 12, device=META)
    ids = torch.tensor([9, 10, 11])
    rotate(x, spec.at(ids.to(META), seq_len=3))
    rotate(x, spec.at(9, device=META, seq_len=torch.tensor(3, device=META)))
    rotate(x, spec.at(positions.per_row(torch.tensor([9, 9], device=META)), seq_len=3))
    for where, of in ((9, "rotate"), (ids, "at")):
        with too_small(12, of=of):
            rotate(x, spec.at(where, device=META, seq_len=3))
    # The copy on the device does not follow changes of the original.
    starts = torch.tensor([9])
    rope = spec.at(positions.per_row(starts), device=META, seq_len=12)
    starts += 500
    rotate(x, rope)
    with too_small(13):
        rotate(torch.empty(2, 1, 4, 12, device=META), rope)
