"""Prologues and epilogues (f and P), forward and backward, compared with float64 formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle, oracle_acts, tolerances
from tests.support.helpers import noise, refusals
from tests.support.matrix import every_backend, every_dtype, needs_kernel
from tightrope import RopeSpec, gates
from tightrope.activations import ACTS, RMSNorm
from tightrope.functional import rotate, rotate_qk, rotate_qk_
from tightrope.ops import gradients, schema

NAMES = ACTS[1:-1]
OFFSET = 7


def assert_formula(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str = ""
) -> None:
    """Assert closeness, relative to the largest element along the last dimension of `want`."""
    assert got.shape == want.shape
    bound = tolerances.value(f"f and P, {str(dtype)[6:]}")
    size = want.abs().amax(-1, keepdim=True)
    error = ((got.double() - want).abs() / size.clamp(min=1e-30)).max().item()
    assert error <= bound, (what, error)


def wanted(x, name, spec, log=None, weight=None, eps=1e-6, offset=0.0):
    """Compute the reference result in float64; `log` is the logarithm of the gate's factors."""
    inside = (
        oracle_acts.norm(x, weight, eps, offset) if name == "rms_norm" else oracle_acts.act(name, x)
    )
    angle = oracle_acts.angles(x.shape[2], OFFSET, spec.rotary_dim)
    y = oracle_acts.turn(inside, angle, spec.start, spec.interleaved)
    return y if log is None else y * torch.exp(log)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*NAMES, "rms_norm", "gate"])
def test_results_are_rounded_once(name, dtype) -> None:
    """At least 99.9 % of 16-bit results are the exact value correctly rounded."""
    spec, x = RopeSpec(128), noise(1, 8, 128, 128, dtype=dtype)
    weight, gamma = noise(128, seed=3).float(), (0.1 * noise(8, 128, seed=4)).float()
    act = RMSNorm(weight) if name == "rms_norm" else None if name == "gate" else name
    gate = gates.Exp(gamma) if name == "gate" else None
    y = rotate(x, spec, OFFSET, act=act, gate=gate)
    log = gamma.double()[:, None] if name == "gate" else None
    inside = "none" if name == "gate" else name
    want = wanted(x.double(), inside, spec, log, weight.double()).to(dtype)
    assert (y == want).double().mean().item() >= tolerances.value("f and P, rounded once")


@every_dtype
@pytest.mark.parametrize("name", [*NAMES, "softmax"])
def test_each_channel_is_near_its_formula(name, dtype) -> None:
    """And its gradient. A sum over all channels would hide a channel that is off by more than the others."""
    unit = tolerances.value("activation, float64" if dtype == torch.float64 else "activation")
    spec, x = RopeSpec(40, rotary_dim=2), noise(20, 10, 1, 40, dtype=dtype)
    cotangent = noise(20, 10, 1, 40, dtype=dtype, seed=1)
    # The only token is at position 0, which does not rotate, so y is f(x).
    found, wanted = [], []
    for leaf, f, ys in (
        (x.clone(), lambda x: rotate(x, spec, act=name), found),
        (x.double(), lambda x: oracle_acts.act(name, x), wanted),
    ):
        y = f(leaf.requires_grad_())
        ys += y.detach(), *torch.autograd.grad(y, leaf, cotangent.to(y.dtype))
    slope = torch.func.jvp(
        lambda x: oracle_acts.act(name, x), (x.double(),), (torch.ones_like(x).double(),)
    )[1]
    if name == "softmax":
        sizes = [wanted[0] * (1 + x.double().abs())] * 2
    else:
        sizes = [
            wanted[0].abs() + (x.double() * slope).abs(),
            cotangent.double().abs() * slope.abs().clamp(min=1),
        ]
    for got, want, size in zip(found, wanted, sizes, strict=True):
        bound = unit * size
        if dtype.itemsize == 2:
            bound = bound + oracle.step_sizes(want, dtype) / 2
        assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("name", ["sigmoid", "silu", "exp"])
def test_every_bfloat16(name) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[(every.abs() >= 2**-60) & (every.abs() <= 88)]
    y = rotate(x[None, None, None], RopeSpec(len(x), rotary_dim=2), act=name)[0, 0, 0]
    want = oracle_acts.act(name, x.double()).bfloat16()
    assert int((y != want).sum()) <= tolerances.value("every bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_far_values(name, dtype) -> None:
    """f is accurate and its gradient finite where a naive formula would overflow or lose digits."""
    spec = RopeSpec(40, rotary_dim=2)
    top = 80.0 if name in ("exp", "softplus") else 700.0
    x = torch.linspace(-top, top, 40, dtype=dtype)[None, None, None]
    if name in ("sin", "cos"):
        x = x * 1e4
    leaf = x.clone().requires_grad_()
    y = rotate(leaf, spec, act=name)
    y.sum().backward()
    exact = x.double().requires_grad_()
    want = oracle_acts.act(name, exact.clamp(-300, 300) if name == "tanh" else exact)
    want.sum().backward()
    tail = tolerances.value("f, float32")
    # The only token is at position 0, which does not rotate, so y is f(x).
    assert bool(((y.double() - want).abs() <= tail * want.abs() + 1e-30).all()), name
    assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"softmax"}))
def test_a_far_value_changes_no_bit_of_its_neighbours(name) -> None:
    """In float64 the kernel takes a longer path for a head with a value that is far away."""
    x = 12 * noise(1, 1, 3, 40, dtype=torch.float64)
    x[0, 0, 1, 39] = 1e4
    x[0, 0, 2, 39] = torch.nan
    x[..., :39] = x[0, 0, 0, :39]
    leaf = x.requires_grad_()
    y = rotate(leaf, RopeSpec(40, rotary_dim=2), torch.zeros(3, dtype=torch.int64), act=name)
    (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    for found in (y.detach(), grad):
        assert torch.equal(found[0, 0, 0, :39].expand(3, -1), found[0, 0, :, :39])


def test_no_number_stays_none() -> None:
    for name in NAMES:
        x = torch.full((1, 1, 2, 8), torch.nan)
        x[0, 0, 1] = 1.0
        y = rotate(x, RopeSpec(8), act=name)
        assert bool(y[0, 0, 0].isnan().all()), name
        assert bool(y[0, 0, 1].isfinite().all()), name


@every_backend
@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_the_slope_at_nan_is_that_of_torch(name, backend) -> None:
    x = torch.full((1, 1, 1, 8), torch.nan, requires_grad=True)
    one = torch.ones(8).reshape(x.shape)
    (got,) = torch.autograd.grad(rotate(x, RopeSpec(8), act=name, backend=backend), x, one)
    (want,) = torch.autograd.grad(getattr(torch.nn.functional, name)(x), x, one)
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
    assert bool(y.isnan().all())


@every_backend
@pytest.mark.parametrize("size", [1e18, 3e19])
def test_a_norm_of_squares_that_overflow_is_that_of_torch(size, backend) -> None:
    x = torch.full((1, 1, 1, 8), size)
    got = rotate(x, RopeSpec(8), act=RMSNorm(eps=1e-6), backend=backend)
    want = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
    tolerances.assert_near(got, want, "float32 ways")


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, weight", [(3e38, 1.0), (1e38, 100.0), (1e15, 1e24)])
def test_a_norm_before_a_turn_that_would_overflow(size, weight, dtype, backend) -> None:
    x, scale = torch.full((1, 2, 9, 64), size, dtype=dtype), torch.full((64,), weight)
    got = rotate(x, RopeSpec(64), OFFSET, act=RMSNorm(scale), backend=backend)
    want = wanted(x.double(), "rms_norm", RopeSpec(64), None, scale.double())
    want = torch.zeros_like(want) if size > 1e19 else want  # like torch: see RMSNorm
    assert_formula(got / weight, want / weight, dtype)


def test_a_norm_without_a_weight_and_with_nothing_to_sum() -> None:
    spec, x = RopeSpec(16), noise(2, 3, 4, 16)
    want = wanted(x, "rms_norm", spec)
    assert_formula(rotate(x, spec, OFFSET, act=RMSNorm()), want, torch.float64)
    weight = torch.ones(16, requires_grad=True)
    empty = torch.zeros(1, 3, 0, 16, requires_grad=True)
    rotate(empty, spec, act=RMSNorm(weight)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(16))


def by_slopes(slopes, ids, dtype, backend="cpu"):
    """Return a slope gate's factors, (tokens, heads, channels): apply it to unrotated ones."""
    width = slopes.shape[1]
    x = torch.ones(1, len(ids), len(slopes), width, dtype=dtype)
    still = torch.zeros(width // 2, dtype=torch.float64)
    gate = gates.Slope(slopes)
    spec = RopeSpec(width)
    return rotate(x, spec, ids, inv_freq=still, gate=gate, layout="bshd", backend=backend)[0]


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
def test_slopes_of_heads_lose_no_digit_of_the_position(dtype, position, heads, half, same, seed):
    most = 80.0 if dtype != torch.float16 else 8.0
    logs = (most / 2 * noise(heads, 1 if same else 2 * half, seed=seed)).clamp(-most, most)
    slopes = (logs / max(1.0, abs(position))).float().double().expand(heads, 2 * half)
    kind = torch.int64 if isinstance(position, int) else torch.float64
    found = by_slopes(slopes, torch.tensor([position], dtype=kind), dtype)[0].double()
    want = torch.exp(slopes * position)
    fits = want < torch.finfo(dtype).max / 2
    bound = tolerances.value("f, float32") * want
    if dtype != torch.float32:
        bound = (
            bound + want.to(dtype).double() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
        )
    assert ((found - want).abs() <= bound)[fits].all()


@every_backend
@every_dtype
def test_slopes_without_end(dtype, backend) -> None:
    """Infinite slopes, NaN, and slopes whose factor overflows give the result of torch.exp."""
    edges = [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 1e20, -1e20, 3e38, -3e38]
    several = torch.tensor(edges, dtype=torch.float64).repeat(4)
    for strange in ([], [math.inf], [-math.inf], [math.nan]):
        slopes = torch.stack([several, several.flip(0), torch.full_like(several, -1e4)])
        slopes[1, : len(strange)] = torch.tensor(strange, dtype=torch.float64)
        ids = torch.tensor([-3, 0, 1, 2**31 - 1])
        found = by_slopes(slopes.float(), ids, dtype, backend)
        want = torch.exp(slopes.float().double() * ids[:, None, None])
        torch.testing.assert_close(found, want.to(dtype), equal_nan=True)


@every_backend
def test_an_overflow_that_a_gate_undoes_has_gradients_by_angles(backend) -> None:
    """Gradients by positions are right where f overflows float16 but f times the gate does not.

    Here f = exp(12), and the gate is 1/8.
    """
    spec, x = RopeSpec(4), torch.full((1, 1, 2, 4), 12.0, dtype=torch.float16)
    found = []
    for dtype in (torch.float16, torch.float64):
        ids = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
        gate = gates.Scalar(0.125)
        y = rotate(x.to(dtype), spec, ids, act="exp", gate=gate, backend=backend)
        assert y.isfinite().all()
        found += torch.autograd.grad(y, ids, torch.ones_like(y))
    # y is rounded to float16 on the way.
    torch.testing.assert_close(*found, rtol=tolerances.value("f and P, float16"), atol=0)


@needs_kernel
@settings(max_examples=25, deadline=None)
@given(
    act=st.sampled_from(NAMES),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 40),
    half=st.integers(1, 40),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_bits_depend_on_the_token_alone(act, heads, tokens, half, interleaved, dtype) -> None:
    """A token has the same bits beside others and alone, among strided channels and beside k."""
    spec = RopeSpec(2 * half, interleaved=interleaved)
    x = noise(2, heads, tokens, 2 * half, dtype=dtype)
    weight = noise(2 * half, seed=3)
    slope = gates.Slope(0.01 * noise(2 * half, seed=4))
    own = gates.Slope(0.01 * noise(heads, 2 * half, seed=4))
    for f, gate in ((act, None), (RMSNorm(weight), slope), (act, own)):
        y = rotate(x, spec, OFFSET, act=f, gate=gate)
        spread = x.repeat_interleave(2, -1)[..., ::2]
        both = rotate_qk(spread, x, spec, OFFSET, act=f, gate=gate)
        assert torch.equal(both[0], y)
        assert torch.equal(both[1], y)
        one = rotate(x[1:, :, -1:], spec, OFFSET + tokens - 1, act=f, gate=gate)
        assert torch.equal(one, y[1:, :, -1:])


@needs_kernel
def test_sums_are_the_same_for_any_number_of_threads() -> None:
    spec = RopeSpec(64)
    x = noise(2, 4, 300, 64, dtype=torch.float32)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        weight, gamma = (
            torch.ones(64, requires_grad=True),
            torch.zeros(4, 64, requires_grad=True),
        )
        for turned in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            y = rotate(turned, spec, act=RMSNorm(weight), gate=gates.Exp(gamma))
            found.append(torch.autograd.grad(y, (weight, gamma), x))
    for by_weight, by_gamma in found[1:]:
        assert torch.equal(by_weight, found[0][0])
        assert torch.equal(by_gamma, found[0][1])


def test_one_sum_of_the_definition_is_the_same_for_any_number_of_threads() -> None:
    """The bits stay the same although torch splits a sum with a single result among threads."""
    y, grad = noise(2, 8, 512, 64), noise(2, 8, 512, 64, seed=1)
    gate = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    options = schema.Options(gate=schema.LOG).pack()
    found = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        found += gradients.gate_gradients(y, None, grad, None, gate, None, None, 0, options)
    for one in found[1:]:
        assert torch.equal(one, found[0])


@needs_kernel
def test_the_definition_sums_gate_gradients_as_the_kernel_does() -> None:
    """It runs where there is no kernel. Rows, heads and tokens all have several elements."""
    y, grad, ids = noise(2, 3, 5, 8), noise(2, 3, 5, 8, seed=1), 10 * noise(1, 2, 5, seed=2)
    for kind, shape in (
        *((schema.SLOPE, shape) for shape in ((3, 8), (1, 8), (3, 1))),
        *((schema.LOG, shape) for shape in ((2, 3, 5, 8), (1, 3, 1, 8), (2, 1, 5, 1))),
    ):
        options = schema.Options(add_index=False, gate=kind).pack()
        call = (y, None, grad, None, noise(*shape, seed=3), None, ids, 3, options)
        wanted = schema.gate_gradients(*call)
        tolerances.assert_near(gradients.gate_gradients(*call), wanted, "float64 ways")


def test_kinds_that_differ_and_kinds_of_none() -> None:
    spec, q, k = RopeSpec(8), noise(1, 2, 3, 8), noise(1, 1, 3, 8, seed=1)
    gate = gates.Exp(noise(8, seed=2))
    y, z = rotate_qk(q, k, spec, act=("silu", None), gate=(None, gate))
    assert torch.equal(y, rotate(q, spec, act="silu"))
    assert torch.equal(z, rotate(k, spec, gate=gate))
    outs = torch.empty_like(q), torch.empty_like(k)
    rotate_qk(q, k, spec, act=("silu", None), gate=(None, gate), out=outs)
    assert torch.equal(outs[0], y)
    assert torch.equal(outs[1], z)
    assert torch.equal(rotate(q, spec, act="none"), rotate(q, spec))
    a, b = q.clone(), k.clone()
    rotate_qk_(a, b, spec, act=("silu", None), gate=(None, gate))
    assert torch.equal(a, y)
    assert torch.equal(b, z)
    # A single xPos gate is inverted for k.
    xpos = gates.XPos(0)
    y, z = rotate_qk(q, k, spec, 5, gate=xpos)
    assert torch.equal(z, rotate(k, spec, 5, gate=xpos.for_keys()))


X = torch.zeros(1, 2, 3, 8)
META = torch.ones(8, device="meta")
LEARNED = gates.Exp(torch.zeros(8, requires_grad=True))


def turn(**options):
    return lambda: rotate(X, RopeSpec(8), **options)


test_errors = refusals(
    ValueError={
        "[rotate] act must be one of none, relu, …": turn(act="swish"),
        **{
            "[rotate] act must be given as RMSNorm(weight), or RMSNorm() without a weight, but got "
            f"{act!r}.": turn(act=act)
            for act in ("rms_norm", "rmsnorm")
        },
        "[rotate_qk] act must be one activation, or a pair for q and k, but got 3 of them.": (
            lambda: rotate_qk(X, X, RopeSpec(8), act=("silu",) * 3)
        ),
        "[rotate] inverse must be False with an act…": turn(act="exp", inverse=True),
        "[rotate] the weight of RMSNorm for x must have shape (8,) or (2, 8) …": (
            turn(act=RMSNorm(torch.ones(7)))
        ),
        "[rotate] the weight of RMSNorm is on meta but x is on cpu.": turn(act=RMSNorm(META)),
        "[RMSNorm] weight must have shape …": lambda: RMSNorm(torch.ones(1, 2, 3)),
        "[RMSNorm] eps must be finite and at least 0 …": lambda: RMSNorm(eps=-1.0),
        "[rotate] the gate Exp must have 1 or 2 heads for x but got 3 …": (
            turn(gate=gates.Exp(torch.zeros(3, 8)))
        ),
        "[rotate] a result written to out has no gradient, but act or gate require one…": (
            turn(gate=LEARNED, out=torch.empty_like(X))
        ),
    },
    TypeError={
        "[rotate] act must be a single value for one tensor but got a pair.": (
            turn(act=("silu", None))
        ),
        "[rotate] gate must be a single value for one tensor but got a pair.": (
            turn(gate=(None, None))
        ),
        "[rotate] act must be None, one of none, …": turn(act=3),
        "[rotate] gate must be None, a gate …": turn(gate=2.0),
        "[RMSNorm] weight must be a floating tensor …": lambda: RMSNorm(torch.ones(3).long()),
        "[RMSNorm] eps must be a number …": lambda: RMSNorm(eps="1"),
        "[RMSNorm] unit_offset must be a bool …": lambda: RMSNorm(unit_offset=1),
    },
)


@pytest.mark.parametrize(
    "call", [lambda module: rotate(X, RopeSpec(8), act=module), RMSNorm], ids=["act", "weight"]
)
def test_a_module_in_place_of_a_norm(call: Callable[[torch.nn.Module], object]) -> None:
    hint = r"but got RMSNorm\(.*\); pass the module's weight: RMSNorm\(module.weight, eps=...\)\.$"
    with pytest.raises(TypeError, match=hint):
        call(torch.nn.RMSNorm(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_prepared_call_sees_every_change_of_a_weight(dtype) -> None:
    """The fast path of a prepared rotation uses the current values of norm weights."""
    spec = RopeSpec(8)
    q, k = torch.randn(2, 3, 1, 8).to(dtype), torch.randn(2, 1, 1, 8).to(dtype)
    rope = spec.at(9)
    weights = [torch.nn.Parameter(torch.rand(8).to(dtype)), torch.nn.Parameter(torch.rand(1, 8))]
    acts = tuple(RMSNorm(weight, 1e-5) for weight in weights)
    for change in (None, "in place", "data", "version"):
        with torch.no_grad():
            for weight in weights:
                if change == "in place":
                    weight.mul_(2)
                elif change == "data":
                    weight.data = torch.rand(weight.shape).to(weight.dtype)
                elif change == "version":
                    weight.data.add_(1)
            for act in (acts, "silu", ("silu", "relu"), (acts[0], None)):
                rotate_qk(q, k, rope)  # fills the cache of the prepared rotation
                expected = rotate_qk(q, k, spec, 9, act=act)
                for got in (
                    rotate_qk(q, k, rope, act=act),
                    rotate_qk_(q.clone(), k.clone(), rope, act=act),
                ):
                    assert all(map(torch.equal, got, expected))
    y, _ = rotate_qk(q, k, rope, act=acts)
    assert torch.autograd.grad(y.sum(), weights[0])[0].abs().sum() > 0
    with pytest.raises(ValueError, match="inverse must be False with an act"):
        rotate_qk(q, k, rope, act=acts, inverse=True)
