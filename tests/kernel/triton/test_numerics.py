"""Numbers that the Triton kernels compute: angles, activations, gates and sums, far from 0 and at their ends.

Where they run is explained in tests/support/triton/cases.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support import oracle, oracle_rounding as rounded
from tests.support.helpers import noise
from tests.support.tolerances import Result, assert_near, assert_rotated, assert_same_bits, value
from tests.support.triton.cases import (
    DEVICE,
    HAS_GPU,
    needs_triton,
    on_this_device,
    operators,
    words,
)
from tightrope import RopeSpec, gates
from tightrope._rounding import ROUNDINGS
from tightrope.activations import ACTS, RMS_NORM
from tightrope.backends.reference import compose
from tightrope.frequencies import Given
from tightrope.functional import rotate
from tightrope.ops.schema import (
    FULL,
    HALF,
    PHASES,
    TRANSPOSE,
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


NO_TURNS = -(2**63)


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


def lost(dtype: torch.dtype) -> torch.Tensor:
    """Return phases of 2 rows and 4 tokens, of which one stands for NaN."""
    found = torch.arange(24, device=DEVICE).view(2, 1, 4, 3).to(dtype)
    found[1, 0, 2, 1] = torch.iinfo(dtype).min
    return found


def lost_positions() -> Any:
    ids = torch.tensor([1.0, math.nan, math.inf, -1e30], device=DEVICE)
    return words(1, 1, 1, 3), None, ids[None, None], 0, Options(add_index=False), 1.0


def lost_frequencies() -> Any:
    turns = torch.tensor([0, NO_TURNS, 0], device=DEVICE)
    return words(1, 1, 1, 3), turns.view(1, 1, 1, 3), None, 0, Options(), 1.0


def outside_a_table(length: int) -> Any:
    ids = torch.tensor([[[0, 4, 5, -1]]], device=DEVICE)
    table = torch.ones(1, 1, length, 4, device=DEVICE)
    return table, table, ids, 0, Options(add_index=False, source=HALF), 1.0


LOST = {
    "positions": (lost_positions, 3 * 6),
    "frequencies": (lost_frequencies, 4 * 2),
    "phases of 32 bits": (
        lambda: (lost(torch.int32), None, None, 0, Options(source=PHASES, add_index=False), 1.0),
        1,
    ),
    "phases of 64 bits, beside words": (
        lambda: (lost(torch.int64), words(1, 1, 3, 3), None, 0, Options(source=PHASES), 1.0),
        1,
    ),
    "positions outside a table": (lambda: outside_a_table(5), 4 * 8),
    "positions in an empty table": (lambda: outside_a_table(0), 8 * 8),
}


@pytest.mark.parametrize("kind", LOST)
def test_what_has_no_angle_becomes_nan(kind: str) -> None:
    """Those channels alone, and the same as in the definition."""
    make, _ = LOST[kind]
    (y,), (want,) = against(torch.ones(2, 3, 4, 8, device=DEVICE), *make())
    assert torch.equal(y.isnan(), want.isnan())
    assert 0 < want.isnan().sum()
    assert kind == "positions in an empty table" or want.isnan().sum() < want.numel()


# --- rounding and tables --------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rounding", range(3))
def test_roundings_and_full_tables(rounding: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Roundings "each" and "wide" give the bits of their formulas, by tables and by phase words."""
    name, x = ROUNDINGS[rounding], noise(2, 3, 5, 40, seed=1).to(dtype).to(DEVICE)
    turning, own = x[..., 2:38], Options(start=2, interleaved=interleaved, rounding=rounding)
    tables = [noise(1, 1, 5, 36, seed=seed).to(DEVICE) for seed in (2, 3)]
    for held, step in ((dtype, 1), (torch.float32, 1), (torch.float32, 2)):
        # With step 2, the entries of a table are not adjacent in memory.
        cos, sin = (torch.stack((t.to(held),) * step, -1).flatten(-2)[..., ::step] for t in tables)
        for back in (False, True):
            options = own._replace(direction=TRANSPOSE if back else 0, source=FULL)
            (y,), (near,) = against(x, cos, sin, None, 0, options, 1.0)
            assert_same_bits(y[..., :2], x[..., :2])
            if name == "once":
                torch.testing.assert_close(y, near.to(dtype))
            else:
                want = rounded.rotate(turning, cos, sin, interleaved, name, back)
                assert_same_bits(y[..., 2:38], want)
    if name == "once":
        return
    first = torch.zeros(1, 1, 5, 36, device=DEVICE)
    first[..., oracle.channels(36, 0, interleaved)[0]] = 1
    given = words(1, 1, 1, 18), None, None, 7
    still = Options(interleaved=interleaved)
    (seen,), _ = against(first, *given, still, 1.5)
    held = dtype if name == "each" else torch.float32
    cos, sin = (
        rounded.join(one, one, interleaved).to(held) for one in rounded.split(seen, interleaved)
    )
    (y,), _ = against(x, *given, own._replace(narrow=rounding == 2), 1.5)
    assert_same_bits(y[..., 2:38], rounded.rotate(turning, cos, sin, interleaved, name))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", ["cat", "repeat", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_other_dtypes(dtype: torch.dtype, source: str) -> None:
    """Of rows and heads, with rows in any order, and one head of another width."""
    width = {"half": 8}.get(source, 16)
    angles = 100 * noise(2, 3, 9, width, seed=2)
    if source == "cat":
        angles = torch.cat((angles[..., :8],) * 2, -1)
    elif source == "repeat":
        angles = angles[..., :8].repeat_interleave(2, -1)
    ids = torch.tensor([[[3, 0, 8, 8, 2]]], device=DEVICE)
    kind = ("cat", "repeat", "half").index(source) + 1
    x = noise(2, 3, 5, 20, seed=3).to(dtype).to(DEVICE)
    for held in DTYPES:
        for inverse in (0, 2):
            cos, sin = (t.to(held).to(DEVICE) for t in (angles.cos(), angles.sin()))
            options = Options(start=3, add_index=False, source=kind, direction=inverse)
            (y,), (want,) = against(x, cos, sin, ids, 0, options, 1.3)
            name = "triton, float64" if dtype == torch.float64 else "triton, float32"
            bound = value(name) * want.abs().amax(-1, keepdim=True)
            if dtype.itemsize == 2:
                bound = bound + oracle.step_sizes(want, dtype) / 2
            assert bool(((y.double() - want).abs() <= bound).all())


# --- activations and gates ------------------------------------------------------------------------

ELEMENTWISE = [name for name in ACTS[1:] if name not in ("softmax", "rms_norm")]
SMALL = torch.logspace(-30, 1.9, 100)
REACH = torch.cat([torch.linspace(-12, 12, 481), SMALL, -SMALL, torch.zeros(1)])
ENDS = torch.tensor([math.inf, -math.inf, math.nan])


def rounds_twice(self: Any, x: Any, y: Any, z: Any) -> Any:
    """A multiply-add that rounds twice, like that of the interpreter before Triton 3.9."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)


def acted(act: str, direction: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f or f' of numbers by the kernel and by the definition, for a head that does not turn."""
    x = x.reshape(1, 1, 1, -1).to(DEVICE)
    still = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=DEVICE)
    options = Options(act=ACTS.index(act), direction=direction)
    given, extras = (torch.ones_like(x), [x]) if direction else (x, [])
    (got,), (want,) = against(given, still, None, None, 0, options, 1.0, extras=extras)
    return got.double().flatten().cpu(), want.flatten().cpu()


@pytest.mark.parametrize(
    "fused",
    [True, pytest.param(False, marks=pytest.mark.skipif(HAS_GPU, reason="a GPU rounds once"))],
    ids=["", "rounded twice"],
)
@pytest.mark.parametrize("act", ELEMENTWISE)
def test_acts_over_their_whole_range(
    act: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elementwise activations and their derivatives are accurate relative to their own size.

    The derivatives of silu and gelu, which pass through 0, have an absolute bound in addition.
    """
    if not fused:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_fma", rounds_twice)
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
