"""Rotations against the oracle, on every backend, with every instruction set, by the bounds of docs/numerics.md."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.support import oracle, tolerances
from tests.support.helpers import on
from tests.support.matrix import BACKENDS, OTHER_SETS, both_pairings, every_dtype
from tests.support.tolerances import Result, assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.backends import reference
from tightrope.functional import rotate, rotate_
from tightrope.ops.schema import LAYOUTS, Options

every_backend = pytest.mark.parametrize("backend", [*BACKENDS, *OTHER_SETS])
TOP = 2**31 - 1
AROUND = {"0": -12, "8k": 8192 - 12, "131k": 131072 - 12, "1M": 2**20 - 12, "2^31": TOP - 24}
HEAD_DIMS = [2, 4, 6, 10, 48, 64, 80, 96, 100, 128, 250]


def every_way(test: Callable[..., None]) -> Callable[..., None]:
    return every_dtype(every_backend(both_pairings(test)))


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random numbers of many magnitudes, so that some pairs mix a large and a small one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * torch.exp2(torch.rand(shape, generator=generator) * 6 - 3)).to(dtype)


def case(
    x: torch.Tensor,
    spec: RopeSpec,
    ids: Sequence[int] | torch.Tensor,
    got: torch.Tensor,
    layout: str = "bhsd",
    inverse: bool = False,
) -> Result:
    """Return the library's result with the oracle's, the pair lengths and the largest |position|."""
    place = {"start": spec.start, "interleaved": spec.interleaved}
    omegas = oracle.frequencies(spec.base, spec.rotary_dim)
    exact = oracle.rotate(x, ids, omegas, layout=layout, inverse=inverse, **place)
    lengths = oracle.pair_lengths(x, spec.rotary_dim, **place)
    numbers = ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids
    assert got.dtype == x.dtype
    return Result(got, exact, lengths, max((abs(number) for number in numbers), default=0))


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@every_way
@pytest.mark.parametrize("where", AROUND)
def test_positions_around(where: str, interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Forward and inverse, by an offset and by ids, for few and for many heads."""
    first, tokens, cases = AROUND[where], 25, []
    for base, dim, heads in ((10000.0, 128, 8), (5e5, 30, 8), (5e5, 30, 40)):
        spec, ids = RopeSpec(dim, base=base, interleaved=interleaved), range(first, first + tokens)
        for inverse in (False, True):
            x = noise(2, heads, tokens, dim, dtype=dtype, seed=dim + inverse)
            y = on(backend, rotate, x, spec, first, inverse=inverse)
            cases.append(case(x, spec, ids, y, inverse=inverse))
            by_ids = on(backend, rotate, x, spec, torch.tensor(ids), inverse=inverse)
            assert_same_bits(by_ids, y)
    tolerances.assert_rotated(cases)


@every_way
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_ids_of_every_type_in_any_order(
    id_dtype: torch.dtype, interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    spec, cases = RopeSpec(64, interleaved=interleaved), []
    generator = torch.Generator().manual_seed(3)
    for heads in (5, 40):
        ids = torch.randint(-(2**20), 2**20, (2, 21), generator=generator).to(id_dtype)
        if id_dtype.is_floating_point:
            ids = ids / 16 + 0.3
        x = noise(2, heads, 21, 64, dtype=dtype)
        cases.append(case(x, spec, ids, on(backend, rotate, x, spec, ids)))
    tolerances.assert_rotated(cases)


# --- shapes ---------------------------------------------------------------------------------------


@every_way
def test_head_dims_and_layouts(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    cases = []
    for dim in HEAD_DIMS:
        spec, x = RopeSpec(dim, interleaved=interleaved), noise(1, 3, 20, dim, dtype=dtype)
        cases.append(case(x, spec, range(20), on(backend, rotate, x, spec)))
    spec = RopeSpec(96, interleaved=interleaved)
    per_row = torch.tensor([[5, 0, 7, 131072, -3], [8192, 2, 2, -1, TOP]])
    for layout in LAYOUTS:
        x = noise(*({"b": 2, "h": 3, "d": 96}.get(letter, 5) for letter in layout), dtype=dtype)
        for ids in (per_row[0], per_row) if "b" in layout else (per_row[0],):
            y = on(backend, rotate, x, spec, ids, layout=layout)
            cases.append(case(x, spec, ids, y, layout))
    tolerances.assert_rotated(cases)


@every_way
def test_slices(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Channels outside [start, start + rotary_dim) keep every bit, whatever they hold."""
    cases = []
    slices = [(0, 4), (3, 6), (1, 38), (2, 32), (30, 10), (38, 2), (7, 0), (5, 20), (0, 40)]
    for start, rotary_dim in slices:
        spec = RopeSpec(40, rotary_dim=rotary_dim, start=start, interleaved=interleaved)
        x, stop = noise(2, 3, 9, 40, dtype=dtype, seed=start), start + rotary_dim
        y = on(backend, rotate, x, spec, 1000)
        cases.append(case(x, spec, range(1000, 1009), y))
        odd = x.clone()
        odd[..., :start], odd[..., stop:] = math.nan, -math.inf
        wanted = torch.cat((odd[..., :start], y[..., start:stop], odd[..., stop:]), -1)
        assert_same_bits(on(backend, rotate, odd, spec, 1000), wanted)
        assert_same_bits(on(backend, rotate_, odd, spec, 1000), wanted)
    tolerances.assert_rotated(cases)


@every_way
def test_sizes_of_zero_and_one(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    spec, big = RopeSpec(10, interleaved=interleaved), noise(7, 11, 13, 10, dtype=dtype)
    whole = on(backend, rotate, big, spec, 3)
    for rows, heads, tokens in itertools.product((0, 1, 2), (0, 1, 3), (0, 1, 4)):
        x = big[:rows, :heads, :tokens]
        per_row = positions.per_row(torch.full((rows,), 3))
        for where in (3, torch.arange(3, 3 + tokens), per_row):
            found = on(backend, rotate, x, spec, where)
            assert_same_bits(found, whole[:rows, :heads, :tokens])
            assert_same_bits(on(backend, rotate_, x.clone(), spec, where), found)
    assert on(backend, rotate, big[..., :0], RopeSpec(0), 3).shape == (7, 11, 13, 0)


@every_dtype
@every_backend
def test_more_pairs_than_a_kernel_keeps_at_once(backend: str, dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        spec, x = RopeSpec(10_006, interleaved=interleaved), noise(1, 1, 3, 10_006, dtype=dtype)
        y = on(backend, rotate, x, spec, 8190)
        tolerances.assert_rotated([case(x, spec, range(8190, 8193), y)])
        assert_same_bits(on(backend, rotate_, x, spec, 8190), y)


# --- special numbers ------------------------------------------------------------------------------


@every_way
def test_nan_and_infinity_stay_non_finite(
    interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """NaN or infinity in one channel of a pair makes both non-finite, and no other pair changes."""
    pairs, tokens = 19, 11
    spec, omegas = RopeSpec(38, interleaved=interleaved), oracle.frequencies(10000.0, 38)
    first, second = oracle.channels(2 * pairs, interleaved=interleaved)
    plain = noise(tokens, 2 * pairs, dtype=dtype)
    wanted = on(backend, rotate, plain, spec, 5, layout="sd")
    ids, place = range(5, 5 + tokens), {"layout": "sd", "interleaved": interleaved}
    for bad, member, other in itertools.product(
        (math.nan, -math.nan, math.inf, -math.inf), (first, second), (0.0, 1.0)
    ):
        x, hit = plain.clone(), torch.zeros(tokens, 2 * pairs, dtype=torch.bool)
        for token in range(tokens):
            pair = (3 * token) % pairs
            both = [first[pair], second[pair]]
            x[token, both] = other
            x[token, member[pair]] = bad
            hit[token, both] = True
        y = on(backend, rotate, x, spec, 5, layout="sd")
        exact = oracle.rotate(x, ids, omegas, **place)
        assert not y[hit].isfinite().any()
        assert torch.equal(y[hit].isnan(), exact[hit].isnan())
        assert torch.equal(y[hit & ~exact.isnan()].double(), exact[hit & ~exact.isnan()])
        assert_same_bits(y[~hit], wanted[~hit])


@every_dtype
@every_backend
def test_every_nan_stays_nan(backend: str, dtype: torch.dtype) -> None:
    """Also one whose payload careless rounding would turn into an infinity."""
    if dtype.itemsize == 2:
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    else:
        integers = torch.int32 if dtype == torch.float32 else torch.int64
        smallest = torch.tensor([math.inf], dtype=dtype).view(integers) + 1
        largest = torch.tensor([torch.iinfo(integers).max], dtype=integers)
        one = torch.ones(1, dtype=integers)
        bits = torch.cat((smallest, largest, *(smallest - 1 + (one << n) for n in range(23))))
        every = torch.cat((bits, bits | torch.iinfo(integers).min)).view(dtype)
    bad = every[every.isnan()]
    bad = bad[: len(bad) // 2 * 2]
    for interleaved, x in itertools.product((False, True), (bad.view(1, -1, 2), bad[None, None])):
        spec = RopeSpec(x.shape[-1], interleaved=interleaved)
        assert on(backend, rotate, x, spec, 3, layout="bsd").isnan().all()


@every_backend
@both_pairings
def test_float16_overflows_to_infinity(interleaved: bool, backend: str) -> None:
    """Rotated by an eighth of a turn, (65504, 65504) has √2 · 65504 in one channel."""
    spec = RopeSpec(34, base=1.0, interleaved=interleaved)  # every pair turns by 1 rad per position
    first, second = oracle.channels(34, interleaved=interleaved)
    cases = []
    tokens = 400
    for left, right in ((65504, 65504), (-65504, 65504), (65504, -65504), (46400, 46400)):
        x = torch.zeros(tokens, 34, dtype=torch.float16)
        x[:, first], x[:, second] = left, right
        got = case(x, spec, range(tokens), on(backend, rotate, x, spec, layout="sd"), "sd")
        overflow = oracle.rounded(got.exact, torch.float16).isinf()
        assert overflow.any()
        # Near the tie between the largest number and infinity, float32 arithmetic could round either
        # way; no element here is that close.
        near = tolerances.value("float32 rotation") * got.lengths
        assert bool(((got.exact.abs() - 65520).abs() > near).all())
        assert torch.equal(got.got.isinf(), overflow)
        assert torch.equal(got.got[overflow].sign(), got.exact[overflow].sign().half())
        calm = ~overflow
        cases.append(Result(got.got[calm], got.exact[calm], got.lengths[calm]))
    tolerances.assert_rotated(cases)


@every_way
def test_subnormal_and_large_numbers(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Small ones are not flushed, and those up to half of the largest do not overflow within the kernel."""
    spec, unit = RopeSpec(40, interleaved=interleaved), noise(8, 8, 40, dtype=torch.float64)
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    cases = []
    for scale in (smallest, 0.1 * smallest, 0.01 * smallest, largest / 2 / float(unit.abs().max())):
        x = (unit.repeat(1, 8, 1) * scale).to(dtype)
        y = on(backend, rotate, x, spec, 100, layout="bsd")
        assert int((y != 0).sum()) > y.numel() // 2
        cases.append(case(x, spec, range(100, 164), y, "bsd"))
    tolerances.assert_rotated(cases[:3])
    if dtype != torch.float16:  # whose largest pairs may overflow
        tolerances.assert_rotated(cases[3:])


@every_dtype
@every_backend
def test_position_zero_is_the_identity(backend: str, dtype: torch.dtype) -> None:
    x = noise(1, 3, 1, 46, dtype=dtype)
    for inverse, interleaved in itertools.product((False, True), repeat=2):
        spec = RopeSpec(46, interleaved=interleaved)
        assert_same_bits(on(backend, rotate, x, spec, inverse=inverse), x)


@every_backend
@both_pairings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_rounded_to_nearest_even(
    dtype: torch.dtype, interleaved: bool, backend: str
) -> None:
    """At position 0 with an amplitude of 3/2, float32 arithmetic is exact and many results are ties.

    The numbers of pairs cover full SIMD vectors and their remainders; strides are 1 and 2.
    """
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    operator = reference.compose if backend == "reference" else torch.ops.tightrope.rotate
    for pairs, step in itertools.product((1, 3, 31, 64), (1, 2)):
        numbers = every[: len(every) // pairs * pairs].reshape(-1, pairs)
        words, at = torch.zeros(1, 1, 1, pairs, dtype=torch.int64), torch.zeros(1, 1, len(numbers))
        for member in oracle.channels(2 * pairs, interleaved=interleaved):
            x = torch.zeros(len(numbers), 2 * pairs * step, dtype=dtype)[:, ::step]
            x[:, member] = numbers
            options = Options(layout=5, interleaved=interleaved, add_index=False).pack()
            (y,) = on(backend, operator, x, None, words, None, at, 0, options, 1.5)
            wanted = oracle.rounded(x.double() * 1.5, dtype)
            assert int(oracle.steps_apart(y, wanted).max()) == 0
            if backend != "reference":
                torch.ops.tightrope.rotate_(x, None, words, None, at, 0, options, 1.5)
                assert int(oracle.steps_apart(x, wanted).max()) == 0


# --- gradients ------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("inverse", [False, True])
def test_the_gradient_is_rotated_back(
    inverse: bool, interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """The backward pass is the transposed rotation, within the same error bounds."""
    spec = RopeSpec(40, rotary_dim=36, start=1, interleaved=interleaved)
    x, cotangent = (noise(2, 4, 40, 40, dtype=dtype, seed=seed) for seed in (0, 1))
    y = on(backend, rotate, x.requires_grad_(), spec, 131000, inverse=inverse)
    (grad,) = torch.autograd.grad(y, x, cotangent)
    ids = range(131000, 131040)
    tolerances.assert_rotated([case(cotangent, spec, ids, grad, inverse=not inverse)])
    outside = [0, 37, 38, 39]
    assert_same_bits(grad[..., outside], cotangent[..., outside])
