"""`rerotate`: rotated keys moved to other positions or other frequencies in one pass."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import refusals
from tests.support.matrix import both_pairings, every_backend, every_dtype
from tests.support.tolerances import (
    ENOUGH,
    Result,
    assert_rotated,
    assert_rotations,
    assert_same_bits,
    dynamic_drift,
    value,
)
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear, LongRoPE, YaRN
from tightrope.functional import rerotate, rerotate_, rotate

MILLION = 1_000_000
TRAINED = 4096
YARN = YaRN(4.0, TRAINED)
OTHER_YARN = YaRN(16.0, TRAINED, attention_factor=0.7)
DYNAMIC = DynamicNTK(2.0, TRAINED)
LONGROPE = LongRoPE((1.0,) * 6, (1.0, 2.0, 3.0, 9.0, 30.0, 64.0), TRAINED, factor=32.0)
UNEQUAL = LongRoPE(
    LONGROPE.short_factor, LONGROPE.long_factor, TRAINED, short_mscale=1.25, long_mscale=1.5
)
SECTIONS = Axes.sections((2, 2, 2))
TOKENS = 4


def spec_of(scaling: Any = None, base: float = 1e4, axes: Axes | None = None) -> RopeSpec:
    """Return a spec of 16 channels; the 12 in the middle rotate."""
    return RopeSpec(16, base=base, rotary_dim=12, start=2, scaling=scaling, axes=axes)


def rates(spec: RopeSpec, length: int | None) -> list[list[Any]]:
    """Return ω of each [axis][pair], by the formulas of the papers."""
    rule, base = spec.scaling, spec.base
    if isinstance(rule, YaRN):
        row = truth.yarn(12, base, rule.factor, TRAINED)
    elif isinstance(rule, DynamicNTK):
        row = truth.dynamic_ntk(12, base, rule.factor, TRAINED, length)
    elif isinstance(rule, LongRoPE):
        row = truth.longrope(12, base, rule.short_factor, rule.long_factor, TRAINED, length)
    elif isinstance(rule, Linear):
        row = truth.linear(12, base, rule.factor)
    else:
        assert rule is None
        row = truth.plain(12, base)
    if spec.axes is None:
        return [row]
    owners = [axis for axis, _, _ in spec.axes.pairs]
    zero = oracle.MP.mpf(0)
    return [
        [omega if owner == axis else zero for omega, owner in zip(row, owners, strict=True)]
        for axis in range(spec.axes.count)
    ]


def amplitude(spec: RopeSpec, length: int | None) -> float:
    rule = spec.scaling
    if isinstance(rule, YaRN):
        return float(truth.yarn_attention(rule.factor, rule.attention_factor))
    if isinstance(rule, LongRoPE) and rule.factor is not None:
        return float(truth.longrope_attention(rule.factor, TRAINED))
    if isinstance(rule, LongRoPE):
        mscale = rule.short_mscale if length is None or length <= TRAINED else rule.long_mscale
        assert mscale is not None
        return mscale
    return 1.0


class Move(NamedTuple):
    """The old and the new rotation; `lengths` are from_seq_len and to_seq_len."""

    before: RopeSpec
    after: RopeSpec
    old: positions.PositionsLike
    new: positions.PositionsLike = None
    lengths: tuple[int | None, int | None] = (None, None)


def written(where: positions.PositionsLike) -> torch.Tensor:
    ids = positions.explicit(where, TOKENS).ids
    assert ids is not None
    return ids


ROWS = torch.tensor([3, MILLION])
IDS = torch.tensor([[5, 1, 9, 700], [MILLION, 0, 77, 12345]])
MOVES: dict[str, Move] = {
    "a shift": Move(spec_of(), spec_of(), MILLION, 17),
    "a shift of a scaled spec": Move(spec_of(YARN), spec_of(YARN), MILLION, 17),
    "to the beginning": Move(spec_of(), spec_of(), 9000, 0),
    "rows apart": Move(spec_of(), spec_of(), positions.per_row(ROWS), positions.per_row(ROWS + 9)),
    "rows together": Move(spec_of(), spec_of(), positions.per_row(ROWS), 100),
    "from ids": Move(spec_of(), spec_of(), IDS, 100),
    "to ids": Move(spec_of(), spec_of(), 100, IDS),
    "ids of 32 bits": Move(spec_of(), spec_of(), IDS.int(), IDS.flip(1)),
    "fractions": Move(spec_of(), spec_of(), IDS.double() / 7, IDS.double() / 3),
    "from fractions": Move(spec_of(), spec_of(), IDS.float() / 8, 50),
    "another base": Move(spec_of(), spec_of(base=5e5), MILLION),
    "another base and place": Move(spec_of(), spec_of(base=5e5), MILLION, IDS),
    "another base, fractions": Move(spec_of(), spec_of(base=5e5), IDS.double() / 7),
    "interpolated": Move(spec_of(), spec_of(Linear(4.0)), IDS),
    "yarn to default": Move(spec_of(YARN), spec_of(), MILLION, 5),
    "default to yarn": Move(spec_of(), spec_of(YARN), MILLION),
    "yarn to yarn": Move(spec_of(YARN), spec_of(OTHER_YARN), IDS, 3),
    "dynamic, longer": Move(spec_of(DYNAMIC), spec_of(DYNAMIC), 5000, lengths=(5004, 9000)),
    "dynamic, over the switch": Move(spec_of(DYNAMIC), spec_of(DYNAMIC), 50, lengths=(4096, 4097)),
    "dynamic, shifted too": Move(spec_of(DYNAMIC), spec_of(DYNAMIC), 5000, 7, (8192, 3199)),
    "longrope's switch": Move(spec_of(LONGROPE), spec_of(LONGROPE), 50, lengths=(4096, 4097)),
    "longrope's switch back": Move(spec_of(LONGROPE), spec_of(LONGROPE), 5000, 7, (6000, 999)),
    "unequal factors": Move(spec_of(UNEQUAL), spec_of(UNEQUAL), 50, lengths=(4096, 4097)),
    "several axes": Move(
        spec_of(axes=SECTIONS),
        spec_of(axes=SECTIONS),
        positions.multi_axis(torch.randint(0, MILLION, (3, 2, TOKENS))),
        positions.multi_axis(torch.randint(0, MILLION, (3, 1, TOKENS))),
    ),
    "text to several axes": Move(
        spec_of(YARN), spec_of(YARN, axes=SECTIONS), 9000, positions.mrope([(1, 2, 2)], start=7)
    ),
    "a grid": Move(
        spec_of(axes=Axes.sections((3, 3))),
        spec_of(axes=Axes.sections((3, 3))),
        positions.grid(2, 2),
        positions.grid(2, 2, step=0.5, start=3.0),
    ),
    "a grid among text": Move(
        spec_of(), spec_of(axes=Axes.sections((3, 3))), 9, positions.grid(2, 2)
    ),
    "a pack": Move(
        spec_of(),
        spec_of(base=5e5),
        positions.packed(torch.tensor([0, 1, 4])),
        positions.packed(torch.tensor([0, 1, 4]), torch.tensor([MILLION, 3])),
    ),
    "far": Move(spec_of(), spec_of(), 2**30, -(2**30) + 7),
}

every_move = pytest.mark.parametrize("name", MOVES)


def with_pairing(move: Move, interleaved: bool) -> Move:
    before, after = (
        RopeSpec(
            16,
            base=spec.base,
            rotary_dim=12,
            start=2,
            interleaved=interleaved,
            scaling=spec.scaling,
            axes=spec.axes,
        )
        for spec in (move.before, move.after)
    )
    return move._replace(before=before, after=after)


def lengths_of(move: Move) -> dict[str, int | None]:
    return {"from_seq_len": move.lengths[0], "to_seq_len": move.lengths[1]}


def drift(move: Move) -> float:
    """Return the relative error of the frequencies of both rotations."""
    total = 0.0
    for spec, length in zip((move.before, move.after), move.lengths, strict=True):
        if isinstance(rule := spec.scaling, DynamicNTK):
            at = TOKENS + 10**6 if length is None else length
            total += dynamic_drift(rule.factor, rule.original_max_position, at)
    return total


def exact(k: torch.Tensor, move: Move) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the keys rotated by the exact angle difference, and two inputs of the error bound.

    These are the length of each pair, and the sum over all axes, old and new, of the largest |position|.
    """
    old = written(move.old)
    new = old if move.new is None else written(move.new)
    rows = k.shape[0]
    old, new = (ids.expand(-1, rows, -1) for ids in (old, new))
    ids = (
        torch.cat((new, -old))
        if new.dtype == old.dtype
        else torch.cat((new.double(), -old.double()))
    )
    omegas = [*rates(move.after, move.lengths[1]), *rates(move.before, move.lengths[0])]
    cos, sin = (table[:, None] for table in oracle.cos_sin(ids, omegas))
    ratio = amplitude(move.after, move.lengths[1]) / amplitude(move.before, move.lengths[0])
    wanted = oracle.turned(k, cos * ratio, sin * ratio, 2, move.after.interleaved)
    lengths = oracle.pair_lengths(k, 12, start=2, interleaved=move.after.interleaved)
    reach = ids.double().abs().flatten(1).amax(1).sum()
    return wanted, lengths * max(1.0, ratio), float(reach)


def assert_ways(
    got: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, rotations: int, reach: float
) -> None:
    """Assert that two computations of one result agree, with up to three roundings in all."""
    assert got.dtype == wanted.dtype
    if got.dtype in (torch.float32, torch.float64):
        assert_rotations(got, wanted, lengths, rotations, reach)
        return
    step = oracle.step_sizes(lengths.clamp(min=2.0**-10), got.dtype)
    error = (got.double() - wanted.double()).abs()
    assert bool((error <= value("16-bit ways") * step * (lengths > 0)).all())


# --- against the truth ----------------------------------------------------------------------------


@pytest.mark.one_in(4)
@every_backend
@both_pairings
@every_dtype
@every_move
def test_keys_lose_one_rounding(
    name: str, dtype: torch.dtype, interleaved: bool, backend: str
) -> None:
    """Stored keys are rotated by the exact difference of two angles and rounded once."""
    move = with_pairing(MOVES[name], interleaved)
    heads = 2 if dtype in (torch.float32, torch.float64) else math.ceil(ENOUGH / (2 * TOKENS * 16))
    k = torch.randn(2, heads, TOKENS, 16).to(dtype)
    moved = rerotate(k, *move[:4], **lengths_of(move), backend=backend)
    wanted, lengths, reach = exact(k, move)
    if dtype == torch.float64:
        # Errors double: two specs have rounded phase words, and two fractions are truncated.
        lengths = lengths * 2
    assert_rotated([Result(moved, wanted, lengths, reach, drift(move))])
    still = [0, 1, 14, 15]
    assert_same_bits(moved[..., still], k[..., still])
    again = rerotate_(k.clone(), *move[:4], **lengths_of(move), backend=backend)
    assert_same_bits(again, moved)
    out = torch.empty_like(k)
    assert rerotate(k, *move[:4], **lengths_of(move), out=out, backend=backend) is out
    assert_same_bits(out, moved)


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
    "rows": positions.per_row(ROWS),
    "ids": IDS,
    "fractions": IDS.double() / 7,
    "fractions of 32 bits": IDS.float() / 7,
    "fractional rows": positions.per_row(ROWS.double() / 3),
}


@pytest.mark.one_in(4)
@every_backend
@every_dtype
@pytest.mark.parametrize("name", STAYS)
@pytest.mark.parametrize("rule", [None, YARN, DYNAMIC, LONGROPE, UNEQUAL], ids=repr)
def test_to_where_they_are_changes_no_bit(
    rule: Any, name: str, dtype: torch.dtype, backend: str
) -> None:
    spec, where = spec_of(rule), STAYS[name]
    if rule is UNEQUAL and "row" in name:
        where = positions.per_row(torch.tensor([5000, 6000]))
    if rule in (DYNAMIC, LONGROPE, UNEQUAL) and isinstance(where, torch.Tensor):
        where = where.sort(1).values
    if rule is UNEQUAL and isinstance(where, torch.Tensor):
        where = where[1:]
    k = torch.randn(2, 3, TOKENS, 16).to(dtype)
    options = {"from_seq_len": 2**62, "to_seq_len": 2**62, "backend": backend}
    assert_same_bits(rerotate(k, spec, spec, where, **options), k)
    if where is not None:
        assert_same_bits(rerotate(k, spec, spec, where, where, **options), k)
    assert_same_bits(rerotate_(k.clone(), spec, spec, where, **options), k)
    if not spec.by_length:
        twin = spec_of(rule)
        assert_same_bits(rerotate(k, spec, twin, where, backend=backend), k)


wheres = st.one_of(
    st.integers(-(2**31), 2**31),
    st.lists(st.integers(-MILLION, MILLION), min_size=TOKENS, max_size=TOKENS).map(torch.tensor),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=TOKENS, max_size=TOKENS).map(
        lambda ids: torch.tensor(ids, dtype=torch.float64)
    ),
    st.lists(st.integers(-MILLION, MILLION), min_size=2, max_size=2).map(
        lambda ids: positions.per_row(torch.tensor(ids))
    ),
)
rules = st.sampled_from(
    [None, YARN, OTHER_YARN, Linear(4.0), Given((1.0, -2.0, 9.0, 0.0, 0.1, 3.0))]
)


@settings(deadline=None, max_examples=100)
@given(
    a=st.tuples(rules, wheres),
    b=st.tuples(rules, wheres),
    c=st.tuples(rules, wheres),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_group_law_and_inverse(a: Any, b: Any, c: Any, dtype: torch.dtype, seed: int) -> None:
    specs = [spec_of(rule) for rule, _ in (a, b, c)]
    at = [where for _, where in (a, b, c)]
    k = torch.randn(2, 2, TOKENS, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    there = rerotate(k, specs[0], specs[1], at[0], at[1])
    onwards = rerotate(there, specs[1], specs[2], at[1], at[2])
    direct = rerotate(k, specs[0], specs[2], at[0], at[2])
    lengths = oracle.pair_lengths(k, 12, start=2)
    # The amplitudes range from 0.7 (OTHER_YARN) to 1.14 (YARN).
    largest = max(spec.attention_scaling() for spec in specs) / min(
        spec.attention_scaling() for spec in specs
    )
    assert_ways(onwards, direct, lengths * largest, 3, 4 * 2.0**31)
    back = rerotate(there, specs[1], specs[0], at[1], at[0])
    assert_ways(back, k, lengths * largest, 2, 4 * 2.0**31)


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "thd", "bsd", "sd"])
def test_layouts(layout: str) -> None:
    spec, other = spec_of(), spec_of(YARN, 5e5)
    letters = layout.replace("t", "s")
    k = torch.randn([{"b": 2, "h": 3, "s": TOKENS, "d": 16}[letter] for letter in letters])
    whole = oracle.as_bhsd(k, layout)
    for to in (spec, other):
        moved = rerotate(k, spec, to, 500, 3, layout=layout)
        wanted = rerotate(whole, spec, to, 500, 3)
        assert_same_bits(oracle.as_bhsd(moved, layout), wanted)


def test_a_slice_of_a_cache_in_place() -> None:
    """`rerotate_` moves the keys in a slice of a cache to the positions of dropped tokens."""
    spec = RopeSpec(16, base=500_000.0)
    keys = torch.randn(1, 2, 100, 16)
    cache = rotate(keys, spec)
    before = cache.clone()
    kept, gone = 4, 30
    window = cache[:, :, kept + gone :]
    assert rerotate_(window, spec, spec, kept + gone, kept) is window
    assert_same_bits(cache[:, :, : kept + gone], before[:, :, : kept + gone])
    cache = torch.cat((cache[:, :, :kept], window), 2)
    fresh = rotate(torch.cat((keys[:, :, :kept], keys[:, :, kept + gone :]), 2), spec)
    lengths = oracle.pair_lengths(fresh, 16)
    assert_rotations(cache, fresh, lengths, 3, 100.0)


def test_keys_with_frequencies_per_head() -> None:
    row = ((1.0, 0.1), (0.5, 0.01))
    spec, plain = RopeSpec(4, scaling=Given(row)), RopeSpec(4)
    k = torch.randn(2, 2, TOKENS, 4)
    for before, after in ((spec, spec), (spec, plain), (plain, spec)):
        moved = rerotate(k, before, after, 500, 3)
        wanted = rotate(rotate(k, before, 500, inverse=True), after, 3)
        assert_rotations(moved, wanted, oracle.pair_lengths(k, 4), 3, 500.0)


def test_rows_of_their_own_lengths() -> None:
    for rule in (DYNAMIC, LONGROPE):
        spec = spec_of(rule)
        k = torch.randn(2, 2, TOKENS, 16)
        where = positions.per_row(torch.tensor([100, 5000]))
        moved = rerotate(k, spec, spec, where, from_seq_len=[104, 5004], to_seq_len=[9000, 9000])
        one_length = rerotate(k, spec, spec, where, from_seq_len=[104, 5004], to_seq_len=9000)
        assert_same_bits(moved, one_length)
        for row, (offset, length) in enumerate(((100, 104), (5000, 5004))):
            alone = rerotate(
                k[row : row + 1], spec_of(rule), spec, offset, from_seq_len=length, to_seq_len=9000
            )
            assert_same_bits(moved[row : row + 1], alone)


@pytest.mark.parametrize("change", [rerotate, rerotate_])
@pytest.mark.parametrize("rule", [DYNAMIC, LONGROPE], ids=repr)
def test_a_shift_over_the_original_length_moves_all_keys_in_any_blocks(
    rule: Any, change: Callable[..., torch.Tensor]
) -> None:
    """A cache of 4,100 tokens loses 50 of them: what stays has the frequencies of the shorter sequence."""
    spec, kept, gone, whole = spec_of(rule), 4, 50, TRAINED + 4
    keys = torch.randn(1, 2, whole, 16, dtype=torch.float64)
    cache, lengths = rotate(keys, spec), {"from_seq_len": whole, "to_seq_len": whole - gone}
    blocks = [change(cache[:, :, :kept], spec, spec, **lengths)]
    for first in range(kept + gone, whole, 1000):
        block = cache[:, :, first : first + 1000]
        blocks.append(change(block, spec, spec, first, first - gone, **lengths))
    left = torch.cat((keys[:, :, :kept], keys[:, :, kept + gone :]), 2)
    pairs = oracle.pair_lengths(left, 12, start=2)
    assert_rotations(torch.cat(blocks, 2), rotate(left, spec), pairs, 3, float(whole))


def test_no_keys() -> None:
    spec = spec_of()
    for shape in ((2, 2, 0, 16), (0, 2, TOKENS, 16), (2, 0, TOKENS, 16)):
        for after in (spec, spec_of(YARN)):
            k = torch.zeros(shape)
            assert rerotate(k, spec, after, 5, 3).shape == shape
            assert rerotate_(k, spec, after, 5, 3) is k


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [spec_of(), spec_of(YARN, 5e5)], ids=repr)
@pytest.mark.parametrize("change", [rerotate, rerotate_])
def test_one_graph_for_all_offsets(change: Callable[..., torch.Tensor], after: RopeSpec) -> None:
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    before = spec_of()

    @torch.compile(fullgraph=True, backend=graphs, dynamic=True)
    def shift(k: torch.Tensor, old: int, new: int) -> torch.Tensor:
        return change(k, before, after, old, new)

    for old, new, tokens in ((90, 80, 5), (91, 70, 5), (3000, 11, 7), (12, 4000, 16)):
        k = torch.randn(1, 2, tokens, 16)
        wanted = rerotate(k, before, after, old, new)
        assert_same_bits(shift(k, old, new), wanted)
    assert graphs.frame_count == 1


def test_a_shift_makes_no_positions() -> None:
    """From one offset to another, a pair turns by the same angle in all tokens: no ids are needed."""
    from tightrope.functional._rerotate import _prepared

    k, spec = torch.randn(1, 2, TOKENS, 16), spec_of()
    rope = _prepared(k, "bhsd", spec, spec, 900, 7, None, None)
    assert (rope.ids, rope.where.offset, rope.where.add_index) == (None, -893, False)
    assert rope.angles.words is spec.at().angles.words


# --- errors ---------------------------------------------------------------------------------------

K = torch.zeros(2, 3, TOKENS, 16)
SPEC, LENGTHY = spec_of(), spec_of(DYNAMIC)
BOTH = {"from_seq_len": 9, "to_seq_len": 9}


def moved(change: Callable[..., object] = rerotate, **changes: Any) -> Callable[[], object]:
    """Return a call with these arguments, and valid ones otherwise."""
    valid = {"k": K, "from_spec": SPEC, "to_spec": SPEC, "positions": 5, "new_positions": 0}
    return partial(change, **(valid | changes))


SAME = "[rerotate] from_spec and to_spec must have the same"
INSTEAD = "rotate by from_spec with inverse=True, then by to_spec."
PREPARED = "must be a RopeSpec but got PreparedRotation; pass the spec that it was made from, and"
ONE_EACH = (
    "must hold one position for each of 4 tokens but got 3 (layout 'bhsd' has its tokens in "
    "dimension 2) (k: float32[2, 3, 4, 16],"
)
TYPES = {
    "[rerotate] k must be a tensor but got None.": moved(k=None),
    f"[rerotate] from_spec {PREPARED} its positions as positions=.": moved(from_spec=SPEC.at(5)),
    f"[rerotate] to_spec {PREPARED} its positions as new_positions=.": moved(to_spec=SPEC.at(5)),
    "[rerotate_] to_spec must be a RopeSpec but got int.": moved(rerotate_, to_spec=5),
}
VALUES = {
    "[rerotate_] k must have 4 dimensions for layout 'bhsd' but got 3; layouts with 3 dimensions: "
    "'thd', 'bsd' (k: float32[3, 4, 16]).": moved(rerotate_, k=K[0]),
    "[rerotate] k must have head_dim 16 in its last dimension but got 12 "
    "(k: float32[2, 3, 4, 12]).": moved(k=K[..., :12]),
    f"{SAME} rotary_dim but have 12 and 8; {INSTEAD}": moved(
        to_spec=RopeSpec(16, base=1e4, rotary_dim=8, start=2)
    ),
    f"{SAME} start but have 2 and 4; {INSTEAD}": moved(
        to_spec=RopeSpec(16, base=1e4, rotary_dim=12, start=4)
    ),
    f"{SAME} interleaved but have False and True; {INSTEAD}": moved(
        to_spec=RopeSpec(16, base=1e4, rotary_dim=12, start=2, interleaved=True)
    ),
    f"[rerotate] positions {ONE_EACH} positions: int64[3]).": [
        moved(positions=torch.arange(3)),
        moved(positions=torch.arange(3), new_positions=None),
    ],
    f"[rerotate_] new_positions {ONE_EACH} new_positions: int64[3]).": moved(
        rerotate_, to_spec=spec_of(YARN), new_positions=torch.arange(3)
    ),
    "[rerotate] new_positions must have 1 or 2 rows but got 3 (k: float32[2, 3, 4, 16], "
    "new_positions: int64[3, 1]).": moved(new_positions=positions.per_row(torch.arange(3))),
    "[rerotate] to_spec must have 1 or 3 heads for k but got 2 (k: float32[2, 3, 4, 4]).": moved(
        k=K[..., :4], from_spec=RopeSpec(4), to_spec=RopeSpec(4, scaling=Given(((1.0, 2.0),) * 2))
    ),
    "[rerotate] new_positions must have 3 axes for this spec but got 1; call positions.multi_axis "
    "with ids (3, tokens) or (3, rows, tokens), or positions.text(0, axes=3) if all coordinates "
    "of a token are equal (new_positions: 0).": moved(to_spec=spec_of(axes=SECTIONS)),
    **{
        f"[rerotate] {name} must be one length, or one for each of 2 rows, but got 3 "
        "(k: float32[2, 3, 4, 16]).": moved(
            from_spec=LENGTHY, to_spec=LENGTHY, new_positions=None, **(BOTH | {name: [1, 2, 3]})
        )
        for name in ("from_seq_len", "to_seq_len")
    },
    "[rerotate] from_seq_len must be given, as the frequencies of DynamicNTK depend on the length of the whole "
    "sequence, of which these keys may be a part; pass from_seq_len= and to_seq_len=, the lengths before and after "
    "the move, and move all keys of the cache if its frequencies change.": [
        moved(from_spec=LENGTHY),
        moved(from_spec=LENGTHY, to_spec=LENGTHY, to_seq_len=9),
    ],
    "[rerotate_] to_seq_len must be given, as the frequencies of LongRoPE…": [
        moved(rerotate_, to_spec=spec_of(LONGROPE)),
        moved(rerotate_, from_spec=LENGTHY, to_spec=spec_of(LONGROPE), from_seq_len=9),
    ],
    "[rerotate] layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got 'bdsh'.": moved(
        layout="bdsh"
    ),
    "[rerotate] out must not overlap itself or the input in memory; to rotate in place call "
    "rerotate_ (out[0]: float32[2, 3, 4, 16]).": moved(out=K.view(3, 2, 4, 16).transpose(0, 1)),
}
test_sentence = refusals(TypeError=TYPES, ValueError=VALUES)
