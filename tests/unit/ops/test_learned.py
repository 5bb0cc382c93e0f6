"""Frequencies given by the caller or learned (`inv_freq`): values, gradients and errors."""

import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import oracle, tolerances
from tests.support.helpers import noise, refusals
from tests.support.matrix import both_pairings, every_backend, every_dtype
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, angles, gates, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.nn import LrpeRotate1d
from tightrope.ops import autograd, schema

NARROW = r"\[inv_freq\] frequencies should be float32"

SPEC = RopeSpec(8, rotary_dim=6, start=1)
PLANE = RopeSpec(8, axes=Axes.blocks((2, 2)))
TOKENS = torch.arange(5)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return noise(*shape, seed=seed, dtype=dtype).requires_grad_()


# --- truth ----------------------------------------------------------------------------------------


def formula(
    x: torch.Tensor, theta: torch.Tensor, at: torch.Tensor, spec: RopeSpec, inverse: bool = False
) -> torch.Tensor:
    """Rotate x (rows, heads, tokens, channels) with torch's float64 functions.

    Args:
        theta: (axes, heads or 1, pairs).
        at: (axes, rows or 1, tokens).
    """
    angle = torch.einsum("abs,ahp->bhsp", at.double(), theta.double())
    angle = -angle if inverse else angle
    return oracle.turned(x, angle.cos(), angle.sin(), spec.start, spec.interleaved)


def exact_gradients(
    x: torch.Tensor, cotangent: torch.Tensor, theta: torch.Tensor, at: torch.Tensor, spec: RopeSpec
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradients of :func:`formula` with respect to theta and to positions.

    Each gradient is paired with an upper bound on the sum of the magnitudes of its terms.
    """
    theta, at = (t.detach().double().requires_grad_() for t in (theta, at))
    y = formula(x, theta, at, spec)
    found = torch.autograd.grad(y, (theta, at), cotangent.double())
    first, second = oracle.channels(2 * theta.shape[-1], spec.start, spec.interleaved)
    y, dy = y.detach(), cotangent.double()
    each = torch.hypot(y[..., first], y[..., second]) * torch.hypot(dy[..., first], dy[..., second])
    rows, heads = x.shape[:2]
    by_theta = torch.einsum("bhsp,abs->ahp", each, at.detach().abs().expand(-1, rows, -1))
    by_at = torch.einsum("bhsp,ahp->abs", each, theta.detach().abs().expand(-1, heads, -1))
    if theta.shape[1] == 1:
        by_theta = by_theta.sum(1, keepdim=True)
    if at.shape[1] == 1:
        by_at = by_at.sum(1, keepdim=True)
    return list(zip(found, (by_theta, by_at)))


SHAPES: dict[str, tuple[RopeSpec, tuple[int, ...]]] = {
    "pairs": (SPEC, (3,)),
    "heads": (SPEC, (2, 3)),
    "one head": (SPEC, (1, 3)),
    "axes": (PLANE, (2, 1, 4)),
    "axes and heads": (PLANE, (2, 2, 4)),
    "interleaved": (RopeSpec(8, rotary_dim=6, start=2, interleaved=True), (2, 3)),
}
every_shape = pytest.mark.parametrize("spec, shape", SHAPES.values(), ids=SHAPES)


def where(
    spec: RopeSpec, rows: int = 1, tokens: int = 5, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return fractional positions of shape (axes, rows, tokens)."""
    return 10 * noise(spec.axis_count, rows, tokens, seed=7, dtype=dtype)


def ids(at: torch.Tensor) -> positions.Positions:
    """Wrap positions from `where` for the public functions."""
    return positions.Positions(at, add_index=False)


def full(theta: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    return theta.reshape(spec.axis_count, -1, theta.shape[-1])


# --- rotation by given frequencies ----------------------------------------------------------------


@every_backend
@every_dtype
@pytest.mark.parametrize("inverse", [False, True])
@every_shape
def test_against_the_formula(
    spec: RopeSpec, shape: tuple[int, ...], inverse: bool, dtype: torch.dtype, backend: str
) -> None:
    x, theta, at = noise(2, 2, 5, 8, dtype=dtype), noise(*shape, seed=1), where(spec, rows=2)
    got = rotate(x, spec, ids(at), inv_freq=theta, inverse=inverse, backend=backend)
    want = formula(x, full(theta, spec), at, spec, inverse)
    bound = tolerances.value(f"table rotation, {dtype}")
    torch.testing.assert_close(got, want.to(dtype), rtol=bound, atol=bound)
    again = rotate(x, spec.at(ids(at)), inv_freq=theta, inverse=inverse, backend=backend)
    assert_same_bits(again, got)


@pytest.mark.parametrize("base", [10.0, 1e4, 1e6])
def test_the_own_frequencies_of_a_spec_within_the_bound(base: float) -> None:
    """The spec's own frequencies, passed as float64 `inv_freq`, rotate within the error bound.

    Their relative error is at most 2^-53.
    """
    spec = RopeSpec(16, base=base)
    theta = torch.tensor(list(map(float, oracle.frequencies(base, 16))), dtype=torch.float64)
    for reach in (1, 2**10, 2**20, 2**31):
        generator = torch.Generator().manual_seed(0)
        at = torch.randint(-reach, reach + 1, (64,), generator=generator)
        x = noise(1, 2, 64, 16)
        exact = rotate(x, spec, at)
        got = rotate(x, spec, at, inv_freq=theta)
        relative = tolerances.value("word of a float64") + 2.0**-53
        angle = reach * (relative * theta + 2 * tolerances.value("word"))
        angle = angle + 2 * tolerances.value("float64 rounding")
        bound = math.sqrt(2) * angle.repeat(2) * oracle.pair_lengths(x, 16)
        bound = bound + 2 * tolerances.value("float64 rotation") * oracle.pair_lengths(x, 16)
        assert bool(((got - exact).abs() <= bound).all())
    # In float32 this error is invisible for positions below 2^20.
    x, at = noise(1, 2, 64, 16, dtype=torch.float32), at % 2**20
    got, exact = rotate(x, spec, at, inv_freq=theta), rotate(x, spec, at)
    difference = (got.double() - exact.double()).abs()
    lengths = oracle.pair_lengths(x, 16)
    assert bool((difference <= 2 * tolerances.value("float32 rotation") * lengths).all())


@pytest.mark.filterwarnings(f"ignore:{NARROW}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_frequencies_are_taken_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    theta = noise(3, seed=1, dtype=dtype)
    x = noise(1, 2, 5, 8)
    assert_same_bits(
        rotate(x, SPEC, 7, inv_freq=theta), rotate(x, SPEC, 7, inv_freq=theta.double())
    )
    theta.requires_grad_()
    rotate(x, SPEC, 7, inv_freq=theta).sum().backward()
    assert theta.grad is not None
    assert theta.grad.dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.bfloat16, "0.4 %"), (torch.float16, "0.05 % (more below 6e-05)")],
    ids=str,
)
def test_16_bit_frequencies_warn_at_the_line_of_the_caller(dtype: torch.dtype, share: str) -> None:
    theta, x = noise(3, seed=1, dtype=dtype), noise(1, 2, 5, 8)
    for call in (
        lambda: rotate(x, SPEC, inv_freq=theta),
        lambda: rotate_(x, SPEC, inv_freq=theta),
        lambda: rotate_qk(x, x, SPEC, inv_freq=theta),
        lambda: rotate_qk_(x, x.clone(), SPEC, inv_freq=theta, act="silu"),
    ):
        with pytest.warns(UserWarning, match=NARROW) as caught:
            call()
        (warning,) = caught
        assert str(warning.message) == (
            f"[inv_freq] frequencies should be float32 but are {str(dtype)[6:]}, which rounds them by up "
            f"to {share}, an error that the position multiplies; keep the parameter in float32 when you "
            "cast the model, or pass inv_freq.float() if these values are right."
        )
        assert warning.filename == __file__
        assert warning.lineno == call.__code__.co_firstlineno  # type: ignore[attr-defined]


def test_the_warning_is_at_the_line_that_calls_torch() -> None:
    """torch's own modules count as no caller, and code without a name as one."""
    x = noise(1, 2, 5, 8)
    module = LrpeRotate1d(8, 2).to(torch.bfloat16)
    layers = torch.nn.Sequential(torch.nn.Sequential(module))
    for call in (
        lambda: layers(noise(1, 3, 2, 8)),
        lambda: checkpoint(rotate, x, SPEC, inv_freq=noise(3).bfloat16(), use_reentrant=False),
    ):
        with pytest.warns(UserWarning, match="frequencies should be float32") as caught:
            call()
        assert [(one.filename, one.lineno) for one in caught] == [
            (__file__, call.__code__.co_firstlineno)  # type: ignore[attr-defined]
        ]
    code = compile("rotate(x, spec, inv_freq=theta)", "<nameless>", "exec")
    with pytest.warns(UserWarning, match=NARROW) as caught:
        exec(code, {"rotate": rotate, "x": x, "spec": SPEC, "theta": noise(3).bfloat16()})
    assert [one.filename for one in caught] == ["<nameless>"]


def test_16_bit_frequencies_warn_once_and_wider_ones_never() -> None:
    x = noise(1, 2, 5, 8, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for dtype in (torch.float32, torch.float64):
            rotate(x, SPEC, inv_freq=noise(3, dtype=dtype))
        rotate(x, SPEC, inv_freq=noise(3, dtype=torch.bfloat16).float())
        assert not caught
        for seed in range(3):
            rotate(x, SPEC, inv_freq=noise(3, seed=seed, dtype=torch.bfloat16))
    assert len(caught) == 1


def test_compiled_code_does_not_warn_of_16_bit_frequencies() -> None:
    """A warning would break the graph; warnings are errors here."""
    x, theta = noise(1, 2, 5, 8), noise(3, seed=1, dtype=torch.bfloat16)

    @torch.compile(fullgraph=True, backend="eager")
    def turned(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return rotate(x, SPEC, inv_freq=theta)

    assert_same_bits(turned(x, theta), rotate(x, SPEC, inv_freq=theta.float()))


@every_backend
@both_pairings
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("at", [None, TOKENS, TOKENS.double() / 3])
def test_a_frequency_that_is_nan_or_infinite_gives_nan(
    at: Any, lost: float, interleaved: bool, backend: str
) -> None:
    """A NaN, infinite or huge frequency makes its own pair NaN and leaves all others unchanged."""
    spec = RopeSpec(16, rotary_dim=14, start=1, interleaved=interleaved)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = noise(2, 2, 5, 16, dtype=dtype)
        theta = noise(2, 7, seed=1)
        clean = rotate(x, spec, at, inv_freq=theta, backend=backend)
        theta[1, 4] = lost
        got = rotate(x, spec, at, inv_freq=theta, backend=backend)
        first, second = oracle.channels(14, 1, interleaved)
        gone = torch.zeros_like(got, dtype=torch.bool)
        gone[:, 1, :, [first[4], second[4]]] = True
        assert got[gone].isnan().all()
        assert_same_bits(got[~gone], clean[~gone])
    theta.requires_grad_()
    x = noise(2, 2, 5, 16)
    y = rotate(x, spec, at, inv_freq=theta, backend=backend)
    (grad,) = torch.autograd.grad(y.sum(), theta)
    assert grad[1, 4].isnan()
    assert int(grad.isnan().sum()) == 1


def test_a_spec_whose_rule_depends_on_the_length_and_its_factor_stay() -> None:
    rule = DynamicNTK(2.0, 4)
    spec, x, theta = RopeSpec(8, scaling=rule), noise(2, 2, 9, 8), noise(4, seed=1)
    plain = rotate(x, RopeSpec(8), 0, inv_freq=theta)
    assert_same_bits(rotate(x, spec, inv_freq=theta), plain)
    assert_same_bits(rotate(x, spec, inv_freq=theta, seq_len=[9, 12]), plain)


def test_given_frequencies_are_those_of_a_given_rule() -> None:
    theta = noise(3, seed=1)
    x = noise(2, 2, 5, 8)
    spec = RopeSpec(8, rotary_dim=6, start=1, scaling=Given.of(theta))
    assert_near(rotate(x, SPEC, 7, inv_freq=theta), rotate(x, spec, 7), "float64 ways")


# --- gradients ----------------------------------------------------------------------------------


@every_backend
@every_dtype
@every_shape
def test_gradients_against_the_formula(
    spec: RopeSpec, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    """Gradients of θ and positions agree with the formula, within the error of y in its dtype."""
    x, cotangent = noise(2, 2, 40, 8, dtype=dtype), noise(2, 2, 40, 8, seed=1, dtype=dtype)
    for rows, narrow in itertools.product((1, 2), (torch.float32, torch.float64)):
        theta = leaf(*shape, seed=2, dtype=narrow)
        at = where(spec, rows, 40, narrow).requires_grad_()
        y = rotate(x, spec, ids(at), inv_freq=theta, backend=backend)
        found = torch.autograd.grad(y, (theta, at), cotangent)
        wanted = exact_gradients(x, cotangent, full(theta, spec), at, spec)
        for got, like, (exact, scale) in zip(found, (theta, at), wanted, strict=True):
            assert got.dtype == like.dtype
            tolerances.assert_angle_gradient(
                got, exact.reshape(got.shape), scale.reshape(got.shape), dtype
            )


@pytest.mark.parametrize(
    "function", [rotate_qk, lambda q, k, *a, **n: rotate_qk_(q * 1, k * 1, *a, **n)]
)
@pytest.mark.parametrize("used", ["q", "k", "both"])
@pytest.mark.parametrize("needing", ["q", "k", "neither", "both"])
def test_one_of_two(needing: str, used: str, function: Callable[..., Any]) -> None:
    """Gradients are correct whichever of q and k require grad and enter the loss."""
    q, k = noise(2, 4, 5, 8), noise(2, 2, 5, 8, seed=1)
    q.requires_grad_(needing in ("q", "both"))
    k.requires_grad_(needing in ("k", "both"))
    theta, at = leaf(3, seed=2), where(SPEC).requires_grad_()
    y, z = function(q, k, SPEC, ids(at), inv_freq=theta)
    loss: Any = 0
    want: Any = 0
    for name, got, x in (("q", y, q), ("k", z, k)):
        if used in (name, "both"):
            loss = loss + got.pow(3).sum()
            want = want + formula(x, full(theta, SPEC), at, SPEC).pow(3).sum()
    needed = [t for t in (q, k, theta, at) if t.requires_grad]
    found, wanted = (torch.autograd.grad(t, needed, allow_unused=True) for t in (loss, want))
    for got, exact in zip(found, wanted, strict=True):
        if exact is None:
            assert got is None or not got.any()
        else:
            assert_near(got, exact, "float64 ways, higher order")


def test_gates_of_q_and_of_k_reach_the_gradients_of_angles() -> None:
    q, k, theta = noise(2, 2, 5, 8), noise(2, 2, 5, 8, seed=1), leaf(3, seed=2)
    at = where(SPEC).requires_grad_()
    own = [gates.Exp(noise(8, seed=seed)) for seed in (3, 4)]
    pair = rotate_qk(q, k, SPEC, ids(at), inv_freq=theta, gate=tuple(own))
    apart = [rotate(x, SPEC, ids(at), inv_freq=theta, gate=g) for x, g in zip((q, k), own)]
    for used in (slice(0, 2), slice(1, 2)):
        both = [sum(y.pow(3).sum() for y in ys[used]) for ys in (pair, apart)]
        found, wanted = (torch.autograd.grad(loss, (theta, at), retain_graph=True) for loss in both)
        assert_near(found, wanted, "float64 ways, higher order")


@every_shape
def test_no_gradient_is_asked_for_where_none_is_wanted(
    spec: RopeSpec, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, theta, at = leaf(2, 2, 5, 8), leaf(*shape, seed=1), where(spec)
    want = rotate(x, spec, ids(at), inv_freq=theta).detach()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("an autograd function was applied")

    monkeypatch.setattr(autograd.OutOfPlace, "apply", refuse)
    monkeypatch.setattr(autograd.InPlace, "apply", refuse)
    with torch.no_grad():
        results = [
            rotate(x, spec, ids(at), inv_freq=theta),
            rotate_(x.clone(), spec, ids(at), inv_freq=theta),
            rotate(x, spec, ids(at), inv_freq=theta, out=torch.empty_like(x)),
        ]
    results.append(rotate(x.detach(), spec, ids(at), inv_freq=theta.detach()))
    for result in results:
        assert not result.requires_grad
        assert_same_bits(result, want)


def test_only_what_is_wanted_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    operator = schema.angle_gradients

    def spy(*arguments: Any) -> Any:
        wanted.append(arguments[-2:])
        return operator(*arguments)

    monkeypatch.setattr(schema, "angle_gradients", spy)
    x, theta, at = leaf(2, 2, 5, 8), leaf(3, seed=1), where(SPEC).requires_grad_()
    for tensors in ((x, theta, at), (x, theta.detach(), at), (x, theta, at.detach())):
        rotate(tensors[0], SPEC, ids(tensors[2]), inv_freq=tensors[1]).sum().backward()
    rotate(x, SPEC, ids(at.detach()), inv_freq=theta.detach()).sum().backward()
    assert wanted == [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("rope", [SPEC, SPEC.at(3)], ids=["spec", "prepared"])
def test_frequencies_that_change_in_place_are_read_again(rope: Any) -> None:
    x, theta = noise(4, 2, 9, 8), noise(3, seed=1)
    for change in (torch.Tensor.mul_, lambda t, by: t.data.mul_(by)):
        change(theta, 1.5)
        assert_same_bits(rotate(x, rope, inv_freq=theta), rotate(x, rope, inv_freq=theta.clone()))


# --- phase words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 1e300, -1e300, 2.0**62 * 7])
def test_phase_words_of_invalid_frequencies(lost: float) -> None:
    words, turns = angles.words_from(torch.tensor([1.0, lost, -2.0], dtype=torch.float64))
    assert turns[1] == -(2**63)
    assert words[1] == 0
    assert angles.without_frequency(turns.reshape(1, 1, 1, 3)).flatten().tolist() == [
        *(False, True, False)
    ]
    words, turns = angles.words_from(torch.tensor([2.0**61 * 6], dtype=torch.float64))
    assert turns[0] > 2**60


# --- errors ---------------------------------------------------------------------------------------

X = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 2, 5, 8)
AT = ids(torch.zeros(2, 1, 5))
LEARNED = torch.ones(3, requires_grad=True)
DTYPE = "inv_freq must be float32, float64, bfloat16 or float16 but got"
SHAPE = (
    "[rotate] inv_freq must have shape (pairs,) or (heads, pairs), here (3,) or (heads, 3), but got"
)
AXES = (
    "[rotate] inv_freq must have shape (axes, heads or 1, pairs), here (2, heads or 1, 4), but got"
)
APART = "rotate q and k one by one, each with its own inv_freq"
IS_X = "x: float32[2, 4, 5, 8]"


def given(
    call: Callable[..., object], *arguments: Any, theta: Any = None, **options: Any
) -> Callable[[], object]:
    """Return a call with frequencies: `theta`, or ones of this shape."""
    inv_freq = torch.ones(theta) if isinstance(theta, tuple) else theta
    return partial(call, *arguments, inv_freq=inv_freq, **options)


TYPES = {
    "[rotate] inv_freq must be a tensor but got [1.0, 2.0, 3.0].": given(
        rotate, X, SPEC, theta=[1.0, 2.0, 3.0]
    ),
    f"[rotate_] {DTYPE} int64 (inv_freq: int64[3]).": given(
        rotate_, X, SPEC, theta=torch.ones(3, dtype=torch.int64)
    ),
    f"[rotate] {DTYPE} complex64 (inv_freq: complex64[3]).": given(
        rotate, X, SPEC, theta=torch.ones(3, dtype=torch.complex64)
    ),
}
VALUES = {
    f"{SHAPE} (4,) (inv_freq: float32[4]).": given(rotate, X, SPEC, theta=(4,)),
    f"{SHAPE} () (inv_freq: float32[]).": given(rotate, X, SPEC, theta=()),
    f"{SHAPE} (1, 4, 3) (inv_freq: float32[1, 4, 3]).": given(rotate, X, SPEC, theta=(1, 4, 3)),
    f"{AXES} (2, 4) (inv_freq: float32[2, 4]).": given(rotate, X, PLANE, AT, theta=(2, 4)),
    f"{AXES} (3, 1, 4) (inv_freq: float32[3, 1, 4]).": given(rotate, X, PLANE, AT, theta=(3, 1, 4)),
    f"[rotate] inv_freq must have 1 or 4 heads for x but got 3 ({IS_X}).": given(
        rotate, X, SPEC, theta=(3, 3)
    ),
    f"[rotate] inv_freq must have 1 or 4 heads for x but got 0 ({IS_X}).": given(
        rotate, X, SPEC, theta=(0, 3)
    ),
    "[rotate] inv_freq must have 1 head for x but got 4 (x: float32[4, 5, 8]).": given(
        rotate, X[0], SPEC, theta=(4, 3), layout="bsd"
    ),
    f"[rotate_qk] inv_freq must have 1 or 2 heads for k but got 4; {APART} "
    "(k: float32[2, 2, 5, 8]).": given(rotate_qk, X, K, SPEC, theta=(4, 3)),
    f"[rotate_qk_] inv_freq must have 1 or 4 heads for q but got 2; {APART} "
    "(q: float32[2, 4, 5, 8]).": given(rotate_qk_, X, K, SPEC, theta=(2, 3)),
    "[rotate_qk] inv_freq is on meta but q is on cpu.": given(
        rotate_qk, X, K, SPEC, theta=torch.ones(3, device="meta")
    ),
    "[rotate] a result written to out has no gradient, but positions or inv_freq require one; use "
    "torch.no_grad(), or omit out.": [
        given(rotate, X, SPEC, theta=LEARNED, out=torch.empty(X.shape)),
        given(rotate, X, SPEC, torch.ones(5, requires_grad=True), out=torch.empty(X.shape)),
    ],
    "[rotate_] x is a leaf that requires grad, or a view of one, and cannot be changed in place; "
    f"call rotate ({IS_X}).": given(rotate_, X.clone().requires_grad_(), SPEC, theta=LEARNED),
}
test_sentence = refusals(TypeError=TYPES, ValueError=VALUES)


def test_nothing_is_kept_between_calls() -> None:
    prepared = SPEC.at(3)
    x = noise(1, 2, 5, 8)
    one = rotate(x, prepared)
    rotate(x, prepared, inv_freq=noise(3, seed=1))
    assert_same_bits(rotate(x, prepared), one)
