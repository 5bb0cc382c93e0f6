"""Models with our operators, exported to ONNX and run by ONNX Runtime, against exact results.

Each graph has many calls, because an export takes seconds whatever it exports. Every graph has a dynamic
number of rows and tokens, and runs with two of each.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import noise, refused
from tests.support.tolerances import Result, assert_near, assert_rotated, assert_same_bits, value
from tightrope import Axes, RopeSpec, gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK, YaRN
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    rotate,
    rotate_,
    rotate_qk_,
)

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tightrope.integrations import onnx  # noqa: E402  (only if the runtime is there)

LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd", "sd")
ROWS, TOKENS = torch.export.Dim("rows"), torch.export.Dim("tokens")
LENGTH, FAR, HEADS = 4096, 2**31 - 1, 16
Function = Callable[..., Sequence[torch.Tensor]]


class Model(torch.nn.Module):
    """A model that calls a function with its inputs and its parameter."""

    def __init__(self, call: Function) -> None:
        super().__init__()
        self.call = call
        self.weight = torch.nn.Parameter(noise(HEADS, 32, seed=5, dtype=torch.float32))

    def forward(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.call(self.weight, *inputs)


def shapes_of(inputs: Sequence[torch.Tensor]) -> Any:
    """Return the dynamic dimensions of inputs ``[2, …, 5, …]``: the sizes 2 are rows and 5 are tokens."""
    dims = {2: ROWS, 5: TOKENS}
    return (tuple({i: dims[n] for i, n in enumerate(x.shape) if n in dims} for x in inputs),)


def exported(
    call: Function, inputs: Sequence[torch.Tensor], opset: int | None = None, dynamic: bool = True
) -> Any:
    """Export by torch's own function."""
    return torch.onnx.export(
        Model(call).eval(),
        tuple(inputs),
        dynamo=True,
        verbose=False,
        opset_version=opset,
        dynamic_shapes=shapes_of(inputs) if dynamic else None,
    )


def session_of(program: Any) -> Callable[..., list[torch.Tensor]]:
    """Return a function that runs an exported program in ONNX Runtime."""
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, feeds)]

    return run


def nodes(program: Any, kind: str = "RotaryEmbedding") -> int:
    return sum(node.op_type == kind for node in program.model.graph)


# --- rotations ------------------------------------------------------------------------------------


class Case(NamedTuple):
    spec: RopeSpec
    layout: str = "bhsd"
    at: Any = None  # "ids" and "rows" are inputs
    dtype: torch.dtype = torch.float32
    inverse: bool = False
    in_place: bool = False

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that this case rotates, from ``[rows, heads, tokens, channels]``."""
        x = x.to(self.dtype)
        return {
            "bhsd": lambda: x,
            "bshd": lambda: x.transpose(1, 2),
            "sbhd": lambda: x.permute(2, 0, 1, 3),
            "thd": lambda: x[0].transpose(0, 1),
            "bsd": lambda: x[:, 0],
            "sd": lambda: x[0, 0],
        }[self.layout]()

    def rotate(self, x: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        at = {"ids": ids, "rows": rows}.get(self.at, self.at)
        x = self.given(x)
        options = {"layout": self.layout, "inverse": self.inverse}
        if self.in_place:
            y = rotate_(x.clone(), self.spec, at, **options)
        else:
            y = rotate(x, self.spec, at, **options)
        # NumPy has no bfloat16; float32 and float64 hold every result.
        return y if self.dtype == torch.float64 else y.float()

    def result(
        self, y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor
    ) -> Result:
        """Return a result with its exact value."""
        tokens = torch.arange(x.shape[2])
        at = {"ids": ids, "rows": rows, None: tokens}.get(self.at)
        at = tokens + self.at if at is None else at
        x, spec = self.given(x).contiguous(), self.spec
        kind = {"start": spec.start, "interleaved": spec.interleaved}
        omegas = oracle.frequencies(spec.base, spec.rotary_dim)
        options = {"layout": self.layout, "inverse": self.inverse, **kind}
        exact = oracle.rotate(x, at, omegas, **options)
        lengths = oracle.pair_lengths(x, spec.rotary_dim, **kind)
        return Result(y.to(self.dtype), exact, lengths, float(at.max()))


HALF, PAIRED = RopeSpec(32), RopeSpec(32, interleaved=True)
PREFIX = RopeSpec(32, rotary_dim=16)
MIDDLE = RopeSpec(32, rotary_dim=16, start=8, interleaved=True)
LAST = RopeSpec(32, start=16)

CASES = {
    "half": Case(HALF),
    "interleaved, ids of rows": Case(PAIRED, "bshd", "rows"),
    "prefix": Case(PREFIX, "sbhd", "ids"),
    "middle": Case(MIDDLE, "thd", 1000),
    "last, inverse": Case(LAST, "bsd", "rows", inverse=True),
    "one head": Case(HALF, "sd", "ids", inverse=True),
    "float16": Case(HALF, "bhsd", "rows", torch.float16),
    "bfloat16": Case(MIDDLE, "bshd", "ids", torch.bfloat16),
    "float64": Case(PREFIX, "bhsd", "rows", torch.float64),
    "in place": Case(MIDDLE, "bhsd", 7, in_place=True),
}
EVERY = {
    f"{layout}, {at}, {spec.start}, {spec.rotary_dim}, {spec.interleaved}": Case(spec, layout, at)
    for (layout, at), spec in itertools.product(
        zip(LAYOUTS, (None, 3, "ids") * 2),
        (
            RopeSpec(32, rotary_dim=width, start=start, interleaved=interleaved)
            for start, width in ((0, 32), (0, 16), (8, 16), (16, 16))
            for interleaved in (False, True)
        ),
    )
}


def inputs_of(rows: int, tokens: int, reach: int) -> tuple[torch.Tensor, ...]:
    """Return x, ids of tokens and ids of rows and tokens, below ``reach``."""
    generator = torch.Generator().manual_seed(rows)
    x = noise(rows, HEADS, tokens, 32, seed=rows, dtype=torch.float32)
    ids = torch.randint(0, reach, (tokens,), generator=generator)
    return x, ids, torch.randint(0, reach, (rows, tokens), generator=generator)


def check_rotations(run: Callable[..., list[torch.Tensor]], cases: Any, reach: int) -> None:
    by_dtype: dict[torch.dtype, list[Result]] = {}
    for size in ((3, 7), (1, 11)):
        inputs = inputs_of(*size, reach)
        for case, y in zip(cases.values(), run(*inputs), strict=True):
            by_dtype.setdefault(case.dtype, []).append(case.result(y, *inputs))
    for results in by_dtype.values():
        assert_rotated(results)


def rotations(cases: dict[str, Case]) -> Function:
    return lambda _, *inputs: [case.rotate(*inputs) for case in cases.values()]


# Every layout with some slices, and every slice with some layouts.
SOME = dict(list(EVERY.items())[::5])

ALL = pytest.param(tuple(CASES), marks=pytest.mark.slow)


@pytest.mark.parametrize("names", [("float16", "bfloat16", "in place"), ALL])
def test_plain_torch_by_default(names: tuple[str, ...]) -> None:
    cases = {name: CASES[name] for name in names}
    program = exported(rotations(cases), inputs_of(2, 5, FAR))
    assert nodes(program) == 0
    check_rotations(session_of(program), cases, FAR)


@pytest.mark.parametrize("names", [("prefix", "float16", "bfloat16", "in place"), ALL])
def test_one_node_for_each_tensor(names: tuple[str, ...]) -> None:
    cases = {name: CASES[name] for name in names}
    with onnx.rotary_nodes(length=LENGTH):
        program = exported(rotations(cases), inputs_of(2, 5, LENGTH), 23)
    # The operator of ONNX has no float64, and tables need no cosines.
    plain = int("float64" in cases)
    assert (nodes(program), nodes(program, "Cos")) == (len(cases) - plain, plain)
    run = session_of(program)
    check_rotations(run, cases, LENGTH)
    x, ids, rows = inputs_of(2, 5, LENGTH)
    ids[1], ids[2], rows[1, 3] = LENGTH, -1, LENGTH + 5
    found = dict(zip(cases, run(x, ids, rows)))
    assert found["prefix"][..., :16].isnan().nonzero()[:, 0].unique().tolist() == [1, 2]
    assert found["float16"].isnan().nonzero()[:, [0, 2]].unique(dim=0).tolist() == [[1, 3]]


@pytest.mark.slow
def test_a_number_of_heads_that_is_not_known() -> None:
    def call(_: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [rotate(x, PREFIX)]

    with onnx.rotary_nodes(length=LENGTH):
        program = torch.onnx.export(
            Model(call).eval(),
            (noise(2, 4, 7, PREFIX.head_dim, dtype=torch.float32),),
            dynamo=True,
            verbose=False,
            opset_version=23,
            dynamic_shapes=(({1: torch.export.Dim("heads")},),),
        )
    assert nodes(program) == 1
    x, _, rows = inputs_of(2, 7, LENGTH)
    (y,) = session_of(program)(x)
    assert_rotated([Case(PREFIX, at="ids").result(y, x, torch.arange(7), rows)])


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, LENGTH])
def test_nodes_of_every_layout_and_slice(length: int | None) -> None:
    every = EVERY if length else SOME
    with onnx.rotary_nodes(length=length):
        program = exported(rotations(every), inputs_of(2, 5, LENGTH), 23)
    assert nodes(program) == len(every)
    check_rotations(session_of(program), every, LENGTH if length else FAR)


@pytest.mark.slow
def test_plain_torch_of_every_layout_and_slice() -> None:
    program = exported(rotations(SOME), inputs_of(2, 5, 9))
    check_rotations(session_of(program), SOME, FAR)


@pytest.mark.slow
def test_static_sizes_need_no_length() -> None:
    names = ("half", "middle", "in place")
    fixed = positions.Positions(None, 3, add_index=False)
    cases = {name: CASES[name] for name in names} | {"one position": Case(HALF, at=fixed)}
    with onnx.rotary_nodes():
        program = exported(rotations(cases), inputs_of(3, 7, 9), 23, dynamic=False)
    assert nodes(program) == len(cases)
    assert nodes(program, "Cos") == nodes(program, "Where") == 0
    x, ids, rows = inputs_of(3, 7, 9)
    y, *_, fourth = session_of(program)(x, ids, rows)
    cases["one position"] = Case(HALF, at="ids")
    threes = torch.full((7,), 3)
    assert_rotated(
        [
            cases["half"].result(y, x, ids, rows),
            cases["one position"].result(fourth, x, threes, rows),
        ]
    )


# --- everything else that the operator can do -----------------------------------------------------

AXES = RopeSpec(32, axes=Axes.sections((4, 6, 6)))
SCALED = RopeSpec(32, scaling=YaRN(factor=4.0, original_max_position=32))
BY_LENGTH = RopeSpec(32, scaling=DynamicNTK(factor=2.0, original_max_position=8))


def others(
    w: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, axes: torch.Tensor, at: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return results of x ``[rows, heads, tokens, 32]`` that ONNX computes by a node, then the others.

    Args:
        w: a parameter ``[heads, 32]``.
        x: float32 or float64.
        ids: int64 ``[rows, tokens]``.
        axes: int64 ``[3, rows, tokens]``.
        at: float64 ``[rows, tokens]``, fractional positions.
    """
    w = w.to(x.dtype)
    angles = x[..., :16]
    tables = [torch.cat((f(at[..., None] * w[0, :16]),) * 2, -1).to(x.dtype) for f in TABLES]
    far = at * 1e5
    q, k = rotate_qk_(x.clone(), x[:, :2].clone(), HALF, ids, gate=gates.Exp(-w[:1].abs()))
    by_node = {
        "q in place": q,
        "k in place": k,
        "silu": rotate(x, PAIRED, ids, act="silu"),
        "norm": rotate(x, MIDDLE, ids, act=RMSNorm(w[0])),
        "slope": rotate(-x, HALF, ids, gate=gates.Slope(-w.abs() / 64)),
        "undone": rotate(x, SCALED, ids, gate=gates.Exp(-w.abs()), inverse=True),
        "axes": rotate(x, AXES, positions.multi_axis(axes)),
        "learned": rotate(x, HALF, far.long(), inv_freq=w[0, :16].abs()),
        "fractional": rotate(x, PAIRED, far),
        "given": rotate(x, HALF, ids, phases=phases.given(angles[:, :1])),
        "running": rotate(x, HALF, phases=phases.running(angles[:, :1])),
        "cat": apply_rotary_pos_emb(x, None, *tables)[0],
        "scaled": rotate(x, SCALED, 5),
        "length": rotate(x, BY_LENGTH, seq_len=ids.max() + 9),
    }
    plain = {
        "heads": rotate(x, HALF, far.long(), inv_freq=w[:, :16].abs()),
        "lrpe": lrpe_rotate_1d(x.transpose(1, 2), w[:, :16], act="sigmoid"),
        "full": apply_rotary_pos_emb(x, None, *tables, tables="full")[0],
        "wide": rotate(x, HALF, ids, rounding="wide"),
    }
    return {**by_node, **plain}


PLAIN, TABLES = ("heads", "lrpe", "full", "wide"), (torch.cos, torch.sin)


def inputs_of_others(rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
    x, _, ids = inputs_of(rows, tokens, 20)
    return x, ids, torch.stack((ids, ids + 3, ids // 2)), ids.double() + 0.25


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 64, "no nodes"])
def test_everything_else(length: Any) -> None:
    def call(weight: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(others(weight, *inputs).values())

    if length == "no nodes":
        program = exported(call, inputs_of_others(2, 5))
        assert nodes(program) == 0
    else:
        with onnx.rotary_nodes(length):
            program = exported(call, inputs_of_others(2, 5), 23)
    run = session_of(program)
    weight = Model(call).weight.detach()
    for size in ((3, 7), (1, 11)):
        x, *rest = inputs_of_others(*size)
        exact = others(weight, x.double(), *rest)
        if length != "no nodes":
            assert nodes(program) == len(exact) - len(PLAIN)
        for (name, want), y in zip(exact.items(), run(x, *rest), strict=True):
            error = (y.double() - want).abs() / want.abs().amax(-1, keepdim=True)
            assert error.max() <= value("f and P, float32"), name


# --- what surrounds the calls ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_frequencies_of_a_stack_are_constants() -> None:
    """They are those of torch; only cosines are computed by ONNX Runtime."""
    spec = RopeSpec(32, base=50000.0, scaling=YaRN(4.0, original_max_position=32))

    def call(_: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        return [rotate(x, spec.at(ids, stack=name)) for name in ("transformers", "vllm-native")]

    program = exported(call, [x for at, x in enumerate(inputs_of(2, 5, 9)) if at != 1])
    x, _, rows = inputs_of(3, 7, 100_000)
    for got, want in zip(session_of(program)(x, rows), call(x, x, rows), strict=True):
        assert_near(got, want, "float32 ways")


def test_errors() -> None:
    rule = "opset_version must be at least 23, the first with RotaryEmbedding, but got 22"
    with refused(ValueError, f"[onnx.export] {rule}."):
        onnx.export(Model(rotations(CASES)), opset_version=22)
    with refused(ValueError, "[onnx.rotary_nodes] length must not be negative but got -1."):
        onnx.rotary_nodes(-1)
    with refused(TypeError, "[onnx.rotary_nodes] length must be an int but got 1.5."):
        onnx.rotary_nodes(1.5)  # type: ignore[arg-type]


def test_without_onnxscript(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    text = "[onnx.export] onnxscript must be installed, as by pip install 'tightrope[onnx]'."
    with refused(NotImplementedError, text):
        onnx.export(Model(rotations(CASES)))


def targets(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def test_only_exports_to_onnx_are_lowered() -> None:
    """torch.export and torch.compile keep the operator, also after a block and inside of one."""
    model, inputs = Model(rotations({"": CASES["half"]})).eval(), inputs_of(2, 5, 9)
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


@pytest.mark.slow
@pytest.mark.parametrize("block", [onnx.plain_torch, onnx.rotary_nodes])
def test_an_exported_program(block: Any) -> None:
    """A program that was exported in a block can be converted outside of it."""
    cases, inputs = {"in place": CASES["in place"]}, inputs_of(2, 5, 9)
    with block():
        program = torch.export.export(
            Model(rotations(cases)).eval(), inputs, dynamic_shapes=shapes_of(inputs)
        )
    made = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=23)
    assert nodes(made) == (block is onnx.rotary_nodes)
    check_rotations(session_of(made), cases, FAR)


@pytest.mark.slow
def test_more_tokens_than_positions() -> None:
    """Packed sequences: ONNX Runtime's node refuses ids if its tables have fewer rows than tokens."""
    cases, inputs = {"half": Case(HALF, at="ids")}, inputs_of(2, 5, 4)
    with onnx.rotary_nodes(length=4):
        program = exported(rotations(cases), inputs, 23)
    assert nodes(program) == 1
    check_rotations(session_of(program), cases, 4)


@pytest.mark.slow
def test_layers_share_their_tables() -> None:
    def call(weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(3):
            x = rotate(x, RopeSpec(32), ids) * weight[0]
        return [x]

    inputs = inputs_of(2, 5, 9)[:2]
    program = onnx.export(
        Model(call).eval(), inputs, length=2**14, verbose=False, dynamic_shapes=shapes_of(inputs)
    )
    assert nodes(program) == 3
    size = sum(tensor.const_value.nbytes for tensor in program.model.graph.initializers.values())
    assert size < 1.1 * 2 * 2**14 * 16 * 4


def test_slots_are_refused() -> None:
    k, cache, slots = noise(5, 2, 8), noise(4, 3, 2, 8), torch.arange(5)

    def write(
        _: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> list[torch.Tensor]:
        return [rotate(k, RopeSpec(8), layout="thd", out=cache, slots=slots)]

    text = "[rotate] slots cannot be exported to ONNX; rotate without out, and write the cache with operators of ONNX."
    with onnx.rotary_nodes(), refused(NotImplementedError, text):
        torch.export.export(Model(write), (k, cache, slots), strict=False)
