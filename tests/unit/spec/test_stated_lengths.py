"""Lengths that the caller states: the types that are accepted, and positions beyond them."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tests.support.by_length import RULES, TRAINED, every_rule, spec_of
from tests.support.helpers import assert_form, noise
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.frequencies import DynamicNTK, YaRN
from tightrope.functional import polar_scan, rerotate, rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.nn import RotaryEmbedding

META = torch.device("meta")
PLAIN = {"none": RopeSpec(12, rotary_dim=8, start=2), "yarn": spec_of(YaRN(4.0, TRAINED))}
SPECS = PLAIN | {name: spec_of(name) for name in RULES}

# --- values ---------------------------------------------------------------------------------------

ONE = "a length must be an int, or one per row"
NUMBERS = "lengths must be int32, int64 or float64"
INVALID: list[tuple[Any, type[Exception], str]] = [
    *((value, TypeError, ONE) for value in ("long", b"ab", {0: 9}, {9}, 5.0, True, object)),
    *((numpy.array(value), TypeError, ONE) for value in (5.0, True, None, [[1.0, 1.0]] * 2)),
    *(
        ([value], TypeError, ONE)
        for value in (torch.tensor(True), 5.5, torch.ones((), device=META))
    ),
    *((value, TypeError, NUMBERS) for value in (torch.zeros(2), torch.ones(2, device=META).bool())),
    (torch.ones(2, 2, dtype=torch.int64), ValueError, "lengths must have shape (rows,)"),
    *((value, ValueError, "must not be negative") for value in (-3, numpy.array(-3), [5, -5])),
]


@pytest.mark.parametrize("seq_len, kind, phrase", INVALID, ids=repr)
@pytest.mark.parametrize("rule", SPECS)
def test_invalid_lengths_are_refused_by_every_rule(
    rule: str, seq_len: Any, kind: type[Exception], phrase: str
) -> None:
    """Also by those that do not depend on the length."""
    spec, x = SPECS[rule], noise(2, 1, 3, 12)
    calls: list[Callable[[], object]] = [
        lambda: spec.at(seq_len=seq_len),
        lambda: RotaryEmbedding(spec)(x, x, seq_len=seq_len),
        lambda: spec.words_for(seq_len),
        lambda: spec.attention_scaling(seq_len),
    ]
    if not isinstance(seq_len, (torch.Tensor, list)) and numpy.ndim(seq_len) == 0:
        calls.append(lambda: spec.frequencies(seq_len))
        if spec.scaling is not None:
            calls.append(lambda: spec.scaling.frequencies(8, 10000.0, seq_len))  # type: ignore[union-attr]
    for call in calls:
        with pytest.raises(kind, match=re.escape(phrase)) as caught:
            call()
        assert_form(caught.value, kind, "seq_len")


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

FAR = positions.Positions(torch.full((1, 1, 3), 2**31 - 1).int(), 10, add_index=False)
STARTS = positions.packed(torch.tensor([0, 1, 3]), torch.tensor([3, 20]))
# Positions of three tokens in two rows, a length that is too small, the least one, its row, and a
# length that is right. Most lengths are far below the original length of 4096.
PASSED: dict[str, tuple[positions.PositionsLike, Any, int, int | None, Any]] = {
    "nothing": (None, 2, 3, None, 3),
    "an offset": (9, 3, 12, None, 12),
    "an offset, one row of two": (9, [12, 11], 12, 1, [12, 12]),
    "a tensor": (9, torch.tensor([11, 12]), 12, 0, torch.tensor([12, 12])),
    "a long one": (6000, 6002, 6003, None, 6003),
    "ids": (torch.tensor([9, 11, 10]), 11, 12, None, 12),
    "ids of rows": (torch.tensor([[0, 1, 2], [0, 11, 1]]), [9, 9], 12, 1, [9, 12]),
    "fractions": (torch.tensor([0.0, 1.0, 11.25]), 12, 13, None, 13),
    "offsets of rows": (positions.per_row(torch.tensor([9, 0])), 11, 12, 0, [12, 3]),
    "a pack": (positions.explicit(STARTS), 21, 22, None, 22),
    "far ids": (FAR, 5, 2**31 + 10, None, 2**31 + 10),
}


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
    for ids in ([nan, 4.0, inf], [nan] * 3, [-9.0, -inf, 4.0]):
        rotate(x, spec.at(torch.tensor(ids), seq_len=5))
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


def test_a_rotation_for_some_rows_refuses_others_the_second_time_too() -> None:
    """Phase words are equal for all rows here, so the kernel would not detect the mismatch."""
    rope = RopeSpec(8, scaling=DynamicNTK(2.0, 64)).at(seq_len=[10, 20])
    rotate_(torch.ones(2, 1, 5, 8), rope)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="seq_len must be one length, or one for each of 3 rows"
        ):
            rotate_(torch.ones(3, 1, 5, 8), rope)
