"""Phases from data: running sums of phase words, bit for bit, and their gradients."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.helpers import noise, refusals, refused
from tests.support.matrix import DISTINCT_SETS, every_dtype, needs_kernel
from tests.support.oracle import MP
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import angles, phases, positions
from tightrope.backends import cpu
from tightrope.ops import schema
from tightrope.phases import PhaseState, _definition

TURN = 2**64
MARKERS = {torch.int64: -(2**63), torch.int32: -(2**31)}


def wrapped(number: int) -> int:
    return (number + TURN // 2) % TURN - TURN // 2


def units(x: torch.Tensor) -> list[Any]:
    """Return angles in units of 2^-64 turn, with many digits."""
    return [MP.mpf(v) / (2 * MP.pi) * TURN for v in x.double().flatten().tolist()]


def summed(x: torch.Tensor, start: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
    """Add up phase words of `words_from` token by token, in Python integers."""
    words = angles.words_from(x)[0]
    rows = max(x.shape[0], start.shape[0], reset.shape[0])
    out = torch.empty(rows, *x.shape[1:], dtype=torch.int64)
    for row in range(rows):
        for head in range(x.shape[1]):
            for pair in range(x.shape[3]):
                total = int(start[row % start.shape[0], head, pair])
                for t in range(x.shape[2]):
                    own = int(words[row % x.shape[0], head, t, pair])
                    total = wrapped((0 if reset[row % reset.shape[0], t] else total) + own)
                    out[row, head, t, pair] = total
    return out


def state_of(x: torch.Tensor, rows: int, dtype: torch.dtype = torch.float32) -> PhaseState:
    generator = torch.Generator().manual_seed(1)
    sizes = (rows, x.shape[1], x.shape[3])
    words = torch.randint(-(2**63), 2**63 - 1, sizes, generator=generator)
    return PhaseState(words, torch.zeros(sizes, dtype=dtype))


# --- phase words ----------------------------------------------------------------------------------


@every_dtype
def test_phase_words_are_exact(dtype: torch.dtype) -> None:
    """The sum of n increments is off by at most n units from the exact sum of the exact numbers."""
    x = (noise(1, 1, 200, 1) * noise(1, 1, 200, 1, seed=1).mul(2).exp()).to(dtype)
    got = phases.running(x).words(wide=True).flatten().tolist()
    each = phases.given(x).words(wide=True).flatten().tolist()
    total = MP.mpf(0)
    for n, (exact, word, sum_) in enumerate(zip(units(x), each, got, strict=True), 1):
        total += exact
        assert abs(wrapped(word - int(MP.nint(exact)))) <= 1
        assert abs(wrapped(sum_ - int(MP.nint(total)))) <= n


@every_dtype
@pytest.mark.parametrize("rows", [(2, 2, 2), (1, 2, 1), (1, 1, 2), (2, 1, 1)])
def test_sums_are_wrapped_phase_words(rows: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = (noise(rows[0], 3, 11, 5) * 9).to(dtype)
    state = state_of(x, rows[1])
    reset = torch.rand(rows[2], 11, generator=torch.Generator().manual_seed(0)) < 0.2
    got = phases.running(x, state, reset)
    want = summed(x, state.words, reset)
    assert_same_bits(got.words(wide=True), want)
    assert_same_bits(got.words(wide=False), ((want + 2**31) >> 32).to(torch.int32))
    assert_same_bits(got.state.words, want[:, :, -1].contiguous())
    assert got.shape == want.shape
    recorded = phases.running(x.requires_grad_(), state, reset)
    assert recorded.drift.shape == want.shape
    assert recorded.state.drift.shape == got.state.words.shape
    x = x.detach()
    assert_same_bits(phases.given(x).words(wide=True), angles.words_from(x)[0])
    assert phases.given(x).state is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most", range(28, 51, 2))
def test_phase_words_of_large_increments(most: int, dtype: torch.dtype) -> None:
    """They are off by 1 unit, or from 2^32 turns to 2^50 turns by 2^-96 of the increment."""
    scale = torch.rand(1000, generator=torch.Generator().manual_seed(most), dtype=torch.float64)
    x = ((1 + scale) * math.pi * 2.0**most).to(dtype).reshape(1, 1, -1, 1)
    got = phases.given(x).words(wide=True).flatten().tolist()
    for exact, word in zip(units(x), got, strict=True):
        off = abs((exact - word + TURN // 2) % TURN - TURN // 2)
        assert off <= max(1, exact * 2.0**-96)


def test_a_million_increments_keep_their_digits() -> None:
    x = torch.full((1, 1, 2**20, 1), 2.4)
    phase = phases.running(x).words(wide=False)[0, 0, -1, 0].float() * (2 * math.pi * 2.0**-32)
    exact = MP.mpf(x[0, 0, 0, 0].item()) * 2**20
    assert abs(phase.cos().item() - float(MP.cos(exact))) < 1e-6
    assert abs(phase.sin().item() - float(MP.sin(exact))) < 1e-6


@every_dtype
@pytest.mark.parametrize("sizes", [[1] * 23, [7, 0, 1, 15], [22, 1]])
def test_chunks_give_the_same_bits(sizes: list[int], dtype: torch.dtype) -> None:
    x = noise(2, 3, 23, 5).to(dtype)
    x[0, 1, 9, 2] = math.inf
    reset = torch.rand(23, generator=torch.Generator().manual_seed(2)) < 0.1
    whole, state, parts = phases.running(x, reset=reset), None, []
    for part, starts in zip(x.split(sizes, 2), reset.split(sizes), strict=True):
        one = phases.running(part, state, starts)
        parts.append(one)
        state = one.state
    for wide in (False, True):
        assert_same_bits(torch.cat([p.words(wide) for p in parts], 2), whole.words(wide))
    assert_same_bits(state.words, whole.state.words)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_reset_at_each_sequence(dtype: torch.dtype) -> None:
    x, ends = noise(1, 2, 9, 3), [0, 4, 4, 7, 9, 9]
    got = phases.running(x, state_of(x, 1), torch.tensor(ends, dtype=dtype)).words(wide=True)
    alone = [phases.running(x[:, :, a:b]).words(wide=True) for a, b in itertools.pairwise(ends)]
    assert_same_bits(got, torch.cat(alone, 2))
    # The same boundaries as those of positions.
    starts = positions.packed(torch.tensor(ends)).ids[0] == 0
    assert_same_bits(got, phases.running(x, reset=starts).words(wide=True))


@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_an_invalid_increment_lasts_until_a_reset(bad: float, dtype: torch.dtype) -> None:
    x = noise(1, 2, 8, 3).to(dtype)
    x[0, 1, 2, 1] = bad
    reset = torch.arange(8) == 5
    got = phases.running(x, reset=reset)
    first = phases.running(x[:, :, :4])
    rest = phases.running(x[:, :, 4:5], first.state)
    for wide in (False, True):
        lost = got.words(wide) == MARKERS[got.words(wide).dtype]
        want = torch.zeros_like(lost)
        want[0, 1, 2:5, 1] = True
        assert torch.equal(lost, want)
        alone = phases.given(x).words(wide)
        want[0, 1, 3:5, 1] = False
        assert torch.equal(alone == MARKERS[alone.dtype], want)
        assert (rest.words(wide) == MARKERS[rest.words(wide).dtype]).sum() == 1
    assert (rest.state.words == -(2**63)).flatten().nonzero().tolist() == [[4]]


@pytest.mark.parametrize("define", [False, True])
def test_half_a_turn_is_no_marker(define: bool) -> None:
    operator = _definition.phase_words if define else schema.phase_words
    zero = torch.zeros(1, 1, 1, 3)
    state = torch.tensor([[[-(2**63) + 1, 2**63 - 1, -(2**63)]]])
    words, last = operator(zero, state, None, True, True)
    assert words.flatten().tolist() == [-(2**63) + 1, 2**63 - 1, -(2**63)]
    assert torch.equal(last, words[:, :, 0])
    words, _ = operator(zero, state, None, True, False)
    assert words.flatten().tolist() == [-(2**31) + 1, -(2**31) + 1, -(2**31)]
    # Exactly half a turn, as the sum of two phase words.
    x = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1)
    one = int(angles.words_from(x)[0][0, 0, 0, 0])
    words, last = operator(x, torch.tensor([[[-(2**63) - one + TURN]]]), None, True, True)
    assert words.flatten().tolist() == [-(2**63) + 1] * 2
    assert last.item() == -(2**63) + 1


@every_dtype
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_any_strides(wide: bool, running: bool, dtype: torch.dtype) -> None:
    x = (noise(2, 40, 3, 50) * 5).to(dtype).transpose(1, 2)
    reset = (noise(40, 2) < -1).T
    for view in (x, x.mT.contiguous().mT, x[:, :, ::2, 1::3], x[:, :1, :, :1].expand(2, 3, 40, 50)):
        starts = reset[:, : view.shape[2]] if running else None
        words, last = schema.phase_words(view, None, starts, running, wide)
        right = _definition.phase_words(view.contiguous(), None, starts, running, wide)
        assert words.stride() == torch.empty_like(view).stride()
        assert torch.equal(words, right[0])
        assert torch.equal(last, right[1])


@pytest.mark.parametrize("sizes", [(2, 3, 0, 4), (0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 5, 0)])
def test_empty_increments(sizes: tuple[int, ...]) -> None:
    x = torch.zeros(sizes, requires_grad=True)
    state = state_of(x.detach(), sizes[0])
    got = phases.running(x, state, torch.ones(sizes[2], dtype=torch.bool))
    assert got.words(wide=True).shape == sizes
    if sizes[2] == 0:
        assert torch.equal(got.state.words, state.words)
        assert not phases.running(x).state.words.any()
    (grad,) = torch.autograd.grad(got.drift.sum() + got.state.drift.sum(), x)
    assert grad.shape == sizes
    assert phases.given(x).words(wide=False).shape == sizes


@needs_kernel
@every_dtype
def test_sets_and_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scale = torch.randn(2, 3, 300, 37, dtype=torch.float64).mul(12).exp()
    x = (noise(2, 3, 300, 37) * scale).to(dtype)
    state, reset = state_of(x, 2).words, noise(2, 300) < -2
    grad, last = noise(2, 3, 300, 37).to(torch.float32), noise(2, 3, 37).to(torch.float32)
    words = [_definition.phase_words(x, state, reset, True, wide) for wide in (False, True)]
    alone = [_definition.phase_words(x, None, None, False, wide) for wide in (False, True)]
    sums = None
    for name in DISTINCT_SETS:
        cpu.use_instruction_set(name)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for wide in (False, True):
                for got, want in (
                    (schema.phase_words(x, state, reset, True, wide), words[wide]),
                    (schema.phase_words(x, None, None, False, wide), alone[wide]),
                ):
                    assert torch.equal(got[0], want[0])
                    assert torch.equal(got[1], want[1])
            found = schema.phase_sums(grad, last, reset)
            sums = sums or found
            assert_same_bits(found[0], sums[0])
            assert_same_bits(found[1], sums[1])
    assert_near(sums, _definition.phase_sums(grad, last, reset), "float32 ways")


# --- gradients ------------------------------------------------------------------------------------


def plain(x: torch.Tensor, start: torch.Tensor | None, reset: torch.Tensor) -> torch.Tensor:
    """Add up tokens one by one, as autograd can follow."""
    rows = max(x.shape[0], reset.shape[0])
    total = x.new_zeros(rows, x.shape[1], x.shape[3]) if start is None else start
    sums = []
    for t in range(x.shape[2]):
        total = torch.where(reset[:, t, None, None], 0.0, total) + x[:, :, t]
        sums.append(total)
    return torch.stack(sums, 2)


@pytest.mark.parametrize("rows", [(2, 2, 2), (1, 2, 1), (1, 1, 2)])
def test_gradients_are_those_of_a_plain_sum(rows: tuple[int, int, int]) -> None:
    x = noise(rows[0], 3, 11, 5).requires_grad_()
    start = state_of(x.detach(), rows[1], torch.float64)
    start = start._replace(drift=start.drift.requires_grad_())
    reset = noise(rows[2], 11) > 1
    got = phases.running(x, start, reset)
    assert not got.drift.any()
    assert not got.words(True).requires_grad
    sums = plain(x, start.drift, reset)
    weights = noise(*sums.shape, seed=1), noise(*sums.shape[:2], 5, seed=2)
    found, wanted = (got.drift, got.state.drift), (sums, sums[:, :, -1])
    for used in ([0], [1], [0, 1]):  # the gradients of the drifts, of the last ones, or of both
        leaves = (x, start.drift) if 0 in used else (x,)
        grads = [
            torch.autograd.grad(
                [ends[i] for i in used], leaves, [weights[i] for i in used], retain_graph=True
            )
            for ends in (found, wanted)
        ]
        for a, b in zip(*grads, strict=True):
            assert_near(a, b, "float64 ways")


@every_dtype
def test_gradients_have_the_dtype_of_increments(dtype: torch.dtype) -> None:
    x = noise(2, 3, 7, 5).to(dtype).requires_grad_()
    for made in (phases.running(x), phases.given(x)):
        assert made.drift.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        (grad,) = torch.autograd.grad((made.drift * noise(2, 3, 7, 5).to(made.drift)).sum(), x)
        assert grad.dtype == dtype
    assert_near(grad, noise(2, 3, 7, 5).to(dtype), "float64 ways")


def test_gradients_flow_through_the_state_until_it_is_detached() -> None:
    x, weight = noise(2, 3, 9, 5).requires_grad_(), noise(2, 3, 9, 5, seed=1)
    whole = phases.running(x)
    (want,) = torch.autograd.grad((whole.drift * weight).sum(), x)
    first = phases.running(x[:, :, :4])
    rest = phases.running(x[:, :, 4:], first.state)
    (got,) = torch.autograd.grad((torch.cat((first.drift, rest.drift), 2) * weight).sum(), x)
    assert_near(got, want, "float64 ways")
    rest = phases.running(x[:, :, 4:], first.state.detached())
    (got,) = torch.autograd.grad((rest.drift * weight[:, :, 4:]).sum(), x)
    assert not got[:, :, :4].any()


def test_nothing_is_recorded_without_need() -> None:
    x = noise(2, 3, 7, 5).requires_grad_()
    with torch.no_grad():
        made = phases.running(x)
    for one in (made, phases.running(x.detach())):
        assert one.drift is None
        assert one.state.drift is None
    # With a recorded state, or increments after one that was not, drifts take no memory.
    start = phases.running(x).state
    assert phases.running(x, start.detached()).drift.requires_grad
    assert phases.running(x.detach(), start).drift.requires_grad
    assert phases.running(x.detach(), start.detached()).drift is None
    assert phases.running(x).drift.untyped_storage().nbytes() == 8


def drifts(
    x: torch.Tensor, before: torch.Tensor, reset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results that depend on the drifts like sines, so that second derivatives are not zero."""
    words = torch.zeros(before.shape, dtype=torch.int64)
    made = phases.running(x, PhaseState(words, before), reset)
    at = made.words(True).double() * (2 * math.pi / TURN)
    return (at + made.drift).sin(), made.state.drift.cos() * made.state.drift


def test_forward_mode_and_transforms_agree_with_autograd() -> None:
    x, before = noise(2, 2, 5, 3), torch.zeros(2, 2, 3, dtype=torch.float64)
    reset = torch.tensor([[False, True, False, False, True], [False] * 5])
    tangents = noise(2, 2, 5, 3, seed=1), noise(2, 2, 3, seed=2)
    want = plain(tangents[0], tangents[1], reset)
    _, (found, _) = torch.func.jvp(lambda *a: drifts(*a, reset), (x, before), tangents)
    at = drifts(x.clone().requires_grad_(), before, reset)[0].detach().asin()
    assert_near(found, want * at.cos() * torch.sign(_cosines(x, reset)), "float64 ways")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangents[0])
        own = forward_ad.unpack_dual(phases.running(dual, reset=reset).drift).tangent
        assert_near(own, plain(tangents[0], None, reset), "float64 ways")
        own = forward_ad.unpack_dual(phases.given(dual).drift).tangent
        assert_near(own, tangents[0], "float64 ways")

    def loss(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return (drifts(x, before, reset)[0] * tangents[0]).sum()

    leaves = (x.clone().requires_grad_(), before.clone().requires_grad_())
    eager = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    for a, b in zip(torch.func.grad(loss, (0, 1))(x, before), eager, strict=True):
        assert_near(a, b.detach(), "float64 ways")
    second = torch.autograd.grad((eager[0] * tangents[0]).sum(), leaves)
    inner = torch.func.grad(loss)
    outer = torch.func.grad(lambda *a: (inner(*a) * tangents[0]).sum(), (0, 1))(x, before)
    assert_near(outer, second, "float64 ways")


def _cosines(x: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
    return plain(x, None, reset).cos()


def test_batched_gradients() -> None:
    """``is_grads_batched`` uses torch's older vmap, which knows no rule of an operator."""
    x = noise(2, 2, 5, 3).requires_grad_()
    reset = torch.tensor([False, True, False, False, True])
    y = phases.running(x, reset=reset).drift
    several = noise(4, 2, 2, 5, 3, seed=1)
    (got,) = torch.autograd.grad(y, x, several, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(got, several, strict=True):
        assert_near(one, torch.autograd.grad(y, x, grad, retain_graph=True)[0], "float64 ways")


@pytest.mark.parametrize("dims", [(0, None, None), (None, 1, 0), (3, 0, 1), (None, None, 0)])
def test_vmap(dims: tuple[int | None, ...]) -> None:
    x, state, reset = noise(1, 3, 5, 4), state_of(noise(1, 3, 1, 4), 2), noise(1, 5) < -1

    def stacked(t: torch.Tensor, dim: int | None) -> torch.Tensor:
        return t if dim is None else torch.stack([t, t.roll(1, -1), t], dim)

    given = [stacked(t, d) for t, d in zip((x, state.words, reset), dims, strict=True)]

    def run(x: torch.Tensor, words: torch.Tensor, reset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = phases.running(x, PhaseState(words, torch.zeros_like(words).double()), reset)
        alone = phases.given(x).words(wide=False) if dims[0] is not None else made.words(False)
        return made.words(False), made.words(True), made.state.words, alone

    got = torch.vmap(run, dims)(*given)
    for i in range(3):
        own = [t if d is None else t.select(d, i) for t, d in zip(given, dims, strict=True)]
        for a, b in zip(got, run(*own), strict=True):
            assert_same_bits(a[i].contiguous(), b.contiguous())


# --- compilers and other devices ------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
# test_phased compiles running phases with inductor.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    reset = torch.tensor([0, 2, 5])

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = phases.running(x, reset=reset)
        second = phases.running(x * 2, first.state)
        alone = phases.given(x)
        loss = (first.drift * x + second.drift * 3 + alone.drift).sum() + second.state.drift.sum()
        return loss, first.words(False), second.words(True), second.state.words, alone.words(False)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for seed in (0, 1):
        x = noise(1, 2, 5, 3, seed=seed).requires_grad_()
        got, want = compiled(x), run(x)
        for a, b in zip(got[1:], want[1:], strict=True):
            assert torch.equal(a, b)
        (a,), (b,) = (torch.autograd.grad(one[0], x) for one in (got, want))
        assert_near(a, b, "float64 ways")


@pytest.mark.usefixtures("fresh_compiler")
def test_made_outside_and_used_inside_a_compiled_function() -> None:
    made = phases.running(noise(1, 2, 5, 3, dtype=torch.float32))
    run = torch.compile(lambda p: (p.words(False) + 1, p.words(True) + 1), backend="aot_eager")
    got = run(made)
    assert torch.equal(got[0], made.words(False) + 1)
    assert torch.equal(got[1], made.words(True) + 1)


def test_opcheck() -> None:
    x, state = noise(1, 3, 5, 4), state_of(noise(1, 3, 1, 4), 2).words
    reset = noise(2, 5) < 0
    for wide in (False, True):
        torch.library.opcheck(schema.phase_words, (x, state, reset, True, wide))
        torch.library.opcheck(schema.phase_words, (x.mT, None, None, False, wide))
    torch.library.opcheck(schema.phase_sums, (noise(2, 5, 3, 4).transpose(1, 2), None, reset))
    torch.library.opcheck(schema.phase_sums, (x.float(), noise(2, 3, 4).float(), None))
    leaf, before = x.requires_grad_(), torch.zeros(2, 3, 4).double().requires_grad_()
    torch.library.opcheck(schema.phase_drift, (leaf, before, reset, True))
    torch.library.opcheck(schema.phase_drift, (leaf, None, None, False))


# --- errors ---------------------------------------------------------------------------------------

X = torch.zeros(1, 2, 5, 3)
STATE = PhaseState(torch.zeros(1, 2, 3).long(), torch.zeros(1, 2, 3))


RESET = torch.zeros(1, 5, dtype=torch.bool)
ROWS = X.expand(2, -1, -1, -1)


test_invalid_angles = refusals(
    TypeError={
        "[phases.given] angles must be a tensor but got 1.0.": lambda: phases.given(1.0),
        "[phases.running] increments must be a tensor but got 1.0.": lambda: phases.running(1.0),
        "[phases.given] angles must be float16, bfloat16, float32 or float64 (angles: int64[1, 2, 5, "
        "3]).": lambda: phases.given(X.long()),
        "[phases.given] angles must be a dense tensor but got one that is sparse_coo.": (
            lambda: phases.given(X.to_sparse())
        ),
    },
    ValueError={
        "[phases.given] angles must have shape (rows|1, heads|1, tokens, pairs|1) (angles: "
        "float32[2, 5, 3]).": lambda: phases.given(X[0]),
    },
)
test_invalid_resets = refusals(
    "phases.running",
    TypeError={
        "reset must be None or a tensor but got 3.": lambda: phases.running(X, reset=3),
        "reset must be bool, or int32 or int64 cu_seqlens (reset: float32[5]).": (
            lambda: phases.running(X, reset=torch.zeros(5))
        ),
    },
    ValueError={
        "reset must have shape (5,) or (rows|1, 5), for the tokens of increments (reset: bool[1, 4]).": (
            lambda: phases.running(X, reset=RESET[:, :4])
        ),
        "reset is on meta but increments are on cpu (reset: bool[1, 5]).": (
            lambda: phases.running(X, reset=RESET.to("meta"))
        ),
        "cu_seqlens must end with the number of tokens 5 but got 4.": (
            lambda: phases.running(X, reset=torch.tensor([0, 4]))
        ),
        "reset must have 1 or 2 rows (reset: bool[3, 5]).": (
            lambda: phases.running(ROWS, reset=RESET.expand(3, 5))
        ),
    },
)
test_invalid_states = refusals(
    "phases.running",
    TypeError={
        "state must be None or the state of phases but got 3.": lambda: phases.running(X, 3),
        "words of state must be a tensor that is int64 (words: int32[1, 2, 3]).": (
            lambda: phases.running(X, STATE._replace(words=STATE.words.int()))
        ),
        "drift of state must be a tensor that is floating (drift: int64[1, 2, 3]).": (
            lambda: phases.running(X, STATE._replace(drift=STATE.words))
        ),
    },
    ValueError={
        "words of state must have shape (rows|1, 2, 3) (words: int64[1, 2, 2]).": (
            lambda: phases.running(X, STATE._replace(words=STATE.words[..., :2]))
        ),
        "state is on meta but increments are on cpu (drift: float32[1, 2, 3]).": (
            lambda: phases.running(X, STATE._replace(drift=STATE.drift.to("meta")))
        ),
        "words and drift of state must share a shape (words: int64[1, 2, 3], drift: float32[2, 2, "
        "3]).": lambda: phases.running(X, STATE._replace(drift=STATE.drift.expand(2, -1, -1))),
        "state must have 1 or 2 rows (state: int64[3, 2, 3]).": (
            lambda: phases.running(ROWS, PhaseState(*(t.expand(3, -1, -1) for t in STATE)))
        ),
    },
)


def test_changed_increments_are_refused() -> None:
    for which in range(3):
        given = [X.clone(), STATE.words.clone(), torch.zeros(1, 5, dtype=torch.bool)]
        made = phases.running(given[0], STATE._replace(words=given[1]), given[2])
        before = made.words(wide=False).clone()
        given[which].fill_(1)
        assert torch.equal(made.words(wide=False), before)
        rule = "angles, state and reset must not change in place while their phases are in use"
        with refused(ValueError, f"[Phases] {rule}."):
            made.words(wide=True)


@pytest.mark.parametrize("how", ["inference", "compiled", "returned", "transform"])
def test_a_change_that_cannot_be_noticed_changes_nothing(how: str) -> None:
    """Without version counters, phase words of the other width come from the numbers as they were."""
    expected = phases.running(X, STATE).words(wide=True)

    def made(x: torch.Tensor) -> phases.Phases:
        return phases.running(x, STATE)

    def changed(x: torch.Tensor) -> torch.Tensor:
        result = made(x)
        x.fill_(1)
        return result.words(wide=True)

    if how == "inference":
        with torch.inference_mode():
            found = changed(X.clone())
    elif how == "compiled":
        found = torch.compile(changed, backend="aot_eager", fullgraph=True)(X.clone())
    elif how == "returned":
        given = X.clone()
        result = torch.compile(made, backend="aot_eager", fullgraph=True)(given)
        given.fill_(1)
        found = result.words(wide=True)
    else:
        found = torch.func.vmap(changed)(X.clone()[None])[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("changes", [0, 1, 2])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_and_pickles(copied: Callable[[Any], Any], changes: int) -> None:
    x = X.clone()
    for _ in range(changes):
        x.mul_(2)
    made = phases.running(x, STATE)
    twin = copied(made)
    for wide in (False, True):
        assert torch.equal(twin.words(wide), made.words(wide))
    stale = phases.running(x, STATE)
    x.fill_(1)
    with refused(
        ValueError,
        "[Phases] angles, state and reset must not change in place while their phases are in use.",
    ):
        copied(stale).words(wide=True)


def test_words_made_in_inference_mode_are_not_kept_for_training() -> None:
    """Autograd could not save them."""
    made = phases.running(X, STATE)
    with torch.inference_mode():
        made.words(wide=True)
    assert not made.words(wide=True).is_inference()


def test_words_made_while_a_graph_is_captured_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory belongs to the graph, and only its replay fills it."""
    made = phases.running(X, STATE)
    with monkeypatch.context() as patched:
        patched.setattr("tightrope._tracing.may_keep", lambda _: False)
        within = made.words(wide=True)
    assert made.words(wide=True) is not within
    assert made.words(wide=True) is made.words(wide=True)


@needs_kernel
def test_raw_operators_refuse_what_does_not_fit() -> None:
    state, reset = STATE.words, torch.zeros(1, 5, dtype=torch.bool)
    for call in (
        lambda: schema.phase_words(X[0], None, None, True, True),
        lambda: schema.phase_words(X.long(), None, None, True, True),
        lambda: schema.phase_words(X, state[..., :2], None, True, True),
        lambda: schema.phase_words(X, STATE.drift, None, True, True),
        lambda: schema.phase_words(X, None, reset[:, :4], True, True),
        lambda: schema.phase_words(X, None, reset.byte(), True, True),
        lambda: schema.phase_words(X, state.expand(2, -1, -1), reset.expand(3, -1), True, True),
        lambda: schema.phase_words(X, state, None, False, True),
        lambda: schema.phase_sums(X.half(), None, None),
        lambda: schema.phase_sums(X, STATE.drift.double(), None),
        lambda: schema.phase_sums(X.clone().requires_grad_(), None, None),
    ):
        with pytest.raises(RuntimeError, match="tightrope"):
            call()


@pytest.mark.parametrize("reset", [[3], [0, 3], [3, 4]])
def test_a_large_gradient_in_one_sequence_leaves_the_others(reset: list[int]) -> None:
    grad = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    grad[0, 0, 4:] = 1e20
    starts = torch.zeros(1, 6, dtype=torch.bool)
    starts[0, reset] = True
    got, _ = _definition.phase_sums(grad, None, starts)
    assert got.flatten().tolist()[:3] == [3.0, 2.0, 1.0]
    assert_same_bits(got, schema.phase_sums(grad, None, starts)[0])
