"""The linear scan: two forms of one recurrence, compared with the double sum that defines it."""

import fractions
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle, tolerances
from tests.support.helpers import noise
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.functional import polar_scan
from tightrope.functional.scan import FORMS, PolarState
from tightrope.gates import Exp

SPEC = RopeSpec(8, interleaved=True)
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
every_form = pytest.mark.parametrize("form", FORMS)


def rotated(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Rotate by RoFormer's formula, in float64."""
    d = x.shape[-1]
    omega = 10000.0 ** (-torch.arange(0, d, 2, dtype=F64) / d)
    angle = (first + torch.arange(x.shape[-2], dtype=F64))[:, None] * omega
    return oracle.turned(x, angle.cos(), angle.sin(), 0, True)


def inputs(
    heads: int = 4, kv: int = 2, tokens: int = 37, dtype: torch.dtype = F64
) -> tuple[torch.Tensor, ...]:
    sizes = (heads, 8), (kv, 8), (kv, 5)
    return tuple(noise(2, n, tokens, d, seed=i, dtype=dtype) for i, (n, d) in enumerate(sizes, 1))


DECAYS: dict[str, Any] = {
    "none": None,
    "a number": -0.3,
    "of each head": -noise(2, 1).abs(),
    "of each channel": -noise(1, 8).abs(),
    "of each head and channel": -noise(2, 8).abs(),
    "of each token and head": -noise(2, 2, 37, 1).abs(),
    "of each token, head and channel": -noise(2, 2, 37, 8).abs(),
}
TWO_KINDS = "of each token and head", "of each token, head and channel"


def four_dims(decay: torch.Tensor) -> torch.Tensor:
    return decay if decay.dim() == 4 else decay[None, :, None]


def double_sum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | float | None,
    g: torch.Tensor | None = None,
    first: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return Σ_{i<=t} (q_tᵀ diag(exp(a_{i+1} + … + a_t)) k_i) v_i and the gradients of q, k, v and decay, then
    the sums of the magnitudes of their terms.

    All are computed term by term in float64, after a rotation from a first position on.
    """
    q, k, v = (x.double() for x in (q, k, v))
    a = torch.full((1, 1), decay or 0.0, dtype=F64) if isinstance(decay, float | None) else decay
    a = a.double()
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[..., None]

    def sums(turn: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> Any:
        """Return the output and the gradients of q and k, which `turn` rotates, of v and of the decay."""
        *given, g = given
        q, k, v, decay = leaves = [x.detach().requires_grad_() for x in given]
        since = decay.cumsum(2)
        weight = (since[:, :, :, None] - since[:, :, None]).masked_fill(~later, -torch.inf).exp()
        terms = turn(q).unflatten(1, (2, 2)), weight, turn(k), v
        out = torch.einsum("rhgtc,rhtic,rhic,rhid->rhgtd", *terms).flatten(1, 2)
        *grads, by_decay = torch.autograd.grad(out, leaves, g)
        by_decay[:, :, 0] = 0.0  # a factor of no term; the cumulative sum leaves rounding errors
        by_decay = by_decay.sum_to_size(four_dims(a).shape).reshape(a.shape)
        return [out.detach(), *grads, by_decay]

    g = torch.ones(*q.shape[:3], v.shape[3], dtype=F64) if g is None else g.double()
    full = four_dims(a).expand(*k.shape[:3], 8)
    exact = sums(partial(rotated, first=first), q, k, v, full, g)
    # All terms are products, so their magnitudes are those of the products of magnitudes.
    q, k = (rotated(x, first).abs() for x in (q, k))
    size = sums(lambda x: x, q, k, v.abs(), full, g.abs())
    for i in (1, 2):
        both = size[i].unflatten(-1, (4, 2)).sum(-1, keepdim=True)
        size[i] = both.expand(*both.shape[:-1], 2).flatten(-2)
    return exact, size


def assert_sums(got: Any, exact: Any, size: Any) -> None:
    """Assert that sums are within their bound, rounded once to their dtype."""
    for found, want, terms in zip(got, exact, size, strict=True):
        last = torch.finfo(found.dtype)
        bound = tolerances.value("scan") * terms
        if last.bits == 16:
            bound += want.abs() * last.eps / 2 + last.tiny * last.eps
        assert bool(((found.double() - want).abs() <= bound).all())


@every_form
@pytest.mark.parametrize(
    "dtype, of_decay", [(F64, F64), (F32, F32), (BF16, F32), (BF16, BF16), (F16, F32), (F16, F16)]
)
@pytest.mark.parametrize("kind", DECAYS)
def test_each_form_is_the_double_sum(
    kind: str, dtype: torch.dtype, of_decay: torch.dtype, form: str
) -> None:
    """Results and gradients of 16 bits are rounded only at the end: sums with cancellation would show others."""
    decay = DECAYS[kind]
    leaves = [x.requires_grad_() for x in inputs(dtype=dtype)]
    if isinstance(decay, torch.Tensor):
        decay = decay.to(of_decay).clone().requires_grad_()
        leaves.append(decay)
    out, state = polar_scan(*leaves[:3], SPEC, decay, form=form, chunk=20)
    assert state.tokens == 37
    assert [x.dtype for x in (out, state.memory)] == [dtype, F64 if dtype == F64 else F32]
    g = noise(2, 4, 37, 5, seed=4, dtype=dtype)
    found = [out, *torch.autograd.grad(out, leaves, g)]
    exact, size = double_sum(*leaves[:3], decay, g)
    count = len(found)
    if dtype == F64:
        assert_near(found, exact[:count], "float64 ways")
    assert_sums(found, exact[:count], size[:count])


def test_scores_without_decay() -> None:
    """Scores are q_tᵀ P R_{i−t} P k_i, with one gate for both channels of a pair and no decay."""
    q, k, v = inputs(2, 2, 9)
    gamma = noise(2, 4)
    gate = gamma.exp().repeat_interleave(2, -1)
    wanted = torch.zeros(2, 2, 9, 5, dtype=F64)
    for t, i in itertools.combinations_with_replacement(range(9), 2):
        turned = rotated(k[:, :, t : t + 1], first=t - i)[:, :, 0]
        wanted[:, :, i] += (q[:, :, i] * gate * turned * gate).sum(-1, keepdim=True) * v[:, :, t]
    for form in FORMS:
        got, _ = polar_scan(q, k, v, SPEC, gate=Exp(gamma, tied="pair"), form=form)
        assert_near(got, wanted, "float64 ways")


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 37), max_size=4),
    forms=st.lists(st.sampled_from(FORMS), min_size=5, max_size=5),
    chunk=st.integers(1, 40),
    kind=st.sampled_from(["none", "of each head", "of each token, head and channel"]),
    layout=st.sampled_from(["bhsd", "bshd", "sbhd"]),
)
def test_any_split_in_any_form_is_one_call(
    cuts: list[int], forms: list[str], chunk: int, kind: str, layout: str
) -> None:
    xs, decay = inputs(), DECAYS[kind]
    whole, last = polar_scan(*xs, SPEC, decay)
    order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
    parts, state = [], None
    for (start, end), form in zip(itertools.pairwise([0, *sorted(cuts), 37]), forms, strict=False):
        own = decay[:, :, start:end] if "token" in kind else decay
        some = (x[:, :, start:end].permute(order) for x in xs)
        options = {"state": state, "form": form, "chunk": chunk, "layout": layout}
        out, state = polar_scan(*some, SPEC, own, **options)
        parts.append(oracle.as_bhsd(out, layout))
    assert_near([torch.cat(parts, 2), state.memory], [whole, last.memory], "float64 ways")
    assert state.tokens == 37


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "strongest, width", [(-1e30, 8), (torch.finfo(F32).min, 1), (-torch.inf, 8)]
)
def test_the_strongest_decay_is_finite_at_32k(strongest: float, width: int) -> None:
    """Each output depends only on its own token."""
    q, k, v = (noise(1, 1, 32_768, 8, seed=i, dtype=F32) for i in range(3))
    every = [x.requires_grad_() for x in (q, k, v, torch.full((1, 1, 32_768, width), strongest))]
    out, state = polar_scan(*every[:3], SPEC, every[3])
    grads = torch.autograd.grad(out.square().sum() + state.memory.sum(), every)
    assert all(x.isfinite().all() for x in (out, state.memory, *grads))
    alone = (rotated(q.detach()) * rotated(k.detach())).sum(-1, keepdim=True) * v
    torch.testing.assert_close(out.double(), alone, rtol=1e-4, atol=1e-4)


@every_form
def test_a_strong_decay_does_not_take_the_digits_of_weak_ones(form: str) -> None:
    q, k, v = inputs(dtype=F32)
    decay = torch.full((1, 1, 37, 1), -0.01)
    decay[:, :, 11] = -1e9
    got, _ = polar_scan(q, k, v, SPEC, decay, form=form)
    (exact, *_), (size, *_) = double_sum(
        *(x[:, :, 11:] for x in (q, k, v)), decay[:, :, 12:13], first=11
    )
    assert_sums([got[:, :, 11:]], [exact], [size])


def most_bytes(tokens: int) -> int:
    """Return the peak memory of tensors in bytes, forward and backward, from torch's profiler.

    The memory of the process would include freed blocks that malloc keeps and pages of libraries, which
    in a CUDA build take more than all of these tensors.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        q, k, v = (torch.randn(1, 2, tokens, 32, requires_grad=True) for _ in range(3))
        decay = (-torch.rand(1, 2, tokens, 32)).requires_grad_()
        polar_scan(q, k, v, RopeSpec(32), decay)[0].sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.slow
def test_memory_grows_linearly() -> None:
    """Twice the tokens take about twice the memory.

    At 4,096 tokens, one score for each pair of tokens would take 128 times the memory of q.
    """
    most_bytes(64)  # allocations that are made only once
    half, whole = most_bytes(2048), most_bytes(4096)
    tensor = 2 * 4096 * 32 * 4  # bytes of q
    # q, k, v, decay, their gradients, rotated q and k, and one block: measured, 11.3 times q.
    assert 8 * tensor <= whole <= 14 * tensor, whole / tensor
    assert whole <= 2.1 * half, whole / half


@pytest.mark.parametrize("wide", [F32, BF16, F64])
@pytest.mark.parametrize("narrow", [BF16, F16])
@every_form
@pytest.mark.parametrize("kind", ["none", *TWO_KINDS])
def test_autocast_changes_nothing(
    kind: str, form: str, narrow: torch.dtype, wide: torch.dtype
) -> None:
    """Autocast changes no bit: memory rounded to 16 bits after each block would lose digits."""
    every = [*inputs(dtype=wide), *([] if kind == "none" else [DECAYS[kind].float()])]
    results = []
    for cast in (False, True):
        leaves = [x.clone().requires_grad_() for x in every]
        with torch.autocast("cpu", dtype=narrow, enabled=cast):
            run = partial(polar_scan, *leaves[:3], SPEC, *leaves[3:], form=form)
            first = run(chunk=20)
            seen = [
                part for made in (first, run(state=first[1])) for part in (made[0], made[1].memory)
            ]
        loss = torch.stack([part.double().square().sum() for part in seen]).sum()
        results.append([*seen, *torch.autograd.grad(loss, leaves)])
    assert_same_bits(*results)


@every_form
@pytest.mark.parametrize("empty", ["rows", "heads", "tokens", "values"])
def test_empty_inputs_have_gradients(empty: str, form: str) -> None:
    sizes = {"rows": 2, "heads": 2, "tokens": 5, "values": 3} | {empty: 0}
    rows, heads, tokens, values = sizes.values()
    q, k, v = (noise(rows, heads, tokens, d).requires_grad_() for d in (8, 8, values))
    decay = torch.tensor(-0.5, requires_grad=True)
    before = PolarState(noise(rows, heads, 8, values, seed=1).requires_grad_(), 4)
    out, after = polar_scan(q, k, v, SPEC, decay, state=before, form=form)
    assert (out.shape, after.tokens) == ((rows, heads, tokens, values), 4 + tokens)
    leaves = q, k, v, decay, before.memory
    found = torch.autograd.grad(out.sum() + after.memory.sum(), leaves)
    assert all(grad.isfinite().all() for grad in found)
    if empty == "tokens":
        assert_same_bits([after.memory, found[4]], [before.memory, torch.ones_like(found[4])])


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        *(
            ({"log_decay": number}, {"log_decay": -0.5})
            for number in (numpy.float32(-0.5), numpy.float64(-0.5), fractions.Fraction(-1, 2))
        ),
        *(({"chunk": number}, {"chunk": 3}) for number in (numpy.uint8(3), numpy.array(3))),
    ],
    ids=repr,
)
def test_numbers_of_any_kind(given: dict[str, Any], plain: dict[str, Any]) -> None:
    found, wanted = (polar_scan(*inputs(), SPEC, **options)[0] for options in (given, plain))
    assert_same_bits(found, wanted)
