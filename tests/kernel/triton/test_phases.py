"""The Triton kernel for phases from data: the bits of the definition, and its sums of gradients.

Where it runs is explained in tests/support/triton/cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.helpers import noise
from tests.support.tolerances import assert_each, assert_near
from tests.support.triton.cases import DEVICE, needs_triton, operators
from tightrope.ops import phases as definition

# The interpreter's numpy warns of what the masks of the kernel discard.
pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ROWS, HEADS, PAIRS = 2, 3, 5
CHUNK = 4
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few tokens take several chunks. The interpreter runs programs sequentially, so use few."""
    from tightrope.backends.triton import blocks, phases

    monkeypatch.setattr(blocks, "CHUNK", CHUNK)
    monkeypatch.setattr(blocks, "APIECE", CHUNK)
    phases._plans.clear()
    yield
    phases._plans.clear()


def angles(tokens: int, dtype: torch.dtype, pairs: int = PAIRS) -> torch.Tensor:
    """Return angles from 1e-3 to 1e4, ``[ROWS, HEADS, tokens, pairs]``."""
    size = 10.0 ** torch.linspace(-3, 4, pairs, dtype=torch.float64)
    return (size * noise(ROWS, HEADS, tokens, pairs, seed=tokens)).to(dtype).to(DEVICE)


def state_of() -> torch.Tensor:
    """Return a state in which one phase is NaN."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(-(2**63), 2**63 - 1, (ROWS, HEADS, PAIRS), generator=generator)
    found[0, 1, 2] = -(2**63)
    return found.to(DEVICE)


def resets(tokens: int) -> torch.Tensor:
    """Return resets: in the first row the first tokens of chunks, in the second those next to them."""
    first = torch.arange(tokens) % CHUNK == 0
    beside = first.roll(-1) | first.roll(1)
    return torch.stack((first & (torch.arange(tokens) != CHUNK), beside)).to(DEVICE)


def check_words(*arguments: Any) -> None:
    """Assert the integers, strides and dtypes of the definition."""
    found, wanted = operators().phase_words(*arguments), definition.phase_words(*arguments)
    for got, want in zip(found, wanted, strict=True):
        assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
        assert torch.equal(got, want)


def check_sums(grad: torch.Tensor, last: torch.Tensor | None, reset: torch.Tensor | None) -> None:
    """Assert the sums, strides and dtypes of the definition, and the same bits in another call."""
    name = "float64 ways" if grad.dtype == torch.float64 else "float32 ways"
    found = operators().phase_sums(grad, last, reset)
    for got, want in zip(found, definition.phase_sums(grad, last, reset), strict=True):
        assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
        assert_near(got, want, name)
    assert_each(torch.equal, operators().phase_sums(grad, last, reset), found)


def check_both(x: torch.Tensor, state: torch.Tensor | None, reset: torch.Tensor | None) -> None:
    """Check running sums, and with the same tensors the sums of gradients."""
    for wide in (False, True):
        check_words(x, state, reset, True, wide)
    if x.dtype in FLOATS[2:]:
        last = None if state is None else state.to(x.dtype) * 2.0**-64
        check_sums(x.nan_to_num(1.0, 2.0, 3.0), last, reset)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_angle_has_the_phase_word_of_the_definition(dtype: torch.dtype, wide: bool) -> None:
    """The bits are equal for angles of all sizes, near multiples of half a turn, and too large ones."""
    size = 10.0 ** (40 * torch.rand(3000, generator=torch.Generator().manual_seed(1)).double() - 20)
    half = torch.arange(1, 2001).double() * math.pi
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 3.4e38, 3.9e38, 1e308])
    powers = 2 * math.pi * 2.0 ** torch.tensor([-64.0, -33, 49, 50, 51, 61, 62, 63]).double()
    ties = 2 * math.pi * 2.0**-33 * (torch.arange(1, 200).double() + 0.5)
    every = [size * noise(3000, seed=2), half, torch.nextafter(half, size[:1]), ties]
    x = torch.cat([*every, edges.double(), powers, -powers]).reshape(1, 1, 1, -1)
    check_words(x.to(dtype).to(DEVICE), None, None, False, wide)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums(dtype: torch.dtype, tokens: int) -> None:
    """With and without state and resets, of all rows or of one that the others share."""
    x = angles(tokens, dtype)
    if tokens > 1:
        x[0, 0, 1, 0], x[1, 2, -1, 1] = math.nan, math.inf
    for state, reset in product((None, state_of()), (None, resets(tokens))):
        check_both(x, state, reset)
    check_words(x, None, None, False, True)
    state, reset = state_of(), resets(tokens)
    for some in ((x[:1], state, None), (x[:1], None, reset), (x, state[:1], reset)):
        check_both(*some)
    check_both(x, state, reset[:1])


def test_a_sum_of_half_a_turn_moves_up() -> None:
    """The results, but not the sum itself, avoid the marker."""
    x = torch.full((1, 1, 3 * CHUNK, 1), math.pi / 2, dtype=torch.float64, device=DEVICE)
    for wide in (False, True):
        check_words(x, None, None, True, wide)


STRIDES: dict[str, Any] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "step": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "last first": lambda x: x.mT.contiguous().mT,
    "flat": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("kind", STRIDES)
def test_strides(kind: str) -> None:
    given = angles(CHUNK + 2, torch.float32), state_of(), resets(CHUNK + 2)
    check_both(*map(STRIDES[kind], given))
    check_words(STRIDES[kind](given[0]), None, None, False, True)


def test_gradients_that_are_nan_end_at_a_reset() -> None:
    tokens = 3 * CHUNK
    for token in (CHUNK - 1, CHUNK, CHUNK + 1):
        grad = noise(1, HEADS, tokens, PAIRS, seed=1).float().to(DEVICE)
        grad[:, :, token, 1] = math.nan
        for at in (token - 1, token, CHUNK):
            reset = torch.zeros(1, tokens, dtype=torch.bool, device=DEVICE)
            reset[0, at] = True
            found, wanted = (
                module.phase_sums(grad, None, reset) for module in (operators(), definition)
            )
            for got, want in zip(found, wanted, strict=True):
                assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_add(shape: tuple[int, ...]) -> None:
    rows, heads, tokens, pairs = shape
    x = torch.zeros(shape, device=DEVICE)
    state = torch.full((rows, heads, pairs), 5, dtype=torch.int64, device=DEVICE)
    reset = torch.ones(rows, tokens, dtype=torch.bool, device=DEVICE)
    for some in ((None, None), (state, None), (state, reset)):
        check_both(x, *some)
    check_words(x, None, None, False, True)
