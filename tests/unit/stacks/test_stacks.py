"""`tightrope.stacks`: the bits of other libraries, from the configuration to the rotated tensor.

The stacks of libraries that are not installed here are compared in tests/coverage/stacks.py.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits, value
from tests.support.written_calls import rows_of
from tightrope import Axes, RopeSpec, frequencies, functional, positions, stacks
from tightrope.frequencies import DynamicNTK, Given, Linear, Llama3, Rule, YaRN
from tightrope.functional import rotate, rotate_, rotate_qk
from tightrope.ops import cosines, schema

LOW = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", LOW)
every_stack = pytest.mark.parametrize("name", stacks.names())
DIM, TOKENS = 64, 37
# Positions within and beyond the original length of the rules below.
NEAR, FAR = torch.arange(TOKENS)[None], torch.tensor([[0], [5]]) + torch.arange(TOKENS) * 97
SPEC = RopeSpec(DIM, base=50000.0)

# Rules, and their parameters in a configuration of transformers with max_position_embeddings 512.
ROWS = rows_of(Path(__file__).with_name("rules.jsonl"))
THEIRS = {row["name"]: row["transformers"] for row in ROWS}
RULES = {row["name"]: row["ours"] and Rule.from_dict(row["ours"]) for row in ROWS}
every_rule = pytest.mark.parametrize("rule", RULES)


def qk(dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    """Return queries and keys (batch, heads, seq, dim) as transposed views, which require grad."""
    draws = (noise(2, TOKENS, heads, DIM, seed=seed + heads).to(dtype) for heads in (3, 2))
    return [x.transpose(1, 2).requires_grad_() for x in draws]


Q = {dtype: qk(dtype)[0].detach() for dtype in LOW}


def assert_rotates_like(
    theirs: Callable[..., Any], ours: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Assert that two rotations of q and k have the same results and gradients, bit for bit."""
    found = []
    for rotation in (theirs, ours):
        xs = qk(dtype)
        ys = rotation(*xs)
        found.append((*ys, *torch.autograd.grad(ys, xs, qk(dtype, seed=9))))
    assert_same_bits(found[1], found[0])


# --- the code of other libraries ------------------------------------------------------------------


def rotary_module(rule: str) -> Any:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    kind = rule.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": 50000.0, **THEIRS[rule]}
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * DIM,
            num_attention_heads=2,
            max_position_embeddings=512,
            rope_parameters=parameters,
        )
    )


def spec_of(rule: str) -> RopeSpec:
    return RopeSpec(DIM, base=50000.0, scaling=RULES[rule])


@every_dtype
@every_rule
def test_every_rule_of_transformers(rule: str, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    for ids in (NEAR, FAR):
        module, rope = rotary_module(rule), spec_of(rule).at(ids, stack="transformers")
        assert_rotates_like(
            lambda q, k, module=module, ids=ids: apply_rotary_pos_emb(q, k, *module(q, ids)),
            lambda q, k, rope=rope: rotate_qk(q, k, rope),
            dtype,
        )


@every_rule
def test_frequencies_of_transformers_are_near_the_exact_ones(rule: str) -> None:
    module, exact = rotary_module(rule), spec_of(rule).frequencies()
    found, scaling = stacks.get("transformers").frequencies(spec_of(rule))
    assert_same_bits(found, module.inv_freq)
    assert scaling == module.attention_scaling
    if rule == "yarn, mscales of 0":
        return  # transformers takes an mscale of 0 for one that is not given
    bound = value("frequency of transformers") * found.double().abs()
    if isinstance(RULES[rule], YaRN):
        bound += value("ramp of transformers") * SPEC.frequencies().inv_freq
    assert ((exact.inv_freq - found.double()).abs() <= bound).all()
    assert exact.attention_scaling == pytest.approx(scaling, rel=value("frequency of transformers"))


def test_a_model_that_was_cast() -> None:
    """Casting a model of transformers rounds its frequencies; `Stack.cast` reproduces that."""
    stack, module = stacks.get("transformers"), rotary_module("default").bfloat16()
    found, _ = stack.cast(torch.bfloat16).frequencies(spec_of("default"))
    assert_same_bits(found, module.inv_freq.float())
    tables = stack.cast(torch.bfloat16).tables(spec_of("default"), FAR, torch.bfloat16)
    wanted = module(Q[torch.bfloat16], FAR)
    assert_same_bits([torch.cat((table, table), -1)[:, 0] for table in tables], wanted)
    assert not torch.equal(tables[0], stack.tables(spec_of("default"), FAR, torch.bfloat16)[0])
    # LitGPT keeps tables as buffers: casting rounds them, and then every product.
    cast = stacks.get("litgpt").cast(torch.bfloat16)
    assert cast.rounding == ("each", "each")
    exact = stacks.get("litgpt").tables(SPEC, FAR)
    rounded = [table.bfloat16() for table in exact]
    assert_same_bits(cast.tables(SPEC, FAR, torch.bfloat16), rounded)
    assert stacks.get("torchtune").cast(torch.bfloat16).rounding == ("wide", "wide")


@every_dtype
def test_several_axes(dtype: torch.dtype) -> None:
    """M-RoPE with the stack of transformers has the bits of Qwen2-VL."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    sections = [8, 12, 12]
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = qwen.Qwen2VLTextConfig(
        hidden_size=2 * DIM, num_attention_heads=2, rope_parameters=parameters
    )
    module = qwen.Qwen2VLRotaryEmbedding(config)
    ids = torch.stack((FAR, FAR // 3, FAR % 17))
    spec = RopeSpec(DIM, axes=Axes.sections(sections))
    rope = spec.at(positions.multi_axis(ids), stack="transformers")
    assert_rotates_like(
        lambda q, k: qwen.apply_rotary_pos_emb(q, k, *module(q, ids)),
        lambda q, k: rotate_qk(q, k, rope),
        dtype,
    )


@pytest.mark.slow
@every_dtype
@pytest.mark.usefixtures("compiler")
def test_a_compiled_model(dtype: torch.dtype) -> None:
    """In one compiled graph tables stay float32, and nothing but the result is rounded.

    Cosines are taken from compiled code too, as they may differ from eager ones in the last bit.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    module, stack = rotary_module("default"), stacks.get("transformers-compiled")
    compiled = torch.compile(lambda q, k: apply_rotary_pos_emb(q, k, *module(q, FAR)))
    angles = torch.compile(lambda at: ((at * module.inv_freq).cos(), (at * module.inv_freq).sin()))
    tables = angles(FAR[:, :, None].float())
    own: Any = {"tables": "half", "rounding": stack.rounding}
    assert_rotates_like(
        compiled, lambda q, k: functional.apply_rotary_pos_emb(q, k, *tables, **own), dtype
    )
    for table, want in zip(stack.tables(spec_of("default"), FAR, dtype), tables, strict=True):
        assert table.dtype == torch.float32
        assert (table[:, 0] - want).abs().max() <= torch.finfo(torch.float32).eps


@every_dtype
@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("name", ["diffusers", "diffusers-float64"])
def test_diffusers(name: str, factor: float | None, dtype: torch.dtype) -> None:
    from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

    inside = torch.float64 if "64" in name else torch.float32
    options: Any = {"use_real": True, "linear_factor": factor or 1.0, "freqs_dtype": inside}
    tables = get_1d_rotary_pos_embed(DIM, FAR[1], theta=50000.0, **options)
    scaling = Linear(factor) if factor else None
    spec = RopeSpec(DIM, base=50000.0, interleaved=True, scaling=scaling)
    rope = spec.at(FAR[1], stack=name)
    assert_rotates_like(
        lambda q, k: (apply_rotary_emb(q, tables), apply_rotary_emb(k, tables)),
        lambda q, k: rotate_qk(q, k, rope),
        dtype,
    )


# --- behaviour ------------------------------------------------------------------------------------


def by_tables(x: torch.Tensor, tables: Any, rounding: Any, **more: Any) -> torch.Tensor:
    more = {"tables": "half", "rounding": rounding, **more}
    return functional.apply_rotary_pos_emb(x, None, *tables, **more)[0]


@every_stack
def test_stacks_stay_close_to_the_exact_rotation(name: str) -> None:
    """At small positions, the rotation of a stack differs from the exact one only by rounding."""
    rope = SPEC.at(NEAR, stack=name)
    found, exact = rotate(Q[torch.float32], rope), rotate(Q[torch.float32], SPEC, NEAR)
    assert float((found - exact).abs().max()) < 1e-4


@every_backend
@pytest.mark.parametrize("dtype", LOW[:2])
def test_a_rotation_is_that_by_the_tables_of_its_stack(dtype: torch.dtype, backend: str) -> None:
    """At offsets and ids, in other layouts, in place, in the second call too, of a part of the channels."""
    q, stack = Q[dtype], stacks.get("transformers")
    want = by_tables(q, stack.tables(SPEC, 7, dtype, tokens=TOKENS), "each")
    for where in (7, NEAR[0] + 7, NEAR + 7):
        rope = SPEC.at(where, stack="transformers")
        for _ in range(2):
            assert_same_bits(on(backend, rotate_qk, q, q, rope), (want, want))
        turned = on(backend, rotate, q.transpose(1, 2), rope, layout="bshd")
        assert_same_bits(turned.transpose(1, 2), want)
        assert_same_bits(on(backend, rotate_, q.clone(), rope), want)
        back = on(backend, rotate, want, rope, inverse=True)
        assert torch.allclose(back.float(), q.float(), atol=0.05)
    for interleaved in (False, True):
        place: Any = {"start": 16, "interleaved": interleaved}
        spec = RopeSpec(DIM, rotary_dim=32, **place)
        want = by_tables(q, stacks.get("meta").tables(spec, FAR), "wide", **place)
        assert_same_bits(on(backend, rotate, q, spec.at(FAR, stack="meta")), want)
    # A rounding that is stated replaces that of the stack; without a stack the default is "once".
    tables, exact = stack.tables(SPEC, FAR, dtype), SPEC.at(FAR)
    for rounding in ("once", "wide", "each"):
        want = by_tables(q, tables, rounding)
        assert_same_bits(rotate(q, SPEC.at(FAR, stack=stack, rounding=rounding)), want)
    for _ in range(2):
        assert_same_bits(rotate(q, exact), rotate(q, SPEC.at(FAR, rounding="once")))


@every_stack
def test_ids_of_32_bits_that_become_larger(name: str) -> None:
    """Offsets and token indices are added in 64 bits: positions from 2^31 on are not negative."""
    x, wide = noise(2, 2, 6, 16, dtype=torch.float32), torch.tensor([2**31 - 3, 7])

    def rotated(starts: torch.Tensor, offset: int | None) -> torch.Tensor:
        where = positions.per_row(starts)
        if offset is not None:
            ids = starts[None, :, None].expand(-1, -1, 6)
            where = positions.Positions(ids, offset, add_index=False)
        return rotate(x, RopeSpec(16).at(where, stack=name))

    for offset in (None, 2**31 - 5, -(2**31)):
        assert_same_bits(rotated(wide.int(), offset), rotated(wide, offset))


def test_rules_by_length() -> None:
    """The length is `seq_len` if it is given, else the largest position of all rows plus 1."""
    rule, stack = dataclasses.replace(RULES["longrope"], factor=1.0), "transformers"
    spec = RopeSpec(DIM, scaling=rule)
    short, long = (stacks.get(stack).frequencies(spec, n)[0] for n in (None, 129))
    assert not torch.equal(short, long)
    q = Q[torch.float32]

    def by_given(inv_freq: torch.Tensor, where: Any, name: str = stack) -> torch.Tensor:
        return rotate(q, RopeSpec(DIM, scaling=Given.of(inv_freq)).at(where, stack=name))

    cases: list[tuple[Any, Any, torch.Tensor]] = [
        (NEAR, None, short),
        (NEAR, 1000, long),
        (torch.cat((NEAR, FAR[:1])), None, long),
        (120, None, long),
        (20, None, short),
    ]
    for where, seq_len, inv_freq in cases:
        y = rotate(q, spec.at(where, stack=stack, seq_len=seq_len))
        assert_same_bits(y, by_given(inv_freq, where))
    # Servers have one set of frequencies, for the longest context.
    y = rotate(q, spec.at(NEAR, stack="vllm", seq_len=1000))
    assert_same_bits(y, by_given(long, NEAR, "vllm"))
    for name in ("vllm-native", "sglang-native", "flashinfer"):
        assert_same_bits(stacks.get(name).frequencies(spec, 1000)[0], long)
        assert_same_bits(stacks.get(name).frequencies(spec, 128)[0], short)
    dynamic, vllm = RopeSpec(DIM, scaling=DynamicNTK(2.0, 128)), stacks.get("vllm")
    assert_same_bits(vllm.frequencies(dynamic, 128)[0], vllm.frequencies(RopeSpec(DIM))[0])
    # An offset is the length that its ids are.
    for offset in (3, -2):
        spec = RopeSpec(DIM, scaling=DynamicNTK(2.0, 4))
        made = stacks.get(stack).tables(spec, offset, tokens=5)
        assert_same_bits(made, stacks.get(stack).tables(spec, torch.arange(5) + offset))
    assert stacks.get(stack).tables(spec, None, tokens=0)[0].shape == (1, 1, 0, DIM // 2)


def test_litgpt_does_not_compute_yarn() -> None:
    """LitGPT exchanges the ends of YaRN's blend: fast pairs are divided and slow ones kept."""
    spec, plain = RopeSpec(64, scaling=YaRN(4.0, 1024)), RopeSpec(64).frequencies().inv_freq.float()
    theirs, scaling = stacks.get("litgpt").frequencies(spec)
    assert (theirs[0], scaling) == (plain[0] / 4, 1.0)
    assert torch.allclose(theirs[-1], plain[-1])
    assert stacks.get("transformers").frequencies(spec)[0][0] == plain[0]


@pytest.mark.parametrize("where", [3, FAR, positions.per_row(torch.tensor([2, 5]))])
@pytest.mark.parametrize("name", ["transformers", "meta", "diffusers-float64"])
def test_another_default_device_and_pickles(name: str, where: Any) -> None:
    x, rope = Q[torch.float32], SPEC.at(where, stack=name)
    copies = [pickle.loads(pickle.dumps(rope))]
    want = rotate(x, rope)
    for copied in (*copies, pickle.loads(pickle.dumps(rope))):
        assert_same_bits(rotate(x, copied), want)
    with torch.device("meta"):
        assert_same_bits(rotate(x, SPEC.at(where, device="cpu", stack=name)), want)
        text = positions.text(where, axes=2, device="cpu")
        spec = RopeSpec(DIM, axes=Axes.blocks((DIM // 4, DIM // 4)))
        assert rotate(x, spec.at(text, device="cpu", stack=name)).device.type == "cpu"


@pytest.mark.parametrize(
    "where",
    [
        positions.Positions(None, 60, add_index=False),
        torch.tensor([[0.0, 59.5, 3.0]]),
        torch.tensor([0, 60, 3]),
        58,
    ],
    ids=str,
)
def test_the_length_is_the_largest_position_plus_1(where: positions.PositionsLike) -> None:
    """Rounded up. Where there are no tokens, there is none."""
    spec, stack = RopeSpec(DIM, scaling=DynamicNTK(2.0, 40)), stacks.get("transformers")
    wanted = stack.tables(spec, where, torch.float32, tokens=3, seq_len=61)
    assert_same_bits(stack.tables(spec, where, torch.float32, tokens=3), wanted)
    assert stack.tables(spec, torch.zeros(1, 0), torch.float32)[0].shape[2] == 0


# --- compiled code --------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")


slow = pytest.mark.slow
ENGINE = stacks.get("transformer-engine").cast(torch.bfloat16)
YARN = {**ENGINE.rules, "yarn": stacks.get("transformers").rules["yarn"]}
LLAMA, SECTIONS = Llama3(8.0, 1.0, 4.0, 8192), Axes.sections((8, 12, 12))
# Stacks with the fields of specs.
COMPILED: dict[str, tuple[str | stacks.Stack, dict[str, Any]]] = {
    "vllm-native": ("vllm-native", {"scaling": LLAMA}),
    "meta": ("meta", {"scaling": LLAMA}),
    "cast": (stacks.get("transformers").cast(torch.bfloat16), {"scaling": LLAMA}),
    "several axes": ("diffusers-float64", {"axes": SECTIONS}),
    # Frequencies, positions, cosines and products with a factor are all rounded to bfloat16.
    "roundings between": (ENGINE, {"scaling": Linear(3.0)}),
    "a factor": (dataclasses.replace(ENGINE, rules=YARN), {"scaling": YaRN(4.0, 64)}),
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=slow if i else ()) for i, name in enumerate(COMPILED)]
)
def test_compiled_calls(case: str) -> None:
    """Compiled code has the bits of eager code, with gradients, wherever the rotation is prepared."""
    stack, fields = COMPILED[case]
    ids = torch.stack((FAR * 31, FAR // 7, FAR % 17))[: 3 if "axes" in fields else 1]
    spec = RopeSpec(DIM, base=50000.0, **fields)
    rope = spec.at(positions.multi_axis(ids), stack=stack)

    # In one graph, as each takes a second to compile.
    def inside(at: torch.Tensor, *xs: torch.Tensor) -> list[torch.Tensor]:
        own = spec.at(positions.multi_axis(at), stack=stack)
        return [rotate(x, each) for each in (own, rope) for x in xs]

    def after(n: int) -> list[torch.Tensor]:
        where = positions.text(n, axes=3) if "axes" in fields else n
        return [rotate(x, spec.at(where, stack=stack)) for x in Q.values()]

    compiled = torch.compile(inside, fullgraph=True)
    for at in (ids, ids.mT.contiguous().mT):
        found = []
        for run in (compiled, inside):
            xs = [x.clone().requires_grad_() for x in Q.values()]
            ys = run(at, *xs)
            grads = [noise(*y.shape, seed=9).to(y.dtype) for y in ys]
            found.append((*ys, *torch.autograd.grad(ys, xs, grads)))
        assert_same_bits(*found)
    compiled = torch.compile(after, fullgraph=True, dynamic=True)
    for offset in (3, 100_001):
        assert_same_bits(compiled(offset), after(offset))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiled_rules_by_length() -> None:
    """The length of an offset is known while compiling; that of ids must be given."""
    q, dynamic = Q[torch.float32], RopeSpec(DIM, scaling=DynamicNTK(2.0, 40))
    long, counter = spec_of("longrope"), CompileCounterWithBackend("aot_eager")

    def turn(spec: RopeSpec, where: Any, n: int | None = None) -> torch.Tensor:
        return rotate(q, spec.at(where, seq_len=n, stack="transformers"))

    compiled = torch.compile(turn, fullgraph=True, dynamic=True)
    for offset in (0, 3, 4, 1000):  # up to the original length, and beyond it
        assert_same_bits(compiled(dynamic, offset), turn(dynamic, offset))
    longer = torch.compile(turn, fullgraph=True, dynamic=True, backend=counter)
    for length in (100, 120, 300, 400, 500):
        assert_same_bits(longer(long, NEAR, length), turn(long, NEAR, length))
    assert counter.frame_count == 2
    assert_same_bits(compiled(dynamic, FAR, 5000), turn(dynamic, FAR, 5000))
    with pytest.raises(Exception, match="seq_len must be given in compiled code"):
        compiled(dynamic, FAR)


@pytest.mark.parametrize("polar", [False, True])
@pytest.mark.parametrize("scalars", [(), (0, 1), (2,), (0, 1, 2)])
def test_the_operator_has_the_bits_of_its_definition(scalars: tuple[int, ...], polar: bool) -> None:
    """In C++, for graphs without Python, and in Python, for other devices; also under vmap."""
    at, inv_freq = noise(3, 2, TOKENS, 1).abs() * 1000, noise(DIM // 2, seed=1).abs()
    numbers = [torch.tensor(v, dtype=torch.float64) for v in (2.5, 1.7, 0.9)]
    given = [number if i in scalars else None for i, number in enumerate(numbers)]
    wanted = [stacks.cos_sin(each, inv_freq, *given, polar) for each in at]
    for each, both in zip(at, wanted, strict=True):
        for made in (schema.cos_sin, cosines.cos_sin):
            assert_same_bits(made(each, inv_freq, *given, polar), both)
        torch.library.opcheck(schema.cos_sin, (each, inv_freq, *given, polar))
    # Mapped over a dimension that is not the first, so that it must be moved.
    mapped = torch.vmap(lambda each: schema.cos_sin(each, inv_freq, *given, polar), in_dims=1)
    stacked = [torch.stack(tables) for tables in zip(*wanted, strict=True)]
    assert_same_bits(mapped(at.transpose(0, 1)), stacked)


# --- values ---------------------------------------------------------------------------------------


@every_stack
def test_stacks_are_values(name: str) -> None:
    stack = stacks.get(name)
    assert sum(stack == stacks.get(other) for other in stacks.names()) == 1
    assert stack.source
    assert stack.verified in (stacks.RUN, stacks.GIVEN_TABLES, stacks.READ)
    assert {*frequencies.RULES, "default"} >= {*stack.rules}
    assert pickle.loads(pickle.dumps(stack)) == stack
    if stack.casts:
        cast = stack.cast(torch.bfloat16)
        other = pickle.loads(pickle.dumps(cast))
        assert stack != other == cast
        assert other.rules == stack.rules
    for field in {field.name for field in dataclasses.fields(stack)}:
        assert dataclasses.replace(stack, **{field: object()}) != stack


def test_other_stacks_are_values_too() -> None:
    """A stack of the user is not confused with that of the library of the same name."""
    own = dataclasses.replace(stacks.get("transformers"), rules={"linear": "linear"})
    for copied in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert copied == own
        assert copied.rules == {"linear": "linear"}
    uncast = dataclasses.replace(stacks.get("meta"), cast_to=torch.bfloat16)
    assert copy.deepcopy(uncast) == uncast
