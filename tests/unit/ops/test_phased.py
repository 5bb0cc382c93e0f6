"""Rotation by phases: angles for each token, in addition to those of the positions (`phases=`).

How phases are made and accumulated is tested in tests/unit/phases/test_phases.py.
"""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.support import oracle, tolerances
from tests.support.helpers import noise, refusals
from tests.support.matrix import (
    DISTINCT_SETS,
    INDUCTOR,
    both_pairings,
    every_backend,
    every_dtype,
    every_way,
    needs_kernel,
)
from tests.support.tolerances import Result, assert_near, assert_rotated, assert_same_bits
from tests.support.triton.cases import DEVICE, kernels_in_place, needs_triton
from tightrope import RopeSpec, phases, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.backends import cpu
from tightrope.backends.reference import compose
from tightrope.frequencies import Given
from tightrope.functional import polar_scan, rotate, rotate_, rotate_qk
from tightrope.gates import Slope, XPos
from tightrope.ops.schema import PHASES, Options

# Inductor's CPU code needs a C++ compiler.

ROWS, HEADS, TOKENS, DIM, PAIRS = 2, 4, 40, 16, 6
# [rows|1, heads|1, tokens, pairs|1]
SHAPES = [tuple(shape) for shape in itertools.product((1, ROWS), (1, HEADS), (TOKENS,), (1, PAIRS))]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def spec_of(interleaved: bool = False, alone: bool = False) -> RopeSpec:
    rule = Given((0.0,) * PAIRS) if alone else None
    return RopeSpec(DIM, rotary_dim=2 * PAIRS, start=2, interleaved=interleaved, scaling=rule)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return noise(*shape, seed=seed, dtype=dtype).requires_grad_()


def angles(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 9
) -> torch.Tensor:
    return (30 * noise(*shape, seed=seed)).to(dtype)


# --- truth ----------------------------------------------------------------------------------------


def exact(
    x: torch.Tensor, angle: torch.Tensor, first: int, omegas: Any, interleaved: bool
) -> torch.Tensor:
    """Rotate x (rows, heads, tokens, channels) by angle + position · ω, without rounding.

    Args:
        angle: the given angles, which broadcast to (rows, heads, tokens, pairs).
        first: the position of the first token.
    """
    full = angle.double().expand(*x.shape[:3], len(omegas))
    values = [
        oracle.cos_sin_at((value, first + token), (oracle.MP.mpf(1), omega))
        for plane in full.flatten(0, 1).tolist()
        for token, pairs in enumerate(plane)
        for value, omega in zip(pairs, omegas, strict=True)
    ]
    cos, sin = torch.tensor(values, dtype=torch.float64).reshape(*full.shape, 2).unbind(-1)
    return oracle.turned(x, cos, sin, 2, interleaved)


# The entry of the tolerances for results beside torch's float64 functions at angles up to 100.
NEAR = {
    dtype: f"table rotation, {dtype}" for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
NEAR[torch.float64] = "float64 ways"
OMEGAS = oracle.frequencies(10000.0, 2 * PAIRS)


# --- values ---------------------------------------------------------------------------------------


@every_way
def test_values(interleaved: bool, dtype: torch.dtype, backend: str) -> None:
    spec, cases = spec_of(interleaved), []
    for i, shape in enumerate(SHAPES[:: 1 if dtype == torch.float32 else 3]):
        x, angle = noise(ROWS, HEADS, TOKENS, DIM, seed=i, dtype=dtype), angles(shape)
        got = rotate(x, spec, 1000 * i, phases=phases.given(angle), backend=backend)
        want = exact(x, angle, 1000 * i, OMEGAS, interleaved)
        lengths = oracle.pair_lengths(x, 2 * PAIRS, start=2, interleaved=interleaved)
        cases.append(Result(got, want, lengths, 1000 * i + TOKENS + 200))
    assert_rotated(cases)


@every_backend
def test_phases_alone(backend: str) -> None:
    """With frequencies of zero, only the phases turn, whatever the positions."""
    spec, angle = spec_of(alone=True), angles((ROWS, HEADS, TOKENS, PAIRS))
    x = noise(ROWS, HEADS, TOKENS, DIM)
    got = rotate(x, spec, 10**9, phases=phases.given(angle), backend=backend)
    assert_near(got, exact(x, angle, 0, (0,) * PAIRS, False), "float64 ways")
    zero = phases.given(torch.zeros(1, 1, TOKENS, 1))
    assert torch.equal(rotate(x, spec, phases=zero, backend=backend), x)
    plain = rotate(x, spec_of(), 7, backend=backend)
    assert_same_bits(rotate(x, spec_of(), 7, phases=zero, backend=backend), plain)


@every_backend
def test_phases_of_queries_and_keys_with_fewer_heads(backend: str) -> None:
    q, k = noise(ROWS, HEADS, TOKENS, DIM), noise(ROWS, 2, TOKENS, DIM, seed=1)
    for_q, for_k = (phases.given(angles((ROWS, n, TOKENS, PAIRS), seed=n)) for n in (HEADS, 2))
    turn, turn_both = (partial(f, backend=backend) for f in (rotate, rotate_qk))
    for own in ((for_q, for_k), (for_q, None)):
        want = [turn(x, spec_of(), phases=each) for x, each in zip((q, k), own)]
        assert_same_bits(turn_both(q, k, spec_of(), phases=own), want)
        assert_same_bits(turn_both(q, k, spec_of().at(None), phases=own), want)
    shared = phases.given(angles((ROWS, 1, TOKENS, PAIRS)))
    assert turn_both(q, None, spec_of(), phases=shared)[1] is None


@every_backend
def test_act_gates_and_rounding(backend: str) -> None:
    """Phases change the angles only: f, P and the rounding act as without them."""
    x = noise(ROWS, HEADS, TOKENS, DIM, dtype=torch.float32)
    angle = angles((ROWS, HEADS, TOKENS, PAIRS))
    given, call = phases.given(angle), {"backend": backend}
    turned = rotate(torch.nn.functional.silu(x), spec_of(), phases=given, **call)
    assert_near(rotate(x, spec_of(), phases=given, act="silu", **call), turned, "float32 ways")
    normed = torch.nn.functional.rms_norm(x, (DIM,), eps=1e-6)
    act = RMSNorm(torch.ones(DIM), 1e-6)
    assert_near(
        rotate(x, spec_of(), phases=given, act=act, **call),
        rotate(normed, spec_of(), phases=given, **call),
        "float32 ways",
    )
    turned = rotate(x, spec_of(), 3, phases=given, **call)
    for gate in (Slope(torch.full((HEADS, 1), -0.01)), XPos(2 * PAIRS, 512.0)):
        factor = rotate(torch.ones_like(x), spec_of(alone=True), 3, gate=gate, **call)
        got = rotate(x, spec_of(), 3, phases=given, gate=gate, **call)
        assert_near(got, turned * factor, "float32 ways")
        # Positions that are not integers are added to the phases first.
        at = torch.arange(TOKENS).double() + 3
        assert_near(rotate(x, spec_of(), at, phases=given, gate=gate, **call), got, "float32 ways")
    for rounding in ("wide", "each"):
        one = rotate(x.bfloat16(), spec_of(), phases=given, rounding=rounding, **call)
        same = rotate(x.bfloat16(), spec_of(), phases=given, rounding=rounding, backend="reference")
        assert_same_bits(one, same)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 1e30])
def test_an_angle_that_is_no_number_makes_its_pair_nan(
    lost: float, dtype: torch.dtype, backend: str
) -> None:
    x, angle = noise(ROWS, HEADS, TOKENS, DIM, dtype=dtype), angles((ROWS, 1, TOKENS, PAIRS))
    clean = rotate(x, spec_of(), phases=phases.given(angle), backend=backend)
    angle[1, 0, 3, 4] = lost
    got = rotate(x, spec_of(), phases=phases.given(angle), backend=backend)
    gone = torch.zeros_like(got, dtype=torch.bool)
    gone[1, :, 3, 2 + 4] = gone[1, :, 3, 2 + 4 + PAIRS] = True
    assert got[gone].isnan().all()
    assert_same_bits(got[~gone], clean[~gone])


@every_backend
def test_a_position_that_is_lost_on_one_axis_loses_its_token(backend: str) -> None:
    at = noise(2, TOKENS)
    at[1, 3] = math.nan
    own = phases.given(angles((1, 1, TOKENS, 4)))
    spec, x = RopeSpec(8, axes=Axes.blocks((2, 2))), noise(ROWS, HEADS, TOKENS, 8)
    lost = rotate(x, spec, positions.multi_axis(at), phases=own, backend=backend).isnan()
    assert lost[:, :, 3].all()
    assert int(lost.sum()) == ROWS * HEADS * 8


@every_backend
@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty_tensors(sizes: tuple[int, int, int], backend: str) -> None:
    rows, heads, tokens = sizes
    x = leaf(rows, heads, tokens, DIM)
    angle = leaf(rows, heads, tokens, PAIRS)
    y = rotate(x, spec_of(), phases=phases.given(angle), backend=backend)
    y.sum().backward()
    assert y.shape == x.shape
    assert angle.grad is not None
    assert angle.grad.shape == angle.shape


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("phased", [True, False])
def test_gates_by_fractional_positions_in_transforms(phased: bool) -> None:
    """The tangent and the gradient of positions pass through the gate in every transform."""
    x, gate = noise(1, 1, 3, 4), Slope(torch.full((4,), 0.5, dtype=torch.float64))
    given = phases.given(torch.zeros(1, 1, 3, 2, dtype=torch.float64)) if phased else None

    def turned(at: torch.Tensor) -> torch.Tensor:
        return rotate(x, RopeSpec(4), at, phases=given, gate=gate)

    def of_batch(at: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(turned)(at[None])[0]

    at = noise(3, seed=1)
    want = torch.func.jacrev(turned)(at)
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        for function in (turned, of_batch):
            assert_near(transform(function)(at), want, "float64 ways")
    twice = torch.func.jacfwd(torch.func.jacrev(turned))(at)
    assert_near(torch.func.jacrev(torch.func.jacfwd(turned))(at), twice, "float64 ways")
    assert_near(torch.func.jacfwd(torch.func.jacfwd(turned))(at), twice, "float64 ways")


@pytest.mark.skipif(INDUCTOR is None, reason="no C++ compiler")
def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    spec = RopeSpec(8)

    def step(x: torch.Tensor, increments: torch.Tensor) -> torch.Tensor:
        return rotate(x * 2, spec, 3, phases=phases.running(increments)) + 1

    compiled = torch.compile(step, fullgraph=True)
    for tokens in (5, 9):
        x, increments = leaf(2, 3, tokens, 8), leaf(2, 3, tokens, 4, seed=1)
        one = torch.autograd.grad(compiled(x, increments).square().sum(), (x, increments))
        other = torch.autograd.grad(step(x, increments).square().sum(), (x, increments))
        assert_near(one, other, "float64 ways")


# --- machines -------------------------------------------------------------------------------------


@needs_kernel
@both_pairings
@every_dtype
def test_every_instruction_set_and_number_of_threads(dtype: torch.dtype, interleaved: bool) -> None:
    """The same bits on every instruction set, with any number of threads."""
    x = leaf(1, 8, 300, 70, dtype=dtype)
    spec = RopeSpec(70, rotary_dim=66, start=3, interleaved=interleaved)
    angle = angles((1, 8, 300, 33), torch.float32).requires_grad_()
    found = []
    for name, count in itertools.product(DISTINCT_SETS, (1, 3)):
        cpu.use_instruction_set(name)
        torch.set_num_threads(count)
        y = rotate(x, spec, 9, phases=phases.given(angle))
        found.append((y.detach(), *torch.autograd.grad(y, (x, angle), x.detach())))
    for one in found[1:]:
        assert_same_bits(one, found[0])


# --- polar attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_polar_scan(dtype: torch.dtype) -> None:
    q, k, v = (noise(2, 4, 12, 8, seed=i, dtype=dtype) for i in range(3))
    spec, decay = RopeSpec(8, interleaved=True), torch.full((4, 1), -0.1)
    own = phases.given(angles((2, 4, 12, 4)))
    got, _ = polar_scan(q, k, v, spec, decay, phases=own)
    none = RopeSpec(8, interleaved=True, scaling=Given((0.0,) * 4))
    turned = rotate_qk(q.double(), k.double(), spec, phases=own)
    want, _ = polar_scan(*turned, v.double(), none, decay)
    bound = tolerances.value(NEAR[dtype])
    torch.testing.assert_close(got.double(), want, rtol=4 * bound, atol=4 * bound)


def test_polar_scan_in_chunks_equals_the_whole() -> None:
    """Both states together continue a sequence, and gradients flow through both."""
    q, k, v = (leaf(1, 2, 12, 8, seed=i) for i in range(3))
    increments = leaf(1, 2, 12, 4, seed=3)
    spec = RopeSpec(8, scaling=Given((0.0,) * 4))
    whole, _ = polar_scan(q, k, v, spec, -0.1, phases=phases.running(increments))
    state = turned = None
    parts = []
    for i in range(0, 12, 5):
        some = [t[:, :, i : i + 5] for t in (q, k, v, increments)]
        own = phases.running(some[3], turned)
        out, state = polar_scan(*some[:3], spec, -0.1, phases=own, state=state)
        turned = own.state
        parts.append(out)
    assert_near(torch.cat(parts, 2), whole, "float64 ways")
    inputs = q, k, v, increments
    cotangent = noise(*whole.shape, seed=9)
    assert_near(
        torch.autograd.grad(whole, inputs, cotangent),
        torch.autograd.grad(torch.cat(parts, 2), inputs, cotangent),
        "float64 ways",
    )


# --- errors ---------------------------------------------------------------------------------------


X, K = noise(2, 4, 6, 8), noise(2, 2, 6, 8)
SPEC = RopeSpec(8)
SHAPE, ORDER = "phases must have shape", "in this order for every layout, but got"


def of(*shape: int, **options: Any) -> phases.Phases:
    return phases.given(torch.zeros(shape, **options))


VALUES = {
    **{
        f"[rotate] {SHAPE} (2|1, 4|1, 6, 4|1) for x, {ORDER} {shape} (x: float64[2, 4, 6, 8]).": (
            partial(rotate, X, SPEC, phases=of(*shape))
        )
        for shape in ((3, 4, 6, 4), (2, 3, 6, 4), (2, 4, 5, 4), (2, 4, 1, 4), (2, 4, 6, 3))
    },
    f"[rotate_qk] {SHAPE} (2|1, 2|1, 6, 4|1) for k, {ORDER} (2, 4, 6, 4); give a pair, one for q "
    "and one for k (k: float64[2, 2, 6, 8]).": (
        lambda: rotate_qk(X, K, SPEC, phases=of(2, 4, 6, 4))
    ),
    f"[rotate] {SHAPE} (2|1, 4|1, 6, 0|1) for x, {ORDER} (2, 4, 6, 4); a spec with rotary_dim=0 "
    "rotates no pair: pass scaling=Proportional(0.0) instead (x: float64[2, 4, 6, 8]).": (
        lambda: rotate(X, RopeSpec(8, rotary_dim=0), phases=of(2, 4, 6, 4))
    ),
    "[rotate] phases must be None with a rotation made for stack 'vllm'.": (
        lambda: rotate(X, SPEC.at(0, stack="vllm"), phases=of(1, 1, 6, 1))
    ),
    "[rotate] phases are on meta but x is on cpu.": (
        lambda: rotate(X, SPEC, phases=of(1, 1, 6, 4, device="meta"))
    ),
    "[rotate] a result written to out has no gradient, but positions, inv_freq or phases require "
    "one; use torch.no_grad(), or omit out.": (
        lambda: rotate(X, SPEC, phases=of(1, 1, 6, 4, requires_grad=True), out=torch.empty_like(X))
    ),
}
TYPES = {
    "[rotate] phases must be made by phases.given or phases.running but got "
    "float32[2, 4, 6, 4].": lambda: rotate(X, SPEC, phases=torch.zeros(2, 4, 6, 4)),
    "[rotate_] phases must be a single value for one tensor but got a pair.": (
        lambda: rotate_(X, SPEC, phases=(of(1, 1, 6, 1), None))
    ),
    "[rotate_qk] phases must be one value or a pair, for q and k, but got 3.": (
        lambda: rotate_qk(X, K, SPEC, phases=(None, None, None))
    ),
}
test_sentence = refusals(ValueError=VALUES, TypeError=TYPES)


@every_backend
def test_the_raw_operator_refuses_phases_that_do_not_fit(backend: str) -> None:
    x, own = noise(2, 3, 5, 8), torch.zeros(2, 3, 5, 4, dtype=torch.int32)
    words = torch.zeros(1, 1, 1, 4, dtype=torch.int64)
    options = Options(source=PHASES).pack()
    rotate_raw = torch.ops.tightrope.rotate
    assert torch.equal(rotate_raw(x, None, own, words, None, 0, options, 1.0)[0], x)
    wrong = (
        (own.float(), words),
        (own[0], words),
        (own[:, :, :4], words),
        (own[:, :2], words),
        (own[:1].expand(3, 3, 5, 4), words),
        (own, words[..., :3]),
        (torch.zeros(2, 3, 5, 5, dtype=torch.int32), None),
    )
    own_kernel = compose if backend == "reference" else rotate_raw
    for primary, secondary in wrong:
        with pytest.raises((RuntimeError, IndexError)):
            own_kernel(x, None, primary, secondary, None, 0, options, 1.0)
    at = positions.per_row(torch.tensor([1, 2]))
    assert rotate(x, RopeSpec(8), at, phases=phases.given(torch.zeros(1, 1, 5, 1))).shape == x.shape


# --- Triton ---------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared ω", "ω per head"])
@every_shape
def test_triton(shape: tuple[int, ...], per_head: bool, dtype: torch.dtype) -> None:
    """Kernels and the definition agree, with their gradients, where an angle is NaN too."""
    spec, generator = spec_of(), torch.Generator().manual_seed(0)
    xs = [leaf(ROWS, HEADS, 5, DIM, seed=seed, dtype=dtype) for seed in range(2)]
    given = angles((*shape[:2], 5, shape[3]))
    given[0, 0, 3, 0] = torch.nan
    inv_freq = torch.rand(HEADS, PAIRS, generator=generator) if per_head else None
    inputs = [x.detach().to(DEVICE).requires_grad_() for x in (*xs, given)]
    inv_freq = None if inv_freq is None else inv_freq.to(DEVICE)

    def found(backend: str | None) -> list[torch.Tensor]:
        q, k, angle = inputs
        own = phases.given(angle)
        ys = rotate_qk(q, k, spec, 5, inv_freq=inv_freq, phases=own, backend=backend)
        loss = sum((y.nan_to_num() * torch.arange(DIM, device=DEVICE)).sum() for y in ys)
        return [*ys, *torch.autograd.grad(loss, inputs)]

    with kernels_in_place():
        by_kernel = found(None)
    for y, expected in zip(by_kernel, found("reference"), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
