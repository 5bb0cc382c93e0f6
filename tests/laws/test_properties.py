"""Laws that hold for every rotation, on generated cases."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support import oracle, tolerances
from tests.support.helpers import noise
from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.functional import rotate


def holds_for(
    cases: int, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a property into a test that runs on this number of generated cases, the same on all machines."""
    profile = settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=cases,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return lambda law: profile(given(**strategies)(law))


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
bases = st.one_of(st.sampled_from([100.0, 1e4, 5e5, 1e9]), st.floats(1.0, 1e9))
sizes = st.integers(0, 5)
plain_dtypes, dtypes = st.sampled_from(DTYPES[:2]), st.sampled_from(DTYPES)


@st.composite
def specs(draw: st.DrawFn) -> RopeSpec:
    pairs, before, after = (draw(st.integers(0, most)) for most in (40, 9, 9))
    place = {"rotary_dim": 2 * pairs, "start": before, "interleaved": draw(st.booleans())}
    return RopeSpec(before + 2 * pairs + after, base=draw(bases), **place)


class Case(NamedTuple):
    """A spec, x [tokens, channels] and a position."""

    spec: RopeSpec
    x: torch.Tensor
    offset: int

    def rotated(self, x: torch.Tensor | None = None, at: Any = None, **more: Any) -> torch.Tensor:
        """Rotate x, or another tensor; by the offset, or at other positions."""
        where = self.offset if at is None else at
        return rotate(self.x if x is None else x, self.spec, where, layout="sd", **more)

    def lengths(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the lengths of the pairs of x, or of another tensor."""
        spec, x = self.spec, self.x if x is None else x
        place = {"start": spec.start, "interleaved": spec.interleaved}
        return oracle.pair_lengths(x, spec.rotary_dim, **place)


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: st.SearchStrategy[torch.dtype] = dtypes,
    tokens: st.SearchStrategy[int] = sizes,
) -> Case:
    spec, seed = draw(specs()), draw(st.integers(0, 2**32 - 1))
    x = noise(draw(tokens), spec.head_dim, seed=seed, dtype=draw(dtypes))
    return Case(spec, x, draw(offsets))


# --- laws of rotations ----------------------------------------------------------------------------


@holds_for(300, case=cases(plain_dtypes, st.integers(0, 3)), inverse=st.booleans())
def test_every_rotation_is_the_oracles(case: Case, inverse: bool) -> None:
    """So pairs keep their norm, angles add, and the inverse undoes."""
    spec, ids = case.spec, range(case.offset, case.offset + len(case.x))
    omegas = oracle.frequencies(spec.base, spec.rotary_dim)
    place = {"start": spec.start, "interleaved": spec.interleaved}
    exact = oracle.rotate(case.x, ids, omegas, layout="sd", inverse=inverse, **place)
    reach = abs(case.offset) + len(case.x)
    result = tolerances.Result(case.rotated(inverse=inverse), exact, case.lengths(), reach)
    tolerances.assert_rotated([result])


@holds_for(300, case=cases(tokens=st.just(2)))
def test_the_inverse_is_a_turn_the_other_way(case: Case) -> None:
    """`inverse=True` has the bits of negated positions: cosines are even and sines odd."""
    ids = torch.tensor([case.offset, -case.offset])
    assert_same_bits(case.rotated(at=ids, inverse=True), case.rotated(at=-ids))


# --- equalities, bit for bit ----------------------------------------------------------------------


@holds_for(400, case=cases())
def test_the_pairings_are_a_permutation_apart(case: Case) -> None:
    spec = case.spec
    place = {"base": spec.base, "rotary_dim": spec.rotary_dim, "start": spec.start}
    half, interleaved = (
        case._replace(spec=RopeSpec(spec.head_dim, interleaved=kind, **place))
        for kind in (False, True)
    )
    order = torch.arange(spec.head_dim)
    pairs = torch.tensor(oracle.channels(spec.rotary_dim, spec.start)).long().T
    order[spec.start : spec.start + spec.rotary_dim] = pairs.flatten()
    assert_same_bits(interleaved.rotated(case.x[:, order]), half.rotated()[:, order])


@holds_for(
    300,
    case=cases(tokens=st.integers(1, 5)),
    data=st.data(),
    id_dtype=st.sampled_from([torch.int32, torch.float64]),
)
def test_how_ids_are_stored_does_not_matter(
    case: Case, data: st.DataObject, id_dtype: torch.dtype
) -> None:
    """int32 ids, integral float64 ids, strided and expanded ids agree with contiguous int64 ids."""
    x, tokens = torch.stack((case.x, case.x.flip(0))), len(case.x)
    plain = torch.tensor(data.draw(st.lists(offsets, min_size=tokens, max_size=tokens)))
    wanted = rotate(x, case.spec, plain, layout="bsd")
    every_third = torch.zeros(3 * tokens, dtype=torch.int64)[::3].copy_(plain)
    for other in (plain.to(id_dtype), every_third, plain.expand(2, -1), plain.repeat(2, 1)):
        assert_same_bits(rotate(x, case.spec, other, layout="bsd"), wanted)


@holds_for(300, case=cases(st.sampled_from(DTYPES[:3])), scale=st.integers(-8, 8))
def test_a_power_of_two_passes_through(case: Case, scale: int) -> None:
    """Scaling x by −1 or a power of two scales the result exactly, except for subnormal numbers."""
    x, y = case.x, case.rotated()
    assert_same_bits(case.rotated(x * 2.0**scale), y * 2.0**scale)
    assert_same_bits(case.rotated(-x), -y)
