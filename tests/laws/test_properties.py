"""Laws that hold for every rotation, on generated cases.

Each property checks that it ran on the requested number of cases. The last test checks that the
requested numbers sum to at least 2,000, however the tests are distributed over processes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support import oracle, tolerances
from tightrope import RopeSpec, positions
from tightrope.functional import rotate, rotate_

PROFILE = settings(
    derandomize=True,  # all machines run the same cases
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
CASES: dict[str, int] = {}


def holds_for(
    cases: int, **strategies: st.SearchStrategy[Any]
) -> Callable[..., Callable[[], None]]:
    """Turn a property into a test that runs on at least the given number of generated cases."""

    def make(law: Callable[..., None]) -> Callable[[], None]:
        CASES[law.__name__] = cases

        def test() -> None:
            count = 0

            @settings(PROFILE, max_examples=cases)
            @given(**strategies)
            def run(**values: Any) -> None:
                nonlocal count
                law(**values)
                count += 1

            run()
            assert count >= cases, f"only {count} of {cases} cases were generated"

        test.__name__ = law.__name__
        test.__doc__ = law.__doc__
        return test

    return make


# --- parts of the cases ---------------------------------------------------------------------------

TOP = 2**31 - 1
offsets = st.one_of(
    st.integers(-40, 40),
    st.integers(-TOP, TOP),
    st.builds(
        lambda around, by: around + by,
        st.sampled_from([8192, 131072, 2**20, TOP - 200, -(2**20)]),
        st.integers(-100, 100),
    ),
)
small_offsets = st.integers(-(2**29), 2**29)
bases = st.one_of(st.sampled_from([100.0, 1e4, 5e5, 1e9]), st.floats(1.0, 1e9))
plain_dtypes = st.sampled_from([torch.float32, torch.float64])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(0, 5)


@st.composite
def specs(draw: st.DrawFn) -> RopeSpec:
    pairs, before, after = (
        draw(st.integers(0, 40)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
    )
    return RopeSpec(
        before + 2 * pairs + after,
        base=draw(bases),
        rotary_dim=2 * pairs,
        start=before,
        interleaved=draw(st.booleans()),
    )


def noise(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def lengths_of(x: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    return oracle.pair_lengths(x, spec.rotary_dim, start=spec.start, interleaved=spec.interleaved)


# --- laws of rotations ----------------------------------------------------------------------------


@holds_for(400, spec=specs(), offset=offsets, tokens=sizes, dtype=plain_dtypes, seed=seeds)
def test_the_norm_of_every_pair_is_kept(
    spec: RopeSpec, offset: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    x = noise(seed, tokens, spec.head_dim, dtype=dtype)
    y = rotate(x, spec, offset, layout="sd")
    before, after = lengths_of(x, spec), lengths_of(y, spec)
    reach = abs(offset) + tokens
    # The norm of a pair's error is at most √2 times its larger component.
    bound = math.sqrt(2) * tolerances.rotation_bound(dtype, reach)
    assert bool(((after - before).abs() <= bound * before).all())


@holds_for(400, spec=specs(), a=small_offsets, b=small_offsets, dtype=plain_dtypes, seed=seeds)
def test_angles_add(spec: RopeSpec, a: int, b: int, dtype: torch.dtype, seed: int) -> None:
    """Rotation by b, then by a, equals rotation by a + b."""
    x = noise(seed, 3, spec.head_dim, dtype=dtype)
    at_a, at_b, at_both = (torch.full((3,), p) for p in (a, b, a + b))
    twice = rotate(rotate(x, spec, at_b, layout="sd"), spec, at_a, layout="sd")
    once = rotate(x, spec, at_both, layout="sd")
    reach = max(abs(a), abs(b), abs(a + b))
    tolerances.assert_rotations(twice, once, lengths_of(x, spec), 3, reach)


@holds_for(400, spec=specs(), offset=offsets, tokens=sizes, dtype=plain_dtypes, seed=seeds)
def test_the_inverse_undoes(
    spec: RopeSpec, offset: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    x = noise(seed, tokens, spec.head_dim, dtype=dtype)
    y = rotate(x, spec, offset, layout="sd")
    reach = abs(offset) + tokens
    for back in (
        rotate(y, spec, offset, layout="sd", inverse=True),
        rotate_(y.clone(), spec, offset, layout="sd", inverse=True),
    ):
        tolerances.assert_rotations(back, x, lengths_of(x, spec), 2, reach)


@holds_for(300, spec=specs(), offset=offsets, dtype=dtypes, seed=seeds)
def test_the_inverse_is_a_turn_the_other_way(
    spec: RopeSpec, offset: int, dtype: torch.dtype, seed: int
) -> None:
    """`inverse=True` has the bits of negated positions: cosines are even and sines odd."""
    x = noise(seed, 2, spec.head_dim, dtype=dtype)
    ids = torch.tensor([offset, -offset])
    inverse = rotate(x, spec, ids, layout="sd", inverse=True)
    turned = rotate(x, spec, -ids, layout="sd")
    tolerances.assert_same_bits(inverse, turned)


@holds_for(
    400,
    spec=specs(),
    m=offsets,
    n=offsets,
    shift=st.sampled_from([1, -1, 77, 2**20, -(2**20) + 5, 2**29]),
    dtype=plain_dtypes,
    seed=seeds,
)
def test_scores_depend_on_the_difference_of_positions_only(
    spec: RopeSpec, m: int, n: int, shift: int, dtype: torch.dtype, seed: int
) -> None:
    q, k = noise(seed, 2, 1, spec.head_dim, dtype=dtype)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        y, z = rotate(q, spec, at_q, layout="sd"), rotate(k, spec, at_k, layout="sd")
        return (y.double() * z.double()).sum()

    reach = max(abs(p) for p in (m, n, m + shift, n + shift))
    # Four rotations, each with an error of at most √2 · bound · |pair|; the float64 sum adds little.
    bound = 4 * math.sqrt(2) * tolerances.rotation_bound(dtype, reach)
    bound += spec.head_dim * tolerances.value("float64 rotation")
    scale = (lengths_of(q, spec) * lengths_of(k, spec)).sum() + (
        q.double() * k.double()
    ).abs().sum()
    assert abs(score(m, n) - score(m + shift, n + shift)) <= bound * (1 + bound) * scale


# --- equalities, bit for bit ----------------------------------------------------------------------


@holds_for(400, spec=specs(), offset=offsets, tokens=sizes, dtype=dtypes, seed=seeds)
def test_the_pairings_are_a_permutation_apart(
    spec: RopeSpec, offset: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    pairs, start = spec.rotary_dim // 2, spec.start
    half = RopeSpec(spec.head_dim, spec.base, spec.rotary_dim, start, False)
    interleaved = RopeSpec(spec.head_dim, spec.base, spec.rotary_dim, start, True)
    order = torch.arange(spec.head_dim)
    for k in range(pairs):
        order[start + 2 * k], order[start + 2 * k + 1] = start + k, start + pairs + k
    x = noise(seed, tokens, spec.head_dim, dtype=dtype)
    y = rotate(x, half, offset, layout="sd")
    z = rotate(x[:, order], interleaved, offset, layout="sd")
    tolerances.assert_same_bits(z, y[:, order])


@st.composite
def strided(draw: st.DrawFn, spec: RopeSpec) -> torch.Tensor:
    """Generate a view [rows, heads, tokens, channels] of a larger buffer, without overlap."""
    shape = [
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        spec.head_dim,
    ]
    order = draw(st.permutations(range(4)))
    strides, step = [0] * 4, 1
    for dim in order:
        step *= draw(st.integers(1, 3))
        strides[dim] = step
        step *= max(shape[dim], 1)
    gap = draw(st.integers(0, 3))
    dtype = draw(dtypes)
    buffer = noise(draw(seeds), step + gap, dtype=dtype)
    return buffer.as_strided(shape, strides, gap)


@holds_for(500, case=specs().flatmap(lambda s: st.tuples(st.just(s), strided(s))), offset=offsets)
def test_strides_do_not_matter(case: tuple[RopeSpec, torch.Tensor], offset: int) -> None:
    """Rotation has the same bits for any strides; in place, it leaves memory around x unchanged."""
    spec, x = case
    wanted = rotate(x.contiguous(), spec, offset)
    tolerances.assert_same_bits(rotate(x, spec, offset), wanted)
    before = x.clone()
    around = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    kept = around.clone()
    rotate_(x, spec, offset)
    tolerances.assert_same_bits(x, wanted)
    x.copy_(before)
    tolerances.assert_same_bits(around, kept)


@holds_for(
    300,
    spec=specs(),
    rows=st.lists(offsets, min_size=1, max_size=4),
    tokens=sizes,
    dtype=dtypes,
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=seeds,
)
def test_an_offset_per_row_equals_explicit_ids(
    spec: RopeSpec,
    rows: list[int],
    tokens: int,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    seed: int,
) -> None:
    x = noise(seed, len(rows), 2, tokens, spec.head_dim, dtype=dtype)
    first = torch.tensor(rows, dtype=id_dtype)
    ids = first.long()[:, None] + torch.arange(tokens)
    wanted = rotate(x, spec, ids)
    tolerances.assert_same_bits(rotate(x, spec, positions.per_row(first)), wanted)
    for row, offset in enumerate(rows):
        tolerances.assert_same_bits(rotate(x[row : row + 1], spec, offset), wanted[row : row + 1])


@holds_for(
    300,
    spec=specs(),
    rows=sizes,
    heads=sizes,
    tokens=sizes,
    offset=offsets,
    dtype=dtypes,
    seed=seeds,
)
def test_layouts_agree(
    spec: RopeSpec,
    rows: int,
    heads: int,
    tokens: int,
    offset: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = noise(seed, rows, heads, tokens, spec.head_dim, dtype=dtype)
    wanted = rotate(x, spec, offset)
    for layout, order in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        there = x.permute(order).contiguous()
        back = [order.index(dim) for dim in range(4)]
        y = rotate(there, spec, offset, layout=layout)
        tolerances.assert_same_bits(y.permute(back), wanted)
    for row in range(rows):
        y = rotate(x[row].transpose(0, 1).contiguous(), spec, offset, layout="thd")
        tolerances.assert_same_bits(y.transpose(0, 1), wanted[row])
        for head in range(heads):
            y = rotate(x[row, head], spec, offset, layout="sd")
            tolerances.assert_same_bits(y, wanted[row, head])
    for head in range(heads):
        y = rotate(x[:, head], spec, offset, layout="bsd")
        tolerances.assert_same_bits(y, wanted[:, head])


@holds_for(
    300,
    spec=specs(),
    ids=st.lists(offsets, min_size=1, max_size=5),
    dtype=dtypes,
    id_dtype=st.sampled_from([torch.int32, torch.float64]),
    seed=seeds,
)
def test_how_ids_are_stored_does_not_matter(
    spec: RopeSpec, ids: list[int], dtype: torch.dtype, id_dtype: torch.dtype, seed: int
) -> None:
    """int32 ids, integral float64 ids, strided and expanded ids agree with contiguous int64 ids."""
    x = noise(seed, 2, len(ids), spec.head_dim, dtype=dtype)
    plain = torch.tensor(ids)
    wanted = rotate(x, spec, plain, layout="bsd")
    every_third = torch.zeros(3 * len(ids), dtype=torch.int64)[::3].copy_(plain)
    for other in (plain.to(id_dtype), every_third, plain.expand(2, -1), plain.repeat(2, 1)):
        tolerances.assert_same_bits(rotate(x, spec, other, layout="bsd"), wanted)


@holds_for(
    300,
    spec=specs(),
    offset=offsets,
    scale=st.integers(-8, 8),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=seeds,
)
def test_a_power_of_two_passes_through(
    spec: RopeSpec, offset: int, scale: int, dtype: torch.dtype, seed: int
) -> None:
    """Scaling x by −1 or a power of two scales the result exactly, except for subnormal numbers."""
    x = noise(seed, 2, spec.head_dim, dtype=dtype)
    y = rotate(x, spec, offset, layout="sd")
    tolerances.assert_same_bits(rotate(x * 2.0**scale, spec, offset, layout="sd"), y * 2.0**scale)
    tolerances.assert_same_bits(rotate(-x, spec, offset, layout="sd"), -y)


def test_at_least_two_thousand_cases_are_generated() -> None:
    assert sum(CASES.values()) >= 2000, CASES
