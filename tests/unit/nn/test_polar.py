"""Polar attention: comparison with its equations, decoding with a cache, and gradients."""

import itertools
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle, oracle_acts
from tests.support.helpers import noise
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.frequencies import YaRN
from tightrope.functional import build_freqs_cis, rotary_apply, rotate, rotate_qk
from tightrope.gates import Given, XPos
from tightrope.nn import KVCache, PolarRoPEAttention

X = noise(2, 7, 12)


def plain(
    x: torch.Tensor,
    p: dict[str, torch.Tensor],
    kv: int,
    mask: torch.Tensor | None = None,
    log: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute Σ_s softmax_s(M_t q_t · M_s k_s / √d) v_s of four heads, where M rotates and applies the gates.

    Args:
        p: parameters; every head of a group has the keys and values of the first.
        log: logarithm of an additional gate, [tokens, heads, channels].
    """
    parts, zero, where = [], torch.zeros(()), torch.arange(x.shape[1])[:, None]
    for i in range(4):
        first = i - i % (4 // kv)
        turned = []
        for head, name in ((i, "q"), (first, "k")):
            each = x @ p[f"heads.{head}.{name}_proj.weight"].T
            angle = oracle_acts.angles(x.shape[1], 0, each.shape[-1])
            each = oracle.turned(each, angle.cos(), angle.sin(), interleaved=True)
            gate = p.get(f"heads.{head}.gamma", zero) + p.get(f"heads.{head}.slope", zero) * where
            turned.append(each * (gate if log is None else gate + log[:, head]).exp())
        scores = turned[0] @ turned[1].mT / math.sqrt(turned[0].shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        parts.append(scores.softmax(-1) @ (x @ p[f"heads.{first}.v_proj.weight"].T))
    return torch.cat(parts, -1) @ p["out.weight"].T


def made(**options: Any) -> PolarRoPEAttention:
    """Return an attention module of four heads of 8 channels, in float64, whose gates are not 1."""
    torch.manual_seed(0)
    attention = PolarRoPEAttention(12, 4, 8, **options, dtype=torch.float64).eval()
    for name, p in attention.named_parameters():
        if name.endswith(("gamma", "slope")):
            torch.nn.init.normal_(p, std=1.0 if name.endswith("gamma") else 0.05)
    return attention


def parameters(attention: PolarRoPEAttention) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in attention.named_parameters()}


def padding_of(tokens: int, rows: slice) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, rows] = False
    return mask[:, None, None]


# --- tables ---------------------------------------------------------------------------------------


def test_build_freqs_cis() -> None:
    """Tables have the bits of the rotation, in graphs of any length too, where torch makes new tensors."""
    for x in (noise(2, 3, 50, 16), noise(2, 3, 50, 16, dtype=torch.float32)):
        y = rotary_apply(x, *build_freqs_cis(50, 16, dtype=x.dtype))
        assert_same_bits(y, rotate(x, RopeSpec(16, interleaved=True)))
    assert build_freqs_cis(0, 16)[0].shape == (0, 8)
    sizes: Any = numpy.array(7), numpy.int32(16)
    assert_same_bits(build_freqs_cis(*sizes), build_freqs_cis(7, 16))
    with torch.device("meta"):
        assert build_freqs_cis(5, 8)[1].is_meta
    assert build_freqs_cis(5, 8, device="meta")[0].is_meta

    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(build_freqs_cis(x.shape[0], 8)) + build_freqs_cis(1, 8, base=100.0)[0]

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 6):
        assert_same_bits(compiled(torch.zeros(tokens)), both(torch.zeros(tokens)))


@pytest.mark.parametrize(
    "shape, tables",
    [
        *(((2, 3, 7, 8), tables) for tables in ((7, 4), (1, 1, 7, 4), (2, 1, 7, 4))),
        *(((7, 8), (7, 4)), ((8,), (4,)), ((7, 8), (2, 7, 4))),
        *(((3, 7, 8), (3, 7, 4)), ((3, 7, 8), (1, 4))),
        *(((5, 2, 3, 7, 8), tables) for tables in ((7, 4), (2, 1, 7, 4))),
        ((2, 5, 2, 3, 7, 8), (5, 1, 3, 7, 4)),
    ],
)
def test_rotary_apply_broadcasts(shape: tuple[int, ...], tables: tuple[int, ...]) -> None:
    x, cos, sin = noise(*shape), noise(*tables, seed=1), noise(*tables, seed=2)
    a, b = x[..., ::2], x[..., 1::2]
    wanted = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    got = rotary_apply(x, cos, sin)
    assert_near(got, wanted, "float64 ways")
    narrow = rotary_apply(x.bfloat16(), cos.float(), sin.float())
    assert_near(narrow, wanted.bfloat16(), "table rotation, torch.bfloat16")


# --- the equations --------------------------------------------------------------------------------


def test_initial_parameters_are_those_of_linear_layers_and_gates_of_1() -> None:
    torch.manual_seed(5)
    p = parameters(PolarRoPEAttention(12, 2, 8))
    torch.manual_seed(5)
    linear = {f"heads.{i}.{each}_proj.weight": (12, 8) for i in range(2) for each in "qkv"}
    for name, sizes in (linear | {"out.weight": (16, 12)}).items():
        assert torch.equal(p.pop(name), torch.nn.Linear(*sizes, bias=False).weight)
    assert p.keys() == {"heads.0.gamma", "heads.1.gamma"}
    assert not any(gamma.any() for gamma in p.values())  # gates begin as 1


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_gates_and_masks_are_the_equations(kv: int, causal: bool) -> None:
    attention = made(num_kv_heads=kv, causal=causal, gate="slope")
    p, lower = parameters(attention), torch.ones(7, 7, dtype=torch.bool).tril()
    mask = lower if causal else None
    assert_near(attention(X), plain(X, p, kv, mask), "float64 ways")
    some = (noise(7, 7) > -0.5) | torch.eye(7, dtype=torch.bool)
    wanted = plain(X, p, kv, some & lower if causal else some)
    assert_near(attention(X, attn_mask=some), wanted, "float64 ways")
    added = torch.zeros(7, 7).masked_fill(~some, -torch.inf)
    assert_near(attention(X, attn_mask=added[None, None]), wanted, "float64 ways")
    # Padding is as if it were not there.
    got = attention(X, attn_mask=padding_of(7, slice(5, 7)))
    assert_near(got[0], attention(X)[0], "float64 ways")
    assert_near(got[1, :5], attention(X[1:, :5])[0], "float64 ways")


def test_a_token_that_may_look_nowhere_gets_zero() -> None:
    x = X.clone().requires_grad_()
    y = made()(x, attn_mask=torch.zeros(2, 1, 1, 7, dtype=torch.bool))
    assert torch.equal(y, torch.zeros_like(y))
    y.sum().backward()
    assert x.grad.isfinite().all()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "relative, options",
    [
        (True, {"tied": "pair"}),
        (False, {"tied": None}),
        # Decay with the distance needs opposite gates on q and k; the gates of "slope" are equal.
        (True, {"gate": XPos(centre=500, scale_base=64.0), "tied": "pair", "causal": True}),
        (False, {"gate": "slope", "tied": "pair", "causal": True}),
    ],
    ids=str,
)
def test_which_gates_keep_attention_relative(relative: bool, options: dict[str, Any]) -> None:
    attention = made(**options)
    far = attention(X, positions=1000 if "gate" not in options or relative else 10)
    assert torch.allclose(attention(X), far, atol=1e-10) == relative


def test_positions_and_what_is_prepared_are_one() -> None:
    spec = RopeSpec(8, rotary_dim=4, base=500.0)
    attention, ids = made(spec=spec, gate="slope"), torch.arange(14).reshape(2, 7) * 3
    wanted = attention(X, positions=ids)
    assert torch.equal(attention(X, positions=spec.at(ids)), wanted)
    for row in range(2):
        assert_near(attention(X[row : row + 1], positions=ids[row])[0], wanted[row], "float64 ways")


def test_the_softmax_scale_of_a_spec_is_applied() -> None:
    rule = YaRN(4.0, 16, mscale=1.0, mscale_all_dim=1.0)
    spec = RopeSpec(8, interleaved=True, scaling=rule)
    assert spec.softmax_scaling != 1.0 == spec.attention_scaling()
    attention, q_k_v = made(spec=spec, use_spd=False), []
    for name in "qkv":
        weights = [attention.get_parameter(f"heads.{i}.{name}_proj.weight") for i in range(4)]
        q_k_v.append(torch.stack([X @ weight.T for weight in weights], 1))
    q, k = rotate_qk(q_k_v[0] * spec.softmax_scaling, q_k_v[1], spec)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, q_k_v[2])
    assert_near(attention(X), attention.out(y.transpose(1, 2).flatten(2)), "float64 ways")


def test_dropout_is_for_training() -> None:
    attention, exact = made(dropout=0.5), made()(X)
    assert torch.equal(attention(X), exact)
    assert not torch.allclose(attention.train()(X), exact)


# --- the cache ------------------------------------------------------------------------------------


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
    cuts: list[int], padded: bool, grad: bool, kv: int, **options: Any
) -> None:
    attention, x = made(num_kv_heads=kv, causal=True, **options), noise(2, 12, 12)
    padding = padding_of(12, slice(0, 3 if padded else 0))
    with torch.set_grad_enabled(grad):
        whole = attention(x, attn_mask=padding if padded else None)
        cache, parts = KVCache(), []
        for start, end in itertools.pairwise([0, *sorted(cuts), 12]):
            mask = padding[..., :end] if padded else None
            parts.append(attention(x[:, start:end], attn_mask=mask, cache=cache))
            assert cache.tokens == end
    assert_near(torch.cat(parts, 1), whole, "float64 ways")


@pytest.mark.parametrize("changed", [{"k": None}, {"v": None}, {"v": torch.ones(2, 4, 2, 8)}])
def test_a_call_that_does_not_fit_its_cache_leaves_it(changed: dict[str, Any]) -> None:
    attention, cache = PolarRoPEAttention(12, 4, 8, causal=True), KVCache()
    cache.append_(torch.zeros(2, 4, 3, 8), torch.ones(2, 4, 3, 8))
    vars(cache).update(changed)
    before = dict(vars(cache))
    with pytest.raises((RuntimeError, TypeError)):
        attention(noise(2, 5, 12).float(), cache=cache)
    assert vars(cache) == before


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [False, True])
def test_a_gate_of_the_call_learns_where_no_parameter_does(learned: bool) -> None:
    attention = made(use_spd=False).requires_grad_(learned)
    log = (0.1 * noise(7, 4, 8)).requires_grad_()
    p = parameters(attention)
    ys = attention(X, gate=Given(log)), plain(X, p, 4, log=log)
    got, wanted = (torch.autograd.grad(y.square().sum(), log)[0] for y in ys)
    assert_near(got, wanted, "float64 ways")
