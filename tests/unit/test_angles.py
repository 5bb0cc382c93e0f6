"""The angles of rotations, compared with exact ones: pairs (1, 0) become their cosines and sines.

The phase words of specs are exact, see spec/test_words.py. Here the operator multiplies phase words and positions.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import on
from tests.support.matrix import BACKENDS
from tests.support.tolerances import assert_angles, value
from tightrope import RopeSpec, angles, frequencies, positions
from tightrope.backends import reference
from tightrope.functional import rotate
from tightrope.ops.schema import Options

every_backend = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.float64]
TOP, MP = 2**31 - 1, oracle.MP
# Both signs, odd and even, the ends of int32, and integers that float32 cannot hold.
INTEGERS = [
    *(0, 1, -1, 2, -3, 8191, 8192, -8193, 131071, 131072, -131073),
    *(2**20 - 1, 2**20, 2**20 + 1, -(2**20) - 1, 16777217, -715827883),
    *(2**30 + 1, TOP - 1, TOP, -TOP, -TOP - 1),
    *random.Random(2).sample(range(-TOP, TOP), 30),
    # Beyond 32 bits.
    *(2**31, -(2**31) - 1, 2**32 + 1, 2**40 + 3, -(2**44) - 1),
]
FRACTIONS = [
    *(0.0, 0.5, -0.5, 1.5, 2.5, 0.25, -0.75, 1 / 3, -math.pi, 1e-3, 1e-9, 2.0**-40),
    *(8191.3, -131071.7, 1048575.9, 16383.499999, 2.0**22 + 0.25),
]


def draws(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near_exact(found: Any, omegas: Sequence[Any], ids: torch.Tensor) -> None:
    """Assert that cosines and sines [tokens, pairs] are within the bound at each position."""
    whole = max(float(abs(omega)) for omega in omegas) / (2 * math.pi)
    for got, wanted in zip(found, oracle.cos_sin(ids, omegas), strict=True):
        for token, reach in enumerate(ids.double().abs().tolist()):
            if got.dtype == torch.float32 and reach > 2 * 2**31:
                continue  # beyond what the bound covers
            axes = int(ids.is_floating_point())
            assert_angles(got[token], wanted[0, token], reach, axes, whole)


@every_backend
@pytest.mark.parametrize("base", [1e-9, 1e-3, 0.03, 1.0, 1e2, 1e4, 1e9])
def test_positions(base: float, backend: str) -> None:
    """With a base below 1, fractional positions also need the whole turns of pairs with ω > π."""
    fractions = [torch.tensor(FRACTIONS, dtype=dtype) for dtype in DTYPES]
    for dim, ids in (
        (8, torch.tensor(INTEGERS)),
        (250, torch.tensor(INTEGERS)),
        *((16, f) for f in fractions),
    ):
        for dtype in DTYPES:
            x = torch.zeros(len(ids), dim, dtype=dtype)
            x[:, : dim // 2] = 1
            y = on(backend, rotate, x, RopeSpec(dim, base=base), ids, layout="sd")
            assert_near_exact(y.chunk(2, -1), oracle.frequencies(base, dim), ids)


def cos_sin(words: Any, turns: Any, ids: Any, backend: str, shape: Any, **more: Any) -> Any:
    """Return the cosines and sines that the raw operator gives to x of a shape [rows, heads, tokens] and a dtype."""
    *sizes, dtype = shape
    pairs = words.shape[-1]
    x = torch.zeros(*sizes, 2 * pairs, dtype=dtype)
    x[..., :pairs] = 1
    operator = reference.compose if backend == "reference" else torch.ops.tightrope.rotate
    options = Options(add_index=bool(more)).pack()
    y = operator(x, None, words, turns, ids, more.get("offset", 0), options, 1.0)[0]
    return y[..., :pairs], y[..., pairs:]


@every_backend
@pytest.mark.parametrize("whole", [1, 2, -1, 5])
def test_whole_turns_per_position_are_not_lost(whole: int, backend: str) -> None:
    """Their phase word is 0, as in DINOv3, so that fractional positions use the turns alone."""
    words = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    ids = torch.tensor([0.25, 0.5, 1.0, -3.125, 7.0625], dtype=torch.float64)
    for dtype in DTYPES:
        found = cos_sin(words, words + whole, ids[None, None], backend, (1, 1, 5, dtype))
        assert_near_exact([table[0, 0] for table in found], [2 * MP.pi * whole], ids)


@every_backend
def test_quarter_turns_are_exact(backend: str) -> None:
    ids = torch.arange(-4, 5)[None, None]
    found = cos_sin(torch.tensor([[[[2**62]]]]), None, ids, backend, (1, 1, 9, torch.float64))
    wanted = [1, 0, -1, 0, 1, 0, -1, 0, 1], [0, 1, 0, -1, 0, 1, 0, -1, 0]
    assert tuple(table.flatten().tolist() for table in found) == wanted


@every_backend
def test_an_int32_offset_plus_the_token_index_does_not_overflow(backend: str) -> None:
    x = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)[None]
    where = positions.per_row(torch.tensor([TOP], dtype=torch.int32))
    y = on(backend, rotate, x, RopeSpec(2), where, layout="bsd")
    for got, wanted in zip(y.split(1, -1), oracle.cos_sin(range(TOP, TOP + 4), [MP.mpf(1)])):
        assert_angles(got, wanted, 2.0**31 + 4)


@every_backend
@pytest.mark.parametrize("position_dtype", DTYPES)
def test_positions_that_are_no_number_give_nan(position_dtype: torch.dtype, backend: str) -> None:
    """So do those from 2^62 on, in magnitude; the last below it is a position."""
    lost = [math.nan, math.inf, -math.inf, 2.0**62, -(2.0**80)]
    last = torch.nextafter(
        torch.tensor(2.0**62, dtype=position_dtype), torch.tensor(0.0).to(position_dtype)
    )
    ids = torch.tensor([1.5, *lost, float(last)], dtype=position_dtype)
    for dtype in (*DTYPES, torch.bfloat16, torch.float16):
        for interleaved in (False, True):
            spec = RopeSpec(14, rotary_dim=10, start=2, interleaved=interleaved)
            y = on(backend, rotate, torch.ones(7, 14, dtype=dtype), spec, ids, layout="sd")
            assert y[1:6, 2:12].isnan().all()
            assert (y[:, [0, 1, 12, 13]] == 1).all()
            assert y[[0, 6]].isfinite().all()


# --- phase words of a tensor, and back ----------------------------------------------------------------


def near(number: float) -> list[float]:
    """Return a float64 and the two next to it on each side."""
    found = [number]
    for end in (-math.inf, math.inf):
        found += [first := math.nextafter(number, end), math.nextafter(first, end)]
    return found


def test_words_from_a_tensor_are_within_the_bound() -> None:
    """Also near an odd number of half turns, 2^63 units, which is one more than a phase word can hold."""
    scale = 10.0 ** torch.linspace(-12, 9, 4000, dtype=torch.float64)
    halves = [half * 2 * math.pi for half in (0.5, -0.5, 1.5, -1.5, 2.5, 7.5, 1e6 + 0.5)]
    close = torch.tensor([omega for half in halves for omega in near(half)], dtype=torch.float64)
    inv_freq = torch.cat(((2 * draws(4000) - 1) * scale, close)).reshape(-1, 3, 5)
    words, turns = angles.words_from(inv_freq)
    assert words.dtype == turns.dtype == torch.int64
    assert words.shape == turns.shape == inv_freq.shape
    for omega, word, turn in zip(*(x.flatten().tolist() for x in (inv_freq, words, turns))):
        exact = MP.mpf(omega) / (2 * MP.pi) * 2**64
        assert abs(word + turn * 2**64 - exact) <= value("word of a float64") * abs(exact) + 0.5
        assert word != 2**63 - 1  # the result of a saturating conversion


def test_words_of_whole_and_half_turns() -> None:
    turn = angles.TWO_PI
    made = angles.words_of(frequencies.Frequencies((turn / 4, turn / 2, turn, -turn / 2, 3 * turn)))
    assert made.words == (2**62, -(2**63), 0, -(2**63), 0)
    assert made.turns == (0, 1, 1, 0, 3)
    assert abs(MP.mpf(str(turn)) - 2 * MP.pi) < MP.mpf(10) ** -75
