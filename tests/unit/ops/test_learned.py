"""Frequencies given by the caller or learned (`inv_freq`): exact values, warnings, invalid and changed ones.

tests/laws compare such calls with formulas and finite differences.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import oracle
from tests.support.helpers import noise, on
from tests.support.matrix import both_pairings, every_backend
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, gates
from tightrope.frequencies import DynamicNTK, Given
from tightrope.functional import (
    lrpe_rotate_1d,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.nn import LrpeRotate1d, RotaryEmbedding
from tightrope.ops import schema

NARROW = r"\[inv_freq\] frequencies should be float32"
SPEC = RopeSpec(8, rotary_dim=6, start=1)
X = noise(1, 2, 5, 8)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return noise(*shape, seed=seed).requires_grad_()


def test_given_frequencies_are_those_of_a_given_rule() -> None:
    """Other rules of the spec, its length and its factor do not matter."""
    theta = noise(3, seed=1)
    wanted = rotate(X, RopeSpec(8, rotary_dim=6, start=1, scaling=Given.of(theta)), 7)
    assert_near(rotate(X, SPEC.at(7, inv_freq=theta)), wanted, "float64 ways")
    by_length = RopeSpec(8, rotary_dim=6, start=1, scaling=DynamicNTK(2.0, 4))
    plain = rotate(X, SPEC.at(inv_freq=theta))
    for seq_len in (None, 12):
        assert_same_bits(rotate(X, by_length.at(seq_len=seq_len, inv_freq=theta)), plain)


# --- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(f"ignore:{NARROW}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_frequencies_are_taken_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    theta = noise(3, seed=1, dtype=dtype)
    wanted = rotate(X, SPEC.at(7, inv_freq=theta.double()))
    assert_same_bits(rotate(X, SPEC.at(7, inv_freq=theta)), wanted)
    theta.requires_grad_()
    (grad,) = torch.autograd.grad(rotate(X, SPEC.at(7, inv_freq=theta)).sum(), theta)
    assert grad.dtype == dtype


NARROWED = noise(3, seed=1, dtype=torch.bfloat16)
LAYERS = torch.nn.Sequential(torch.nn.Sequential(LrpeRotate1d(8, 2).to(torch.bfloat16)))
ROTARY = RotaryEmbedding(8, learnable=True).to(torch.bfloat16)
# torch's own modules count as no caller.
WARNING: dict[str, Callable[[], object]] = {
    "rotate": lambda: rotate(X, SPEC.at(inv_freq=NARROWED)),
    "rotate_": lambda: rotate_(X.clone(), SPEC.at(inv_freq=NARROWED)),
    "rotate_qk": lambda: rotate_qk(X, X, SPEC.at(inv_freq=NARROWED)),
    "rotate_qk_": lambda: rotate_qk_(X * 1, X * 2, SPEC.at(inv_freq=NARROWED), act="silu"),
    "module": lambda: LAYERS(noise(1, 3, 2, 8)),
    "rotary module": lambda: ROTARY(X),
    "lrpe": lambda: lrpe_rotate_1d(noise(1, 3, 2, 8), NARROWED),
    "checkpoint": lambda: checkpoint(rotate, X, SPEC.at(inv_freq=NARROWED), use_reentrant=False),
}


@pytest.mark.parametrize("name", WARNING)
def test_16_bit_frequencies_warn_at_the_line_of_the_caller(name: str) -> None:
    with pytest.warns(UserWarning, match="frequencies should be float32 but are bf") as caught:
        WARNING[name]()
    (warning,) = caught
    assert "by up to 0.4 %, an error that the position multiplies; keep" in str(warning.message)
    assert warning.filename == __file__
    assert warning.lineno == WARNING[name].__code__.co_firstlineno  # type: ignore[attr-defined]


def test_float16_frequencies_warn_once_and_wider_ones_never() -> None:
    code, here = compile("rotate(x, spec.at(inv_freq=theta))", "<nameless>", "exec"), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for dtype in (torch.float32, torch.float64, *[torch.float16] * 3):
            here |= {"rotate": rotate, "x": X, "spec": SPEC, "theta": noise(3, dtype=dtype)}
            exec(code, here)
    (warning,) = caught
    assert "by up to 0.05 % (more below 6e-05), an error" in str(warning.message)
    assert warning.filename == "<nameless>"


def test_compiled_code_does_not_warn_of_16_bit_frequencies() -> None:
    """A warning would break the graph; warnings are errors here."""
    turned = torch.compile(
        lambda x, theta: rotate(x, SPEC.at(inv_freq=theta)), fullgraph=True, backend="eager"
    )
    assert_same_bits(turned(X, NARROWED), rotate(X, SPEC.at(inv_freq=NARROWED.float())))


# --- values ---------------------------------------------------------------------------------------


@every_backend
@both_pairings
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 1e30, -1e300, 2.0**62 * 7])
@pytest.mark.parametrize("at", [None, torch.arange(5), torch.arange(5).double() / 3])
def test_a_frequency_that_is_nan_or_infinite_gives_nan(
    at: Any, lost: float, interleaved: bool, backend: str
) -> None:
    """Such a frequency, or a huge one, makes its own pair NaN and leaves all others unchanged."""
    spec = RopeSpec(16, rotary_dim=14, start=1, interleaved=interleaved)
    first, second = oracle.channels(14, 1, interleaved)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, theta = noise(2, 2, 5, 16, dtype=dtype), noise(2, 7, seed=1)
        clean = on(backend, rotate, x, spec.at(at, inv_freq=theta))
        theta[1, 4] = lost
        theta.requires_grad_()
        got = on(backend, rotate, x, spec.at(at, inv_freq=theta))
        gone = torch.zeros_like(got, dtype=torch.bool)
        gone[:, 1, :, [first[4], second[4]]] = True
        assert got[gone].isnan().all()
        assert_same_bits(got[~gone], clean[~gone])
        (grad,) = torch.autograd.grad(got.sum(), theta)
        assert grad[1, 4].isnan()
        assert int(grad.isnan().sum()) == 1


@pytest.mark.parametrize("given", [SPEC.at, SPEC.at(3).having], ids=["at", "having"])
def test_frequencies_that_change_in_place_are_read_again(given: Any) -> None:
    theta, without = noise(3, seed=1), rotate(X, given())
    rope = given(inv_freq=theta)
    for change in (torch.Tensor.mul_, lambda t, by: t.data.mul_(by)):
        change(theta, 1.5)
        wanted = rotate(X, given(inv_freq=theta.clone()))
        for own in (rope, given(inv_freq=theta)):
            assert_same_bits(rotate(X, own), wanted)
    assert_same_bits(rotate(X, given()), without)


@pytest.mark.parametrize("first", ["inference mode", "no grad", "with a gradient"])
def test_words_that_are_kept_serve_later_calls_of_every_mode(first: str) -> None:
    """Those of equal values, also of negated views and other dtypes, forward and backward."""
    seed = ["inference mode", "no grad", "with a gradient"].index(first) + 40
    theta = noise(3, seed=seed)
    with {"inference mode": torch.inference_mode, "no grad": torch.no_grad}.get(
        first, torch.enable_grad
    )():
        before = rotate(X, SPEC.at(7, inv_freq=theta.clone()))
    leaf = theta.clone().requires_grad_()
    after = rotate(X, SPEC.at(7, inv_freq=leaf))
    assert_same_bits(after, before.clone())
    assert leaf.untyped_storage().resizable(), "FSDP could not free it"
    assert torch.autograd.grad(after.sum(), leaf)[0].isfinite().all()
    negated = torch.complex(theta, -theta).conj().imag
    assert negated.is_neg()
    assert_same_bits(rotate(X, SPEC.at(7, inv_freq=negated)), before.clone())
    narrow = theta.float()
    wanted = rotate(X, SPEC.at(7, inv_freq=narrow.double()))
    assert_same_bits(rotate(X, SPEC.at(7, inv_freq=narrow)), wanted)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, "float64 ways, higher order"), (torch.float32, "float32 ways")],
)
def test_gates_of_q_and_of_k_reach_the_gradients_of_angles(
    dtype: torch.dtype, tolerance: str
) -> None:
    """In float64 the definition runs, as there are gates."""
    q, k = (noise(2, 2, 5, 8, seed=seed, dtype=dtype) for seed in (0, 1))
    theta = leaf(3, seed=2)
    at, own = leaf(5, seed=7), [gates.Exp(noise(8, seed=seed)) for seed in (3, 4)]
    pair = rotate_qk(q, k, SPEC.at(at, inv_freq=theta), gate=tuple(own))
    apart = [rotate(x, SPEC.at(at, inv_freq=theta), gate=g) for x, g in zip((q, k), own)]
    for used in (slice(0, 2), slice(1, 2)):
        both = [sum(y.pow(3).sum() for y in ys[used]) for ys in (pair, apart)]
        found, wanted = (torch.autograd.grad(loss, (theta, at), retain_graph=True) for loss in both)
        assert_near(found, wanted, tolerance)


@pytest.mark.parametrize("used", ["q", "k", "both"])
@pytest.mark.parametrize("verb", [rotate_qk, rotate_qk_])
def test_the_gradients_of_angles_are_sums_over_what_the_loss_uses(verb: Any, used: str) -> None:
    """Whichever of q and k requires grad."""
    q, k, theta, at = noise(2, 4, 5, 8), noise(2, 2, 5, 8, seed=1), leaf(3, seed=2), leaf(5, seed=7)
    taken = slice(used == "k", 1 + (used != "q"))

    def gradients(ys: Any) -> Any:
        loss = sum(y.pow(3).sum() for y in ys[taken])
        return torch.autograd.grad(loss, (theta, at))

    wanted = gradients([rotate(x, SPEC.at(at, inv_freq=theta)) for x in (q, k)])
    for learns in ("", "q", "k", "qk"):
        xs = [x.clone().requires_grad_(name in learns) * 1 for name, x in (("q", q), ("k", k))]
        found = gradients(verb(*xs, SPEC.at(at, inv_freq=theta)))
        assert_near(found, wanted, "float64 ways, higher order")


def test_only_gradients_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    operator = schema.angle_gradients

    def spy(*arguments: Any) -> Any:
        wanted.append(arguments[-2:])
        return operator(*arguments)

    monkeypatch.setattr(schema, "angle_gradients", spy)
    x, theta, at = leaf(2, 2, 5, 8), leaf(3, seed=1), leaf(5, seed=7)
    for by_theta, by_at in ((theta, at), (theta.detach(), at), (theta, at.detach())):
        rotate(x, SPEC.at(by_at, inv_freq=by_theta)).sum().backward()
    rotate(x, SPEC.at(at.detach(), inv_freq=theta.detach())).sum().backward()
    assert wanted == [(True, True), (True, False), (False, True)]
