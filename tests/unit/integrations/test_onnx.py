"""Models with our operators, exported to ONNX and run by ONNX Runtime, against the same calls in float64.

Each graph has many calls, because an export takes seconds whatever it exports. Every graph has a dynamic
number of rows and tokens, and runs with two of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import pairwise
from tests.support.helpers import noise
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_near, assert_same_bits, value
from tightrope import Axes, RopeSpec, gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK, YaRN
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    rerotate_,
    rotate,
    rotate_,
    rotate_qk_,
    write_kv,
)
from tightrope.integrations import onnx

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROWS, TOKENS = torch.export.Dim("rows"), torch.export.Dim("tokens")
FAR, HEADS = 2**31 - 1, 16
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


def exported(call: Function, inputs: Tensors) -> Any:
    """Export by torch's own function."""
    model = Model(call).eval()
    shapes = shapes_of(inputs)
    return torch.onnx.export(
        model, tuple(inputs), dynamo=True, verbose=False, dynamic_shapes=shapes
    )


def run(program: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run an exported program in ONNX Runtime."""
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def near(name: str, y: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert closeness, relative to the largest channel of each head."""
    error = (y.double() - want).abs() / want.abs().amax(-1, keepdim=True)
    assert error.max() <= value(f"f and P, {str(dtype)[6:]}"), name


# --- rotations ------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bhsd": lambda x: x,
    "bshd": lambda x: x.transpose(1, 2),
    "sbhd": lambda x: x.permute(2, 0, 1, 3),
    "thd": lambda x: x[0].transpose(0, 1),
    "bsd": lambda x: x[:, 0],
    "sd": lambda x: x[0, 0],
}


class Case(NamedTuple):
    spec: RopeSpec
    layout: str = "bhsd"
    at: Any = None  # "ids" and "rows" are inputs
    dtype: torch.dtype = torch.float32
    inverse: bool = False
    in_place: bool = False

    def rotate(self, x: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the result for ``[rows, heads, tokens, channels]``."""
        at = {"ids": ids, "rows": rows}.get(self.at, self.at)
        call, x = rotate, LAYOUTS[self.layout](x)
        if self.in_place:
            call, x = rotate_, x.clone()
        return call(x, self.spec, at, layout=self.layout, inverse=self.inverse)


HALF, PAIRED = RopeSpec(32), RopeSpec(32, interleaved=True)
MIDDLE = RopeSpec(32, rotary_dim=16, start=8, interleaved=True)
FEW = {
    "prefix": Case(RopeSpec(32, rotary_dim=16), "sbhd", "ids", inverse=True),
    "float16": Case(HALF, "bhsd", "rows", torch.float16),
    "bfloat16": Case(MIDDLE, "bshd", "ids", torch.bfloat16),
    "in place": Case(MIDDLE, "bhsd", 7, in_place=True),
}
OPTIONS: dict[str, Any] = {
    "layout": tuple(LAYOUTS),
    "place": ((0, 32), (0, 16), (8, 16), (16, 16)),
    "interleaved": (False, True),
    "at": (None, 1000, "ids", "rows"),
    "dtype": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "inverse": (False, True),
    "in_place": (False, True),
}


def made(place: tuple[int, int], interleaved: bool, **options: Any) -> Case:
    spec = RopeSpec(32, start=place[0], rotary_dim=place[1], interleaved=interleaved)
    return Case(spec, **options)


def has_rows(case: Mapping[str, Any]) -> bool:
    return case.get("at") != "rows" or "b" in case.get("layout", "b")


EVERY = {
    str(number): made(**case) for number, case in enumerate(pairwise.covering(OPTIONS, has_rows))
}


def inputs_of(rows: int, tokens: int, reach: int = FAR) -> tuple[torch.Tensor, ...]:
    """Return x, ids of tokens and ids of rows and tokens, below ``reach``."""
    generator = torch.Generator().manual_seed(rows)
    x = noise(rows, HEADS, tokens, 32, seed=rows, dtype=torch.float32)
    ids = torch.randint(0, reach, (tokens,), generator=generator)
    return x, ids, torch.randint(0, reach, (rows, tokens), generator=generator)


def rotations(cases: Mapping[str, Case]) -> Function:
    def call(_: torch.Tensor, x: torch.Tensor, *at: torch.Tensor) -> Tensors:
        found = [case.rotate(x.to(case.dtype), *at) for case in cases.values()]
        # NumPy has no bfloat16; float32 and float64 hold every result.
        return [y if y.dtype == torch.float64 else y.float() for y in found]

    return call


def check_rotations(program: Any, cases: Mapping[str, Case]) -> None:
    for size in ((3, 7), (1, 11)):
        x, *at = inputs_of(*size)
        for (name, case), y in zip(cases.items(), run(program, x, *at), strict=True):
            near(name, y, case.rotate(x.to(case.dtype).double(), *at), case.dtype)


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(dict([*EVERY.items()][::4]), marks=pytest.mark.slow)]
)
def test_rotations(cases: dict[str, Case]) -> None:
    check_rotations(exported(rotations(cases), inputs_of(2, 5)), cases)


@pytest.mark.slow
def test_an_exported_program() -> None:
    """A program that was exported in a block can be converted outside of it."""
    inputs = inputs_of(2, 5)
    with onnx.plain_torch():
        model = Model(rotations(FEW)).eval()
        program = torch.export.export(model, inputs, dynamic_shapes=shapes_of(inputs))
    check_rotations(torch.onnx.export(program, dynamo=True, verbose=False), FEW)


# --- everything else that the operator can do -----------------------------------------------------

AXES = RopeSpec(32, axes=Axes.sections((4, 6, 6)))
SCALED = RopeSpec(32, scaling=YaRN(factor=4.0, original_max_position=32))
BY_LENGTH = RopeSpec(32, scaling=DynamicNTK(factor=2.0, original_max_position=8))


def others(
    w: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, axes: torch.Tensor, at: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return results of x ``[rows, heads, tokens, 32]``.

    Args:
        w: a parameter ``[heads, 32]``.
        x: float32 or float64.
        ids: int64 ``[rows, tokens]``.
        axes: int64 ``[3, rows, tokens]``.
        at: float64 ``[rows, tokens]``, fractional positions.
    """
    w = w.to(x.dtype)
    angles = x[..., :16]
    turns = at[..., None] * w[0, :16]
    tables = [torch.cat((f(turns),) * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin)]
    far = at * 1e5
    q, k = rotate_qk_(x.clone(), x[:, :2].clone(), HALF, ids, gate=gates.Exp(-w[:1].abs()))
    return {
        "q in place": q,
        "k in place": k,
        "silu": rotate(x, PAIRED, ids, act="silu"),
        "norm": rotate(x, MIDDLE, ids, act=RMSNorm(w[0])),
        "slope": rotate(-x, HALF, ids, gate=gates.Slope(-w.abs() / 64)),
        "undone": rotate(x, SCALED, ids, gate=gates.Exp(-w.abs()), inverse=True),
        "axes": rotate(x, AXES, positions.multi_axis(axes)),
        "learned": rotate(x, HALF.at(far.long(), inv_freq=w[0, :16].abs())),
        "fractional": rotate(x, PAIRED, far),
        "given": rotate(x, HALF.at(ids, phases=phases.given(angles[:, :1]))),
        "running": rotate(x, HALF.at(phases=phases.running(angles[:, :1]))),
        "cat": apply_rotary_pos_emb(x, None, *tables)[0],
        "scaled": rotate(x, SCALED, 5),
        "length": rotate(x, BY_LENGTH.at(seq_len=ids.max() + 9)),
        "heads": rotate(x, HALF.at(far.long(), inv_freq=w[:, :16].abs())),
        "lrpe": lrpe_rotate_1d(x.transpose(1, 2), w[:, :16], act="sigmoid"),
        "full": apply_rotary_pos_emb(x, None, *tables, tables="full")[0],
        "wide": rotate(x, HALF.at(ids, rounding="wide")),
    }


@pytest.mark.slow
def test_everything_else() -> None:
    def call(weight: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(others(weight, *inputs).values())

    def inputs(rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
        x, _, ids = inputs_of(rows, tokens, 20)
        return x, ids, torch.stack((ids, ids + 3, ids // 2)), ids.double() + 0.25

    program, weight = exported(call, inputs(2, 5)), Model(call).weight.detach()
    for size in ((3, 7), (1, 11)):
        x, *rest = inputs(*size)
        exact = others(weight, x.double(), *rest)
        for (name, want), y in zip(exact.items(), run(program, x, *rest), strict=True):
            near(name, y, want, torch.float32)


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
    model, inputs = Model(rotations({"": Case(HALF)})).eval(), inputs_of(2, 5)
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
    with onnx.plain_torch():
        torch.export.export(Model(call), inputs, strict=False)


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())
