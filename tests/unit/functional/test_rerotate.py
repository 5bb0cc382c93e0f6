"""`rerotate`: rotated keys moved to other positions or other frequencies in one pass."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import on
from tests.support.matrix import DTYPES, every_backend, every_pair
from tests.support.refused_calls import NAMES
from tests.support.rows import read_rows
from tests.support.tolerances import (
    ENOUGH,
    Result,
    assert_rotated,
    assert_rotations,
    assert_same_bits,
    dynamic_drift,
)
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, LongRoPE, YaRN
from tightrope.functional import rerotate, rerotate_, rotate
from tightrope.positions import multi_axis, per_row
from tightrope.spec import PreparedRotation

MILLION = 1_000_000
TRAINED = 4096
YARN, OTHER_YARN = YaRN(4.0, TRAINED), YaRN(16.0, TRAINED, attention_factor=0.7)
DYNAMIC = DynamicNTK(2.0, TRAINED)
FACTORS = (1.0,) * 6, (1.0, 2.0, 3.0, 9.0, 30.0, 64.0)
LONGROPE = LongRoPE(*FACTORS, TRAINED, factor=32.0)
UNEQUAL = LongRoPE(*FACTORS, TRAINED, short_mscale=1.25, long_mscale=1.5)
TOKENS = 4


def spec_of(scaling: Any = None, base: float = 1e4, **more: Any) -> RopeSpec:
    """Return a spec of 16 channels; the 12 in the middle rotate."""
    return RopeSpec(16, base=base, rotary_dim=12, start=2, scaling=scaling, **more)


class Move(NamedTuple):
    """The old and the new rotation; `lengths` are those of the sequence, before and after."""

    before: RopeSpec
    after: RopeSpec
    old: positions.PositionsLike
    new: positions.PositionsLike = None
    lengths: tuple[int | None, int | None] = (None, None)

    def of(
        self, k: torch.Tensor, change: Callable[..., torch.Tensor] = rerotate, **more: Any
    ) -> Any:
        if self.lengths == (None, None):
            return change(k, *self[:4], **more)
        return change(k, *self.ends(), **more)

    def ends(self) -> tuple[PreparedRotation, PreparedRotation]:
        """Return both rotations at their positions."""
        later = self.old if self.new is None else self.new
        return (
            self.before.at(self.old, seq_len=self.lengths[0]),
            self.after.at(later, seq_len=self.lengths[1]),
        )


OFFSETS = torch.tensor([3, MILLION])
ROWS, ROWS_LATER = per_row(OFFSETS), per_row(OFFSETS + 9)
IDS = torch.tensor([[5, 1, 9, 700], [MILLION, 0, 77, 12345]])
ENDS = torch.tensor([0, 1, 4])


def moves(interleaved: bool = False) -> dict[str, Move]:
    """Return the moves of moves.jsonl, expressions of the specs and positions here."""

    def one(scaling: Any = None, base: float = 1e4, *sections: int) -> RopeSpec:
        axes = Axes.sections(sections) if sections else None
        return spec_of(scaling, base, axes=axes, interleaved=interleaved)

    plain, other, yarn, dynamic = one(), one(base=5e5), one(YARN), one(DYNAMIC)
    long, unequal, three, two = (
        one(LONGROPE),
        one(UNEQUAL),
        one(None, 1e4, 2, 2, 2),
        one(None, 1e4, 3, 3),
    )
    generator = torch.Generator().manual_seed(0)
    old, new = (
        multi_axis(torch.randint(0, MILLION, (3, rows, TOKENS), generator=generator))
        for rows in (2, 1)
    )
    rows = read_rows(Path(__file__).with_name("moves.jsonl")).items()
    names = {**NAMES, **globals(), **locals()}
    return {name: eval(f"Move({row['move']})", names) for name, row in rows}


def exact(k: torch.Tensor, move: Move) -> Result:
    """Return the keys rotated by the exact angle difference, and what bounds the error.

    Two specs have rounded phase words, and two fractions are truncated, so the errors of float64 double.
    """
    ends = []
    for spec, length, where, sign in (
        (move.after, move.lengths[1], move.old if move.new is None else move.new, 1),
        (move.before, move.lengths[0], move.old, -1),
    ):
        row = truth.of(spec.scaling, 12, spec.base, length)
        owners = [0] * 6 if spec.axes is None else [axis for axis, _, _ in spec.axes.pairs]
        zero = oracle.MP.mpf(0)
        rates = [
            [omega if owner == axis else zero for omega, owner in zip(row, owners, strict=True)]
            for axis in range(max(owners) + 1)
        ]
        ids = sign * positions.explicit(where, TOKENS).ids.expand(-1, k.shape[0], -1)
        drift = 0.0
        if isinstance(rule := spec.scaling, DynamicNTK):
            drift = dynamic_drift(rule.factor, rule.original_max_position, length)
        ends.append((rates, ids, float(truth.attention_of(spec.scaling, length)), drift))
    (after, new, up, one), (before, old, down, other) = ends
    ids = torch.cat((new, old) if new.dtype == old.dtype else (new.double(), old.double()))
    cos, sin = (table[:, None] * up / down for table in oracle.cos_sin(ids, [*after, *before]))
    place = {"start": 2, "interleaved": move.after.interleaved}
    lengths = oracle.pair_lengths(k, 12, **place) * max(1.0, up / down)
    reach = float(ids.double().abs().flatten(1).amax(1).sum())
    lengths = lengths * 2 if k.dtype == torch.float64 else lengths
    return Result(k, oracle.turned(k, cos, sin, **place), lengths, reach, one + other)


# --- against the truth ----------------------------------------------------------------------------


@pytest.mark.one_in(2)
@every_backend
@every_pair(name=tuple(moves()), dtype=DTYPES, interleaved=(False, True))
def test_keys_lose_one_rounding(
    name: str, dtype: torch.dtype, interleaved: bool, backend: str
) -> None:
    """Stored keys are rotated by the exact difference of two angles and rounded once."""
    move = moves(interleaved)[name]
    heads = 2 if dtype in (torch.float32, torch.float64) else math.ceil(ENOUGH / (2 * TOKENS * 16))
    k = torch.randn(2, heads, TOKENS, 16).to(dtype)
    moved = on(backend, move.of, k)
    assert_rotated([exact(k, move)._replace(got=moved)])
    still = [0, 1, 14, 15]
    assert_same_bits(moved[..., still], k[..., still])
    assert_same_bits(on(backend, move.of, k.clone(), rerotate_), moved)
    out = torch.empty_like(k)
    assert on(backend, move.of, k, out=out) is out
    assert_same_bits(out, moved)
    # Positions may be stated beside a spec, or with it; the new ones are by default those of the old rotation.
    old, new = move.ends()
    given = () if move.new is None else (None, move.new)
    ways = [(old, new), (old, move.after, *given), (move.before, new, move.old)]
    for way in ways if move.lengths[0] is None else ways[:1]:
        assert_same_bits(on(backend, rerotate, k, *way), moved)
    # In another layout, and without keys.
    other = on(backend, rerotate, k.transpose(1, 2), old, new, layout="bshd")
    assert_same_bits(other.transpose(1, 2), moved)
    assert on(backend, rerotate, k[:, :0], old, new).shape == (2, 0, TOKENS, 16)


@pytest.mark.parametrize("after", [spec_of(), spec_of(base=5e5)], ids=repr)
def test_angles_wrap_as_those_of_a_rotation_do(after: RopeSpec) -> None:
    """Beyond 2^31, where angles are inexact, `rerotate` still agrees with two rotations."""
    k = torch.randn(2, 3, TOKENS, 16)
    moved = rerotate(k, spec_of(), after, 2**62, -(2**62) - 7)
    wanted = rotate(rotate(k, spec_of(), 2**62, inverse=True), after, -(2**62) - 7)
    assert_rotations(moved, wanted, oracle.pair_lengths(k, 12, start=2), 3, 0.0)


# --- the group ------------------------------------------------------------------------------------

STAYS: dict[str, positions.PositionsLike] = {
    "nothing": None,
    "an offset": MILLION,
    "far": 2**61,
    "rows": ROWS,
    "ids": IDS,
    "fractions": IDS.double() / 7,
    "fractions of 32 bits": IDS.float() / 7,
    "fractional rows": per_row(OFFSETS.double() / 3),
}


@every_backend
@every_pair(rule=(None, YARN, DYNAMIC, LONGROPE, UNEQUAL), name=tuple(STAYS), dtype=DTYPES)
def test_to_where_they_are_changes_no_bit(
    rule: Any, name: str, dtype: torch.dtype, backend: str
) -> None:
    spec, where, k = spec_of(rule), STAYS[name], torch.randn(2, 3, TOKENS, 16).to(dtype)
    at, also = (spec.at(where, seq_len=2**62) for _ in range(2))
    assert_same_bits(on(backend, rerotate, k, at, at), k)
    assert_same_bits(on(backend, rerotate, k, at, also), k)
    assert_same_bits(on(backend, rerotate_, k.clone(), at, also), k)
    if not spec.by_length:
        assert_same_bits(on(backend, rerotate, k, spec, spec_of(rule), where), k)
        assert_same_bits(on(backend, rerotate, k, spec, spec, where, where), k)
        assert_same_bits(on(backend, rerotate_, k.clone(), spec, spec, where), k)


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step, wanted", [(1, (26.0, 2.2)), (180, (26.9, 2.3))])
def test_keys_drift_by_as_much_as_the_page_says(step: int, wanted: tuple[float, float]) -> None:
    """In thousandths of the keys' length, after 50 moves in bfloat16: of moved keys, and of those moved once."""
    spec, start, end = RopeSpec(128, base=500_000.0), 10_000, 10_000 - 50 * step
    raw = torch.randn(1, 8, 256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    anchor = rotate(raw, spec, start)
    moved = anchor.clone()
    for at in range(start, end, -step):
        rerotate_(moved, spec, spec, at, at - step)
    exact = rotate(raw.double(), spec, end)
    for found, error in zip((moved, rerotate(anchor, spec, spec, start, end)), wanted, strict=True):
        drift = 1000 * float((found - exact).norm() / exact.norm())
        assert drift == pytest.approx(error, abs=0.06)


def test_keys_with_frequencies_per_head() -> None:
    spec, plain = RopeSpec(4, scaling=Given(((1.0, 0.1), (0.5, 0.01)))), RopeSpec(4)
    k = torch.randn(2, 2, TOKENS, 4)
    for before, after in ((spec, spec), (spec, plain), (plain, spec)):
        moved = rerotate(k, before, after, 500, 3)
        wanted = rotate(rotate(k, before, 500, inverse=True), after, 3)
        assert_rotations(moved, wanted, oracle.pair_lengths(k, 4), 3, 500.0)


@pytest.mark.parametrize("rule", [DYNAMIC, LONGROPE], ids=repr)
def test_rows_of_their_own_lengths(rule: Any) -> None:
    spec, k, offsets, lengths = (
        spec_of(rule),
        torch.randn(2, 2, TOKENS, 16),
        (100, 5000),
        [104, 5004],
    )
    where = per_row(torch.tensor(offsets))
    old = spec.at(where, seq_len=lengths)
    moved = rerotate(k, old, spec.at(where, seq_len=[9000, 9000]))
    assert_same_bits(moved, rerotate(k, old, spec.at(where, seq_len=9000)))
    for row, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
        own = spec.at(at, seq_len=length), spec.at(at, seq_len=9000)
        assert_same_bits(moved[row : row + 1], rerotate(k[row : row + 1], *own))
