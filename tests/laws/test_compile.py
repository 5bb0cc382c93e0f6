"""Laws of compiled calls: each is one graph, which gives the results and gradients of eager code.

The graphs run as they are; what Inductor makes of them is in tests/torch_modes/test_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.calls import CASES, mapped
from tests.support.functions import FUNCTIONS, Function, call_of
from tests.support.helpers import noise
from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.frequencies import YaRN
from tightrope.functional import lrpe_rotate_1d, rerotate, rerotate_, rotate, rotate_
from tightrope.positions import per_row

# Sizes are known, or symbols; or the call is mapped, and differentiated by torch.func.
WAYS = ("static", "dynamic", "transformed")
CALLS: list[Any] = [*CASES[::5], *list(FUNCTIONS.values())[::3]]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Module(torch.nn.Module):
    """A call of q and k whose other tensors are parameters: to the compiler, their sizes are constants."""

    def __init__(self, case: Mapping[str, Any] | Function) -> None:
        super().__init__()
        self.call = call_of(case)
        self.learned = self.call.learned()
        self.rest = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(x.clone(), name in self.learned)
                for name, x in self.call.leaves.items()
                if name not in "qk"
            }
        )

    def forward(self, xs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self.call(**xs, **self.rest)

    def gradients(self, run: Callable[..., Any], dynamic: bool = False) -> list[torch.Tensor]:
        """Return the results of a function, and the gradients of a loss by what learns."""
        xs = {
            name: x.clone().requires_grad_(name in self.learned)
            for name, x in self.call.leaves.items()
            if name in "qk"
        }
        for x in xs.values() if dynamic else ():
            torch._dynamo.maybe_mark_dynamic(x, list(range(x.dim() - 1)))
        ys, leaves = run(xs), {**xs, **self.rest}
        loss = sum((y * y.detach().cos()).sum() for y in ys)
        return [*ys, *torch.autograd.grad(loss, [leaves[name] for name in self.learned])]


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_compiled_call_is_one_graph(number: int) -> None:
    case, way, plain = CALLS[number], WAYS[number % 3], True
    if way != "transformed":
        module = Module(case)
        # With symbols, lengths are not read, and phase words by them are of float64.
        by_length = not isinstance(case, Function) and case["frequencies"] == "by length"
        found = module.gradients(compiled(module), way == "dynamic" and not by_length)
        # In place, a gradient of -0 becomes 0 where autograd adds the zeros of what x was.
        assert_each(torch.equal, found, module.gradients(module))
        return
    call = case
    if not isinstance(case, Function):
        # In float64, the definition runs where there is an f or P, as does the backend "reference".
        plain = {case["act"], case["gate"]} == {"none"}
        dtype = torch.float64 if plain else torch.float32
        call = mapped(case, dtype=dtype, backend=None)
    names = call.learned()
    stacks = [torch.stack((call.leaves[name], 0.75 * call.leaves[name])) for name in names]

    def one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(**dict(zip(names, tensors)))

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return sum(y.pow(3).sum() for y in torch.vmap(one)(*tensors))  # type: ignore[return-value]

    run = torch.func.grad_and_value(loss, tuple(range(len(names))))
    for got, wanted in zip(compiled(run)(*stacks), run(*stacks), strict=True):
        assert_near(got, wanted, "float64 ways, higher order" if plain else "float32 ways")


PLAIN, SCALED = RopeSpec(12), RopeSpec(12, base=5e5, scaling=YaRN(4.0, 4096))
THETA, INV_FREQ = noise(3, 4, seed=1), noise(6, seed=2)
#: Calls with an offset, which a graph takes as a symbol.
BY_OFFSET: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "in place": lambda x, at: rotate_(x * 1, PLAIN, at, layout="bshd"),
    "ids": lambda x, at: rotate(x, PLAIN, torch.arange(x.shape[1]) + at, layout="bshd"),
    "per row": lambda x, at: rotate(x, PLAIN, per_row(torch.full((2,), at)), layout="bshd"),
    "prepared": lambda x, at: rotate(x, PLAIN.at(at), layout="bshd"),
    "learned": lambda x, at: rotate(x, PLAIN.at(at, inv_freq=INV_FREQ), layout="bshd"),
    "rerotate": lambda x, at: rerotate(x, PLAIN, PLAIN, at, 7 * at, layout="bshd"),
    "rerotate_": lambda x, at: rerotate_(x * 1, PLAIN, SCALED, at, 3, layout="bshd"),
    "lrpe": lambda x, at: lrpe_rotate_1d(x, THETA, at, "silu"),
    "lrpe, softmax": lambda x, at: lrpe_rotate_1d(x, THETA, at, "softmax", -1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name, dynamic", [*((name, True) for name in BY_OFFSET), ("in place", None), ("learned", None)]
)
def test_one_graph_for_all_offsets_and_lengths(name: str, dynamic: bool | None) -> None:
    """One for x without a gradient, and one with; by default torch makes one more of each for the first length alone."""
    counter, call = CompileCounterWithBackend("aot_eager"), BY_OFFSET[name]
    counts = set()
    run = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
    for offset, tokens in ((5, 10), (6, 11), (700, 17), (2**40, 17), (4, 21)):
        x = noise(2, tokens, 3, 12)
        assert_same_bits(run(x, offset), call(x, offset))
        x.requires_grad_()
        slopes = [torch.autograd.grad(each(x, offset).square().sum(), x) for each in (run, call)]
        assert_near(*slopes, "float64 ways")
        counts.add(counter.frame_count)
    assert len(counts) == 1 if dynamic else max(counts) <= 4
