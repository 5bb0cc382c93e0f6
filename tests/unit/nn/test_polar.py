"""Polar attention: comparison with its equations, decoding with a cache, gradients and errors."""

import copy
import itertools
import math
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.helpers import noise, refusals
from tests.support.tolerances import assert_near
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, YaRN
from tightrope.functional import build_freqs_cis, rotary_apply, rotate
from tightrope.gates import Given, XPos
from tightrope.nn import KVCache, PolarRoPEAttention, PolarRoPEHead
from tightrope.positions import multi_axis

F64 = torch.float64


# --- the equations, in float64 --------------------------------------------------------------------


def plain_tables(tokens: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    theta = torch.exp(-torch.arange(0, d, 2, dtype=F64) * (math.log(10000.0) / d))
    angle = torch.arange(tokens, dtype=F64)[:, None] * theta
    return angle.cos(), angle.sin()


def plain_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def plain_head(
    x: torch.Tensor,
    p: dict[str, torch.Tensor],
    i: int,
    first: int,
    g: Any = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute Σ_s softmax_s(M_t q_t · M_s k_s / √d) v_s of head i, with k and v of head `first`.

    M rotates and applies the gates.
    """
    q, k, v = (
        x @ p[f"heads.{h}.{name}_proj.weight"].T
        for h, name in ((i, "q"), (first, "k"), (first, "v"))
    )
    cos, sin = plain_tables(x.shape[1], q.shape[-1])
    q, k = plain_rotation(q, cos, sin), plain_rotation(k, cos, sin)
    if f"heads.{i}.gamma" in p:
        q, k = q * p[f"heads.{i}.gamma"].exp(), k * p[f"heads.{first}.gamma"].exp()
    where = torch.arange(x.shape[1], dtype=F64)[:, None]
    if g is not None:
        q, k = q * g(where, i).exp(), k * g(where, first).exp()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def plain_attention(
    x: torch.Tensor, p: dict[str, torch.Tensor], heads: int, kv: int | None = None, **options: Any
) -> torch.Tensor:
    group = heads // (kv or heads)
    parts = [plain_head(x, p, i, i - i % group, **options) for i in range(heads)]
    return torch.cat(parts, -1) @ p["out.weight"].T


def made(*args: Any, seed: int = 0, **options: Any) -> PolarRoPEAttention:
    """Return an attention module whose gates are not 1."""
    torch.manual_seed(seed)
    attention = PolarRoPEAttention(*args, **options, dtype=F64).eval()
    for name, p in attention.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.normal_(p)
        if name.endswith("slope"):
            torch.nn.init.normal_(p, std=0.05)
    return attention


def detached(attention: PolarRoPEAttention) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in attention.named_parameters()}


def lower(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


X = noise(2, 7, 12)

# --- tables ---------------------------------------------------------------------------------------


def test_lengths_of_tables() -> None:
    assert build_freqs_cis(0, 16)[0].shape == (0, 8)
    for got, wanted in zip(
        build_freqs_cis(numpy.array(7), numpy.int32(16)), build_freqs_cis(7, 16)
    ):  # type: ignore[arg-type]
        assert torch.equal(got, wanted)


def test_tables_have_the_bits_of_the_rotation() -> None:
    for x in (noise(2, 3, 50, 16), noise(2, 3, 50, 16, dtype=torch.float32)):
        y = rotary_apply(x, *build_freqs_cis(50, 16, dtype=x.dtype))
        assert torch.equal(y, rotate(x, RopeSpec(16, interleaved=True)))


def test_tables_are_where_torch_makes_new_tensors() -> None:
    with torch.device("meta"):
        cos, sin = build_freqs_cis(5, 8)
    assert cos.device.type == sin.device.type == "meta"
    assert build_freqs_cis(5, 8, device="meta")[0].device.type == "meta"
    assert build_freqs_cis(5, 8)[0].device.type == "cpu"


def test_tables_are_made_in_a_graph_of_any_length() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(build_freqs_cis(x.shape[0], 8)) + build_freqs_cis(1, 8, base=100.0)[0]

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 6):
        assert torch.equal(compiled(torch.zeros(tokens)), both(torch.zeros(tokens)))


SHAPES = [
    ((2, 3, 7, 8), (7, 4)),
    ((2, 3, 7, 8), (1, 1, 7, 4)),
    ((2, 3, 7, 8), (2, 1, 7, 4)),
    ((7, 8), (7, 4)),
    ((8,), (4,)),
    ((3, 7, 8), (3, 7, 4)),
    ((3, 7, 8), (1, 4)),
    ((7, 8), (2, 7, 4)),
    ((5, 2, 3, 7, 8), (7, 4)),
    ((5, 2, 3, 7, 8), (2, 1, 7, 4)),
    ((2, 5, 2, 3, 7, 8), (5, 1, 3, 7, 4)),
]


@pytest.mark.parametrize("shape, tables", SHAPES)
def test_rotary_apply_broadcasts(shape: tuple[int, ...], tables: tuple[int, ...]) -> None:
    x, cos, sin = noise(*shape), noise(*tables, seed=1), noise(*tables, seed=2)
    wanted = plain_rotation(x, cos, sin)
    got = rotary_apply(x, cos, sin)
    assert got.shape == wanted.shape
    assert_near(got, wanted, "float64 ways")
    narrow = rotary_apply(x.bfloat16(), cos.float(), sin.float())
    assert narrow.dtype == torch.bfloat16
    assert_near(narrow, wanted.bfloat16(), "table rotation, torch.bfloat16")


# --- the modules ----------------------------------------------------------------------------------


def test_initial_parameters_are_those_of_linear_layers() -> None:
    attention = PolarRoPEAttention(12, 2, 8)
    torch.manual_seed(5)
    attention = PolarRoPEAttention(12, 2, 8)
    torch.manual_seed(5)
    for i in range(2):
        for name in "qkv":
            wanted = torch.nn.Linear(12, 8, bias=False).weight
            assert torch.equal(attention.get_parameter(f"heads.{i}.{name}_proj.weight"), wanted)
    assert torch.equal(attention.out.weight, torch.nn.Linear(16, 12, bias=False).weight)


def test_it_copies_saves_and_casts() -> None:
    attention = made(12, 4, 8, num_kv_heads=2, gate="slope")
    assert torch.equal(copy.deepcopy(attention)(X), attention(X))
    meta = PolarRoPEAttention(12, 4, 8, num_kv_heads=2, gate="slope", device="meta")
    meta.load_state_dict(attention.state_dict(), assign=True)
    assert torch.equal(meta.eval()(X), attention(X))
    assert attention.to(torch.bfloat16)(X.bfloat16()).dtype == torch.bfloat16


WITHOUT_NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {"use_spd": False},
    "gated": {},
    "grouped": {"num_kv_heads": 2, "causal": True},
    "slope": {"gate": "slope", "num_kv_heads": 2},
    "tied": {"gate": "slope", "tied": "pair"},
    "xpos": {"gate": XPos(2.0), "causal": True},
    "by length": {"spec": RopeSpec(8, scaling=DynamicNTK(2.0, 4))},
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("case", WITHOUT_NUMBERS)
def test_meta_and_fake_tensors(case: str, fake: bool) -> None:
    options = WITHOUT_NUMBERS[case]
    with FakeTensorMode() if fake else torch.device("meta"):
        empty = PolarRoPEAttention(12, 4, 8, **options)
        x = torch.randn(2, 6, 12, requires_grad=True)
        mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
        ids = torch.arange(6).expand(2, 6)
        cache = KVCache() if options.get("causal") else None
        for y in (empty(x), empty(x, positions=ids, attn_mask=mask, cache=cache)):
            assert (y.shape, y.device) == (x.shape, x.device)
            for grad, leaf in zip(
                torch.autograd.grad(y.sum(), [x, *empty.parameters()]), [x, *empty.parameters()]
            ):
                assert (grad.shape, grad.device) == (leaf.shape, leaf.device)
        with torch.no_grad():
            assert empty(x).shape == x.shape
        head = PolarRoPEHead(12, 8)
        assert head(x, *build_freqs_cis(6, 8, device=x.device)).shape == (2, 6, 8)
    if not fake:
        full = made(12, 4, 8, **options)
        empty.load_state_dict(full.state_dict(), assign=True)
        assert torch.equal(empty.eval()(X), full(X))


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_gates_and_masks_are_the_equations(kv: int, causal: bool) -> None:
    attention = made(12, 4, 8, num_kv_heads=kv, causal=causal, gate="slope")
    p = detached(attention)

    def g(where: torch.Tensor, head: int) -> torch.Tensor:
        return p[f"heads.{head}.slope"] * where

    mask = lower(7) if causal else None
    assert_near(attention(X), plain_attention(X, p, 4, kv, g=g, mask=mask), "float64 ways")
    some = noise(7, 7) > -0.5
    some |= torch.eye(7, dtype=torch.bool)
    both = some if mask is None else some & mask
    wanted = plain_attention(X, p, 4, kv, g=g, mask=both)
    assert_near(attention(X, attn_mask=some), wanted, "float64 ways")
    added = torch.zeros(7, 7).masked_fill(~some, -torch.inf)
    assert_near(attention(X, attn_mask=added[None, None]), wanted, "float64 ways")


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_as_if_it_were_not_there(causal: bool) -> None:
    attention = made(12, 4, 8, causal=causal)
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, 5:] = False
    got = attention(X, attn_mask=padding[:, None, None])
    assert_near(got[0], attention(X)[0], "float64 ways")
    assert_near(got[1, :5], attention(X[1:, :5])[0], "float64 ways")


def test_a_token_that_may_look_nowhere_gets_zero() -> None:
    attention = made(12, 4, 8)
    x = X.clone().requires_grad_()
    y = attention(x, attn_mask=torch.zeros(2, 1, 1, 7, dtype=torch.bool))
    assert torch.equal(y, torch.zeros_like(y))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_a_tied_gate_keeps_attention_relative_and_one_per_channel_does_not() -> None:
    for tied, relative in (("pair", True), (None, False)):
        attention = made(12, 4, 8, tied=tied)
        assert attention.get_parameter("heads.0.gamma").shape == (4 if tied else 8,)
        far = attention(X, positions=1000)
        assert torch.allclose(far, attention(X), atol=1e-11) == relative


def test_a_gate_with_opposite_exponents_decays_with_the_distance() -> None:
    attention = made(12, 4, 8, gate=XPos(centre=500, scale_base=64.0), tied="pair", causal=True)
    assert torch.allclose(attention(X), attention(X, positions=1000), atol=1e-10)
    # This needs opposite gates on q and k; the gates of "slope" are equal.
    slope = made(12, 4, 8, gate="slope", tied="pair", causal=True)
    assert not torch.allclose(slope(X), slope(X, positions=10), atol=1e-6)


def test_positions_and_what_is_prepared_are_one() -> None:
    spec = RopeSpec(8, rotary_dim=4, base=500.0)
    attention = made(12, 4, 8, spec=spec, gate="slope")
    ids = torch.arange(14).reshape(2, 7) * 3
    wanted = attention(X, positions=ids)
    assert torch.equal(attention(X, positions=spec.at(ids)), wanted)
    for row in range(2):
        assert_near(attention(X[row : row + 1], positions=ids[row])[0], wanted[row], "float64 ways")


def test_the_softmax_scale_of_a_spec_is_applied() -> None:
    rule = YaRN(4.0, 16, mscale=1.0, mscale_all_dim=1.0)
    spec = RopeSpec(8, interleaved=True, scaling=rule)
    assert spec.softmax_scaling != 1.0
    attention = made(12, 1, 8, False, spec=spec)
    q, k, v = (X @ attention.get_parameter(f"heads.0.{n}_proj.weight").T for n in "qkv")
    q, k = rotate(q, spec, layout="bsd"), rotate(k, spec, layout="bsd")
    scores = q @ k.mT * spec.softmax_scaling / math.sqrt(8)
    assert_near(attention(X), attention.out(scores.softmax(-1) @ v), "float64 ways")


def test_dropout_is_for_training() -> None:
    attention = made(12, 4, 8, dropout=0.5)
    plain = made(12, 4, 8)
    assert torch.equal(attention(X), plain(X))
    attention.train()
    assert not torch.allclose(attention(X), plain(X))


@settings(derandomize=True, database=None, deadline=None, max_examples=80)
@given(
    cuts=st.lists(st.integers(1, 11), max_size=5, unique=True),
    kv=st.sampled_from([1, 2, 4]),
    gate=st.sampled_from([None, "slope", XPos(centre=0)]),
    tied=st.sampled_from([None, "pair"]),
    spec=st.sampled_from([None, RopeSpec(8, rotary_dim=4), RopeSpec(8, base=100.0)]),
    padded=st.booleans(),
    grad=st.booleans(),
)
def test_decoding_with_a_cache_is_the_full_pass(
    cuts: list[int], kv: int, gate: Any, tied: Any, spec: Any, padded: bool, grad: bool
) -> None:
    attention = made(12, 4, 8, num_kv_heads=kv, causal=True, gate=gate, tied=tied, spec=spec)
    x = noise(2, 12, 12)
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, :3] = not padded
    with torch.set_grad_enabled(grad):
        whole = attention(x, attn_mask=padding[:, None, None] if padded else None)
        cache, parts = KVCache(), []
        ends = [0, *sorted(cuts), 12]
        for start, end in itertools.pairwise(ends):
            mask = padding[:, None, None, :end] if padded else None
            parts.append(attention(x[:, start:end], attn_mask=mask, cache=cache))
            assert cache.tokens == end
    assert_near(torch.cat(parts, 1), whole, "float64 ways")


def test_what_is_refused_does_not_grow_the_cache() -> None:
    attention = made(12, 4, 8, causal=True)
    cache = KVCache()
    attention(X[:, :3], cache=cache)
    refused: list[dict[str, Any]] = [
        {"attn_mask": lower(4)},
        {"attn_mask": "causal"},
        {"attn_mask": torch.zeros(4, 7, dtype=torch.int64)},
        {"attn_mask": torch.zeros(4, 1)},
        {"gate": Given(torch.zeros(7, 1, 1))},
        {"positions": torch.arange(7)},
    ]
    for options in refused:
        with pytest.raises((TypeError, ValueError), match=r"^\[PolarRoPEAttention\] "):
            attention(X[:, 3:], cache=cache, **options)
        assert cache.tokens == 3, options
    assert_near(attention(X[:, 3:], cache=cache), attention(X)[:, 3:], "float64 ways")


# --- gradients and transforms ---------------------------------------------------------------------


@pytest.mark.parametrize("learns", ["gamma", "slope", "q_proj", "out"])
def test_only_some_parameters_learn(learns: str) -> None:
    """Freezing some parameters does not change the gradients of the others."""
    attention = made(12, 4, 8, num_kv_heads=2, causal=True, gate="slope")
    attention(X).square().sum().backward()
    wanted = {name: p.grad for name, p in attention.named_parameters()}
    for name, p in attention.named_parameters():
        p.grad = None
        p.requires_grad_(learns in name)
    attention(X).square().sum().backward()
    for name, p in attention.named_parameters():
        if p.requires_grad:
            assert_near(p.grad, wanted[name], "float64 ways")


@pytest.mark.parametrize("learned", [False, True])
def test_a_gate_of_the_call_learns_where_no_parameter_does(learned: bool) -> None:
    attention = made(12, 4, 8, use_spd=False).requires_grad_(learned)
    log = (0.1 * noise(7, 4, 8)).requires_grad_()
    (got,) = torch.autograd.grad(attention(X, gate=Given(log)).square().sum(), log)
    (wanted,) = torch.autograd.grad(
        plain_attention(
            X,
            detached(attention),
            4,
            g=lambda where, i: log[:, i],  # noqa: ARG005
        )
        .square()
        .sum(),
        log,
    )
    assert_near(got, wanted, "float64 ways")


def test_gradients() -> None:
    attention = made(4, 2, 4, num_kv_heads=1, causal=True, gate="slope")
    names = [name for name, _ in attention.named_parameters()]

    def run(x: torch.Tensor, *values: torch.Tensor) -> Any:
        return torch.func.functional_call(attention, dict(zip(names, values)), (x,))

    values = [p.detach().clone().requires_grad_() for p in attention.parameters()]
    x = noise(1, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *values))
    got = torch.func.grad(lambda x: run(x, *values).square().sum())(x.detach())
    (wanted,) = torch.autograd.grad(run(x, *values).square().sum(), x)
    assert_near(got, wanted, "float64 ways")


def test_it_compiles_as_one_graph() -> None:
    attention = made(12, 4, 8, num_kv_heads=2, causal=True, gate="slope")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_near(compiled(X), attention(X), "float64 ways")


# --- errors ---------------------------------------------------------------------------------------

new = partial(PolarRoPEAttention, 12, 4, 8)
A, C = new(), new(causal=True)
Y = torch.zeros(2, 5, 12)
COS, SIN = build_freqs_cis(5, 8)


def filled(rows: int, **changes: Any) -> KVCache:
    cache = KVCache()
    assert cache.append_(torch.zeros(rows, 4, 3, 8), torch.ones(rows, 4, 3, 8)) == (
        cache.k,
        cache.v,
    )
    for name, value in changes.items():
        setattr(cache, name, value)
    return cache


test_errors_of_functions_and_heads = refusals(
    ValueError={
        "[PolarRoPEHead] x is on cpu but the parameters are on meta.": (
            lambda: PolarRoPEHead(12, 8, device="meta")(Y, COS, SIN)
        ),
        "[build_freqs_cis] d must be even but got 7.": lambda: build_freqs_cis(4, 7),
        "[build_freqs_cis] seq_len must not be negative but got -1.": (
            lambda: build_freqs_cis(-1, 8)
        ),
        "[build_freqs_cis] d must not be negative but got -2.": lambda: build_freqs_cis(4, -2),
        "[rotary_apply] x must have an even last dimension but got 7 (x: float32[2, 5, 7]).": (
            lambda: rotary_apply(Y[..., :7], COS, SIN)
        ),
        "[rotary_apply] cos and sin must share a shape that broadcasts against x, with 4 entries in "
        "the last dimension, one for each pair (x: float32[2, 5, 8], cos: float32[4, 4], sin: "
        "float32[4, 4]).": lambda: rotary_apply(Y[..., :8], COS[:4], SIN[:4]),
        "[PolarRoPEHead] d_head must be even but got 7.": lambda: PolarRoPEHead(12, 7),
        "[PolarRoPEHead] cos and sin must have shape (5, 4) (x: float32[2, 5, 12], cos: float32[4, "
        "4], sin: float32[4, 4]).": lambda: PolarRoPEHead(12, 8)(Y, COS[:4], SIN[:4]),
        "[PolarRoPEHead] d_head must be positive but got -2.": lambda: PolarRoPEHead(12, -2),
        "[PolarRoPEHead] d_model must be positive but got -12.": lambda: PolarRoPEHead(-12, 2),
    },
    TypeError={
        "[build_freqs_cis] seq_len must be an int but got 1.5.": lambda: build_freqs_cis(1.5, 8),
        "[build_freqs_cis] d must be an int but got 8.0.": lambda: build_freqs_cis(4, 8.0),
        "[build_freqs_cis] dtype must be float32 or float64 but got torch.bfloat16.": (
            lambda: build_freqs_cis(4, 8, dtype=torch.bfloat16)
        ),
        "[PolarRoPEHead] use_spd must be a bool but got 'no'.": (
            lambda: PolarRoPEHead(12, 8, use_spd="no")
        ),
        "[PolarRoPEHead] dtype must be floating but got 'float32'.": (
            lambda: PolarRoPEHead(12, 8, dtype="float32")
        ),
    },
)
MASK = "attn_mask must have shape (5, 5) or (2|1, 4|1, 5|1, 5) (attn_mask: float32"
CACHE = "tokens, 8] on cpu, or neither (cache.k:"
HELD = "float32[2, 4, 3, 8]"
BY_LENGTH = RopeSpec(8, scaling=DynamicNTK(2.0, 16))
test_errors_of_attention = refusals(
    "PolarRoPEAttention",
    ValueError={
        "x is on cpu but the parameters are on meta.": lambda: new(device="meta")(X),
        "x is on meta but the parameters are on cpu.": lambda: A(X.to("meta")),
        "attn_mask is on meta but x is on cpu.": lambda: A(Y, attn_mask=lower(5).to("meta")),
        "num_heads must be a positive multiple of num_kv_heads but got 4 and 3.": (
            lambda: new(num_kv_heads=3)
        ),
        "spec must be a RopeSpec with head_dim=8 but got RopeSpec(head_dim=16).": (
            lambda: new(spec=RopeSpec(16))
        ),
        "gate must be None, 'slope' or a gate of tightrope.gates but got 'tanh'.": (
            lambda: new(gate="tanh")
        ),
        "tied must be None or 'pair' but got 'head'.": lambda: new(tied="head"),
        "dropout must lie in [0, 1) but got 1.0.": lambda: new(dropout=1.0),
        "num_heads must be positive but got 0.": lambda: PolarRoPEAttention(12, 0, 8),
        "d_head must be positive but got 0.": lambda: PolarRoPEAttention(12, 4, 0),
        "x must have shape (batch, tokens, 12) (x: float32[2, 5, 8]).": lambda: A(Y[..., :8]),
        f"cache must hold keys and values float32[2, 4, {CACHE} {HELD}, cache.v: None).": (
            lambda: C(Y, cache=filled(2, v=None))
        ),
        f"cache must hold keys and values float32[2, 4, {CACHE} {HELD}, cache.v: []).": (
            lambda: C(Y, cache=filled(2, v=[]))
        ),
        f"cache must hold keys and values float32[2, 2, {CACHE} {HELD}, cache.v: {HELD}).": (
            lambda: new(num_kv_heads=2, causal=True)(Y, cache=filled(2))
        ),
        f"cache must hold keys and values float64[2, 4, {CACHE} {HELD}, cache.v: {HELD}).": (
            lambda: copy.deepcopy(C).double()(Y.double(), cache=filled(2))
        ),
        f"cache must hold keys and values float32[1, 4, {CACHE} {HELD}, cache.v: {HELD}).": (
            lambda: C(Y[:1], cache=filled(2))
        ),
        "positions must be prepared by RopeSpec(head_dim=8, interleaved=True) but were prepared by "
        "RopeSpec(head_dim=8).": lambda: A(Y, positions=RopeSpec(8).at(0)),
        f"{MASK}[5, 4]).": lambda: A(Y, attn_mask=torch.ones(5, 4)),
        f"{MASK}[2, 5, 5]).": lambda: A(Y, attn_mask=torch.ones(2, 5, 5)),
        "causal must be True with a cache: cached tokens cannot attend to later ones.": (
            lambda: A(Y, cache=KVCache())
        ),
        "cache must be None if the frequencies depend on the length, because its keys were rotated "
        f"for a shorter length (spec: {BY_LENGTH}).": (
            lambda: new(causal=True, spec=BY_LENGTH)(Y, cache=KVCache())
        ),
        "positions must have 1 axis for a gate that depends on them but got 2; give its values per "
        "token with gates.Given.": lambda: new(
            gate="slope", spec=RopeSpec(8, axes=Axes.blocks((2, 2)))
        )(Y, positions=multi_axis(torch.zeros(2, 5))),
    },
    TypeError={
        "gate must be None, a gate of tightrope.gates, or a pair of them for q and k, but got 3.": (
            lambda: new(gate=3)
        ),
        "dropout must be a number but got '0.1'.": lambda: new(dropout="0.1"),
        "num_heads must be an int but got 4.0.": lambda: PolarRoPEAttention(12, 4.0, 8),
        "num_kv_heads must be an int but got 2.0.": lambda: new(num_kv_heads=2.0),
        "d_head must be an int but got 8.0.": lambda: PolarRoPEAttention(12, 4, 8.0),
        "d_model must be an int but got 12.0.": lambda: PolarRoPEAttention(12.0, 4, 8),
        "causal must be a bool but got 'no'.": lambda: new(causal="no"),
        "dtype must be floating but got torch.int64.": lambda: new(dtype=torch.int64),
        "x must be a tensor but got None.": lambda: A(None),
        "attn_mask must be a bool or floating tensor but got int64[5, 5].": (
            lambda: A(Y, attn_mask=torch.ones(5, 5, dtype=torch.int64))
        ),
        "cache must be a KVCache but got {}.": lambda: C(Y, cache={}),
    },
)
