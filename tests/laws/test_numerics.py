"""Rotations against the oracle, on every backend.

tests/kernel/cpu/test_instruction_sets.py runs this file again with each instruction set that is not in use here.
"""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from tests.support import oracle, tolerances
from tests.support.matrix import both_pairings, every_backend, every_dtype, every_way
from tests.support.tolerances import Result
from tightrope import RopeSpec, positions
from tightrope.backends import reference
from tightrope.functional import rotate, rotate_
from tightrope.ops.schema import LAYOUTS, Options

TOP = 2**31 - 1
AROUND = {"0": -12, "8k": 8192 - 12, "131k": 131072 - 12, "1M": 2**20 - 12, "2^31": TOP - 24}
HEAD_DIMS = [2, 4, 6, 10, 48, 64, 80, 96, 100, 128, 250]


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


def assert_untouched(x: torch.Tensor, y: torch.Tensor, spec: RopeSpec) -> None:
    stop = spec.start + spec.rotary_dim
    tolerances.assert_same_bits(y[..., : spec.start], x[..., : spec.start])
    tolerances.assert_same_bits(y[..., stop:], x[..., stop:])


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@every_way
@pytest.mark.parametrize("where", AROUND)
def test_positions_around(where: str, interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Rotations forward and inverse, by an offset and by ids, are within the error bounds."""
    first, tokens, cases = AROUND[where], 25, []
    for base, dim in ((10000.0, 128), (5e5, 30)):
        spec = RopeSpec(dim, base=base, interleaved=interleaved)
        for inverse in (False, True):
            x = noise(2, 8, tokens, dim, dtype=dtype, seed=dim + inverse)
            y = rotate(x, spec, first, inverse=inverse, backend=backend)
            ids = range(first, first + tokens)
            cases.append(case(x, spec, ids, y, inverse=inverse))
            by_ids = rotate(x, spec, torch.tensor(ids), inverse=inverse, backend=backend)
            tolerances.assert_same_bits(by_ids, y)
    tolerances.assert_rotated(cases)


@every_way
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_ids_of_every_type_in_any_order(
    id_dtype: torch.dtype, interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    spec = RopeSpec(64, interleaved=interleaved)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-(2**20), 2**20, (2, 21), generator=generator).to(id_dtype)
    if id_dtype.is_floating_point:
        ids = ids / 16 + 0.3
    x = noise(2, 5, 21, 64, dtype=dtype)
    y = rotate(x, spec, ids, backend=backend)
    tolerances.assert_rotated([case(x, spec, ids, y)])


# --- shapes ---------------------------------------------------------------------------------------


@every_way
def test_head_dims(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    cases = []
    for dim in HEAD_DIMS:
        spec = RopeSpec(dim, interleaved=interleaved)
        x = noise(1, 3, 20, dim, dtype=dtype, seed=dim)
        cases.append(case(x, spec, range(20), rotate(x, spec, backend=backend)))
    tolerances.assert_rotated(cases)


@every_way
def test_layouts(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    cases = []
    spec = RopeSpec(96, interleaved=interleaved)
    for layout in LAYOUTS:
        shape = [{"b": 2, "h": 3, "d": 96}.get(letter, 5) for letter in layout]
        per_row = torch.tensor([[5, 0, 7, 131072, -3], [8192, 2, 2, -1, TOP]])
        for ids in (per_row[0], per_row) if "b" in layout else (per_row[0],):
            x = noise(*shape, dtype=dtype, seed=len(cases))
            y = rotate(x, spec, ids, layout=layout, backend=backend)
            cases.append(case(x, spec, ids, y, layout))
    tolerances.assert_rotated(cases)


@every_way
def test_slices(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Channels outside [start, start + rotary_dim) keep every bit, whatever they hold."""
    cases = []
    slices = [(0, 4), (3, 6), (1, 38), (2, 32), (30, 10), (38, 2), (7, 0), (5, 20), (0, 40)]
    for start, rotary_dim in slices:
        spec = RopeSpec(40, rotary_dim=rotary_dim, start=start, interleaved=interleaved)
        x = noise(2, 3, 9, 40, dtype=dtype, seed=start)
        y = rotate(x, spec, 1000, backend=backend)
        cases.append(case(x, spec, range(1000, 1009), y))
        odd = x.clone()
        odd[..., :start] = math.nan
        odd[..., start + rotary_dim :] = -math.inf
        z = rotate(odd, spec, 1000, backend=backend)
        assert_untouched(odd, z, spec)
        assert_untouched(odd, rotate_(odd.clone(), spec, 1000, backend=backend), spec)
        stop = start + rotary_dim
        tolerances.assert_same_bits(z[..., start:stop], y[..., start:stop])
    tolerances.assert_rotated(cases)


@every_way
def test_sizes_of_zero_and_one(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    spec = RopeSpec(10, interleaved=interleaved)
    big = noise(7, 11, 13, 10, dtype=dtype)
    whole = rotate(big, spec, 3, backend=backend)
    for rows, heads, tokens in itertools.product((0, 1, 2), (0, 1, 3), (0, 1, 4)):
        x = big[:rows, :heads, :tokens]
        for result in (
            rotate(x, spec, 3, backend=backend),
            rotate_(x.clone(), spec, 3, backend=backend),
            rotate(x, spec, torch.arange(3, 3 + tokens), backend=backend),
            rotate(x, spec, positions.per_row(torch.full((rows,), 3)), backend=backend),
        ):
            tolerances.assert_same_bits(result, whole[:rows, :heads, :tokens])
    none = RopeSpec(0)
    assert rotate(big[..., :0], none, 3, backend=backend).shape == (7, 11, 13, 0)


@every_dtype
@every_backend
def test_more_pairs_than_a_kernel_keeps_at_once(backend: str, dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        spec = RopeSpec(10_006, interleaved=interleaved)
        x = noise(1, 1, 3, 10_006, dtype=dtype)
        y = rotate(x, spec, 8190, backend=backend)
        tolerances.assert_rotated([case(x, spec, range(8190, 8193), y)])
        tolerances.assert_same_bits(rotate_(x, spec, 8190, backend=backend), y)


# --- special numbers ------------------------------------------------------------------------------


@every_way
def test_nan_and_infinity_stay_non_finite(
    interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """NaN or infinity in one channel of a pair makes both non-finite, and no other pair changes."""
    pairs, tokens = 19, 11
    spec = RopeSpec(2 * pairs, interleaved=interleaved)
    first, second = oracle.channels(2 * pairs, interleaved=interleaved)
    plain = noise(tokens, 2 * pairs, dtype=dtype)
    wanted = rotate(plain, spec, 5, layout="sd", backend=backend)
    for bad, member, other in itertools.product(
        (math.nan, -math.nan, math.inf, -math.inf), (first, second), (0.0, 1.0)
    ):
        x = plain.clone()
        hit = torch.zeros(tokens, 2 * pairs, dtype=torch.bool)
        for token in range(tokens):
            pair = (3 * token) % pairs
            x[token, first[pair]] = x[token, second[pair]] = other
            x[token, member[pair]] = bad
            hit[token, first[pair]] = hit[token, second[pair]] = True
        y = rotate(x, spec, 5, layout="sd", backend=backend)
        exact = oracle.rotate(
            x,
            range(5, 5 + tokens),
            oracle.frequencies(10000.0, 2 * pairs),
            layout="sd",
            interleaved=interleaved,
        )
        assert not y[hit].isfinite().any()
        assert torch.equal(y[hit].isnan(), exact[hit].isnan())
        assert torch.equal(y[hit & ~exact.isnan()].double(), exact[hit & ~exact.isnan()])
        tolerances.assert_same_bits(y[~hit], wanted[~hit])


@every_dtype
@every_backend
def test_every_nan_stays_nan(backend: str, dtype: torch.dtype) -> None:
    """Every NaN stays NaN, also one whose payload careless rounding would turn into an infinity."""
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
    bad = bad[: len(bad) // 2 * 2].reshape(1, -1, 2)
    for interleaved in (False, True):
        y = rotate(bad, RopeSpec(2, interleaved=interleaved), 3, layout="bsd", backend=backend)
        assert bool(y.isnan().all())
        wide = bad.reshape(1, 1, -1)
        spec = RopeSpec(wide.shape[-1], interleaved=interleaved)
        assert bool(rotate(wide, spec, 3, layout="bsd", backend=backend).isnan().all())


@every_backend
@both_pairings
def test_float16_overflows_to_infinity(interleaved: bool, backend: str) -> None:
    """Results beyond the range of float16 become infinite.

    Rotated by an eighth of a turn, (65504, 65504) has √2 · 65504 in one channel.
    """
    spec = RopeSpec(34, base=1.0, interleaved=interleaved)  # every pair turns by 1 rad per position
    cases = []
    tokens = 400
    for left, right in ((65504, 65504), (-65504, 65504), (65504, -65504), (46400, 46400)):
        first, second = oracle.channels(34, interleaved=interleaved)
        x = torch.zeros(tokens, 34, dtype=torch.float16)
        x[:, first], x[:, second] = left, right
        got = case(x, spec, range(tokens), rotate(x, spec, layout="sd", backend=backend), "sd")
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
def test_subnormal_numbers_are_not_flushed(
    interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    unit = noise(8, 8, 40, dtype=torch.float64).repeat(1, 8, 1)
    cases = []
    for scale in (1.0, 0.1, 0.01):
        x = (unit * smallest * scale).to(dtype)
        spec = RopeSpec(40, interleaved=interleaved)
        y = rotate(x, spec, 100, layout="bsd", backend=backend)
        assert int((y != 0).sum()) > y.numel() // 2
        cases.append(case(x, spec, range(100, 164), y, "bsd"))
    tolerances.assert_rotated(cases)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_numbers(dtype: torch.dtype, backend: str) -> None:
    """Numbers up to half of the dtype's maximum do not overflow within the kernel."""
    spec = RopeSpec(64)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 4, 10, 64, generator=generator, dtype=torch.float64) - 0.5
    x = (x * torch.finfo(dtype).max).to(dtype)
    tolerances.assert_rotated([case(x, spec, range(9, 19), rotate(x, spec, 9, backend=backend))])


@every_dtype
@every_backend
def test_position_zero_is_the_identity(backend: str, dtype: torch.dtype) -> None:
    x = noise(1, 3, 1, 46, dtype=dtype)
    for inverse, interleaved in itertools.product((False, True), repeat=2):
        spec = RopeSpec(46, interleaved=interleaved)
        y = rotate(x, spec, inverse=inverse, backend=backend)
        tolerances.assert_same_bits(y, x)


@every_backend
@both_pairings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_rounded_to_nearest_even(
    dtype: torch.dtype, interleaved: bool, backend: str
) -> None:
    """16-bit results are rounded to the nearest number, ties to even.

    At position 0 with an amplitude of 3/2, float32 arithmetic is exact and many results are ties.
    The numbers of pairs cover full SIMD vectors and their remainders; strides are 1 and 2.
    """
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    options = Options(layout=5, interleaved=interleaved, add_index=False).pack()
    add_index = Options(layout=5, interleaved=interleaved).pack()
    operator = reference.compose if backend == "reference" else torch.ops.tightrope.rotate
    for pairs, step in itertools.product((1, 3, 31, 64), (1, 2)):
        numbers = every[: len(every) // pairs * pairs].reshape(-1, pairs)
        words = torch.zeros(1, 1, 1, pairs, dtype=torch.int64)
        for member in oracle.channels(2 * pairs, interleaved=interleaved):
            x = torch.zeros(len(numbers), 2 * pairs * step, dtype=dtype)[:, ::step]
            x[:, member] = numbers
            (y,) = operator(x, None, words, None, torch.zeros(1, 1, len(x)), 0, options, 1.5)
            wanted = oracle.rounded(x.double() * 1.5, dtype)
            assert int(oracle.steps_apart(y, wanted).max()) == 0
            if backend != "reference":
                torch.ops.tightrope.rotate_(x, None, words, None, None, 0, add_index, 1.5)
                assert int(oracle.steps_apart(x, wanted).max()) == 0


# --- gradients ------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("inverse", [False, True])
def test_the_gradient_is_rotated_back(
    inverse: bool, interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """The backward pass is the transposed rotation, within the same error bounds."""
    spec = RopeSpec(40, rotary_dim=36, start=1, interleaved=interleaved)
    x = noise(2, 4, 40, 40, dtype=dtype).requires_grad_()
    cotangent = noise(2, 4, 40, 40, dtype=dtype, seed=1)
    y = rotate(x, spec, 131000, inverse=inverse, backend=backend)
    (grad,) = torch.autograd.grad(y, x, cotangent)
    ids = range(131000, 131040)
    tolerances.assert_rotated([case(cotangent, spec, ids, grad, inverse=not inverse)])
    assert_untouched(cotangent, grad, spec)


@every_backend
@both_pairings
def test_the_gradient_by_fractional_positions(interleaved: bool, backend: str) -> None:
    """A position's gradient is Σ ω · (u · dv − v · du) over rows, heads and pairs (u, v) of y."""
    spec = RopeSpec(24, interleaved=interleaved)
    ids = torch.tensor([0.5, -3.25, 1000.75, 8191.1], requires_grad=True)
    x, cotangent = (noise(2, 3, 4, 24, dtype=torch.float32, seed=seed) for seed in (0, 1))
    y = rotate(x, spec, ids, backend=backend)
    (grad,) = torch.autograd.grad(y, ids, cotangent)
    omegas = oracle.frequencies(10000.0, 24)
    exact = oracle.rotate(x, ids.detach(), omegas, interleaved=interleaved)
    first, second = oracle.channels(24, interleaved=interleaved)
    omega = torch.tensor([float(number) for number in omegas], dtype=torch.float64)
    u, v = exact[..., first], exact[..., second]
    du, dv = cotangent.double()[..., first], cotangent.double()[..., second]
    wanted = (omega * (u * dv - v * du)).sum((0, 1, 3))
    scale = (omega * torch.hypot(u, v) * torch.hypot(du, dv)).sum((0, 1, 3))
    tolerances.assert_angle_gradient(grad, wanted, scale, torch.float32)
