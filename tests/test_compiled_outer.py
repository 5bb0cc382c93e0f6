"""f and P under the compiler: parameters beside symbolic shapes, and calls in place with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.functional import (
    apply_rotary_pos_emb_,
    lrpe_rotate_1d,
    polar_scan,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.nn import LrpeRotate1d
from tolerances import assert_near, assert_same_bits

SPEC = RopeSpec(8)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = noise(2, 3, 5, 8)


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Holder(torch.nn.Module):
    """A parameter, whose sizes the compiler takes for constants, and a call with it."""

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
    "frequencies of heads": (lambda x, w: rotate(x, SPEC, inv_freq=w), (3, 4)),
    "a decay of heads": (lambda x, w: polar_scan(x, x, x, SPEC, w)[0], (3, 8)),
    "theta of heads and pairs": (lambda x, w: lrpe_rotate_1d(x.transpose(1, 2), w), (3, 4)),
    "theta of heads": (lambda x, w: lrpe_rotate_1d(x.transpose(1, 2), w), (3,)),
    "theta of heads and one": (lambda x, w: lrpe_rotate_1d(x.transpose(1, 2), w), (3, 1)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_beside_symbols(name: str) -> None:
    """Every size of x is a symbol, and those of the parameter are not."""
    call, shape = PARAMETERS[name]
    module = Holder(call, *shape)
    compiled = torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    both = [torch.autograd.grad(f(X).square().sum(), module.values) for f in (compiled, module)]
    assert_near(both[0][0], both[1][0], "float64 ways")
    rows = X[:1]
    assert_near(compiled(rows), module(rows), "float64 ways")


@pytest.mark.parametrize("per", ["head and pair", "pair", "head"])
def test_the_module_beside_symbols(per: str) -> None:
    module = LrpeRotate1d(8, 3, per=per, act="silu")
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
    "a gate and frequencies": lambda x, w: rotate_(x, SPEC, gate=gates.Exp(w), inv_freq=w[:4]),
    "frequencies": lambda x, w: rotate_(x, SPEC, inv_freq=w[:4]),
    "tables": lambda x, w: apply_rotary_pos_emb_(
        x, None, w[:4].expand(5, 4).cos(), w[:4].expand(5, 4).sin(), tables="half"
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_in_place(name: str) -> None:
    """What a gradient is made of is kept before it is overwritten."""

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


# What k alone takes of a tensor shaped as q, so that its call is another than that of q.
OF_K: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "a weight": lambda source: {"act": ("silu", RMSNorm(source[0, 0, 0]))},
    "a gate": lambda source: {"gate": (None, gates.Given(source.transpose(1, 2)))},
    "a gate and positions": lambda source: {
        "gate": (None, gates.Given(source.transpose(1, 2))),
        "positions": source[:, 1, :, 0],
    },
    "a slope": lambda source: {"gate": (None, gates.Slope(source[0, :, 0]))},
    "positions": lambda source: {"act": ("silu", None), "positions": source[:, 0, :, 0]},
    "frequencies": lambda source: {"act": ("silu", None), "inv_freq": source[0, 0, 0, :4]},
}


def apart(kind: str, how: str, source: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
    """A call whose q is written before k is rotated, by what k takes of source."""
    more = OF_K[kind](source)
    if how == "in place":
        return rotate_qk_(q, k, SPEC, **more)
    if how == "out":
        # What is written is the memory of q, and what is rotated another.
        return rotate_qk(q.clone(), k, SPEC, out=(q, torch.empty_like(k)), **more)
    q, k = q * 1, k * 1
    return rotate_qk_(q, k, SPEC, **(OF_K[kind](q) if source is not q else more))


every_way = pytest.mark.parametrize("how", ["in place", "out"])
every_kind_of_k = pytest.mark.parametrize("kind", OF_K)


@pytest.mark.parametrize("source", ["a view", "an argument"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@every_way
@every_kind_of_k
def test_what_k_takes_from_the_memory_of_q(
    kind: str, how: str, backend: str, source: str
) -> None:
    """Its numbers are those from before the call, as in eager mode."""
    memory, k = X.float() / 4, X.float().flip(-1)
    wanted = apart(kind, how, memory.clone(), memory.clone(), k.clone())
    if source == "a view":
        run = torch.compile(lambda q, k: apart(kind, how, q, q, k), backend=backend, fullgraph=True)
        got = run(memory, k.clone())
    else:
        run = torch.compile(
            lambda s, q, k: apart(kind, how, s.transpose(0, 1), q, k),
            backend=backend,
            fullgraph=True,
        )
        got = run(memory.transpose(0, 1), memory, k.clone())
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(memory, wanted[0])
