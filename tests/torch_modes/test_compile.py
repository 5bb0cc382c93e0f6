"""Compiled calls: any spec, the constants of a graph, and the definition.

tests/laws/test_compile.py has what holds for every call; test_export.py what is exported.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from tests.support import helpers
from tests.support.helpers import on
from tests.support.matrix import INDUCTOR
from tests.support.tolerances import assert_each, assert_near
from tightrope import RopeSpec, backends
from tightrope.frequencies import DynamicNTK, LongRoPE, Rule
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_, rotate_qk, rotate_qk_

noise = partial(helpers.noise, dtype=torch.float32)
SPEC = RopeSpec(8, rotary_dim=6, start=1)
pytestmark = pytest.mark.usefixtures("fresh_compiler")
# Without a compiler the graphs are captured and run as they are.
BACKEND = "inductor" if INDUCTOR else "aot_eager"


def test_one_compiled_function_takes_any_spec() -> None:
    """Out of place and in place; the results have the bits of eager ones."""
    specs = [RopeSpec(8, base=base) for base in (10.0, 1e4, 5e5)]
    run = partial(every_verb, noise(2, 3, 5, 8), noise(2, 2, 5, 8))
    compiled = torch.compile(run, fullgraph=True, backend=BACKEND)
    for spec in (*specs, *specs):
        assert_each(torch.equal, compiled(spec), run(spec))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", [None, DynamicNTK(2.0, 4), LongRoPE([1.0] * 3, [2.0] * 3, 4, 8.0)])
@pytest.mark.parametrize("used", [False, True])
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


def every_verb(q: torch.Tensor, k: torch.Tensor, spec: RopeSpec = SPEC) -> tuple[torch.Tensor, ...]:
    outs = torch.empty_like(q), torch.empty_like(k)
    return (
        *rotate_qk(q * 2, k, spec, 9),
        *rotate_qk_(q * 2, k.clone(), spec, 9),
        *rotate_qk(q * 2, k, spec, 9, out=outs),
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_definition_may_be_left_to_the_compiler(dynamic: bool | None) -> None:
    """`backends.use("reference")` lets a compiler fuse the definition with the operations around it."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(str(graph.graph))
        return graph

    function = partial(on, "reference", every_verb)
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (5, 7, 9):
        q, k = noise(2, 3, tokens, 8), noise(2, 2, tokens, 8)
        assert_each(assert_near, compiled(q, k), every_verb(q, k), "float32 ways")
    assert len(graphs) <= 2
    assert "tightrope.rotate" not in graphs[0], "the graph contains an opaque operator"


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
def test_the_definition_of_a_rotation_whose_ints_are_symbols(prepared: bool) -> None:
    """With dynamic shapes, so are the integer fields of a spec that is made outside."""
    spec = RopeSpec(8, rotary_dim=4, start=1)
    rope = spec.at(3) if prepared else spec

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tables = (x[0, 0, :, :2],) * 2
        with backends.use("reference"):
            turned = apply_rotary_pos_emb(x, None, *tables, tables="half", start=1)[0]
            return rotate(x, rope), rotate_(x * 1, rope, act="silu"), turned

    x = noise(2, 3, 5, 8)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_each(assert_near, compiled(x), run(x), "float32 ways")
