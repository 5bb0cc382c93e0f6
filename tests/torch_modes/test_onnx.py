"""Models with our operators, exported to ONNX and run by ONNX Runtime, against the same calls in float64.

Each graph has many calls, because an export takes seconds whatever it exports. Every graph has a dynamic
number of rows and tokens, and runs with two of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.calls import CASES, Call
from tests.support.helpers import noise
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_near, assert_same_bits, value
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import YaRN
from tightrope.functional import rerotate_, rotate, rotate_, write_kv
from tightrope.integrations import onnx

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROWS, TOKENS = torch.export.Dim("rows"), torch.export.Dim("tokens")
LENGTH, FAR, HEADS = 4096, 2**31 - 1, 16
Tensors = Sequence[torch.Tensor]
Function = Callable[..., Tensors]


class Model(torch.nn.Module):
    """A model that calls a function with its inputs and its parameter."""

    def __init__(self, call: Function) -> None:
        super().__init__()
        self.call = call
        self.weight = torch.nn.Parameter(noise(HEADS, 32, seed=5, dtype=torch.float32))

    def forward(self, *inputs: torch.Tensor) -> Tensors:
        return self.call(self.weight, *inputs)


def shapes_of(inputs: Tensors) -> Any:
    """Return the dynamic dimensions of inputs ``[2, …, 5, …]``: the sizes 2 are rows and 5 are tokens."""
    dims = {2: ROWS, 5: TOKENS}
    return (tuple({i: dims[n] for i, n in enumerate(x.shape) if n in dims} for x in inputs),)


def exported(call: Function, inputs: Tensors, opset: int | None = None) -> Any:
    """Export by torch's own function."""
    model = Model(call).eval()
    shapes = shapes_of(inputs)
    named = {"dynamo": True, "verbose": False, "dynamic_shapes": shapes, "opset_version": opset}
    return torch.onnx.export(model, tuple(inputs), **named)


def run(program: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run an exported program in ONNX Runtime."""
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def nodes(program: Any, kind: str = "RotaryEmbedding") -> int:
    return sum(node.op_type == kind for node in program.model.graph)


def near(y: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert closeness, relative to the largest channel of each head."""
    error = (y.double() - want).abs() / want.abs().amax(-1, keepdim=True)
    assert error.max() <= value(f"f and P, {str(dtype)[6:]}")


# --- rotations ------------------------------------------------------------------------------------

HALF, PREFIX = RopeSpec(32), RopeSpec(32, rotary_dim=16)
MIDDLE = RopeSpec(32, rotary_dim=16, start=8, interleaved=True)
AXES = RopeSpec(32, axes=Axes.blocks((8, 8)))
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float32


def inputs_of(rows: int, tokens: int, reach: int = FAR) -> tuple[torch.Tensor, ...]:
    """Return x, ids of tokens and ids of rows and tokens, below ``reach``."""
    generator = torch.Generator().manual_seed(rows)
    x = noise(rows, HEADS, tokens, 32, seed=rows, dtype=torch.float32)
    ids = torch.randint(0, reach, (tokens,), generator=generator)
    return x, ids, torch.randint(0, reach, (rows, tokens), generator=generator)


def rotated(x: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, exact: bool) -> Tensors:
    """Rotate x ``[rows, heads, tokens, channels]`` in each of DTYPES, or what these hold of it in float64."""
    xs = [x.to(dtype).double() if exact else x.to(dtype) for dtype in DTYPES]
    return [
        rotate(xs[0].permute(2, 0, 1, 3), PREFIX, ids, layout="sbhd", inverse=True),
        rotate(xs[1], HALF, rows),
        rotate(xs[2].transpose(1, 2), MIDDLE, ids, layout="bshd"),
        rotate_(xs[3].clone(), MIDDLE, 7),
    ]


def rotations(_: torch.Tensor, *inputs: torch.Tensor) -> Tensors:
    # NumPy has no bfloat16; float32 holds every result.
    return [y.float() for y in rotated(*inputs, exact=False)]


def check_rotations(program: Any, reach: int = FAR) -> None:
    for size in ((3, 7), (1, 11)):
        inputs = inputs_of(*size, reach)
        wanted = rotated(*inputs, exact=True)
        for each in zip(run(program, *inputs), wanted, DTYPES, strict=True):
            near(*each)


def test_plain_torch_by_default() -> None:
    program = exported(rotations, inputs_of(2, 5))
    assert nodes(program) == 0
    check_rotations(program)


def test_one_node_for_each_tensor() -> None:
    """Tables need no cosines; positions outside of them give NaN."""
    with onnx.rotary_nodes(LENGTH):
        program = exported(rotations, inputs_of(2, 5, LENGTH), 23)
    assert (nodes(program), nodes(program, "Cos")) == (len(DTYPES), 0)
    check_rotations(program, LENGTH)
    x, ids, rows = inputs_of(2, 5, LENGTH)
    ids[1], ids[2], rows[1, 3] = LENGTH, -1, LENGTH + 5
    prefix, half, *_ = run(program, x, ids, rows)
    assert prefix[..., :16].isnan().nonzero()[:, 0].unique().tolist() == [1, 2]
    assert half.isnan().nonzero()[:, [0, 2]].unique(dim=0).tolist() == [[1, 3]]


@pytest.mark.slow
def test_nodes_for_any_position() -> None:
    with onnx.rotary_nodes():
        program = exported(rotations, inputs_of(2, 5), 23)
    assert nodes(program) == len(DTYPES)
    check_rotations(program)


@pytest.mark.slow
@pytest.mark.parametrize("by", [onnx.plain_torch, onnx.rotary_nodes])
def test_far_positions_of_several_axes(by: Any) -> None:
    """Phases of the axes add up modulo a turn: a sum of int64 numbers does not wrap around in ONNX Runtime."""

    def call(weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        where = positions.multi_axis(torch.stack((ids, ids.flip(0))))
        learned = AXES.at(where, inv_freq=weight[:2, None, :16])
        return [rotate(x, AXES, where), rotate(x, learned)]

    with by():
        program = exported(call, inputs_of(2, 5)[:2], 23)
    x, ids, _ = inputs_of(3, 7)
    weight = Model(call).weight.detach()
    for y, want in zip(run(program, x, ids), call(weight, x.double(), ids), strict=True):
        near(y, want, torch.float32)


@pytest.mark.slow
def test_more_tokens_than_positions() -> None:
    """Packed sequences: ONNX Runtime's node refuses ids if its tables have fewer rows than tokens."""
    with onnx.rotary_nodes(length=4):
        program = exported(lambda _, *at: [rotate(at[0], HALF, at[1])], inputs_of(2, 5, 4)[:2], 23)
    x, ids, _ = inputs_of(3, 7, 4)
    assert nodes(program) == 1
    near(run(program, x, ids)[0], rotate(x.double(), HALF, ids), torch.float32)


@pytest.mark.slow
def test_layers_share_their_tables() -> None:
    def call(weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(3):
            x = rotate(x, HALF, ids) * weight[0]
        return [x]

    inputs, named = inputs_of(2, 5, 9)[:2], {"length": 2**14, "verbose": False}
    shapes = shapes_of(inputs)
    program = onnx.export(Model(call).eval(), inputs, **named, dynamic_shapes=shapes)
    assert nodes(program) == 3
    size = sum(tensor.const_value.nbytes for tensor in program.model.graph.initializers.values())
    assert size < 1.1 * 2 * 2**14 * 16 * 4


@pytest.mark.slow
@pytest.mark.parametrize("block", [onnx.plain_torch, onnx.rotary_nodes])
def test_an_exported_program(block: Any) -> None:
    """A program that was exported in a block can be converted outside of it."""
    inputs = inputs_of(2, 5)
    with block():
        model = Model(rotations).eval()
        program = torch.export.export(model, inputs, dynamic_shapes=shapes_of(inputs))
    made = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=23)
    assert (nodes(made) > 0) == (block is onnx.rotary_nodes)
    check_rotations(made)


# --- all options ----------------------------------------------------------------------------------

# In 16 bits ONNX Runtime lacks operators on the CPU, such as Expand of bfloat16.
EXACT = [c for c in CASES if (c["rounding"], c["dtype"]) == ("once", torch.float32)]
WAYS = {onnx.plain_torch: EXACT[::8], onnx.rotary_nodes: EXACT[4::8]}


def results(calls: Sequence[Call], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of calls for their tensors, one after the other."""
    rest = iter(leaves)
    return [y for call in calls for y in call(**{name: next(rest) for name in call.leaves})]


@pytest.mark.slow
@pytest.mark.parametrize("by", WAYS)
def test_calls_with_many_options(by: Any) -> None:
    """Calls of the laws in float32, in one graph, against themselves in float64; each is exported in one of both ways."""
    calls = [Call(case) for case in WAYS[by]]
    leaves = [x for call in calls for x in call.leaves.values()]
    model = Model(lambda _, *inputs: results(calls, inputs)).eval()
    with by():
        program = torch.onnx.export(
            model, tuple(leaves), dynamo=True, verbose=False, opset_version=23
        )
    assert (nodes(program) > 0) == (by is onnx.rotary_nodes)
    exact = [Call({**call.case, "dtype": torch.float64}) for call in calls]
    wanted = results(exact, [x.double() for x in leaves])
    for y, want in zip(run(program, *leaves), wanted, strict=True):
        near(y, want, torch.float32)


@pytest.mark.slow
def test_the_frequencies_of_a_stack_are_constants() -> None:
    """They are those of torch; only cosines are computed by ONNX Runtime."""
    spec = RopeSpec(32, base=50000.0, scaling=YaRN(4.0, original_max_position=32))

    def call(_: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        return [rotate(x, spec.at(ids, stack=name)) for name in ("transformers", "vllm-native")]

    program = exported(call, inputs_of(2, 5)[::2])
    x, _, rows = inputs_of(3, 7, 100_000)
    for got, want in zip(run(program, x, rows), call(x, x, rows), strict=True):
        assert_near(got, want, "float32 ways")


# --- what surrounds the calls ---------------------------------------------------------------------


def targets(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def test_only_exports_to_onnx_are_plain_torch() -> None:
    """torch.export and torch.compile keep the operator, also after a block and inside of one."""
    model, inputs = Model(rotations).eval(), inputs_of(2, 5)
    dynamic = shapes_of(inputs)
    before = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    assert "tightrope.rotate.default" in targets(before.graph)
    with onnx.plain_torch():
        plain = torch.export.export(model, inputs, dynamic_shapes=dynamic)
        seen = []

        def backend(module: torch.fx.GraphModule, _: Any) -> Any:
            seen.append(targets(module.graph))
            return module

        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        # Eager calls run the kernel.
        assert_same_bits(model(*inputs)[0], before.module()(*inputs)[0])
    assert not any("tightrope" in name for name in targets(plain.graph))
    assert any("tightrope" in name for name in seen[0])
    after = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    assert str(after.graph) == str(before.graph)


def writes(
    dtype: torch.dtype = torch.float32, paged: bool = True, **options: Any
) -> Callable[[], object]:
    """Return the export of a model that writes to a cache."""

    def call(_: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Tensors:
        to: Any = {"cache": (cache, None), "slots": slots if paged else None, **options}
        write_kv(None, k, None, RopeSpec(8), layout="thd", **to)
        return [cache.float()]

    return partial(exports, call, (4, 3, 2, 8) if paged else (5, 2, 8), dtype)


def moves(_: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Tensors:
    return [rerotate_(cache, None, RopeSpec(8), layout="thd", slots=slots)]


def exports(
    call: Function, cache: tuple[int, ...] = (4, 3, 2, 8), dtype: torch.dtype = torch.float32
) -> None:
    inputs = noise(5, 2, 8).float(), noise(*cache).to(dtype), torch.arange(5)
    with onnx.rotary_nodes():
        torch.export.export(Model(call), inputs, strict=False)


test_calls = refused_calls(Path(__file__).with_name("refused_onnx.jsonl"), {}, globals())
