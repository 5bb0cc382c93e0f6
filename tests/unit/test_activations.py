"""Prologues and epilogues (f and P), forward and backward, compared with float64 formulas."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle, oracle_acts, tolerances
from tests.support.helpers import noise, on
from tests.support.matrix import every_backend, every_dtype, needs_kernel
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, gates
from tightrope.activations import ACTS, RMSNorm
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_qk, rotate_qk_
from tightrope.gates import Channels, Exp, Factor, Gate, Scalar, XPos
from tightrope.ops import gradients, schema
from tightrope.ops.gating import Stages, lower
from tightrope.ops.layouts import BY_NAME

NAMES = ACTS[1:-1]
# Position 0 does not rotate, so that the result for a single token is f(x).
SLICE = RopeSpec(40, rotary_dim=2)
OFFSET = 7
LOG = schema.Options(gate=schema.LOG).pack()


def normed(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return oracle_acts.norm(x, weight, 1e-6, 0.0)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotate all channels of x in float64, from OFFSET on."""
    angle = oracle_acts.angles(x.shape[2], OFFSET, x.shape[-1])
    return oracle.turned(x, angle.cos(), angle.sin())


# --- against formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*NAMES, "rms_norm", "gate"])
def test_results_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """At least 99.9 % of 16-bit results are the exact value correctly rounded."""
    x = noise(1, 8, 128, 128, dtype=dtype)
    weight, gamma = noise(128, seed=3).float(), (0.1 * noise(8, 128, seed=4)).float()
    options: dict[str, Any] = {"act": name}
    if name == "rms_norm":
        options, wanted = {"act": RMSNorm(weight)}, turned(normed(x.double(), weight.double()))
    elif name == "gate":
        wanted = turned(x.double()) * gamma.double()[:, None].exp()
        options = {"gate": gates.Exp(gamma)}
    else:
        wanted = turned(oracle_acts.act(name, x.double()))
    y = rotate(x, RopeSpec(128), OFFSET, **options)
    assert (y == wanted.to(dtype)).double().mean() >= tolerances.value("f and P, rounded once")


@every_dtype
@pytest.mark.parametrize("name", [*NAMES, "softmax"])
def test_each_channel_is_near_its_formula(name: str, dtype: torch.dtype) -> None:
    """And its gradient. A sum over all channels would hide a channel that is off by more than the others."""
    unit = tolerances.value("activation, float64" if dtype == torch.float64 else "activation")
    x, cotangent = (noise(20, 10, 1, 40, dtype=dtype, seed=seed) for seed in (0, 1))
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for leaf, f, ys in (
        (x.clone(), lambda x: rotate(x, SLICE, act=name), found),
        (x.double(), lambda x: oracle_acts.act(name, x), wanted),
    ):
        y = f(leaf.requires_grad_())
        ys += y.detach(), *torch.autograd.grad(y, leaf, cotangent.to(y.dtype))
    exact = x.double()
    if name == "softmax":
        sizes = [wanted[0] * (1 + exact.abs())] * 2
    else:
        one = torch.ones_like(exact)
        slope = torch.func.jvp(lambda x: oracle_acts.act(name, x), (exact,), (one,))[1]
        sizes = [
            wanted[0].abs() + (exact * slope).abs(),
            cotangent.double().abs() * slope.abs().clamp(min=1),
        ]
    for got, want, size in zip(found, wanted, sizes, strict=True):
        bound = unit * size
        if dtype.itemsize == 2:
            bound = bound + oracle.step_sizes(want, dtype) / 2
        assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "exp"])
def test_every_bfloat16(name: str) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[(every.abs() >= 2**-60) & (every.abs() <= 88)]
    y = rotate(x[None, None, None], RopeSpec(len(x), rotary_dim=2), act=name)[0, 0, 0]
    want = oracle_acts.act(name, x.double()).bfloat16()
    assert int((y != want).sum()) <= tolerances.value("every bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_far_values(name: str, dtype: torch.dtype) -> None:
    """f is accurate and its gradient finite where a naive formula would overflow or lose digits."""
    top = 80.0 if name in ("exp", "softplus") else 700.0
    x = torch.linspace(-top, top, 40, dtype=dtype)[None, None, None]
    leaf = (x * 1e4 if name in ("sin", "cos") else x).requires_grad_()
    y = rotate(leaf, SLICE, act=name)
    exact = leaf.detach().double()
    want = oracle_acts.act(name, exact.clamp(-300, 300) if name == "tanh" else exact)
    tail = tolerances.value("f, float32")
    assert ((y.double() - want).abs() <= tail * want.abs() + 1e-30).all()
    assert torch.autograd.grad(y.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "softmax"])
def test_far_values_and_nan_change_no_bit_of_their_neighbours(name: str) -> None:
    """The kernel corrects the sines and cosines of values that are far away."""
    x = 12 * noise(1, 1, 3, 40, dtype=torch.float32)
    x[0, 0, 1, 39], x[0, 0, 2, 39] = 1e4, torch.nan
    x[..., :39] = x[0, 0, 0, :39]
    leaf = x.requires_grad_()
    y = rotate(leaf, SLICE, torch.zeros(3, dtype=torch.int64), act=name)
    assert y[0, 0, 2, 39].isnan()
    for found in (y.detach(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0]):
        assert_same_bits(found[0, 0, :, :39], found[0, 0, 0, :39].expand(3, -1))


@every_backend
@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_the_slope_at_nan_is_that_of_torch(name: str, backend: str) -> None:
    x = torch.full((1, 1, 1, 8), torch.nan, requires_grad=True)
    ys = on(backend, rotate, x, RopeSpec(8), act=name), getattr(torch.nn.functional, name)(x)
    got, want = (torch.autograd.grad(y.sum(), x)[0] for y in ys)
    assert torch.equal(got, want)


@every_dtype
@pytest.mark.parametrize("head_dim", [2, 30, 64, 130])
def test_softmax_finds_its_largest_value_in_every_channel(
    dtype: torch.dtype, head_dim: int
) -> None:
    """Without the maximum, e^200 overflows in float32. A NaN in any channel makes its head NaN."""
    spec = RopeSpec(head_dim, rotary_dim=2)
    one_each = torch.eye(head_dim, dtype=dtype)[None, :, None]
    y = rotate(200 * one_each, spec, act="softmax")
    torch.testing.assert_close(y, one_each, rtol=0, atol=1e-80)  # e^-200 in float64
    y = rotate(one_each.where(one_each == 0, torch.nan), spec, act="softmax")
    assert y.isnan().all()


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, weight", [(1e18, 1.0), (1e15, 1e24), (3e38, 1.0), (1e38, 100.0)])
def test_norms_of_squares_that_overflow(
    size: float, weight: float, dtype: torch.dtype, backend: str
) -> None:
    """They are 0, like torch's: see RMSNorm. A rotation before the division would overflow earlier."""
    x, scale = torch.full((1, 2, 9, 64), size, dtype=dtype), torch.full((64,), weight)
    got = on(backend, rotate, x, RopeSpec(64), OFFSET, act=RMSNorm(scale)) / weight
    want = turned(normed(x.double())) if size < 1e19 else torch.zeros_like(x, dtype=torch.float64)
    size_of_head = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    bound = tolerances.value(f"f and P, {str(dtype)[6:]}")
    assert ((got.double() - want).abs() <= bound * size_of_head).all()


def test_a_norm_without_a_weight_and_with_nothing_to_sum() -> None:
    x = noise(2, 3, 4, 16)
    assert_near(rotate(x, RopeSpec(16), OFFSET, act=RMSNorm()), turned(normed(x)), "float64 ways")
    weight = torch.ones(16, requires_grad=True)
    y = rotate(torch.zeros(1, 3, 0, 16), RopeSpec(16), act=RMSNorm(weight))
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], torch.zeros(16))


# --- gates ----------------------------------------------------------------------------------------


def by_slopes(
    slopes: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Return a slope gate's factors, (tokens, heads, channels): apply it to unrotated ones."""
    width = slopes.shape[1]
    x = torch.ones(1, len(ids), len(slopes), width, dtype=dtype)
    still = RopeSpec(width).at(ids, inv_freq=torch.zeros(width // 2))
    y: torch.Tensor = on(backend, rotate, x, still, gate=gates.Slope(slopes), layout="bshd")
    return y[0]


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(
    position=st.one_of(
        st.integers(-(2**31), 2**31),
        st.integers(-300, 300),
        st.floats(-1e6, 1e6, allow_subnormal=False),
    ),
    heads=st.integers(1, 3),
    half=st.integers(1, 70),
    same=st.booleans(),
    seed=st.integers(0, 99),
)
def test_slopes_of_heads_lose_no_digit_of_the_position(
    dtype: torch.dtype, position: float, heads: int, half: int, same: bool, seed: int
) -> None:
    most = 80.0 if dtype != torch.float16 else 8.0
    logs = (most / 2 * noise(heads, 1 if same else 2 * half, seed=seed)).clamp(-most, most)
    slopes = (logs / max(1.0, abs(position))).float().double().expand(heads, 2 * half)
    kind = torch.int64 if isinstance(position, int) else torch.float64
    found = by_slopes(slopes, torch.tensor([position], dtype=kind), dtype, "cpu")[0].double()
    want, limits = torch.exp(slopes * position), torch.finfo(dtype)
    bound = tolerances.value("f, float32") * want
    if dtype != torch.float32:
        bound = bound + want.to(dtype).double() * limits.eps / 2 + limits.tiny
    assert ((found - want).abs() <= bound)[want < limits.max / 2].all()


@every_backend
@every_dtype
def test_slopes_without_end(dtype: torch.dtype, backend: str) -> None:
    """Infinite slopes, NaN, and slopes whose factor overflows give the result of torch.exp."""
    edges = [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 1e20, -1e20, 3e38, -3e38]
    several, ids = torch.tensor(edges).repeat(4), torch.tensor([-3, 0, 1, 2**31 - 1])
    for strange in (0.0, math.inf, -math.inf, math.nan):
        slopes = torch.stack([several, several.flip(0), torch.full_like(several, -1e4)])
        slopes[1, 0] = strange
        want = torch.exp(slopes.double() * ids[:, None, None]).to(dtype)
        for name in cpu.instruction_sets() if backend == "cpu" else [""]:
            if name:
                cpu.use_instruction_set(name)
            found = by_slopes(slopes, ids, dtype, backend)
            torch.testing.assert_close(found, want, equal_nan=True)


@every_backend
def test_an_overflow_that_a_gate_undoes_has_gradients_by_angles(backend: str) -> None:
    """Where f = exp(12) overflows float16, but f times the gate of 1/8 does not."""
    x = torch.full((1, 1, 2, 4), 12.0, dtype=torch.float16)
    found: list[torch.Tensor] = []
    for dtype in (torch.float16, torch.float64):
        ids = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
        gate = gates.Scalar(0.125)
        y = on(backend, rotate, x.to(dtype), RopeSpec(4), ids, act="exp", gate=gate)
        assert y.isfinite().all()
        found += torch.autograd.grad(y.sum(), ids)
    # y is rounded to float16 on the way.
    torch.testing.assert_close(*found, rtol=tolerances.value("f and P, float16"), atol=0)


# --- equalities, bit for bit ----------------------------------------------------------------------


@needs_kernel
@settings(max_examples=25, deadline=None)
@given(
    act=st.sampled_from(NAMES),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 40),
    half=st.integers(1, 40),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_bits_depend_on_the_token_alone(
    act: str, heads: int, tokens: int, half: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """A token has the same bits beside others and alone, among strided channels and beside k."""
    spec, x = (
        RopeSpec(2 * half, interleaved=interleaved),
        noise(2, heads, tokens, 2 * half, dtype=dtype),
    )
    norm, slopes = RMSNorm(noise(2 * half, seed=3)), 0.01 * noise(heads, 2 * half, seed=4)
    for f, gate in ((act, None), (norm, gates.Slope(slopes[0])), (act, gates.Slope(slopes))):
        y = rotate(x, spec, OFFSET, act=f, gate=gate)
        spread = x.repeat_interleave(2, -1)[..., ::2]
        assert_same_bits(rotate_qk(spread, x, spec, OFFSET, act=f, gate=gate), (y, y))
        one = rotate(x[1:, :, -1:], spec, OFFSET + tokens - 1, act=f, gate=gate)
        assert_same_bits(one, y[1:, :, -1:])


@needs_kernel
def test_sums_are_the_same_for_any_number_of_threads() -> None:
    """Also a sum with a single result, which torch splits among threads, and by the definition."""
    x, found = noise(2, 4, 300, 64, dtype=torch.float32), []
    y, grad = noise(2, 8, 512, 64), noise(2, 8, 512, 64, seed=1)
    single = torch.zeros(1, 1, 1, 1, dtype=torch.float64), None, None, 0
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        leaves = torch.ones(64), torch.zeros(4, 64), torch.ones(())
        weight, gamma, scale = (leaf.requires_grad_() for leaf in leaves)
        sums = list(gradients.gate_gradients(y, None, grad, None, *single, LOG))
        for gate, own in ((gates.Exp(gamma), gamma), (gates.Scalar(scale), scale)):
            z = rotate(x, RopeSpec(64), act=RMSNorm(weight), gate=gate)
            sums += torch.autograd.grad(z, (weight, own), x)
        found.append(sums)
    for one in found[1:]:
        assert_same_bits(one, found[0])


def test_q_and_k_may_have_different_stages() -> None:
    spec, q, k = RopeSpec(8), noise(1, 2, 3, 8), noise(1, 1, 3, 8, seed=1)
    own: dict[str, Any] = {"act": ("silu", None), "gate": (None, gates.Exp(noise(8, seed=2)))}
    wanted = rotate(q, spec, act="silu"), rotate(k, spec, gate=own["gate"][1])
    outs = torch.empty_like(q), torch.empty_like(k)
    for found in (
        rotate_qk(q, k, spec, **own),
        rotate_qk(q, k, spec, **own, out=outs),
        rotate_qk_(q.clone(), k.clone(), spec, **own),
    ):
        assert_same_bits(found, wanted)
    assert_same_bits(rotate(q, spec, act="none"), rotate(q, spec))
    # A single xPos gate is inverted for k.
    xpos = gates.XPos(0)
    z = rotate_qk(q, k, spec, 5, gate=xpos)[1]
    assert_same_bits(z, rotate(k, spec, 5, gate=xpos.for_keys()))


@every_backend
@every_dtype
@pytest.mark.parametrize("heads", [(), (3,)], ids=["shared", "per head"])
def test_a_norm_after_the_rotation(
    heads: tuple[int, ...], dtype: torch.dtype, backend: str | None
) -> None:
    """Its result and gradients are those of a norm before, and of its weight as factors, also if they are 0 or negative."""
    spec = RopeSpec(12, rotary_dim=8, start=2, interleaved=True)
    x, seed = noise(2, 3, 5, 12, dtype=dtype), noise(2, 3, 5, 12, seed=1, dtype=dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    weight = noise(*heads, 12, seed=2, dtype=kind)
    weight[..., 1:8:3] = 0
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    wide = [t.double().requires_grad_() for t in (x, weight)]
    y = on(backend, rotate, leaves[0], spec, OFFSET, act=RMSNorm(), gate=Factor(leaves[1]))
    turns = oracle_acts.angles(5, OFFSET, 8)
    wanted = normed(oracle.turned(wide[0], turns.cos(), turns.sin(), 2, True))
    wanted = wanted * (wide[1][:, None] if heads else wide[1])
    found = y, *torch.autograd.grad(y, leaves, seed)
    true = wanted, *torch.autograd.grad(wanted, wide, seed.double())
    for got, want, bound in zip(found, true, (1, 4, 4)):
        limit = bound * tolerances.value(f"f and P, {str(dtype)[6:]}") * want.abs().max()
        assert bool(((got.double() - want).abs() <= limit).all())


def lowered(x: torch.Tensor, *gates: list[Gate]) -> list[Any]:
    """Return what the operator takes for the gates of two tensors like x."""
    stages = Stages((None, None), gates)
    return lower(stages, "qk", [x, x], BY_NAME["bhsd"], RopeSpec(8).at(), False)


def test_a_factor_has_no_logarithm_but_products() -> None:
    """A product with gates that have one is of factors; an inverse rotation divides by it."""
    x, own, gamma = noise(2, 3, 5, 8), noise(3, 8, seed=1), noise(8, seed=2)
    both = [Factor(own), Exp(gamma), Scalar(2.0)]
    found, _ = lowered(x, both, [])
    code, product = found.kind[1], found.gate
    assert code == schema.FACTOR
    assert_near(product, 2 * own[None, :, None] * gamma.exp(), "float64 ways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[Factor\] the gate must be read by factor\(\)"):
        both[0].log_factor(CHANNELS)
    y = rotate(x, RopeSpec(8), 3, gate=both[0])
    assert_near(rotate(y, RopeSpec(8), 3, gate=both[0], inverse=True), x, "float64 ways")


def test_q_and_k_have_tensors_of_their_own_in_one_launch() -> None:
    """Without gradients too, where less is checked; what calls of one rotation share is of their tokens."""
    x, spec = noise(2, 3, 5, 8, dtype=torch.float32), RopeSpec(8)
    first, second = (noise(8, seed=n, dtype=torch.float32) for n in (1, 2))
    for option, kind in (
        *(("gate", kind) for kind in (Exp, Factor, gates.Slope)),
        ("act", RMSNorm),
    ):
        q, k = rotate_qk(x, x, spec, 3, **{option: (kind(first), kind(second))})
        for y, own in ((q, first), (k, second)):
            assert_same_bits(y, rotate(x, spec, 3, **{option: kind(own)}))
    gate, rope = XPos(7.0), spec.at(3)
    for tokens in (2, 5):
        some = x[:, :, :tokens]
        assert_same_bits(rotate(some, rope, gate=gate), rotate(some, spec, 3, gate=gate))


# --- factors of gates -----------------------------------------------------------------------------

CHANNELS, HALF, F64 = Channels(8, 0, 8, True), Channels(8, 2, 4, False), torch.float64


def test_scalar_and_products() -> None:
    factor = Scalar(3.0).factor(CHANNELS, dtype=F64)
    assert_near(factor, torch.full((1, 1, 1, 1), 3.0, dtype=F64), "float64 ways")
    value = torch.tensor(3.0, requires_grad=True)
    (grad,) = torch.autograd.grad(Scalar(value).factor(CHANNELS).sum(), value)
    assert_near(grad, torch.tensor(1.0), "float32 ways")
    x, gamma = noise(2, 3, 5, 8), noise(3, 8)
    found, of_none = lowered(x, [Exp(gamma), Scalar(2.0)], [])
    assert_near(found.gate.exp(), gamma.exp()[None, :, None] * 2, "float64 ways")  # type: ignore[union-attr]
    assert of_none == ((0, schema.NO_GATE, 0.0), None, None)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize("centre", [4, 0.3, 2.0**24 + 0.25, 1e9, 2.0**31])
def test_xpos_is_the_formula_of_the_paper(kind: torch.dtype, centre: float) -> None:
    """For any token alone; the distance of a position from the centre is exact, even far from 0."""
    gate = XPos(centre=centre, scale_base=32.0, smoothing=0.4)
    near = [int(centre) - 70, int(centre) - 1]
    for dtype, digits in ((F64, 1e-12), (torch.float32, 1e-6)):
        got = gate.factor(HALF, torch.tensor([near], dtype=kind), dtype)
        for token, position in enumerate(near):
            for channel in range(8):
                # Channels 2 to 5 rotate, as pairs of halves.
                zeta = (2 * (channel % 2) / 4 + 0.4) / 1.4 if 2 <= channel < 6 else 1.0
                wanted = zeta ** ((position - centre) / 32)
                assert math.isclose(got[0, 0, token, channel].item(), wanted, rel_tol=digits)
        alone = gate.factor(HALF, torch.tensor([near[1:]], dtype=kind), dtype)
        assert torch.equal(alone[:, :, 0], got[:, :, 1])
    opposite = gate.for_keys().factor(HALF, torch.tensor([near], dtype=kind), torch.float32)
    assert_near(got * opposite, torch.ones_like(got), "float32 ways")
    assert gates.pair((gate, gate))[1] == gate
    assert gates.pair(gate)[1] == gate.for_keys() != gate == gate.for_keys().for_keys()


def test_xpos_up_to_the_last_position_that_fits() -> None:
    """Beyond it is an error, or NaN where positions cannot be read."""
    gate, last = XPos(centre=0), 36260  # floor(ln(largest float32) · 512 / ln(1.4 / 0.4))
    got = gate.factor(CHANNELS, torch.tensor([[-last, last]]))
    assert (got.isfinite() & (got > 0)).all()
    with pytest.raises(ValueError, match="overflows float32"):
        gate.factor(CHANNELS, torch.tensor([[last + 1]]))
    where = torch.tensor([[1.0, 1e9]])
    got = torch.func.vmap(lambda w: gate.factor(CHANNELS, w[None]))(where)
    assert got[..., 0, :].isfinite().all()
    assert got[..., 1, 0].isnan().all()
