"""Numbers that the Triton kernels compute: angles, activations, gates and sums, far from 0 and at their ends.

Where they run is explained in tests/support/triton/cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import Watcher, noise, on
from tests.support.tolerances import Result, assert_near, assert_rotated, value
from tests.support.triton.cases import (
    DEVICE,
    needs_fma,
    needs_triton,
    on_this_device,
    operators,
    words,
)
from tightrope import RopeSpec, gates, phases
from tightrope.activations import ACTS, RMS_NORM
from tightrope.backends.reference import compose
from tightrope.frequencies import Given
from tightrope.functional import rotate
from tightrope.ops.schema import (
    HALF,
    PHASES,
    Options,
)
from tightrope.positions import explicit

__all__ = ["on_this_device"]

pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("on_this_device"),
    # Of the interpreter's numpy, about what masks leave out.
    pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore::RuntimeWarning"),
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FAR = torch.tensor([0, 1, 8191, 131_071, 1_048_575, 2**31 - 2, -5, -(2**31)])
FINE = torch.arange(0, 60, 4)
FRACTIONS = torch.tensor([0.5, 1 / 3, -2.75, 1000.1, 65536.015625], dtype=torch.float64)


def against(x: torch.Tensor, *rest: Any, extras: Any = (), eps: float = 0.0) -> tuple[Any, Any]:
    """Return the results of a raw call and those of the definition in float64."""
    primary, secondary, ids, offset, options, amplitude = rest
    found = operators().rotate(
        x, None, primary, secondary, ids, offset, options.pack(), amplitude, list(extras), eps
    )
    wide = [t if t is None or not t.is_floating_point() else t.double() for t in rest[:3]]
    more = [t.double() for t in extras]
    want = compose(x.double(), None, *wide, offset, options.pack(), amplitude, more, eps)
    return found, want


# --- angles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_are_those_of_the_oracle(dtype: torch.dtype, interleaved: bool) -> None:
    """The same in 16 bits, which are rounded once; that takes many numbers to see."""
    heads = 2 if dtype in (torch.float32, torch.float64) else 32
    spec, omegas = RopeSpec(64, interleaved=interleaved), oracle.frequencies(10000.0, 64)
    for ids in (FAR, FRACTIONS):
        x = noise(1, heads, len(ids), 64, seed=1).to(dtype)
        y = rotate(x.to(DEVICE), spec, explicit(ids.to(DEVICE)))
        exact = oracle.rotate(x, ids[None], omegas, interleaved=interleaved)
        lengths = oracle.pair_lengths(x, 64, interleaved=interleaved)
        reach = float(ids.double().abs().max()) if dtype == torch.float64 else 0.0
        assert_rotated([Result(y.cpu(), exact, lengths, reach)])


def test_turns_count_for_fractions() -> None:
    """Frequencies of one turn per position or more are accurate at fractional positions."""
    omegas = [2 * math.pi, 5 * math.pi, 100.0]
    x, ids = noise(1, 1, 5, 6, seed=1).float(), FRACTIONS.remainder(8)
    y = rotate(x.to(DEVICE), RopeSpec(6, scaling=Given(tuple(omegas))), explicit(ids.to(DEVICE)))
    exact = oracle.rotate(x, ids[None], [oracle.MP.mpf(omega) for omega in omegas])
    assert_rotated([Result(y.cpu(), exact, oracle.pair_lengths(x, 6))])


def test_cosines_and_sines_of_critical_phases() -> None:
    """Random phases, small ones, and those around each multiple of an eighth of a turn, exactly reduced before."""
    generator, far = torch.Generator().manual_seed(1), 2**63 - 1
    random = torch.randint(-far, far, (8192,), generator=generator)
    small = random[:4096] >> torch.randint(0, 63, (4096,), generator=generator)
    edges = (torch.arange(8) << 61)[:, None, None] + (torch.arange(-16, 16)[:, None] << FINE)
    every = torch.cat((random, small, edges.flatten())).clamp(min=-far).view(1, 1, -1, 64)
    x = torch.tensor([1.0, 0.0]).repeat(1, 1, every.shape[2], 64)
    options = Options(source=PHASES, add_index=False, interleaved=True).pack()
    given = every.to(DEVICE), None, None, 0, options, 1.0
    (y,) = operators().rotate(x.to(DEVICE), None, *given)
    quarter = (every >> 61) + 1 >> 1
    rest = (every - (quarter << 62)).double() * (2 * math.pi / 2**64)
    one, other = rest.cos(), rest.sin()
    turned = torch.stack((one, -other, -one, other)), torch.stack((other, one, -other, -one))
    for found, want in zip((y[..., 0::2], y[..., 1::2]), turned):
        exact = want.gather(0, quarter.remainder(4)[None])[0]
        assert (found.cpu() - exact).abs().max() <= value("float32 angle")


LOST: dict[str, Callable[[torch.Tensor], Any]] = {
    "positions": lambda x: RopeSpec(8).at(x.new_tensor([1.0, math.nan, math.inf, -1e30])),
    "frequencies": lambda x: RopeSpec(8).at(inv_freq=x.new_tensor([1.0, math.nan, 2.0, 0.1])),
    "phases": lambda x: RopeSpec(8).at(phases=phases.given(x[..., :4])),
    "phases of each token alone": lambda x: RopeSpec(8, scaling=Given((0.0,) * 4)).at(
        phases=phases.given(x[:, :1, :, :1])
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LOST)
def test_what_has_no_angle_becomes_nan(kind: str, dtype: torch.dtype) -> None:
    """Those channels alone, and the same as in the definition; phases have 32 or 64 bits."""
    x = torch.ones(2, 3, 4, 8, dtype=dtype, device=DEVICE)
    lost = x.clone()
    lost[1, 0, 2, 0] = math.inf
    with Watcher():
        found, want = (on(by, rotate, x, LOST[kind](lost)) for by in (None, "reference"))
    assert torch.equal(found.isnan(), want.isnan())
    assert 0 < want.isnan().sum() < want.numel()


@pytest.mark.parametrize("length", [5, 0])
def test_positions_outside_a_table_give_nan(length: int) -> None:
    ids, table = torch.tensor([[[0, 4, 5, -1]]]).to(DEVICE), torch.ones(1, 1, length, 4).to(DEVICE)
    given = table, table, ids, 0, Options(add_index=False, source=HALF), 1.0
    (y,), (want,) = against(torch.ones(2, 3, 4, 8, device=DEVICE), *given)
    assert torch.equal(y.isnan(), want.isnan())
    assert want.isnan().any()


# --- activations and gates ------------------------------------------------------------------------

ELEMENTWISE = [name for name in ACTS[1:] if name not in ("softmax", "rms_norm")]
SMALL = torch.logspace(-30, 1.9, 100)
REACH = torch.cat([torch.linspace(-12, 12, 481), SMALL, -SMALL, torch.zeros(1)])
ENDS = torch.tensor([math.inf, -math.inf, math.nan])


def acted(act: str, direction: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f or f' of numbers by the kernel and by the definition, for a head that does not turn."""
    x = x.reshape(1, 1, 1, -1).to(DEVICE)
    still = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=DEVICE)
    options = Options(act=ACTS.index(act), direction=direction)
    given, extras = (torch.ones_like(x), [x]) if direction else (x, [])
    (got,), (want,) = against(given, still, None, None, 0, options, 1.0, extras=extras)
    return got.double().flatten().cpu(), want.flatten().cpu()


@pytest.mark.parametrize("act", ELEMENTWISE)
def test_acts_over_their_whole_range(act: str) -> None:
    """Elementwise activations and their derivatives are accurate relative to their own size.

    The derivatives of silu and gelu, which pass through 0, have an absolute bound in addition.
    """
    for direction in (0, 1):
        got, want = acted(act, direction, REACH)
        over = want.abs() > torch.finfo(torch.float32).max
        assert bool(got[over].isinf().all())
        bound = value("triton act") * want.abs() + value("float32 tiny")
        if direction and act in ("silu", "gelu"):
            bound = bound + value("triton slope")
        wrong = ~over & ~((got - want).abs() <= bound)
        assert not wrong.any(), REACH[wrong][:5]


@pytest.mark.parametrize("act", [act for act in ELEMENTWISE if act not in ("relu2", "sin", "cos")])
def test_infinities_are_those_of_the_definition(act: str) -> None:
    """And the slope at NaN: that of torch."""
    for direction in (0, 1):
        got, want = acted(act, direction, ENDS)
        assert_near(*(x.nan_to_num(7.0, 1e3, -1e3) for x in (got, want)), "float32 ways")
        if direction and act in ("relu", "leaky_relu"):
            assert want[2] == {"relu": 1.0, "leaky_relu": 0.01}[act]


@pytest.mark.parametrize("direction", [0, 1])
def test_a_norm_whose_sum_overflows_is_that_of_the_definition(direction: int) -> None:
    """Squares beyond float32's range have an infinite mean, so the result is 0."""
    x = torch.tensor([[3e19, -2.0, 1e20, 0.5], [1.0, 2.0, -3.0, 4.0]], device=DEVICE)[None, None]
    weight, options = torch.ones(1, 4, device=DEVICE), Options(act=RMS_NORM, direction=direction)
    given, extras = (torch.ones_like(x), [weight, x]) if direction else (x, [weight])
    got = operators().rotate(
        given, None, words(1, 1, 1, 2), None, None, 0, options.pack(), 1.0, extras, 1e-6
    )
    want = compose(given, None, words(1, 1, 1, 2), None, None, 0, options.pack(), 1.0, extras, 1e-6)
    assert not bool(got[0].isnan().any())
    assert_near(got, want, "float32 ways")


@pytest.mark.parametrize("make", [gates.Exp, gates.Slope])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_factor_beyond_float32_is_infinite(make: Any, dtype: torch.dtype) -> None:
    gate = make(torch.full((2, 8), 100.0, dtype=dtype, device=DEVICE))
    y = rotate(torch.ones(1, 2, 3, 8, device=DEVICE), RopeSpec(8, base=1e9), 1, gate=gate)
    assert torch.isinf(y[..., 4:]).all()


@needs_fma
@pytest.mark.parametrize("at", [2**30 + 29, -1.75])
def test_slopes_have_more_digits_than_float32(at: float) -> None:
    """P is accurate at e^±80 far from 0, and where positions are fractions."""
    still = RopeSpec(8, scaling=Given((0.0,) * 4))
    slope = torch.linspace(-80, 80, 8).div(abs(at) + 40)
    ids = at + torch.arange(40, dtype=torch.float64) * (1 if at > 0 else 0.9)
    x, gate = torch.ones(1, 1, 40, 8, device=DEVICE), gates.Slope(slope[None].to(DEVICE))
    y = rotate(x, still, explicit(ids.to(DEVICE)), gate=gate).double().cpu()
    want = (slope.double() * ids[:, None]).exp()
    assert ((y - want).abs() <= value("P of slopes, float32") * want).all()


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["heads of angles", "heads of gates"])
def test_sums_over_many_heads(over: str) -> None:
    """They are compensated: equal terms, whose roundings all go one way, add up to the exact sum."""
    heads = 200
    x = torch.full((1, heads, 1, 2), 0.1, device=DEVICE)
    grad = torch.tensor([-0.7, 0.3], device=DEVICE).expand_as(x)
    one, other = (t.double().flatten()[:2] for t in (x, grad))
    if over == "heads of angles":
        (_, got) = operators().angle_gradients(
            x, None, grad, None, words(1, 1, 1, 1), None, None, 1, Options().pack(), False, True
        )
        want = heads * (one[0] * other[1] - one[1] * other[0])
    else:
        gate = torch.zeros(1, 1, 1, 2, device=DEVICE)
        (got,) = operators().gate_gradients(
            x, None, grad, None, gate, None, None, 0, Options(gate=1).pack()
        )
        want = heads * one * other
    error = (got.double().flatten().cpu() / want - 1).abs().max().item()
    assert error <= 4 * value("float32 rounding")
