"""The Triton kernel for phases from data: the bits of the definition, and its sums of gradients.

It runs under Triton's interpreter, or compiled where there is a GPU; see tests/support/triton/cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_near
from tests.support.triton.cases import DEVICE, needs_triton, noise, strided
from tests.support.triton.running import operators
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


def angles(tokens: int, dtype: torch.dtype, rows: int = ROWS, pairs: int = PAIRS) -> torch.Tensor:
    """Return angles from 1e-3 to 1e4, ``[rows, HEADS, tokens, pairs]``."""
    shape = rows, HEADS, tokens, pairs
    size = 10.0 ** torch.linspace(-3, 4, pairs, dtype=torch.float64)
    return (size * noise(*shape, seed=tokens)).to(dtype).to(DEVICE)


def state_of(rows: int = ROWS) -> torch.Tensor:
    """Return a state in which one phase is NaN."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(-(2**63), 2**63 - 1, (rows, HEADS, PAIRS), generator=generator)
    found[0, 1, 2] = -(2**63)
    return found.to(DEVICE)


def resets(tokens: int, rows: int = ROWS) -> torch.Tensor:
    """Return resets: in the first row the first tokens of chunks, in the second those next to them."""
    first = torch.arange(tokens) % CHUNK == 0
    either = torch.stack((first & (torch.arange(tokens) != CHUNK), first.roll(-1) | first.roll(1)))
    return either[:rows].to(DEVICE)


def assert_as_definition(found: Any, wanted: Any) -> None:
    """Assert that integers, strides and dtypes are equal."""
    for got, want in zip(found, wanted, strict=True):
        assert got.stride() == want.stride()
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def check_words(*arguments: Any) -> None:
    assert_as_definition(operators().phase_words(*arguments), definition.phase_words(*arguments))


# --- phase words ----------------------------------------------------------------------------------


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
@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_have_the_bits_of_the_definition(dtype: torch.dtype, tokens: int) -> None:
    x = angles(tokens, dtype)
    x[0, 0, 1, 0], x[1, 2, 2, 1] = math.nan, math.inf
    for i, (state, reset) in enumerate(
        ((None, None), (state_of(), None), (None, resets(tokens)), (state_of(), resets(tokens)))
    ):
        check_words(x, state, reset, True, i % 2 == 0)
    check_words(x, None, None, False, True)


def test_a_sum_of_half_a_turn_moves_up() -> None:
    """The results, but not the sum itself, avoid the marker; so does the upper half alone."""
    x = torch.full((1, 1, 3 * CHUNK, 1), math.pi / 2, dtype=torch.float64, device=DEVICE)
    for wide in (False, True):
        check_words(x, None, None, True, wide)
    words, last = operators().phase_words(x, None, None, True, False)
    assert words[0, 0, :4, 0].tolist() == [2**30, -(2**31) + 1, -(2**30), 0]
    assert last.item() != -(2**63)


@pytest.mark.parametrize("strides", ["transposed", "gaps", "channel step", "flat", "tokens last"])
def test_strides(strides: str) -> None:
    x = angles(CHUNK + 2, torch.float32)
    state, reset = state_of(), resets(CHUNK + 2)
    if strides == "flat":
        x = x[:, :1, :, :1].expand(-1, HEADS, -1, PAIRS)
        state, reset = state[:, :1].expand(-1, HEADS, -1), reset[:, :1].expand(-1, CHUNK + 2)
    elif strides == "tokens last":
        x, state, reset = x.mT.contiguous().mT, state.mT.contiguous().mT, reset.T.contiguous().T
    else:
        x, state = strided(x, strides), strided(state, strides)
        reset = reset.repeat_interleave(2, 1)[:, ::2]
    check_words(x, state, reset, True, False)
    check_words(x, None, None, False, True)
    last = state.float() * 2.0**-64
    for got, want in zip(
        operators().phase_sums(x, last, reset), definition.phase_sums(x, last, reset), strict=True
    ):
        assert got.stride() == want.stride()
        assert_near(got, want, "float32 ways")


@pytest.mark.parametrize("tokens", [1, CHUNK + 1])
def test_rows_are_shared(tokens: int) -> None:
    """Angles, state and resets have one row or those of the others."""
    x, state, reset = angles(tokens, torch.float32), state_of(), resets(tokens)
    for some in (
        (x[:1], state, None),
        (x[:1], None, reset),
        (x, state[:1], reset),
        (x, state, reset[:1]),
        (x[:1], state[:1], reset),
    ):
        check_words(*some, True, False)
        grads = (some[0], None if some[1] is None else some[1].float() * 2.0**-64, some[2])
        for got, want in zip(
            operators().phase_sums(*grads), definition.phase_sums(*grads), strict=True
        ):
            assert got.stride() == want.stride()
            assert_near(got, want, "float32 ways")


def test_one_token_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of tokens is added up in one launch; more tokens take three."""
    from tightrope.backends.triton import blocks, phases

    launches = []
    real = phases.launcher

    def counting(*arguments: Any) -> Any:
        launch = real(*arguments)
        return lambda *rest: (launches.append(arguments[1]), launch(*rest))

    monkeypatch.setattr(phases, "launcher", counting)
    monkeypatch.setattr(blocks, "WALKS", blocks.WALKS._replace(pairs=8))
    for tokens, pairs, running, wanted in (
        (1, PAIRS, True, [(6, 1, 1)]),
        (CHUNK, 17, True, [(6, 3, 1)]),
        (CHUNK + 1, 3, True, [(6, 1, 1), (6, 1, 1), (6, 1, 1)]),
        (CHUNK + 1, 3, False, [(6, 1, 1)]),
    ):
        x = angles(tokens, torch.float32, pairs=pairs)
        launches.clear()
        check_words(x, None, None, running, True)
        assert launches == wanted


# --- sums of gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_added_up_in_reverse(dtype: torch.dtype, tokens: int) -> None:
    grad = noise(ROWS, HEADS, tokens, PAIRS, seed=1).to(dtype).to(DEVICE)
    last = noise(ROWS, HEADS, PAIRS, seed=2).to(dtype).to(DEVICE)
    name = "float64 ways" if dtype == torch.float64 else "float32 ways"
    for some in ((None, None), (last, None), (None, resets(tokens)), (last, resets(tokens))):
        got, want = operators().phase_sums(grad, *some), definition.phase_sums(grad, *some)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype == dtype
            assert one.stride() == other.stride()
            assert_near(one, other, name)
        for one, other in zip(operators().phase_sums(grad, *some), got, strict=True):
            assert torch.equal(one, other)


def test_gradients_that_are_nan_end_at_a_reset() -> None:
    tokens = 3 * CHUNK
    grad = noise(1, HEADS, tokens, PAIRS, seed=1).float().to(DEVICE)
    for token in (CHUNK - 1, CHUNK, CHUNK + 1):
        given = grad.clone()
        given[:, :, token, 1] = math.nan
        for at in (token - 1, token, CHUNK):
            reset = torch.zeros(1, tokens, dtype=torch.bool, device=DEVICE)
            reset[0, at] = True
            found, by_state = operators().phase_sums(given, None, reset)
            want, want_state = definition.phase_sums(given, None, reset)
            assert torch.equal(found.isnan(), want.isnan())
            assert torch.equal(by_state.isnan(), want_state.isnan())


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_add(shape: tuple[int, ...]) -> None:
    rows, heads, tokens, pairs = shape
    x = torch.zeros(shape, device=DEVICE)
    state = torch.full((rows, heads, pairs), 5, dtype=torch.int64, device=DEVICE)
    reset = torch.ones(rows, tokens, dtype=torch.bool, device=DEVICE)
    for some in ((None, None), (state, None), (state, reset)):
        check_words(x, *some, True, False)
        last = None if some[0] is None else some[0].float()
        assert_as_definition(
            operators().phase_sums(x, last, some[1]), definition.phase_sums(x, last, some[1])
        )
    check_words(x, None, None, False, True)


WRONG: dict[str, tuple[Any, str]] = {
    "dimensions": (lambda x, s, r: (x[0], s, r, True, True), "increments must be"),
    "dtype": (lambda x, s, r: (x.long(), s, r, True, True), "increments must be float16"),
    "state": (lambda x, s, r: (x, s[:, :1], r, True, True), "a state must be"),
    "dtype of a state": (lambda x, s, r: (x, s.int(), r, True, True), "a state must be"),
    "reset": (lambda x, s, r: (x, s, r[:, 1:], True, True), "reset must be bool"),
    "dtype of reset": (lambda x, s, r: (x, s, r.int(), True, True), "reset must be bool"),
    "rows": (lambda x, s, r: (x, s, r[:1].expand(3, -1), True, True), "must have 1 row"),
    "no sums": (lambda x, s, _: (x, s, None, False, True), "only running sums have"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_direct_call_is_refused(case: str) -> None:
    arguments, sentence = WRONG[case]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"tightrope: .*{sentence}"):
            operators().phase_words(*arguments(angles(3, torch.float32), state_of(), resets(3)))


def test_freed_storage_is_refused() -> None:
    given = [angles(3, torch.float32), state_of(), resets(3)]
    for at, one in enumerate(given):
        copy = one.clone()
        copy.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="tensors must have their memory"):
            operators().phase_words(*given[:at], copy, *given[at + 1 :], True, True)


def test_gradients_of_16_bits_are_refused() -> None:
    with pytest.raises(RuntimeError, match="must be float32 or float64"):
        operators().phase_sums(angles(3, torch.float16), None, None)
