"""Prologue f and epilogue P in compiled calls: symbolic shapes, and gradients of in-place calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.helpers import noise, on
from tests.support.tolerances import assert_each, assert_near
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.functional import (
    apply_rotary_pos_emb_,
    lrpe_rotate_1d,
    polar_scan,
    rotate,
    rotate_,
)
from tightrope.nn import LrpeRotate1d

SPEC = RopeSpec(8)


X = noise(2, 3, 5, 8)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Holder(torch.nn.Module):
    """A module that calls a function with x and the module's parameter.

    The compiler treats the sizes of a module's parameter as constants.
    """

    def __init__(self, call: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.call, self.values = call, torch.nn.Parameter(-noise(*shape, seed=1).abs())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.values)


PARAMETERS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "a weight of heads": (lambda x, w: rotate(x, SPEC, act=RMSNorm(w)), (3, 8)),
    "a gate of heads": (lambda x, w: rotate(x, SPEC, gate=gates.Exp(w)), (3, 8)),
    "a slope of heads": (lambda x, w: rotate(x, SPEC, gate=gates.Slope(w)), (3, 1)),
    "a gate of tokens": (lambda x, w: rotate(x, SPEC, gate=gates.Given(w)), (5, 3, 8)),
    "frequencies of heads": (lambda x, w: rotate(x, SPEC.at(inv_freq=w)), (3, 4)),
    "a decay of heads": (lambda x, w: polar_scan(x, x, x, SPEC, w)[0], (3, 8)),
    "theta of heads and pairs": (lambda x, w: lrpe_rotate_1d(x.transpose(1, 2), w), (3, 4)),
    "theta of heads": (lambda x, w: lrpe_rotate_1d(x.transpose(1, 2), w), (3,)),
    "theta of heads and one": (lambda x, w: lrpe_rotate_1d(x.transpose(1, 2), w), (3, 1)),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_beside_symbols(name: str) -> None:
    """Symbolic sizes of x work together with constant sizes of a parameter; so does a single row, which is constant."""
    call, shape = PARAMETERS[name]
    x, module = X[: 2 - [*PARAMETERS].index(name) % 2], Holder(call, *shape)
    compiled = torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    both = [torch.autograd.grad(f(x).square().sum(), module.values) for f in (compiled, module)]
    assert_near(both[0][0], both[1][0], "float64 ways")


def test_the_module_beside_symbols() -> None:
    module = LrpeRotate1d(8, 3, per="head", act="silu")
    compiled = torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (5, 4):
        x = X.transpose(1, 2)[:, :tokens]
        assert_near(compiled(x, 3), module(x, 3), "float64 ways")


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "nothing": lambda x, w: rotate_(x, SPEC, 7),  # noqa: ARG005
    "an act": lambda x, w: rotate_(x, SPEC, 7, act="silu"),  # noqa: ARG005
    "a norm": lambda x, w: rotate_(x, SPEC, 7, act=RMSNorm(w)),
    "a gate": lambda x, w: rotate_(x, SPEC, 7, gate=gates.Slope(0.1 * w)),
    "a gate that divides": lambda x, w: rotate_(x, SPEC, 7, gate=gates.Exp(w), inverse=True),
    "a gate and frequencies": lambda x, w: rotate_(x, SPEC.at(inv_freq=w[:4]), gate=gates.Exp(w)),
    "frequencies": lambda x, w: rotate_(x, SPEC.at(inv_freq=w[:4])),
    "tables": lambda x, w: apply_rotary_pos_emb_(
        x, None, w[:4].expand(5, 4).cos(), w[:4].expand(5, 4).sin(), tables="half"
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_in_place(name: str) -> None:
    """Compiled in-place calls save tensors for the backward pass before overwriting them."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 1
        IN_PLACE[name](y, w)
        return y

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found: list[Any] = []
    for f in (compiled, run):
        leaves = X.clone().requires_grad_(), noise(8, seed=1).requires_grad_()
        found.append(torch.autograd.grad(f(*leaves).square()[0].sum(), leaves, allow_unused=True))
    for one, other in zip(*found):
        assert (one is None) == (other is None)
        if one is not None:
            assert_near(one, other, "float64 ways")


DEFINED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "a spec": lambda x, rope: on("reference", rotate, x, rope),
    "in place": lambda x, rope: on("reference", rotate_, x * 1, rope, act="silu"),
    "a batch": lambda x, rope: torch.vmap(lambda x: rotate(x[None], rope))(x),
    "tables": lambda x, _: on(
        "reference",
        apply_rotary_pos_emb_,
        x * 1,
        None,
        x[0, 0, :, :2],
        x[0, 0, :, :2],
        tables="half",
        start=1,
    )[0],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DEFINED)
def test_the_definition_of_a_rotation_whose_ints_are_symbols(name: str) -> None:
    """The definition compiles with dynamic shapes, where integer fields of a spec, or of a prepared one, are symbols."""
    spec = RopeSpec(8, rotary_dim=4, start=1)
    rope = spec.at(3) if name in ("a batch", "in place") else spec

    def run(x: torch.Tensor) -> torch.Tensor:
        return DEFINED[name](x, rope)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_near(compiled(X), run(X), "float64 ways")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_definition_by_positions_and_frequencies_that_learn(backend: str | None) -> None:
    def loss(where: torch.Tensor, omega: torch.Tensor) -> torch.Tensor:
        return on(backend, rotate, X, SPEC.at(where, inv_freq=omega)).square()[..., 0].sum()

    run = torch.func.grad(loss, (0, 1))
    leaves = noise(5, seed=1), noise(4, seed=2)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_each(assert_near, compiled(*leaves), run(*leaves), "float64 ways")
