"""Angles compared with exact angles.

Cosines and sines come from tightrope.angles and, for each backend, from rotated pairs (1, 0).
"""

import math
import random
from collections.abc import Iterator

import pytest
import torch

import tightrope
from tests.support import oracle, tolerances
from tests.support.matrix import BACKENDS
from tightrope import RopeSpec, angles, frequencies, positions
from tightrope.backends import reference
from tightrope.functional import rotate
from tightrope.ops.schema import Options

BASES = [1e2, 1e4, 5e5, 1e7, 1e9]
DIMS = [8, 16, 64, 96, 128, 250, 512]
TOP = 2**31 - 1

# Both signs, odd and even, the ends of int32, and integers that float32 cannot hold.
POSITIONS = [
    *(0, 1, -1, 2, -3, 8191, 8192, -8193, 131071, 131072, -131073),
    *(2**20 - 1, 2**20, 2**20 + 1, -(2**20) - 1, 16777217, -715827883),
    *(2**30 + 1, TOP - 1, TOP, -TOP, -TOP - 1),
    *random.Random(2).sample(range(-TOP, TOP), 30),
]

DTYPES = [torch.float32, torch.float64]


def from_definition(
    words: torch.Tensor,
    turns: torch.Tensor | None,
    ids: torch.Tensor,
    dtype: torch.dtype,
    offset: int = 0,
    add_index: bool = False,
    tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines [rows, tokens, pairs] that tightrope.angles computes.

    Args:
        ids: positions [axes, rows, tokens].
    """
    tokens = ids.shape[2] if tokens is None else tokens
    phase = angles.phase_at(words, turns, ids, offset, add_index, tokens)
    cos, sin = angles.cos_sin(phase, dtype)
    return cos[:, 0], sin[:, 0]


def from_rotation(
    spec: RopeSpec,
    where: positions.PositionsLike,
    shape: tuple[int, int],
    dtype: torch.dtype,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [rows, tokens, pairs] by letting a backend rotate pairs (1, 0)."""
    first, second = oracle.channels(spec.rotary_dim, spec.start, spec.interleaved)
    x = torch.zeros(*shape, spec.head_dim, dtype=dtype)
    x[..., first] = 1
    y = rotate(x, spec, where, layout="bsd", backend=backend)
    return y[..., first], y[..., second]


def by_every_way(
    spec: RopeSpec, ids: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield cosine and sine by the definition, and by each backend that runs here."""
    rotation = spec.at(ids)
    yield from_definition(rotation.angles.words, rotation.angles.turns, rotation.ids, dtype)
    for backend, missing in tightrope.backends.why_not().items():
        if missing is None:
            yield from_rotation(spec, ids, (1, len(ids)), dtype, backend)


def raw_rotate(
    x: torch.Tensor,
    words: torch.Tensor,
    turns: torch.Tensor | None,
    ids: torch.Tensor | None,
    backend: str,
    offset: int = 0,
    add_index: bool = False,
) -> torch.Tensor:
    """Call the raw operator on x [rows, heads, tokens, 2 · pairs], with half pairing."""
    operator = reference.compose if backend == "reference" else torch.ops.tightrope.rotate
    return operator(x, None, words, turns, ids, offset, Options(add_index=add_index).pack(), 1.0)[0]


# --- phase words ----------------------------------------------------------------------------------------


def test_words_of_whole_and_half_turns() -> None:
    turn = angles.TWO_PI
    made = angles.words_of(frequencies.Frequencies((turn / 4, turn / 2, turn, -turn / 2, 3 * turn)))
    assert made.words == (2**62, -(2**63), 0, -(2**63), 0)
    assert made.turns == (0, 1, 1, 0, 3)


def test_two_pi_has_the_digits_that_a_word_needs() -> None:
    assert abs(oracle.MP.mpf(str(angles.TWO_PI)) - 2 * oracle.MP.pi) < oracle.MP.mpf(10) ** -75


def test_inv_freq_is_read_back_from_words() -> None:
    for base in (1e-3, 1e4):
        rotation = RopeSpec(16, base=base).at()
        read = angles.inv_freq(
            rotation.angles.words, rotation.angles.turns, torch.float64
        ).flatten()
        wanted = [float(omega) for omega in oracle.frequencies(base, 16)]
        for got, omega in zip(read.tolist(), wanted, strict=True):
            # The resolution of phase words is absolute: a slow pair has fewer digits.
            assert abs(got - omega) <= tolerances.value("word") + 4e-16 * omega


# --- integer positions ----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("base", BASES)
def test_integer_positions(base: float, dim: int) -> None:
    ids = torch.tensor(POSITIONS)
    cos, sin = oracle.cos_sin(ids, oracle.frequencies(base, dim))
    spec = RopeSpec(dim, base=base)
    near = ids.abs() <= 2**20
    for dtype in DTYPES:
        for got in by_every_way(spec, ids, dtype):
            for mine, exact in zip(got, (cos, sin), strict=True):
                tolerances.assert_angles(mine, exact, 2.0**31)
                tolerances.assert_angles(mine[:, near], exact[:, near], 2.0**20 + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_beyond_32_bits_do_not_wrap_early(backend: str) -> None:
    """Float64 angles stay within the bound of phase words at positions beyond 32 bits."""
    ids = [2**31, -(2**31) - 1, 2**32 + 1, 2**40 + 3, -(2**44) - 1]
    exact = oracle.cos_sin(ids, oracle.frequencies(10000.0, 16))
    got = from_rotation(RopeSpec(16), torch.tensor(ids), (1, len(ids)), torch.float64, backend)
    for mine, true in zip(got, exact, strict=True):
        for token, position in enumerate(ids):
            tolerances.assert_angles(mine[:, token], true[:, token], abs(position))


@pytest.mark.parametrize("backend", BACKENDS)
def test_quarter_turns_are_exact(backend: str) -> None:
    """At multiples of a quarter turn, each cosine and sine is exactly 0, 1 or −1."""
    words = torch.tensor([[[[2**62]]]])
    cos, sin = from_definition(words, None, torch.arange(-4, 5)[None, None], torch.float64)
    assert cos.flatten().tolist() == [1, 0, -1, 0, 1, 0, -1, 0, 1]
    assert sin.flatten().tolist() == [0, 1, 0, -1, 0, 1, 0, -1, 0]
    x = torch.tensor([[1.0, 0.0]]).expand(1, 1, 9, 2)
    y = raw_rotate(x, words, None, torch.arange(-4, 5)[None, None], backend)[0, 0]
    assert y[:, 0].tolist() == cos.flatten().tolist()
    assert y[:, 1].tolist() == sin.flatten().tolist()


# --- fractional positions -------------------------------------------------------------------------

FRACTIONS = [0.0, 0.5, -0.5, 1.5, 2.5, 0.25, -0.75, 1 / 3, -math.pi, 1e-3, 1e-9, 2.0**-40]
LARGE = [8191.3, -131071.7, 1048575.9, 16383.499999, 2.0**22 + 0.25]


@pytest.mark.parametrize("position_dtype", DTYPES)
@pytest.mark.parametrize("base", [1e-9, 1e-3, 0.03, 1.0, 1e4])
def test_fractional_positions(base: float, position_dtype: torch.dtype) -> None:
    """Angles at fractional positions are within the bound.

    With a base below 1, pairs with ω > π also need whole turns.
    """
    dim = 16
    omegas = oracle.frequencies(base, dim)
    turns = float(max(omegas)) / (2 * math.pi)
    ids = torch.tensor([*FRACTIONS, *LARGE], dtype=position_dtype)
    exact = oracle.cos_sin(ids, omegas)
    spec = RopeSpec(dim, base=base)
    turns_kept = spec.at(ids).angles.turns is not None
    assert turns_kept == any(omega > oracle.MP.pi for omega in omegas)
    for dtype in DTYPES:
        for got in by_every_way(spec, ids, dtype):
            for mine, true in zip(got, exact, strict=True):
                for token, position in enumerate(ids.tolist()):
                    tolerances.assert_angles(
                        mine[:, token], true[:, token], abs(position), 1, turns
                    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whole", [1, 2, -1, 5])
def test_whole_turns_per_position_are_not_lost(whole: int, backend: str) -> None:
    """Angles are within the bound for frequencies of whole turns, as in DINOv3.

    Their phase word is 0, so that fractional positions use the turns alone.
    """
    words = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    turns = torch.full_like(words, whole)
    ids = torch.tensor([0.25, 0.5, 1.0, -3.125, 7.0625], dtype=torch.float64)
    exact = oracle.cos_sin(ids, [2 * oracle.MP.pi * whole])
    for dtype in DTYPES:
        x = torch.tensor([[1.0, 0.0]], dtype=dtype).expand(1, 1, 5, 2)
        y = raw_rotate(x, words, turns, ids[None, None], backend)[:, 0]
        tolerances.assert_angles(y[..., :1], exact[0], 8, 1, abs(whole))
        tolerances.assert_angles(y[..., 1:], exact[1], 8, 1, abs(whole))


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_far_finer_than_float32_change_the_result(backend: str) -> None:
    """Positions 2^-24 or 2^-32 apart differ in their angles, as gradcheck requires."""
    for step in (2.0**-24, 2.0**-32):
        ids = torch.tensor([1000.3, 1000.3 + step], dtype=torch.float64)
        _, sin = from_rotation(RopeSpec(2), ids, (1, 2), torch.float64, backend)
        _, exact = oracle.cos_sin(ids, oracle.frequencies(10000.0, 2))
        moved, wanted = (s[0, 1, 0] - s[0, 0, 0] for s in (sin, exact))
        assert abs(moved - wanted) <= 2 * tolerances.angle_bound(torch.float64, 0, 1)
        assert abs(moved) > step / 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position_dtype", DTYPES)
def test_positions_that_are_no_number_give_nan(position_dtype: torch.dtype, backend: str) -> None:
    lost = [math.nan, math.inf, -math.inf, 2.0**62, -(2.0**80)]
    ids = torch.tensor([1.5, *lost, 2.5], dtype=position_dtype)
    for dtype in (*DTYPES, torch.bfloat16, torch.float16):
        for interleaved in (False, True):
            spec = RopeSpec(14, rotary_dim=10, start=2, interleaved=interleaved)
            y = rotate(torch.ones(7, 14, dtype=dtype), spec, ids, layout="sd", backend=backend)
            assert bool(y[1:6, 2:12].isnan().all())
            assert bool((y[:, :2] == 1).all())
            assert bool((y[:, 12:] == 1).all())
            assert bool(y[[0, 6]].isfinite().all())


def test_the_definition_detects_invalid_positions() -> None:
    below = math.nextafter(2.0**62, 0)
    ids = torch.tensor([0.0, below, -below, 2.0**62, math.nan, -math.inf], dtype=torch.float64)
    lost = angles.is_lost(ids)
    assert lost.tolist() == [False, False, False, True, True, True]
    assert angles.is_lost(torch.tensor([2**62])) is None
    assert angles.is_lost(None) is None


# --- several axes, offsets, rows ------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fractional", [False, True])
def test_axes_add_their_angles(fractional: bool, backend: str) -> None:
    """The angles of two axes add up; one of the axes leaves half of the pairs unrotated."""
    pairs = 6
    omegas = [oracle.frequencies(100.0, 2 * pairs), oracle.frequencies(1e6, 2 * pairs)]
    zero = oracle.MP.mpf(0)
    omegas[1] = (zero,) * 3 + omegas[1][3:]
    words = torch.tensor([[oracle.phase(omega).word for omega in axis] for axis in omegas])
    words = words[:, None, None]
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-(2**30), 2**30, (2, 2, 5), generator=generator)
    if fractional:
        ids = torch.rand(2, 2, 5, generator=generator, dtype=torch.float64) * 4000 - 2000
    exact = oracle.cos_sin(ids, omegas)
    reach = ids.abs().sum(0).max().item()
    for dtype in DTYPES:
        x = torch.zeros(2, 1, 5, 2 * pairs, dtype=dtype)
        x[..., :pairs] = 1
        y = raw_rotate(x, words, None, ids, backend)[:, 0]
        axes = 2 if fractional else 0
        for got in ((y[..., :pairs], y[..., pairs:]), from_definition(words, None, ids, dtype)):
            for mine, true in zip(got, exact, strict=True):
                tolerances.assert_angles(mine, true, reach, axes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_words_per_row_and_per_head(backend: str) -> None:
    """Each row and head rotates by its own phase words, [axes, rows|1, heads|1, pairs]."""
    rows, heads, tokens, pairs = 2, 3, 4, 5
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(-(2**63), 2**63 - 1, (1, rows, heads, pairs), generator=generator)
    x = torch.zeros(rows, heads, tokens, 2 * pairs, dtype=torch.float64)
    x[..., :pairs] = 1
    for some in (words, words[:, :1].contiguous(), words[:, :, :1].contiguous()):
        y = raw_rotate(x, some, None, None, backend, offset=100, add_index=True)
        for row in range(rows):
            for head in range(heads):
                own = some[0, row % some.shape[1], head % some.shape[2]].tolist()
                omegas = [2 * oracle.MP.pi * oracle.MP.mpf(word) / 2**64 for word in own]
                cos, sin = oracle.cos_sin(range(100, 100 + tokens), omegas)
                # Here ω is defined by the phase words, so positions add no error.
                tolerances.assert_angles(y[row, head, :, :pairs], cos[0], 0)
                tolerances.assert_angles(y[row, head, :, pairs:], sin[0], 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_with_ids_and_int32_sums_do_not_overflow(backend: str) -> None:
    """An int32 offset of 2^31 − 1 plus the token index does not overflow."""
    offsets = torch.tensor([TOP], dtype=torch.int32)
    exact = oracle.cos_sin(range(TOP, TOP + 4), oracle.frequencies(10000.0, 8))
    got = from_rotation(RopeSpec(8), positions.per_row(offsets), (1, 4), torch.float64, backend)
    for mine, true in zip(got, exact, strict=True):
        tolerances.assert_angles(mine, true, 2.0**31 + 4)


# --- derivative -----------------------------------------------------------------------------------


def test_position_angle_is_zero_with_the_derivative_of_the_angle() -> None:
    ids = torch.tensor([[[0.0, 0.3, -7.75, 12345.678]]], dtype=torch.float64, requires_grad=True)
    for base in (1e-3, 1e4):
        rotation = RopeSpec(8, base=base).at()
        step = angles.position_angle(
            rotation.angles.words, rotation.angles.turns, ids, torch.float64
        )
        assert step.shape == (1, 1, 4, 4)
        assert float(step.detach().abs().max()) <= 2.0**-62 * 1e3
        (slope,) = torch.autograd.grad(step.sum(), ids)
        wanted = sum(float(omega) for omega in oracle.frequencies(base, 8))
        assert slope.flatten().tolist() == pytest.approx([wanted] * 4, rel=1e-14)


# --- phase words of a tensor ----------------------------------------------------------------------------


def test_words_from_a_tensor_are_within_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.linspace(-12, 9, 4000, dtype=torch.float64)
    inv_freq = torch.randn(4000, generator=generator, dtype=torch.float64) * scale
    words, turns = angles.words_from(inv_freq)
    assert words.dtype == turns.dtype == torch.int64
    bound = tolerances.value("word of a float64")
    for omega, word, turn in zip(inv_freq.tolist(), words.tolist(), turns.tolist(), strict=True):
        exact = oracle.MP.mpf(omega) / (2 * oracle.MP.pi) * 2**64
        assert abs(word + turn * 2**64 - exact) <= bound * abs(exact) + 0.5
        assert -(2**63) <= word < 2**63


@pytest.mark.parametrize("half", [0.5, -0.5, 1.5, -1.5, 2.5, 7.5, 1e6 + 0.5])
@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
def test_words_from_a_tensor_near_half_a_turn(half: float, step: int) -> None:
    """Frequencies near an odd number of half turns are converted without saturation.

    Half a turn is 2^63 units, one more than a phase word can hold.
    """
    omega = half * 2 * math.pi
    for _ in range(abs(step)):
        omega = math.nextafter(omega, math.copysign(math.inf, step))
    (words, turns) = angles.words_from(torch.tensor([omega], dtype=torch.float64))
    exact = oracle.MP.mpf(omega) / (2 * oracle.MP.pi) * 2**64
    count = words.item() + turns.item() * 2**64
    assert abs(count - exact) <= tolerances.value("word of a float64") * abs(exact) + 0.5
    assert words.item() != 2**63 - 1  # the result of a saturating conversion


def test_words_from_a_tensor_keep_its_shape() -> None:
    words, turns = angles.words_from(torch.ones(2, 3, 4))
    assert words.shape == turns.shape == (2, 3, 4)
    assert words.unique().numel() == 1
    assert not turns.any()
