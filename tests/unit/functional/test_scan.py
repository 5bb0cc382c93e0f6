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


def rotated(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Rotate by RoFormer's formula, in float64."""
    d = x.shape[-1]
    omega = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = (first + torch.arange(x.shape[-2], dtype=torch.float64))[:, None] * omega
    return oracle.turned(x, angle.cos(), angle.sin(), 0, True)


def inputs(
    heads: int = 4, kv: int = 2, tokens: int = 37, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    q = noise(2, heads, tokens, 8, seed=1, dtype=dtype)
    k, v = (
        noise(2, kv, tokens, 8, seed=2, dtype=dtype),
        noise(2, kv, tokens, 5, seed=3, dtype=dtype),
    )
    return q, k, v


DECAYS = {
    "none": None,
    "a number": -0.3,
    "of each head": -noise(2, 1).abs(),
    "of each channel": -noise(1, 8).abs(),
    "of each head and channel": -noise(2, 8).abs(),
    "of each token and head": -noise(2, 2, 37, 1).abs(),
    "of each token, head and channel": -noise(2, 2, 37, 8).abs(),
}


def spread(decay: torch.Tensor | float | None) -> torch.Tensor:
    if decay is None or isinstance(decay, float):
        decay = torch.full((1, 1), decay or 0.0, dtype=torch.float64)
    full = decay if decay.dim() == 4 else decay[None, :, None]
    return full.expand(2, 2, 37, 8)


def double_sum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    g: torch.Tensor | None = None,
    first: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return Σ_{i<=t} (q_tᵀ diag(exp(a_{i+1} + … + a_t)) k_i) v_i and the gradients of q, k, v and decay, then
    the sums of the magnitudes of their terms.

    All are computed term by term in float64, after a rotation from a first position on. The decay has shape
    (2, 2, tokens, 8).
    """
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[..., None]

    def sums(turn: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> Any:
        """Return the output and the gradients of q and k, which `turn` rotates, of v and of the decay."""
        *given, g = given
        q, k, v, decay = leaves = [x.detach().requires_grad_() for x in given]
        since = decay.cumsum(2)
        weight = (since[:, :, :, None] - since[:, :, None]).masked_fill(~later, -torch.inf).exp()
        turned = turn(q).unflatten(1, (2, 2)), weight, turn(k), v
        out = torch.einsum("rhgtc,rhtic,rhic,rhid->rhgtd", *turned).flatten(1, 2)
        *grads, by_decay = torch.autograd.grad(out, leaves, g)
        by_decay[:, :, 0] = 0.0  # a factor of no term; the cumulative sum leaves rounding errors
        return [out.detach(), *grads, by_decay]

    g = torch.ones(*q.shape[:3], v.shape[3], dtype=torch.float64) if g is None else g
    exact = sums(partial(rotated, first=first), q, k, v, decay, g)
    # All terms are products, so their magnitudes are those of the products of magnitudes.
    q, k = (rotated(x, first).abs() for x in (q, k))
    size = sums(lambda x: x, q, k, v.abs(), decay, g.abs())
    for i in (1, 2):
        both = size[i].unflatten(-1, (4, 2)).sum(-1, keepdim=True)
        size[i] = both.expand(*both.shape[:-1], 2).flatten(-2)
    return exact, size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DECAYS)
def test_each_form_is_the_double_sum(kind: str, form: str) -> None:
    q, k, v = inputs()
    (exact, *_), _ = double_sum(q, k, v, spread(DECAYS[kind]))
    got, state = polar_scan(q, k, v, SPEC, DECAYS[kind], form=form, chunk=20)
    assert_near(got, exact, "float64 ways")
    assert state.tokens == 37
    decay = DECAYS[kind]
    narrow = decay.float() if isinstance(decay, torch.Tensor) else decay
    # Round the inputs first: their rounding is not an error of the scan.
    q, k, v = (x.float().double() for x in (q, k, v))
    wide = narrow.double() if isinstance(narrow, torch.Tensor) else narrow
    (exact, *_), (size, *_) = double_sum(q, k, v, spread(wide))
    got, _ = polar_scan(q.float(), k.float(), v.float(), SPEC, narrow, form=form, chunk=20)
    assert got.dtype == torch.float32
    assert bool(((got.double() - exact).abs() <= tolerances.value("scan") * size).all())


@pytest.mark.parametrize("narrow_decay", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [kind for kind in DECAYS if kind.startswith("of")])
def test_16_bits_are_rounded_at_the_end_and_nowhere_else(
    kind: str, form: str, dtype: torch.dtype, narrow_decay: bool
) -> None:
    """16-bit results and gradients are rounded only at the end.

    Sums with cancellation would reveal that an intermediate result was rounded.
    """
    q, k, v = inputs(dtype=dtype)
    decay = DECAYS[kind].to(dtype if narrow_decay else torch.float32)  # type: ignore[union-attr]
    g = noise(2, 4, 37, 5, seed=4, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, decay)]
    out, _ = polar_scan(*leaves[:3], SPEC, leaves[3], form=form, chunk=20)
    got = [out, *torch.autograd.grad(out, leaves, g)]
    exact, size = double_sum(q.double(), k.double(), v.double(), spread(decay.double()), g.double())
    full = decay if decay.dim() == 4 else decay[None, :, None]
    exact[4], size[4] = (
        x.sum_to_size(full.shape).reshape(decay.shape) for x in (exact[4], size[4])
    )
    for name, found, want, terms in zip(("out", *"qkv", "decay"), got, exact, size, strict=True):
        last = torch.finfo(found.dtype)
        bound = tolerances.value("scan") * terms + want.abs() * last.eps / 2 + last.tiny * last.eps
        assert bool(((found.double() - want).abs() <= bound).all()), name


def test_scores_without_decay() -> None:
    """Scores are q_tᵀ P R_{i−t} P k_i, with one gate for both channels of a pair and no decay."""
    q, k, v = inputs(2, 2, 9)
    gamma = noise(2, 4)
    gate = gamma.exp().repeat_interleave(2, -1)
    wanted = torch.zeros(2, 2, 9, 5, dtype=torch.float64)
    for t in range(9):
        for i in range(t + 1):
            turned = rotated(k[:, :, i : i + 1], first=i - t)[:, :, 0]
            score = (q[:, :, t] * gate * turned * gate).sum(-1, keepdim=True)
            wanted[:, :, t] += score * v[:, :, i]
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
    q, k, v = inputs()
    decay = DECAYS[kind]
    whole, last = polar_scan(q, k, v, SPEC, decay)
    order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
    parts, state = [], None
    ends = [0, *sorted(cuts), 37]
    for start, end, form in zip(ends, ends[1:], forms, strict=False):
        own = decay
        if isinstance(decay, torch.Tensor) and decay.dim() == 4:
            own = decay[:, :, start:end]
        some = (x[:, :, start:end].permute(order) for x in (q, k, v))
        out, state = polar_scan(
            *some, SPEC, own, state=state, form=form, chunk=chunk, layout=layout
        )
        parts.append(out.permute([order.index(axis) for axis in range(4)]))
    assert_near(torch.cat(parts, 2), whole, "float64 ways")
    assert state is not None
    assert_near(state.memory, last.memory, "float64 ways")
    assert state.tokens == 37


@pytest.mark.one_in(6)
@pytest.mark.parametrize("strongest", [-1e30, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("width", [1, 8])
def test_the_strongest_decay_is_finite_at_32k(strongest: float, width: int) -> None:
    tokens = 32_768
    q, k, v = (noise(1, 1, tokens, 8, seed=i, dtype=torch.float32) for i in range(3))
    decay = torch.full((1, 1, tokens, width), strongest)
    every = [x.requires_grad_() for x in (q, k, v, decay)]
    out, state = polar_scan(q, k, v, SPEC, decay)
    (out.square().sum() + state.memory.sum()).backward()
    assert out.isfinite().all()
    assert state.memory.isfinite().all()
    for x in every:
        assert x.grad is not None
        assert x.grad.isfinite().all()
    # Each output depends only on its own token.
    alone = (rotated(q.detach().double()) * rotated(k.detach().double())).sum(-1, keepdim=True)
    torch.testing.assert_close(out.double(), alone * v.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_strong_decay_does_not_take_the_digits_of_weak_ones(form: str) -> None:
    q, k, v = (x.float() for x in inputs())
    decay = torch.full((1, 1, 37, 1), -0.01)
    decay[:, :, 11] = -1e9
    got, _ = polar_scan(q, k, v, SPEC, decay, form=form)
    after = [x[:, :, 11:].double() for x in (q, k, v)]
    weak = torch.full((2, 2, 26, 8), -0.01, dtype=torch.float32).double()
    (exact, *_), (size, *_) = double_sum(*after, weak, first=11)
    assert bool(((got[:, :, 11:].double() - exact).abs() <= tolerances.value("scan") * size).all())


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


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind", ["none", "of each token and head", "of each token, head and channel"]
)
def test_autocast_changes_nothing(
    kind: str, form: str, narrow: torch.dtype, wide: torch.dtype
) -> None:
    """Autocast changes no bit: memory rounded to 16 bits after each block would lose digits."""
    every = [x.to(wide) for x in inputs()]
    decay = DECAYS[kind]
    if isinstance(decay, torch.Tensor):
        every.append(decay.float())

    def results(cast: bool) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in every]
        with torch.autocast("cpu", dtype=narrow, enabled=cast):
            made = [polar_scan(*leaves[:3], SPEC, *leaves[3:], form=form, chunk=20)]
            more = polar_scan(*leaves[:3], SPEC, *leaves[3:], form=form, state=made[0][1])
            made.append(more)
        seen = [part for out, state in made for part in (out, state.memory)]
        loss = torch.stack([part.double().square().sum() for part in seen]).sum()
        return [*seen, *torch.autograd.grad(loss, leaves)]

    wanted = results(False)
    assert wanted[1].dtype == (torch.float64 if wide == torch.float64 else torch.float32)
    assert_same_bits(results(True), wanted)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing_when_compiled(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    decay = DECAYS["of each token and head"].float()  # type: ignore[union-attr]
    wanted, last = polar_scan(q, k, v, SPEC, decay)
    torch.compiler.reset()
    run = torch.compile(polar_scan, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = run(q, k, v, SPEC, decay)
    last_place = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, rtol=last_place, atol=1e-5)
    torch.testing.assert_close(state.memory, last.memory, rtol=1e-5, atol=1e-5)
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = polar_scan(*(torch.empty(1, 2, 9, 8) for _ in range(3)), SPEC)
    assert out.dtype == torch.float32


def test_narrow_types_and_no_tokens() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in inputs())
    out, state = polar_scan(q, k, v, SPEC, -0.1)
    assert (out.dtype, state.memory.dtype) == (torch.bfloat16, torch.float32)
    none, same = polar_scan(q[:, :, :0], k[:, :, :0], v[:, :, :0], SPEC, -0.1, state=state)
    assert none.shape == (2, 4, 0, 5)
    assert same.tokens == 37
    assert torch.equal(same.memory, state.memory)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("empty", ["rows", "heads", "tokens", "values"])
def test_empty_inputs_have_gradients(empty: str, form: str) -> None:
    sizes = {"rows": 2, "heads": 2, "tokens": 5, "values": 3} | {empty: 0}
    rows, heads, tokens, values = sizes.values()
    q, k = (noise(rows, heads, tokens, 8).requires_grad_() for _ in range(2))
    v = noise(rows, heads, tokens, values).requires_grad_()
    decay = torch.tensor(-0.5, requires_grad=True)
    before = PolarState(noise(rows, heads, 8, values, seed=1).requires_grad_(), 4)
    out, after = polar_scan(q, k, v, SPEC, decay, state=before, form=form)
    assert (out.shape, after.tokens) == ((rows, heads, tokens, values), 4 + tokens)
    leaves = q, k, v, decay, before.memory
    found = torch.autograd.grad(out.sum() + after.memory.sum(), leaves)
    assert all(grad.isfinite().all() for grad in found)
    if empty == "tokens":
        assert torch.equal(after.memory, before.memory)
        assert torch.equal(found[4], torch.ones_like(found[4]))


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
    q, k, v = inputs()
    assert torch.equal(polar_scan(q, k, v, SPEC, **given)[0], polar_scan(q, k, v, SPEC, **plain)[0])
