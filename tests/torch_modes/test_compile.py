"""Compiled and exported calls: one graph for all lengths, gradients, calls in place, modules, specs made inside."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support import helpers
from tests.support.helpers import on
from tests.support.matrix import INDUCTOR
from tests.support.tolerances import assert_each, assert_near
from tightrope import RopeSpec, nn, positions
from tightrope.frequencies import DynamicNTK, LongRoPE, Rule
from tightrope.functional import (
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

noise = partial(helpers.noise, dtype=torch.float32)
SPEC = RopeSpec(8, rotary_dim=6, start=1)
pytestmark = pytest.mark.usefixtures("fresh_compiler")
# Without a compiler the graphs are captured and run as they are.
BACKEND = "inductor" if INDUCTOR else "aot_eager"


def graphs_for(function, calls, *, dynamic: bool | None = None) -> int:
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    for call in calls:
        fresh = [a.clone() if isinstance(a, torch.Tensor) else a for a in call]
        expected, got = function(*call), compiled(*fresh)
        assert_each(torch.equal, expected, got)
    return counter.frame_count


LENGTHS = ((5, 2), (6, 3), (7, 4), (9, 100), (13, 100_000), (4, 5))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "where, in_place", [("offset", False), ("ids", True), ("per row", True), ("prepared", False)]
)
def test_one_graph_for_all_lengths_and_offsets(where: str, in_place: bool) -> None:
    call = rotate_qk_ if in_place else rotate_qk

    def function(q, k, at):
        if where == "per row":
            at = positions.per_row(at)
        if where == "prepared":
            return call(q, k, SPEC.at(at))
        return call(q, k, SPEC, at)

    calls = []
    for tokens, offset in LENGTHS:
        at = {
            "ids": torch.arange(tokens) + offset,
            "per row": torch.tensor([offset, 7]),
        }.get(where, offset)
        calls.append((noise(2, 3, tokens, 8), noise(2, 2, tokens, 8), at))
    # torch.compile makes the first graph for the first length only, and the second for all lengths.
    assert graphs_for(function, calls) <= 2
    torch._dynamo.reset()
    assert graphs_for(function, calls, dynamic=True) == 1


def test_one_graph_for_all_lengths_with_learned_frequencies() -> None:
    def function(q, k, theta):
        return rotate_qk_(q, k, SPEC.at(3, inv_freq=theta))

    calls = [(noise(2, 3, tokens, 8), noise(2, 2, tokens, 8), noise(3)) for tokens, _ in LENGTHS]
    assert graphs_for(function, calls, dynamic=True) == 1


# test_phased compiles gradients of rotations into new tensors.
def test_compiled_gradients_in_place() -> None:
    def function(x, p):
        return rotate_(x * 1, SPEC, p).sin()

    x, p = noise(2, 3, 5, 8).requires_grad_(), (100 * noise(2, 5)).requires_grad_()
    expected = torch.autograd.grad(function(x, p).sum(), (x, p))
    got = torch.autograd.grad(
        torch.compile(function, fullgraph=True, backend=BACKEND)(x, p).sum(), (x, p)
    )
    assert_each(assert_near, expected, got, "float32 ways")


@pytest.mark.slow
def test_compiled_between_a_projection_and_attention() -> None:
    weight = noise(16, 6 * 8).requires_grad_()

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        qkv = (x @ weight).unflatten(-1, (6, 8))
        q, k = qkv[:, :, :2].transpose(1, 2), qkv[:, :, 2:4].transpose(1, 2)
        q, k = rotate_qk_(q, k, SPEC)
        v = qkv[:, :, 4:].transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = noise(2, 5, 16)
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND)
    torch.testing.assert_close(compiled(x, weight), function(x, weight))
    (expected,) = torch.autograd.grad(function(x, weight).square().sum(), weight)
    (got,) = torch.autograd.grad(compiled(x, weight).square().sum(), weight)
    assert_near(got, expected, "float32 ways, through attention")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight), function(x, weight))


def test_compiled_in_place_reaches_the_input() -> None:
    x = noise(2, 3, 5, 8)
    expected = rotate(x, SPEC, 3)
    torch.compile(lambda x: rotate_(x, SPEC, 3), fullgraph=True, backend=BACKEND)(x)
    assert torch.equal(x, expected)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.RotaryPositionalEmbedding(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rope(x, seq_dim=1)


def test_compiled_module_has_one_graph_and_leaves_the_module_alone() -> None:
    model = Attention()
    calls = [noise(2, tokens, 3, 8) for tokens, _ in LENGTHS]
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    got = [compiled(x) for x in calls]
    assert counter.frame_count == 1
    assert model.rope.max_seq_len_cached == 0
    for x, y in zip(calls, got, strict=True):
        assert torch.equal(y, model(x))


def test_one_compiled_function_takes_any_spec() -> None:
    specs = [RopeSpec(8, base=base) for base in (10.0, 1e4, 5e5)]
    compiled = torch.compile(lambda x, spec: rotate(x, spec, 9), fullgraph=True, backend=BACKEND)
    for spec in (*specs, *specs):
        x = noise(1, 2, 5, 8)
        assert torch.equal(compiled(x, spec), rotate(x, spec, 9))


@pytest.mark.parametrize(
    "used, rule",
    [(True, None), (False, DynamicNTK(2.0, 4)), (False, LongRoPE([1.0] * 3, [2.0] * 3, 4, 8.0))],
)
def test_equal_specs_share_the_constants_of_a_graph(used: bool, rule: Rule | None) -> None:
    """Nothing is copied from the host in a call, also if compiled code is the first to use a spec."""
    base = 4321.0 + used
    specs = [RopeSpec(8, base=base, rotary_dim=6, start=1, scaling=rule) for _ in range(2)]
    other = RopeSpec(8, base=base / 2, rotary_dim=6, start=1, scaling=rule)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph.graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def layers(q: torch.Tensor, offset: int) -> torch.Tensor:
        for spec in [*specs, other]:
            q = rotate(q, spec, offset)
        return q

    q = noise(1, 2, 1, 8)
    if used:
        layers(q, 0)
    compiled = torch.compile(layers, fullgraph=True, backend=backend, dynamic=True)
    for offset in (2, 3, 9):
        assert torch.equal(compiled(q, offset), layers(q, offset))
    (graph,) = graphs
    constants = [node.target for node in graph.nodes if node.op == "get_attr"]
    each = {None: 1, DynamicNTK: 3, LongRoPE: 2}[None if rule is None else type(rule)]
    assert len(set(constants)) == 2 * each  # of the equal specs, and of the other
    assert torch.tensor not in [node.target for node in graph.nodes]


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model = Attention()
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(
        model, (noise(2, 5, 3, 8),), dynamic_shapes={"x": {1: tokens}}, strict=strict
    )
    for length in (5, 9, 31):
        x = noise(2, length, 3, 8)
        assert torch.equal(program.module()(x), model(x))
    assert not program.state_dict


def _out_of_place(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return on("reference", rotate_qk, q * 2, k, SPEC, 9)


def _in_place(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return on("reference", rotate_qk_, q * 2, k.clone(), SPEC, 9)


def _into(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outs = torch.empty_like(q), torch.empty_like(k)
    return on("reference", rotate_qk, q * 2, k, SPEC, 9, out=outs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "function, dynamic", [(_out_of_place, True), (_in_place, None), (_into, True)]
)
def test_the_definition_may_be_left_to_the_compiler(
    function: Callable[..., tuple[torch.Tensor, ...]], dynamic: bool | None
) -> None:
    """`backends.use("reference")` lets a compiler fuse the definition with the operations around it."""

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(str(graph.graph))
        return graph

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (5, 7, 9):
        q, k = noise(2, 3, tokens, 8), noise(2, 2, tokens, 8)
        assert_each(assert_near, compiled(q, k), rotate_qk(q * 2, k, SPEC, 9), "float32 ways")
    assert len(graphs) <= 2
    assert "tightrope.rotate" not in graphs[0], "the graph contains an opaque operator"
