"""Phases from data: running sums of phase words, bit for bit, and their gradients."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import noise, refused
from tests.support.matrix import DISTINCT_SETS, every_dtype, needs_kernel
from tests.support.oracle import MP
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import angles, phases, positions
from tightrope.backends import cpu
from tightrope.ops import schema
from tightrope.phases import PhaseState, _definition

TURN = 2**64
MARKERS = {torch.int64: -(2**63), torch.int32: -(2**31)}


def wrapped(number: Any) -> Any:
    return (number + TURN // 2) % TURN - TURN // 2


def units(x: torch.Tensor) -> list[Any]:
    """Return angles in units of 2^-64 turn, with many digits."""
    return [MP.mpf(v) / (2 * MP.pi) * TURN for v in x.double().flatten().tolist()]


def some_resets(*shape: int, share: float = 0.2) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share


def state_of(x: torch.Tensor, rows: int) -> PhaseState:
    generator = torch.Generator().manual_seed(1)
    sizes = (rows, x.shape[1], x.shape[3])
    words = torch.randint(-(2**63), 2**63 - 1, sizes, generator=generator)
    return PhaseState(words, torch.zeros(sizes))


def lost(words: torch.Tensor) -> torch.Tensor:
    return words == MARKERS[words.dtype]


# --- phase words ----------------------------------------------------------------------------------


@every_dtype
def test_phase_words_are_exact(dtype: torch.dtype) -> None:
    """The sum of n increments is off by at most n units from the exact sum of the exact numbers."""
    x = (noise(1, 1, 200, 1) * noise(1, 1, 200, 1, seed=1).mul(2).exp()).to(dtype)
    sums = phases.running(x).words(wide=True).flatten().tolist()
    each = phases.given(x).words(wide=True).flatten().tolist()
    totals = itertools.accumulate(units(x))
    for n, (exact, total, word, one) in enumerate(
        zip(units(x), totals, each, sums, strict=True), 1
    ):
        assert abs(wrapped(word - int(MP.nint(exact)))) <= 1
        assert abs(wrapped(one - int(MP.nint(total)))) <= n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most", range(28, 51, 2))
def test_phase_words_of_large_increments(most: int, dtype: torch.dtype) -> None:
    """They are off by 1 unit, or from 2^32 turns to 2^50 turns by 2^-96 of the increment."""
    scale = torch.rand(1000, generator=torch.Generator().manual_seed(most), dtype=torch.float64)
    x = ((1 + scale) * math.pi * 2.0**most).to(dtype).reshape(1, 1, -1, 1)
    words = phases.given(x).words(wide=True).flatten().tolist()
    for exact, word in zip(units(x), words, strict=True):
        assert abs(wrapped(exact - word)) <= max(1, exact * 2.0**-96)


@every_dtype
# Rows of increments, state and reset.
@pytest.mark.parametrize("rows", [(2, 2, 2), (1, 2, 1), (1, 1, 2), (2, 1, 1)])
def test_sums_are_wrapped_phase_words(rows: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Those that are added up token by token, in Python integers."""
    x = (noise(rows[0], 3, 11, 5) * 9).to(dtype)
    state, reset = state_of(x, rows[1]), some_resets(rows[2], 11)
    whole = phases.running(x.requires_grad_(), state, reset)
    words = angles.words_from(x.detach())[0]
    assert_same_bits(phases.given(x.detach()).words(wide=True), words)
    assert phases.given(x).state is None
    wanted = torch.empty(max(rows), *x.shape[1:], dtype=torch.int64)
    for row, head, pair in itertools.product(range(max(rows)), range(3), range(5)):
        total = int(state.words[row % rows[1], head, pair])
        for t in range(11):
            own = int(words[row % rows[0], head, t, pair])
            total = wrapped((0 if reset[row % rows[2], t] else total) + own)
            wanted[row, head, t, pair] = total
    assert_same_bits(whole.words(wide=True), wanted)
    assert_same_bits(whole.words(wide=False), ((wanted + 2**31) >> 32).to(torch.int32))
    assert_same_bits(whole.state.words, wanted[:, :, -1].contiguous())
    assert whole.shape == whole.drift.shape == wanted.shape
    assert whole.state.drift.shape == whole.state.words.shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_reset_at_each_sequence(dtype: torch.dtype) -> None:
    x, ends = noise(1, 2, 9, 3), [0, 4, 4, 7, 9, 9]
    words = phases.running(x, state_of(x, 1), torch.tensor(ends, dtype=dtype)).words(wide=True)
    alone = [phases.running(x[:, :, a:b]).words(wide=True) for a, b in itertools.pairwise(ends)]
    assert_same_bits(words, torch.cat(alone, 2))
    # The same boundaries as those of positions.
    starts = positions.packed(torch.tensor(ends)).ids[0] == 0
    assert_same_bits(words, phases.running(x, reset=starts).words(wide=True))


@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_an_invalid_increment_lasts_until_a_reset(bad: float, dtype: torch.dtype) -> None:
    x = noise(1, 2, 8, 3).to(dtype)
    x[0, 1, 2, 1] = bad
    whole = phases.running(x, reset=torch.arange(8) == 5)
    rest = phases.running(x[:, :, 4:5], phases.running(x[:, :, :4]).state)
    for wide in (False, True):
        assert lost(whole.words(wide)).nonzero().tolist() == [[0, 1, t, 1] for t in (2, 3, 4)]
        assert lost(phases.given(x).words(wide)).nonzero().tolist() == [[0, 1, 2, 1]]
        assert lost(rest.words(wide)).nonzero().tolist() == [[0, 1, 0, 1]]
    assert lost(rest.state.words).nonzero().tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("operator", [_definition.phase_words, schema.phase_words])
def test_half_a_turn_is_no_marker(operator: Any) -> None:
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
    assert [*words.flatten().tolist(), last.item()] == [-(2**63) + 1] * 3


@every_dtype
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_any_strides(wide: bool, running: bool, dtype: torch.dtype) -> None:
    x = (noise(2, 40, 3, 50) * 5).to(dtype).transpose(1, 2)
    reset = (noise(40, 2) < -1).T
    for view in (x, x.mT.contiguous().mT, x[:, :, ::2, 1::3], x[:, :1, :, :1].expand(2, 3, 40, 50)):
        starts = reset[:, : view.shape[2]] if running else None
        found = schema.phase_words(view, None, starts, running, wide)
        wanted = _definition.phase_words(view.contiguous(), None, starts, running, wide)
        assert found[0].stride() == torch.empty_like(view).stride()
        assert_same_bits(found, wanted)
        assert schema.phase_drift(view, None, starts, running)[1].shape == found[1].shape


@pytest.mark.parametrize("sizes", [(2, 3, 0, 4), (0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 5, 0)])
def test_empty_increments(sizes: tuple[int, ...]) -> None:
    x = torch.zeros(sizes, requires_grad=True)
    state = state_of(x.detach(), sizes[0])
    made = phases.running(x, state, torch.ones(sizes[2], dtype=torch.bool))
    assert made.words(wide=True).shape == phases.given(x).words(wide=False).shape == sizes
    if sizes[2] == 0:
        assert_same_bits(made.state.words, state.words)
        assert not phases.running(x).state.words.any()
    (grad,) = torch.autograd.grad(made.drift.sum() + made.state.drift.sum(), x)
    assert grad.shape == sizes


@needs_kernel
@every_dtype
def test_sets_and_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    size = 2, 3, 300, 37
    x = (noise(*size) * noise(*size, seed=3).mul(12).exp()).to(dtype)
    reset = some_resets(2, 300, share=0.02)
    reset[1, 0] = True  # there no gradient reaches the state
    grad, last = noise(*size, dtype=torch.float32), noise(2, 3, 37, dtype=torch.float32)
    calls = [
        (x, state_of(x, 2).words if running else None, reset if running else None, running, wide)
        for running in (False, True)
        for wide in (False, True)
    ]
    wanted, sums = [_definition.phase_words(*call) for call in calls], None
    for name, threads in itertools.product(DISTINCT_SETS, (1, 3)):
        cpu.use_instruction_set(name)
        torch.set_num_threads(threads)
        for call, want in zip(calls, wanted, strict=True):
            assert_same_bits(schema.phase_words(*call), want)
        found = schema.phase_sums(grad, last, reset)
        sums = sums or found
        assert_same_bits(found, sums)
    assert_near(sums, _definition.phase_sums(grad, last, reset), "float32 ways")


# --- gradients ------------------------------------------------------------------------------------


@every_dtype
def test_gradients_have_the_dtype_of_increments(dtype: torch.dtype) -> None:
    x, weight = noise(2, 3, 7, 5).to(dtype).requires_grad_(), noise(2, 3, 7, 5)
    for made in (phases.running(x), phases.given(x)):
        assert made.drift.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        (grad,) = torch.autograd.grad((made.drift * weight.to(made.drift)).sum(), x)
        assert grad.dtype == dtype
    assert_near(grad, weight.to(dtype), "float64 ways")


def test_nothing_is_recorded_without_need() -> None:
    x = noise(2, 3, 7, 5).requires_grad_()
    start = phases.running(x).state
    with torch.no_grad():
        made = phases.running(x)
    for one in (made, phases.running(x.detach()), phases.running(x.detach(), start.detached())):
        assert one.drift is one.state.drift is None
    # With a recorded state, or increments after one that was not, drifts take no memory.
    for one in (phases.running(x, start.detached()), phases.running(x.detach(), start)):
        assert one.drift.requires_grad
    assert phases.running(x).drift.untyped_storage().nbytes() == 8


@pytest.mark.parametrize("reset", [[3], [0, 3], [3, 4]])
def test_a_large_gradient_in_one_sequence_leaves_the_others(reset: list[int]) -> None:
    grad, starts = torch.ones(1, 1, 6, 1, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.bool)
    grad[0, 0, 4:] = 1e20
    starts[0, reset] = True
    found, _ = _definition.phase_sums(grad, None, starts)
    assert found.flatten().tolist()[:3] == [3.0, 2.0, 1.0]
    assert_same_bits(found, schema.phase_sums(grad, None, starts)[0])


# --- compiled code --------------------------------------------------------------------------------


def test_phases_made_outside_of_a_compiled_function() -> None:
    """The laws of compiled calls have phases that are made inside."""
    outside = phases.running(noise(1, 2, 5, 3, dtype=torch.float32))
    both = lambda p: p.words(False) + p.words(True)  # noqa: E731
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(outside), both(outside))


# --- errors ---------------------------------------------------------------------------------------

X = torch.zeros(1, 2, 5, 3)
ROWS = X.expand(2, -1, -1, -1)
RESET = torch.zeros(1, 5, dtype=torch.bool)
STATE = PhaseState(torch.zeros(1, 2, 3).long(), torch.zeros(1, 2, 3))


def given(angles: Any) -> Callable[[], object]:
    return lambda: phases.given(angles)


def running(x: Any = X, reset: Any = None, **state: Any) -> Callable[[], object]:
    return lambda: phases.running(x, STATE._replace(**state), reset)


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())


# --- words that are made later --------------------------------------------------------------------

CHANGED = "[Phases] angles, state and reset must not change in place while their phases are in use."


@pytest.mark.parametrize("which", range(3))
def test_changed_increments_are_refused(which: int) -> None:
    given = [X.clone(), STATE.words.clone(), RESET.clone()]
    made = phases.running(given[0], STATE._replace(words=given[1]), given[2])
    before = made.words(wide=False).clone()
    given[which].fill_(1)
    assert_same_bits(made.words(wide=False), before)
    for stale in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        with refused(ValueError, CHANGED):
            stale.words(wide=True)


@pytest.mark.parametrize("how", ["inference", "compiled", "returned", "transform"])
def test_a_change_that_cannot_be_noticed_changes_nothing(how: str) -> None:
    """Without version counters, phase words of the other width come from the numbers as they were."""

    def made(x: torch.Tensor) -> phases.Phases:
        return phases.running(x, STATE)

    def changed(x: torch.Tensor, make: Callable[..., phases.Phases] = made) -> torch.Tensor:
        result = make(x)
        x.fill_(1)
        return result.words(wide=True)

    x = X.clone()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(how == "inference"):
        found = {
            "inference": lambda: changed(X.clone()),
            "compiled": lambda: torch.compile(changed, backend="aot_eager", fullgraph=True)(x),
            "returned": lambda: changed(x, compiled),
            "transform": lambda: torch.func.vmap(changed)(x[None])[0],
        }[how]()
    assert_same_bits(found, made(X).words(wide=True))


@pytest.mark.parametrize("changes", [0, 1, 2])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_and_pickles(copied: Callable[[Any], Any], changes: int) -> None:
    """Also of increments that have changed before."""
    x = X.clone()
    for _ in range(changes):
        x.mul_(2)
    made = phases.running(x, STATE)
    twin = copied(made)
    for wide in (False, True):
        assert_same_bits(twin.words(wide), made.words(wide))


def test_words_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made in inference mode, which autograd could not save, and while a graph is captured, whose
    memory only its replay fills."""
    made = phases.running(X, STATE)
    with torch.inference_mode():
        made.words(wide=True)
    assert not made.words(wide=True).is_inference()
    made = phases.running(X, STATE)
    with monkeypatch.context() as patched:
        patched.setattr("tightrope._tracing.may_keep", lambda _: False)
        within = made.words(wide=True)
    assert made.words(wide=True) is not within
    assert made.words(wide=True) is made.words(wide=True)
