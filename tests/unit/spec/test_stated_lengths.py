"""Lengths that the caller states: the types that are accepted, and positions beyond them."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tests.support.by_length import RULES, TRAINED, every_rule, spec_of
from tests.support.helpers import refusals, refused
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.frequencies import DynamicNTK, Given, Linear, Rule, YaRN
from tightrope.functional import polar_scan, rerotate, rotate, rotate_, rotate_qk, rotate_qk_

TAIL = 3
X = torch.zeros(5, 12)
test_errors = refusals(
    ValueError={
        "[rotate] seq_len must be one length but got 2 (layout 'thd' has no rows) (x: float32[5, 1, "
        "12]).": lambda: rotate(
            X[:, None], spec_of("longrope"), seq_len=torch.tensor([2, 3]), layout="thd"
        ),
        "[rotate] seq_len must be None with a prepared rotation, which has its own; call "
        "spec.at(positions, seq_len=…).": (
            lambda: rotate(X, spec_of("dynamic").at(), seq_len=5, layout="sd")
        ),
        "[rotate] seq_len must be one length, or one for each of 2 rows, but got 3 (x: float32[2, 1, 5, "
        "12]).": [
            lambda lengths=lengths: rotate(
                X.expand(2, 1, 5, 12), spec_of("dynamic"), seq_len=lengths
            )
            for lengths in ([5000, 6000, 7000], [5, 6, 7])
        ],
        "[seq_len] lengths must have data but are on the meta device while the rotated tensors are "
        "on cpu.": lambda: rotate(
            X, spec_of("dynamic"), layout="sd", seq_len=torch.tensor(5, device="meta")
        ),
        "[seq_len] a length must not be negative but got -5.": (
            lambda: spec_of("longrope").at(seq_len=[5, -5])
        ),
    },
)


def test_lost_ids_are_what_they_were() -> None:
    spec, ids = spec_of("dynamic"), torch.tensor([0.0, torch.nan, 6000.0])
    rotation = spec.at(ids)
    for _ in range(2):
        assert rotate(torch.ones(1, 1, 3, 12), rotation).isnan().any()


PLAIN: dict[str, Rule | None] = {
    "none": None,
    "yarn": YaRN(4.0, TRAINED),
    "linear": Linear(4.0),
    "given": Given((1.0, 0.3, 0.1, 0.01)),
}


ONE_PER_ROW = "a length must be an int, or one per row, but got"
NUMBERS = "lengths must be int32, int64 or float64 (seq_len:"
INVALID: dict[str, tuple[Any, type[Exception], str]] = {
    **{
        f"{type(value).__name__} {value!r}": (value, TypeError, f"{ONE_PER_ROW} {value!r}.")
        for value in (
            *("long", b"ab", {0: 9}, {9}, 5.0, True, object),
            *(numpy.array(5.0), numpy.array(True), numpy.array(None)),
        )
    },
    "a table of numpy": (numpy.ones((2, 2)), TypeError, f"{ONE_PER_ROW} array([1., 1.])."),
    "a bool in a list": ([torch.tensor(True)], TypeError, f"{ONE_PER_ROW} bool[]."),
    "no number in a list": ([torch.tensor(5, device="meta")], TypeError, f"{ONE_PER_ROW} int64[]."),
    "floats": ([7, 5.5], TypeError, f"{ONE_PER_ROW} 5.5."),
    "narrow floats": (torch.zeros(2), TypeError, f"{NUMBERS} float32[2])."),
    "a mask": (torch.ones(2, device="meta").bool(), TypeError, f"{NUMBERS} bool[2])."),
    "a table": (
        torch.ones(2, 2, dtype=torch.int64),
        ValueError,
        "lengths must have shape (rows,) (seq_len: int64[2, 2]).",
    ),
    "a negative int": (-3, ValueError, "a length must not be negative but got -3."),
    "one of numpy": (numpy.array(-3), ValueError, "a length must not be negative but got -3."),
}


def test_rules_that_do_not_depend_on_the_length_ignore_it() -> None:
    spec, x = spec_of(YaRN(4.0, TRAINED)), torch.randn(2, 1, 5, 12)
    for seq_len in (
        *(5, [5, 6, 7], iter([5, 6]), torch.tensor([5, 6]), torch.tensor(1)),
        *(numpy.array(5), numpy.uint8(5), numpy.array([5, 6])),
    ):
        assert_same_bits(rotate(x, spec, 3, seq_len=seq_len), rotate(x, spec, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seq_len",
    [numpy.array(6000), numpy.int32(6000), numpy.uint64(6000), numpy.array([6000])],
    ids=repr,
)
@every_rule
def test_one_number_of_numpy_is_a_length_for_all_rows(rule: str, seq_len: Any) -> None:
    spec, x = spec_of(rule), torch.randn(2, 2, TAIL, 12)
    want = rotate(x, spec_of(rule), 9, seq_len=6000)
    assert not torch.equal(want, rotate(x, spec_of(rule), 9, seq_len=4000))
    for made in (
        rotate(x, spec, 9, seq_len=seq_len),
        rotate_(x.clone(), spec, 9, seq_len=seq_len),
        *rotate_qk(x, x, spec, 9, seq_len=seq_len),
        rotate(x, spec.at(9, seq_len=seq_len)),
    ):
        assert_same_bits(made, want)
    assert spec.attention_scaling(seq_len) == spec.attention_scaling(6000)


@pytest.mark.parametrize(
    "seq_len", [numpy.array(6000), numpy.int64(6000), numpy.array([6000, 5000])], ids=repr
)
@pytest.mark.parametrize("rule", ["none", "dynamic"])
def test_numbers_of_numpy_compile(rule: str, seq_len: Any) -> None:
    spec, x = spec_of({**PLAIN, **RULES}[rule]), torch.randn(2, 2, TAIL, 12)  # type: ignore[arg-type]
    call = torch.compile(
        lambda x, n: rotate(x, spec, 9, seq_len=n), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(call(x, seq_len), rotate(x, spec, 9, seq_len=seq_len))


@pytest.mark.parametrize("case", INVALID)
@pytest.mark.parametrize("rule", [*PLAIN, *RULES])
def test_invalid_lengths_are_refused_by_every_rule(rule: str, case: str) -> None:
    seq_len, kind, text = INVALID[case]
    spec = spec_of({**PLAIN, **RULES}[rule])  # type: ignore[arg-type]
    x = torch.randn(2, 1, 3, 12)
    calls: list[Callable[[], object]] = [
        lambda: rotate(x, spec, seq_len=seq_len),
        lambda: rotate_(x.clone(), spec, seq_len=seq_len),
        lambda: rotate_qk(x, x, spec, seq_len=seq_len),
        lambda: rerotate(x, spec, spec, from_seq_len=9, to_seq_len=seq_len),
        lambda: rerotate(x, spec, spec, from_seq_len=seq_len, to_seq_len=9),
        lambda: polar_scan(x, x, x, spec, seq_len=seq_len),
        lambda: spec.at(seq_len=seq_len),
        lambda: spec.words_for(seq_len),
        lambda: spec.attention_scaling(seq_len),
    ]
    if not isinstance(seq_len, (torch.Tensor, list)) and numpy.ndim(seq_len) == 0:
        calls.append(lambda: spec.frequencies(seq_len))
        if spec.scaling is not None:
            calls.append(lambda: spec.scaling.frequencies(8, 10000.0, seq_len))  # type: ignore[union-attr]
    for call in calls:
        with refused(kind, f"[seq_len] {text}"):
            call()


# --- positions beyond the stated length -----------------------------------------------------------

# Positions of three tokens in two rows, a length that is too small, the least one and its row, and a
# length that is right. Most lengths are far below the original length of 4096.
PASSED: dict[str, tuple[positions.PositionsLike, Any, str, Any]] = {
    "nothing": (None, 2, "3, but got 2", 3),
    "an offset": (9, 3, "12, but got 3", 12),
    "an offset, one row of two": (9, [12, 11], "12, of row 1, but got 11", [12, 12]),
    "a tensor": (9, torch.tensor([11, 12]), "12, of row 0, but got 11", torch.tensor([12, 12])),
    "a long one": (6000, 6002, "6003, but got 6002", 6003),
    "ids": (torch.tensor([9, 11, 10]), 11, "12, but got 11", 12),
    "ids of rows": (
        torch.tensor([[0, 1, 2], [0, 11, 1]]),
        [9, 9],
        "12, of row 1, but got 9",
        [9, 12],
    ),
    "fractions": (torch.tensor([0.0, 1.0, 11.25]), 12, "13, but got 12", 13),
    "offsets of rows": (
        positions.per_row(torch.tensor([9, 0])),
        11,
        "12, of row 0, but got 11",
        [12, 3],
    ),
    "a pack": (
        positions.explicit(positions.packed(torch.tensor([0, 1, 3]), torch.tensor([3, 20]))),
        21,
        "22, but got 21",
        22,
    ),
    "far ids": (
        positions.Positions(torch.full((1, 1, 3), 2**31 - 1).int(), 10, add_index=False),
        5,
        f"{2**31 + 10}, but got 5",
        2**31 + 10,
    ),
}


def too_small(facts: str, where: positions.PositionsLike = None) -> str:
    """Return the error for a length, from its facts like ``12, of row 1, but got 11``."""
    least, *row, got = facts.split(", ")
    ids = positions.as_positions(where).ids
    shape = [] if ids is None else list(ids.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    found = "" if ids is None else f" (positions: {str(ids.dtype)[6:]}{shape})"
    largest = " ".join(("the largest position", *row))
    return (
        f"seq_len must be at least {least}, {largest} plus 1, {got}; give the length of the whole "
        f"sequence{found}."
    )


@pytest.mark.parametrize("case", PASSED)
@every_rule
def test_positions_beyond_the_length_are_refused(rule: str, case: str) -> None:
    where, small, facts, enough = PASSED[case]
    spec, x = spec_of(rule), torch.randn(2, 1, 3, 12)
    text = too_small(facts, where)
    given = positions.as_positions(where)
    explicit = given.ids is not None and not given.add_index
    calls: dict[str, Callable[[], object]] = {
        "rotate": lambda: rotate(x, spec, where, seq_len=small),
        "rotate_": lambda: rotate_(x, spec, where, seq_len=small),
        "rotate_qk": lambda: rotate_qk(x, x, spec, where, seq_len=small),
        "rotate_qk_": lambda: rotate_qk_(x, x.clone(), spec, where, seq_len=small),
        "polar_scan": lambda: polar_scan(x, x, x, spec, positions=where, seq_len=small),
        "at" if explicit else "rotate ": lambda: rotate(x, spec.at(where, seq_len=small)),
    }
    if given.packed:
        calls.pop("polar_scan")  # takes one sequence in each row
    kept = x.clone()
    for operation, call in calls.items():
        with refused(ValueError, f"[{operation.strip()}] {text}"):
            call()
    for name, stated in (("from", (small, 2**40)), ("to", (2**40, small))):
        with refused(ValueError, f"[rerotate] {name}_{text}"):
            rerotate(x, spec, spec, where, from_seq_len=stated[0], to_seq_len=stated[1])
    assert_same_bits(x, kept)
    # A rule that does not depend on the length accepts any valid length.
    assert rotate(x, spec_of(YaRN(4.0, TRAINED)), where, seq_len=small).shape == x.shape
    rotate(x, spec, where, seq_len=enough)
    rotate(x, spec.at(where, seq_len=enough))
    with torch.device("meta"):
        rotate(torch.empty(2, 1, 3, 12), spec, where, seq_len=enough)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@every_rule
def test_a_prepared_rotation_checks_every_call(rule: str, layout: str) -> None:
    """Every call of a prepared rotation checks its length, also on the fast path of later calls."""
    spec = spec_of(rule)
    rope = spec.at(9, seq_len=12)

    def turn(tokens: int) -> torch.Tensor:
        x = torch.randn(2, 1, tokens, 12)
        return rotate_(x.permute(["bhsd".index(axis) for axis in layout]), rope, layout=layout)

    for tokens in (3, 3, 1, 0, 3):
        turn(tokens)
        for many in (4, 400):
            with refused(ValueError, f"[rotate_] {too_small(f'{9 + many}, but got 12')}"):
                turn(many)


@every_rule
def test_ids_that_change_are_compared_again(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(2, 1, 3, 12)
    starts, ids = torch.tensor([0, 9]), torch.tensor([0, 1, 2])
    ramps, written = spec.at(positions.per_row(starts), seq_len=12), spec.at(ids, seq_len=12)
    for _ in range(2):
        rotate(x, ramps)
        rotate(x, written)
    # numpy changes what they share, and no version counter counts this.
    starts.numpy()[:] -= 1
    ids.numpy()[:] += 9
    assert_same_bits(rotate(x, ramps), rotate(x, spec, positions.per_row(starts), seq_len=12))
    assert_same_bits(rotate(x, written), rotate(x, spec, 9, seq_len=12))
    starts.numpy()[:] += 2
    ids.numpy()[:] += 1
    for _ in range(2):
        for rope in (ramps, written):
            with pytest.raises(ValueError, match=r"^\[rotate\] seq_len must be at least 13"):
                rotate(x, rope)


@every_rule
def test_lost_and_negative_positions_exceed_no_length(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 3, 12)
    nan, inf = float("nan"), float("inf")
    for ids in ([nan, 4.0, inf], [nan] * 3, [-9.0, -inf, 4.0]):
        rotate(x, spec, torch.tensor(ids), seq_len=5)
    rotate(x, spec, -9, seq_len=0)
    rotate(x[:, :, :0], spec, 9, seq_len=2)
    rotate(x[:, :, :0], spec, torch.zeros(0, dtype=torch.int64), seq_len=0)
    rotate(x[:0], spec, torch.zeros(0, 3, dtype=torch.int64), seq_len=0)


@every_rule
def test_checks_do_not_wait_for_a_device(rule: str) -> None:
    """Positions are not compared with seq_len if either is on a device: reading it would wait."""
    spec, x = spec_of(rule), torch.empty(2, 1, 3, 12, device="meta")
    ids = torch.tensor([9, 10, 11])
    rotate(x, spec, ids.to("meta"), seq_len=3)
    rotate(x, spec, 9, seq_len=torch.tensor(3, device="meta"))
    rotate(x, spec, positions.per_row(torch.tensor([9, 9], device="meta")), seq_len=3)
    for where in (9, ids):
        with refused(ValueError, f"[rotate] {too_small('12, but got 3', where)}"):
            rotate(x, spec, where, seq_len=3)
    # The copy on the device does not follow changes of the original.
    starts = torch.tensor([9])
    rope = spec.at(positions.per_row(starts), device="meta", seq_len=12)
    starts += 500
    rotate(x, rope)
    with pytest.raises(ValueError, match=r"^\[rotate\] seq_len must be at least 13"):
        rotate(torch.empty(2, 1, 4, 12, device="meta"), rope)


class Ids(torch.Tensor):
    """A subclass that holds its own data."""


@every_rule
def test_ids_of_a_subclass_are_compared_with_the_length(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 3, 12)
    ids = torch.tensor([9, 10, 11]).as_subclass(Ids)
    text = too_small("12, but got 3", ids)
    with refused(ValueError, f"[rotate] {text}"):
        rotate(x, spec, ids, seq_len=3)
    with refused(ValueError, f"[at] {text}"):
        spec.at(ids, seq_len=3)
    rope = spec.at(positions.per_row(ids[:1]), seq_len=12)
    assert_same_bits(rotate(x, rope), rotate(x, spec, 9, seq_len=12))
    ids += 1
    with pytest.raises(ValueError, match="seq_len must be at least 13"):
        rotate(x, rope)


def test_a_rotation_for_some_rows_refuses_others_the_second_time_too() -> None:
    """Phase words are equal for all rows here, so the kernel would not detect the mismatch."""
    rope = RopeSpec(8, scaling=DynamicNTK(2.0, 64)).at(seq_len=[10, 20])
    rotate_(torch.ones(2, 1, 5, 8), rope)
    sentence = "[rotate_] seq_len must be one length, or one for each of 3 rows, but got 2"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            rotate_(torch.ones(3, 1, 5, 8), rope)


@pytest.mark.parametrize("wrong", [None, [1, 2], torch.zeros(8, 64)], ids=["none", "list", "rank"])
def test_an_invalid_tensor_has_its_error_after_a_stated_length(wrong: Any) -> None:
    spec = RopeSpec(64, scaling=DynamicNTK(factor=2.0, original_max_position=16))
    rotation = spec.at(torch.arange(8), seq_len=64)
    rotate(torch.zeros(1, 2, 8, 64), rotation)
    with pytest.raises((TypeError, ValueError), match=r"^\[rotate\] x must "):
        rotate(wrong, rotation)
