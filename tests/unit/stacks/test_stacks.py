"""`tightrope.stacks`: the bits of other libraries, from the configuration to the rotated tensor."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.helpers import noise, refusals
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits, value
from tightrope import Axes, RopeSpec, frequencies, functional, gates, positions, stacks
from tightrope.frequencies import (
    NTK,
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
)
from tightrope.functional import rotate, rotate_, rotate_qk
from tightrope.ops import cosines, schema
from tightrope.stacks._formulas import linear

LOW = [torch.float32, torch.bfloat16, torch.float16]
DIM, TOKENS = 64, 37
SHORT, LONG = [1 + k / 32 for k in range(32)], [2 + k / 3 for k in range(32)]
# Positions within and beyond the original length of the rules below.
NEAR, FAR = torch.arange(TOKENS)[None], torch.tensor([[0], [5]]) + torch.arange(TOKENS) * 97

ORIGINAL = {"original_max_position_embeddings": 128}
# Rule, and its parameters in a configuration of transformers with max_position_embeddings 512.
RULES: dict[str, tuple[Rule | None, dict[str, Any]]] = {
    "default": (None, {}),
    "linear": (Linear(3.0), {"factor": 3.0}),
    "dynamic": (DynamicNTK(2.5, 512), {"factor": 2.5}),
    "yarn": (YaRN(4.0, 128), {"factor": 4.0, **ORIGINAL}),
    "yarn, mscales": (
        YaRN(4.0, 128, mscale=0.7, mscale_all_dim=1.1, beta_fast=16.0, beta_slow=2.0),
        {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16.0, "beta_slow": 2.0}
        | ORIGINAL,
    ),
    "yarn, untruncated": (
        YaRN(4.0, 128, truncate=False, attention_factor=1.25),
        {"factor": 4.0, "truncate": False, "attention_factor": 1.25, **ORIGINAL},
    ),
    "yarn, shorter than a turn": (
        YaRN(4.0, 5),
        {"factor": 4.0, "original_max_position_embeddings": 5},
    ),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 128),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    ),
    "longrope": (
        LongRoPE(tuple(SHORT), tuple(LONG), 128, factor=4.0),
        {"factor": 4.0, "short_factor": SHORT, "long_factor": LONG, **ORIGINAL},
    ),
    "proportional": (Proportional(0.25, 2.0), {"partial_rotary_factor": 0.25, "factor": 2.0}),
}


def qk(dtype: torch.dtype, seed: int = 1, dims: int = DIM) -> list[torch.Tensor]:
    """Return queries and keys (batch, heads, seq, dim) as transposed views, which require grad."""
    draws = (noise(2, TOKENS, heads, dims, seed=seed + heads).to(dtype) for heads in (3, 2))
    return [x.transpose(1, 2).requires_grad_() for x in draws]


def assert_rotates_like(
    theirs: Callable[..., Any], ours: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Assert that two rotations of q and k have the same results and gradients, bit for bit."""
    found = []
    for rotation in (theirs, ours):
        xs = qk(dtype)
        ys = rotation(*xs)
        found.append((*ys, *torch.autograd.grad(ys, xs, qk(dtype, seed=9))))
    for want, got in zip(*found, strict=True):
        assert_same_bits(got, want)


# --- transformers ----------------------------------------------------------------------


def rotary_module(rule: str) -> torch.nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = rule.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": 50000.0, **RULES[rule][1]}
    config = LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


def spec_of(rule: str) -> RopeSpec:
    return RopeSpec(DIM, base=50000.0, scaling=RULES[rule][0])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_transformers(rule: str, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    for ids in (NEAR, FAR):
        module = rotary_module(rule)
        rope = spec_of(rule).at(ids, stack="transformers")
        assert_rotates_like(
            lambda q, k, module=module, ids=ids: apply_rotary_pos_emb(q, k, *module(q, ids)),
            lambda q, k, rope=rope: rotate_qk(q, k, rope),
            dtype,
        )


@pytest.mark.parametrize("rule", RULES)
def test_frequencies_of_transformers(rule: str) -> None:
    module: Any = rotary_module(rule)
    found, scaling = stacks.get("transformers").frequencies(spec_of(rule))
    assert_same_bits(found, module.inv_freq)
    assert scaling == module.attention_scaling
    exact = spec_of(rule).frequencies()
    bound = value("frequency of transformers") * found.double().abs()
    if isinstance(RULES[rule][0], YaRN):
        bound += value("ramp of transformers") * RopeSpec(DIM, base=50000.0).frequencies().inv_freq
    assert bool(((exact.inv_freq - found.double()).abs() <= bound).all())
    assert exact.attention_scaling == pytest.approx(scaling, rel=value("frequency of transformers"))


def test_a_model_that_was_cast() -> None:
    """Casting a model of transformers rounds its frequencies; `Stack.cast` reproduces that."""
    stack = stacks.get("transformers")
    assert stack.casts == "frequencies"
    module: Any = rotary_module("default").bfloat16()
    assert module.inv_freq.dtype == torch.bfloat16
    found, _ = stack.cast(torch.bfloat16).frequencies(spec_of("default"))
    assert_same_bits(found, module.inv_freq.float())
    q, _ = qk(torch.bfloat16)
    cos, sin = stack.cast(torch.bfloat16).tables(spec_of("default"), FAR, torch.bfloat16)
    for table, want in zip((cos, sin), module(q, FAR), strict=True):
        assert_same_bits(torch.cat((table, table), -1)[:, 0], want)
    assert not torch.equal(cos, stack.tables(spec_of("default"), FAR, torch.bfloat16)[0])


def test_stacks_whose_tables_are_cast() -> None:
    """LitGPT keeps tables as buffers: casting rounds them, and then every product."""
    cast = stacks.get("litgpt").cast(torch.bfloat16)
    assert cast.rounding == ("each", "each")
    found = cast.tables(SPEC, FAR, torch.bfloat16)
    for table, exact in zip(found, stacks.get("litgpt").tables(SPEC, FAR), strict=True):
        assert_same_bits(table, exact.to(torch.bfloat16))
    assert stacks.get("torchtune").cast(torch.bfloat16).rounding == ("wide", "wide")


@pytest.mark.parametrize("dtype", LOW)
def test_several_axes(dtype: torch.dtype) -> None:
    """M-RoPE with the stack of transformers has the bits of Qwen2-VL."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2VLRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    sections = [8, 12, 12]
    config = Qwen2VLTextConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections},
    )
    module = Qwen2VLRotaryEmbedding(config)
    ids = torch.stack((FAR, FAR // 3, FAR % 17))
    rope = RopeSpec(DIM, axes=Axes.sections(sections)).at(
        positions.multi_axis(ids), stack="transformers"
    )
    assert_rotates_like(
        lambda q, k: apply_rotary_pos_emb(q, k, *module(q, ids)),
        lambda q, k: rotate_qk(q, k, rope),
        dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
def test_a_compiled_model(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In one compiled graph tables stay float32, and nothing but the result is rounded.

    Cosines are taken from compiled code too, as they may differ from eager ones in the last bit.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    module: Any = rotary_module("default")
    stack, spec = stacks.get("transformers-compiled"), spec_of("default")
    compiled = torch.compile(lambda q, k: apply_rotary_pos_emb(q, k, *module(q, FAR)))
    angles = torch.compile(lambda at: ((at * module.inv_freq).cos(), (at * module.inv_freq).sin()))
    tables = angles(FAR[:, :, None].float())
    assert_rotates_like(
        compiled,
        lambda q, k: functional.apply_rotary_pos_emb(
            q, k, *tables, tables="half", rounding=stack.rounding
        ),
        dtype,
    )
    for table, want in zip(stack.tables(spec, FAR, dtype), tables, strict=True):
        assert table.dtype == torch.float32
        assert (table[:, 0] - want).abs().max() <= torch.finfo(torch.float32).eps
    torch._dynamo.reset()


# --- diffusers and others ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("name", ["diffusers", "diffusers-float64"])
def test_diffusers(name: str, factor: float | None, dtype: torch.dtype) -> None:
    from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

    ids = FAR[1]
    tables = get_1d_rotary_pos_embed(
        DIM,
        ids,
        theta=50000.0,
        use_real=True,
        linear_factor=factor or 1.0,
        freqs_dtype=torch.float64 if "64" in name else torch.float32,
    )
    spec = RopeSpec(DIM, base=50000.0, interleaved=True, scaling=factor and Linear(factor))
    rope = spec.at(ids, stack=name)
    assert_rotates_like(
        lambda q, k: (apply_rotary_emb(q, tables), apply_rotary_emb(k, tables)),
        lambda q, k: rotate_qk(q, k, rope),
        dtype,
    )


def test_litgpt_does_not_compute_yarn() -> None:
    """LitGPT exchanges the ends of YaRN's blend: fast pairs are divided and slow ones kept."""
    rule = YaRN(4.0, 1024)
    spec = RopeSpec(64, scaling=rule)
    theirs, scaling = stacks.get("litgpt").frequencies(spec)
    right, _ = stacks.get("transformers").frequencies(spec)
    plain = RopeSpec(64).frequencies().inv_freq.float()
    assert theirs[0] == plain[0] / 4
    assert torch.allclose(theirs[-1], plain[-1])
    assert right[0] == plain[0]
    assert scaling == 1.0


# --- behaviour ----------------------------------------------------------------------------

SPEC = RopeSpec(DIM, base=50000.0)


@pytest.mark.parametrize("name", stacks.names())
def test_stacks_stay_close_to_the_exact_rotation(name: str) -> None:
    """At small positions, the rotation of a stack differs from the exact one only by rounding."""
    rope = SPEC.at(NEAR, stack=name)
    for x in qk(torch.float32):
        found, exact = rotate(x, rope), rotate(x, SPEC, NEAR)
        assert float((found - exact).detach().abs().max()) < 1e-4


@every_backend
def test_offsets_ids_and_reused_rotations(backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (x.detach() for x in qk(dtype))
        tables = stacks.get("transformers").tables(SPEC, 7, dtype, tokens=TOKENS)
        want = functional.apply_rotary_pos_emb(q, k, *tables, tables="half", rounding="each")
        for where in (7, NEAR[0] + 7, NEAR + 7):
            rope = SPEC.at(where, stack="transformers")
            for _ in range(2):
                for y, expected in zip(rotate_qk(q, k, rope, backend=backend), want, strict=True):
                    assert_same_bits(y, expected)
            turned = rotate(q.transpose(1, 2), rope, layout="bshd", backend=backend)
            assert_same_bits(turned.transpose(1, 2), want[0])
            inside = q.clone()
            assert_same_bits(rotate_(inside, rope), want[0])
            back = rotate(inside, rope, inverse=True)
            assert torch.allclose(back.float(), q.float(), atol=0.05)


@pytest.mark.parametrize("name", stacks.names())
def test_ids_of_32_bits_that_become_larger(name: str) -> None:
    """Offsets and token indices are added in 64 bits: positions from 2^31 on are not negative."""
    x, wide = noise(2, 2, 6, 16, dtype=torch.float32), torch.tensor([2**31 - 3, 7])

    def rotated(starts: torch.Tensor, offset: int | None) -> torch.Tensor:
        where = positions.per_row(starts)
        if offset is not None:
            where = positions.Positions(
                starts[None, :, None].expand(-1, -1, 6), offset, add_index=False
            )
        return rotate(x, RopeSpec(16).at(where, stack=name))

    for offset in (None, 2**31 - 5, -(2**31)):
        assert_same_bits(rotated(wide.int(), offset), rotated(wide, offset))


def test_rounding_can_be_overridden() -> None:
    """`rounding=` of a call replaces that of the stack."""
    q = qk(torch.bfloat16)[0].detach()
    rope = SPEC.at(FAR, stack="transformers")
    tables = stacks.get("transformers").tables(SPEC, FAR, torch.bfloat16)
    for rounding in ("once", "wide", "each"):
        want = functional.apply_rotary_pos_emb(q, None, *tables, tables="half", rounding=rounding)
        assert_same_bits(rotate(q, rope, rounding=rounding), want[0])
    assert_same_bits(rotate(q, rope), rotate(q, rope, rounding="each"))
    assert not torch.equal(rotate(q, rope), rotate(q, rope, rounding="once"))
    # Without a stack the default is "once", also on the fast path of a prepared rotation.
    exact = SPEC.at(FAR)
    for _ in range(2):
        assert_same_bits(rotate(q, exact), rotate(q, exact, rounding="once"))


def test_partial_rotation_and_interleaved_pairs() -> None:
    q = qk(torch.bfloat16)[0].detach()
    for interleaved in (False, True):
        spec = RopeSpec(DIM, rotary_dim=32, start=16, interleaved=interleaved)
        cos, sin = stacks.get("meta").tables(spec, FAR)
        want = functional.apply_rotary_pos_emb(
            q, None, cos, sin, tables="half", start=16, interleaved=interleaved, rounding="wide"
        )
        assert_same_bits(rotate(q, spec.at(FAR, stack="meta")), want[0])


def test_rules_by_length() -> None:
    """The length is `seq_len` if it is given, else the largest position of all rows plus 1."""
    spec = RopeSpec(DIM, scaling=LongRoPE(tuple(SHORT), tuple(LONG), 128, 1.0))
    stack = stacks.get("transformers")
    short, _ = stack.frequencies(spec)
    long, _ = stack.frequencies(spec, 129)
    assert not torch.equal(short, long)
    q = qk(torch.float32)[0].detach()
    cases: list[tuple[Any, Any, torch.Tensor]] = [
        (NEAR, None, short),
        (NEAR, 1000, long),
        (torch.cat((NEAR, FAR[:1])), None, long),
        (120, None, long),
        (20, None, short),
    ]
    for where, seq_len, inv_freq in cases:
        given = RopeSpec(DIM, scaling=Given.of(inv_freq))
        want = rotate(q, given.at(where, stack=stack))
        assert_same_bits(rotate(q, spec.at(where, stack=stack, seq_len=seq_len)), want)
    # vLLM has one set of frequencies for the longest context.
    serving = rotate(q, spec.at(NEAR, stack="vllm", seq_len=1000))
    for name in ("vllm-native", "sglang-native", "flashinfer"):
        got = stacks.get(name).frequencies(spec, 1000)[0]
        assert_same_bits(got, long)
        assert_same_bits(stacks.get(name).frequencies(spec, 100)[0], short)
    assert_same_bits(
        serving, rotate(q, RopeSpec(DIM, scaling=Given.of(long)).at(NEAR, stack="vllm"))
    )
    dynamic = RopeSpec(DIM, scaling=DynamicNTK(2.0, 128))
    assert_same_bits(
        stacks.get("vllm").frequencies(dynamic, 128)[0],
        stacks.get("vllm").frequencies(RopeSpec(DIM))[0],
    )


BY_LENGTH = [
    RopeSpec(DIM, scaling=rule)
    for rule in (DynamicNTK(2.0, 128), LongRoPE(tuple(SHORT), tuple(LONG), 128, 1.0))
]


@pytest.mark.parametrize(
    "name, spec",
    [
        *((name, spec) for name in ("vllm", "vllm-native") for spec in BY_LENGTH),
        *((name, BY_LENGTH[1]) for name in ("sglang-native", "flashinfer")),
    ],
)
def test_the_length_of_a_server_is_not_that_of_its_rows(name: str, spec: RopeSpec) -> None:
    """Positions do not tell which frequencies a server took: without `seq_len`, nothing is rotated."""
    stack = stacks.get(name)
    for call in (
        lambda: spec.at(NEAR, stack=name),
        lambda: spec.at(5, stack=name),
        lambda: stack.frequencies(spec),
        lambda: stack.tables(spec, NEAR),
    ):
        with pytest.raises(
            ValueError, match=r"seq_len must be given for .* which chooses frequencies"
        ):
            call()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "name",
    [
        "vllm-native",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("meta", "transformers")),
    ],
)
def test_compiled_calls(name: str) -> None:
    """Compiled code has the bits of eager code, wherever the rotation is prepared."""
    rule = Llama3(8.0, 1.0, 4.0, 8192)
    spec, stack = RopeSpec(DIM, base=50000.0, scaling=rule), stacks.get(name)
    if name == "transformers":
        stack = stack.cast(torch.bfloat16)
    ids = FAR * 31
    rope = spec.at(ids, stack=stack)
    # In one graph, as each takes a second to compile.
    every = [qk(dtype)[0].detach() for dtype in LOW]

    def inside(at: torch.Tensor) -> list[torch.Tensor]:
        return [rotate(x, r) for r in (rope, spec.at(at, stack=stack)) for x in every]

    def made(n: int) -> list[torch.Tensor]:
        own = RopeSpec(DIM, base=50000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192)).at(n, stack=name)
        return [rotate(x, own) for x in every]

    want = [rotate(x, spec.at(ids, stack=stack)) for x in every]
    compiled = torch.compile(inside, fullgraph=True)
    for at in (ids, ids.t().contiguous().t()):
        assert_same_bits(compiled(at), want * 2)
    compiled = torch.compile(made, fullgraph=True, dynamic=True)
    for offset in (3, 100_001):
        want = [rotate(x, spec.at(offset, stack=name)) for x in every]
        assert_same_bits(compiled(offset), want)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiled_calls_of_several_axes_and_gradients() -> None:
    spec = RopeSpec(DIM, base=50000.0, axes=Axes.sections((8, 12, 12)))
    where = torch.stack((FAR, FAR // 7, NEAR.expand_as(FAR)))
    x = qk(torch.float32)[0]

    def loss(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rope = spec.at(positions.multi_axis(ids), stack="diffusers-float64")
        return rotate(x, rope).square().sin()

    found = []
    for each in (loss, torch.compile(loss, fullgraph=True, dynamic=True)):
        y = each(x, where)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    (y, dx), (y_compiled, dx_compiled) = found
    # Inductor computes the sine of the loss itself.
    torch.testing.assert_close(y_compiled, y, rtol=0, atol=1e-6)
    torch.testing.assert_close(dx_compiled, dx, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiled_rules_by_length() -> None:
    """The length of an offset is known while compiling; that of ids must be given."""
    spec = RopeSpec(DIM, scaling=DynamicNTK(2.0, 40))
    q = qk(torch.float32)[0].detach()
    compiled = torch.compile(
        lambda x, n: rotate(x, spec.at(n, stack="transformers")), fullgraph=True, dynamic=True
    )
    for offset in (0, 3, 4, 1000):  # up to the original length, and beyond it
        assert_same_bits(compiled(q, offset), rotate(q, spec.at(offset, stack="transformers")))
    long = RopeSpec(DIM, scaling=LongRoPE(tuple(SHORT), tuple(LONG), 64, factor=4.0))
    counter = CompileCounterWithBackend("aot_eager")
    longer = torch.compile(
        lambda x, n: rotate(x, long.at(NEAR, seq_len=n, stack="transformers")),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for length in (40, 50, 300, 400, 500):
        rope = long.at(NEAR, seq_len=length, stack="transformers")
        assert_same_bits(longer(q, length), rotate(q, rope))
    assert counter.frame_count == 2
    given = torch.compile(
        lambda x, at: rotate(x, spec.at(at, seq_len=5000, stack="transformers")), fullgraph=True
    )
    assert_same_bits(given(q, FAR), rotate(q, spec.at(FAR, seq_len=5000, stack="transformers")))
    with pytest.raises(Exception, match="seq_len must be given in compiled code"):
        torch.compile(lambda x, at: rotate(x, spec.at(at, stack="transformers")), fullgraph=True)(
            q, FAR
        )


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_roundings_between_are_kept() -> None:
    """Tables whose frequencies, positions, cosines and products with a factor are bfloat16."""
    cast = stacks.get("transformer-engine").cast(torch.bfloat16)
    rules = {**cast.rules, YaRN: stacks.get("transformers").rules[YaRN]}
    stack = dataclasses.replace(cast, rules=rules)
    for rule in (Linear(3.0), YaRN(4.0, 64)):
        spec = RopeSpec(32, base=50000.0, scaling=rule)
        compiled = torch.compile(lambda ids: stack.tables(spec, ids), fullgraph=True, dynamic=True)  # noqa: B023
        for got, want in zip(compiled(FAR), stack.tables(spec, FAR), strict=True):
            assert_same_bits(got, want)
        with torch.device("meta"):
            compiled(FAR)


def test_an_offset_is_the_length_that_its_ids_are() -> None:
    spec = RopeSpec(DIM, scaling=DynamicNTK(2.0, 4))
    for name, offset in (("transformers", 3), ("transformers", -2)):
        stack = stacks.get(name)
        made = stack.tables(spec, offset, tokens=5), stack.tables(spec, torch.arange(5) + offset)
        for got, want in zip(*made, strict=True):
            assert_same_bits(got, want)
    assert stacks.get("transformers").tables(spec, None, tokens=0)[0].shape == (1, 1, 0, DIM // 2)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_calls(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return rotate(x, SPEC.at(ids, stack="vllm-native"))

    tokens = torch.export.Dim("tokens")
    x = qk(torch.float32)[0].detach()
    program = torch.export.export(
        Model(), (x, FAR), dynamic_shapes={"x": {2: tokens}, "ids": {1: tokens}}, strict=strict
    ).module()
    for count in (TOKENS, 11):
        part, ids = x[:, :, :count], FAR[:, :count] + 90_000
        assert_same_bits(program(part, ids), rotate(part, SPEC.at(ids, stack="vllm-native")))


def test_stack_values() -> None:
    assert stacks.get("vllm") == stacks.get("vllm")
    assert stacks.get("vllm") != stacks.get("vllm-native")
    assert len({*map(stacks.get, stacks.names())}) == len(stacks.names())
    for stack in map(stacks.get, stacks.names()):
        assert stack.source
        assert stack.verified in (stacks.RUN, stacks.GIVEN_TABLES, stacks.READ)
    cast = stacks.get("transformers").cast(torch.float16)
    assert cast != stacks.get("transformers")
    assert repr(cast) == (
        "<Stack 'transformers'.cast(torch.float16): transformers, eager, as in Llama>"
    )


@pytest.mark.parametrize("name", stacks.names())
def test_stacks_are_pickled_by_name(name: str) -> None:
    stack = stacks.get(name)
    assert pickle.loads(pickle.dumps(stack)) is stack
    if stack.casts:
        cast = stack.cast(torch.bfloat16)
        other = pickle.loads(pickle.dumps(cast))
        assert other == cast
        assert other.rules is stack.rules


def test_other_stacks_are_pickled_by_value() -> None:
    """A stack of the user is not confused with that of the library of the same name."""
    own = dataclasses.replace(stacks.get("transformers"), rules={Linear: linear})
    for copied in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert copied == own
        assert copied.rules == {Linear: linear}
    uncast = dataclasses.replace(stacks.get("meta"), cast_to=torch.bfloat16)
    assert copy.deepcopy(uncast) == uncast


@pytest.mark.parametrize("used", [False, True])
def test_a_pickled_rotation(used: bool) -> None:
    x, rope = qk(torch.bfloat16)[0].detach(), SPEC.at(FAR, stack="meta")
    if used:
        rotate(x, rope)
    assert_same_bits(rotate(x, pickle.loads(pickle.dumps(rope))), rotate(x, rope))


@pytest.mark.parametrize("where", [3, FAR, positions.per_row(torch.tensor([2, 5]))])
@pytest.mark.parametrize("name", ["transformers", "meta", "diffusers-float64"])
def test_another_default_device(name: str, where: Any) -> None:
    x = qk(torch.float32)[0].detach()
    want = rotate(x, SPEC.at(where, stack=name))
    with torch.device("meta"):
        assert_same_bits(rotate(x, SPEC.at(where, device="cpu", stack=name)), want)
        axes = RopeSpec(DIM, axes=Axes.blocks((DIM // 4, DIM // 4))).at(
            positions.text(where, axes=2, device="cpu"), device="cpu", stack=name
        )
        assert rotate(x, axes).device.type == "cpu"


# --- errors -------------------------------------------------------------------------------


Q = torch.zeros(2, 3, TOKENS, DIM)
VLLM = stacks.get("vllm")
ROPE = SPEC.at(FAR, stack="vllm")
test_errors = refusals(
    ValueError={
        f"[at] stack must be one of {', '.join(stacks.names())} but got 'vlm'.": (
            lambda: SPEC.at(0, stack="vlm")
        ),
        "[stacks.get] stack must be one of transformers, …": lambda: stacks.get(3),
        "[rotate] act and gate must be None with a rotation made for stack 'vllm'; normalise or "
        "activate first, then rotate, then multiply by the gate.": (
            lambda: rotate(Q, ROPE, act="silu")
        ),
        "[rotate] act and gate must be None …": lambda: rotate(Q, ROPE, gate=gates.XPos(8)),
        "[rotate] inv_freq must be None with a rotation made for stack 'vllm'…": (
            lambda: rotate(Q, ROPE, inv_freq=torch.ones(32))
        ),
        "[polar_scan] spec must have exact angles but was made for stack 'vllm'…": (
            lambda: functional.polar_scan(Q, Q, Q, ROPE)
        ),
        "[at] positions must not require a gradient with a stack…": (
            lambda: SPEC.at(torch.ones(3, requires_grad=True), stack="vllm")
        ),
        "[at] seq_len must be at least 3493…": lambda: SPEC.at(FAR, stack="vllm", seq_len=9),
        "[at] positions must have 1 axis …": (
            lambda: SPEC.at(positions.text(1, axes=3), stack="vllm")
        ),
        "[tables] tokens must be given…": lambda: VLLM.tables(SPEC, 3),
        "[cast] stack 'meta' must not be cast…": lambda: stacks.get("meta").cast(torch.bfloat16),
    },
    TypeError={
        "[cast] dtype must be a floating dtype but got torch.int64.": lambda: VLLM.cast(
            torch.int64
        ),
    },
    NotImplementedError={
        "[at] scaling must be None, Given or a rule that stack 'meta' has (Llama3) but got NTK…": (
            lambda: RopeSpec(64, scaling=NTK(2.0)).at(0, stack="meta")
        ),
        "[frequencies] scaling must be None, Given or a rule that stack 'flash-attention' has (none) …": (
            lambda: stacks.get("flash-attention").frequencies(RopeSpec(64, scaling=Linear(2.0)))
        ),
        "[at] factor must be 8.0, the only value that this stack supports, but got 4.0.": (
            lambda: RopeSpec(64, scaling=Llama3(4.0, 1.0, 4.0, 8192)).at(0, stack="meta")
        ),
        "[at] frequencies per head or axis must not be used with a stack …": (
            lambda: RopeSpec(4, scaling=Given(((1.0, 0.5), (2.0, 0.1)))).at(0, stack="vllm")
        ),
        "[frequencies] seq_len must not be 129 for this LongRoPE rule…": (
            lambda: stacks.get("sglang-native").frequencies(BY_LENGTH[1], 129)
        ),
        "[frequencies] seq_len must be at least 65 for this DynamicNTK rule, …": (
            lambda: VLLM.frequencies(RopeSpec(64, scaling=DynamicNTK(2.0, 128)), 64)
        ),
    },
)


def test_no_stack_field_is_forgotten() -> None:
    """Two stacks that differ in any field other than `rules` are unequal."""
    stack = stacks.get("vllm")
    for name in {field.name for field in dataclasses.fields(stack)} - {"rules"}:
        assert dataclasses.replace(stack, **{name: object()}) != stack
    assert set(frequencies.RULES.values()) >= {rule for rule in stack.rules if rule is not None}


# --- the raw operator -----------------------------------------------------------------------------


@pytest.mark.parametrize("polar", [False, True])
@pytest.mark.parametrize("scalars", [(), (0, 1), (2,), (0, 1, 2)])
def test_the_operator_has_the_bits_of_its_definition(scalars: tuple[int, ...], polar: bool) -> None:
    """In C++, for graphs without Python, and in Python, for other devices; also under vmap."""
    at, inv_freq = noise(3, 2, TOKENS, 1).abs() * 1000, noise(DIM // 2, seed=1).abs()
    values = [2.5, 1.7, 0.9]
    given = [
        torch.tensor(v, dtype=torch.float64) if i in scalars else None for i, v in enumerate(values)
    ]
    wanted = [stacks.cos_sin(each, inv_freq, *given, polar) for each in at]
    for each, both in zip(at, wanted, strict=True):
        for made in (schema.cos_sin, cosines.cos_sin):
            for got, want in zip(made(each, inv_freq, *given, polar), both, strict=True):
                assert got.is_contiguous()
                assert_same_bits(got, want.contiguous())
    # Mapped over a dimension that is not the first, so that it must be moved.
    mapped = torch.vmap(lambda each: schema.cos_sin(each, inv_freq, *given, polar), in_dims=1)
    for got, want in zip(mapped(at.transpose(0, 1)), zip(*wanted, strict=True), strict=True):
        assert_same_bits(got, torch.stack(want))


def test_the_operator_is_registered_and_refuses_what_no_caller_passes() -> None:
    at, inv_freq = noise(2, TOKENS, 1), noise(2, DIM // 2)
    for x in (at, at.expand(2, TOKENS, DIM // 2).contiguous()):
        torch.library.opcheck(schema.cos_sin, (x, inv_freq[0], None, at[0, 0, 0], None, True))
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        schema.cos_sin(at.clone().requires_grad_(), inv_freq[0], None, None, None, False)
    with pytest.raises(RuntimeError, match="only positions may be batched"):
        torch.vmap(lambda each: schema.cos_sin(at, each, None, None, None, False))(inv_freq)
    for made in (schema.cos_sin, cosines.cos_sin):
        with pytest.raises(RuntimeError, match="positions must be contiguous"):
            made(at.transpose(0, 1), inv_freq[0], None, None, None, False)
