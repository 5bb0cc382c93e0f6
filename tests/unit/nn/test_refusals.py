"""What the modules refuse."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK
from tightrope.functional import build_freqs_cis, rotary_apply
from tightrope.nn import (
    KVCache,
    LrpeRotate1d,
    PolarRoPEAttention,
    PolarRoPEHead,
    RotaryEmbedding,
)
from tightrope.positions import multi_axis

META, BY_LENGTH = torch.device("meta"), DynamicNTK(2.0, 4)


def each(make: Callable[..., object], *options: dict[str, Any]) -> list[Callable[[], object]]:
    """Return calls with each of these arguments."""
    return [lambda one=one: make(**one) for one in options]


rope = partial(RotaryEmbedding, 8)
test_rotary = refusals(
    ValueError={
        "[RotaryEmbedding] base, rotary_dim, start, interleaved, scaling and axes must be left out": (
            each(partial(RotaryEmbedding, RopeSpec(8)), {"base": 500.0}, {"base": torch.ones(2)})
        ),
        "[RotaryEmbedding] layout must be one of bhsd, bshd,": each(rope, {"layout": "hb"}),
        "[RotaryEmbedding] learnable must be False for frequencies that depend on the length or": (
            each(
                partial(rope, learnable=True),
                {"scaling": BY_LENGTH},
                {"axes": Axes.blocks((2, 2))},
            )
        ),
        "[rotate_qk] q must have": lambda: rope()(torch.zeros(1, 2, 3, 6)),
    },
    TypeError={
        "[RotaryEmbedding] learnable must be a bool": each(rope, {"learnable": 1}),
        "[RotaryEmbedding] only spec may be given without a name but got 2": lambda: rope(8192),
        "[rotate_qk] q must be a tensor": lambda: rope()(None, torch.zeros(1)),
    },
)
lrpe, ROWS = partial(LrpeRotate1d, 12), LrpeRotate1d(12, 3)
FITS = "x must have shape (batch, tokens, 3, 12) or, if num_heads is None, (batch, tokens, 12)"
test_lrpe = refusals(
    ValueError={
        "[LrpeRotate1d] rotary_dim must be even but got 7, its default": lambda: LrpeRotate1d(7),
        "num_heads must be positive": each(lrpe, {"num_heads": 0}),
        "per must be one of 'head and pair', 'pair', 'head'": each(lrpe, {"per": "token"}),
        "num_heads must be given for per='head'": each(lrpe, {"per": "head"}),
        "pairs must be None for per='head'": each(
            lrpe, {"per": "head", "num_heads": 2, "pairs": 3}
        ),
        "pairs must be at most 6": each(lrpe, {"pairs": 7}),
        "pairs must be positive": each(lrpe, {"pairs": 0}),
        "act must be one of none, relu, ": each(lrpe, {"act": "swish"}, {"act": "rms_norm"}),
        "dim must be None for act 'relu'": each(lrpe, {"act": "relu", "dim": -1}),
        "dim must be -1 or 1 for act 'softmax'": each(partial(lrpe, act="softmax"), {}, {"dim": 2}),
        "base must be positive and finite": each(lrpe, {"base": 0}),
        FITS: [lambda: ROWS(torch.zeros(2, 5, 3, 8)), lambda: ROWS(torch.zeros(5, 12))],
        "theta must have shape (6,), (4, 6) or (1, 6)": lambda: ROWS(torch.zeros(2, 5, 4, 12)),
    },
    TypeError={
        "[LrpeRotate1d] head_dim must be an int": lambda: LrpeRotate1d("wide"),
        "num_heads must be an int": each(lrpe, {"num_heads": 2.0}),
        "dim must be an int": each(partial(lrpe, act="softmax"), {"dim": True}, {"dim": 1.0}),
        "base must be a number": each(lrpe, {"base": "1e4"}),
        "dtype must be floating": each(lrpe, {"dtype": torch.int64}, {"dtype": "float32"}),
        "learnable must be a bool": each(lrpe, {"learnable": "no"}),
        "x must be a tensor": lambda: ROWS(3),
    },
)

Y = torch.zeros(2, 5, 12)
COS, SIN = build_freqs_cis(5, 8)
HEAD = PolarRoPEHead(12, 8)
test_tables_and_heads = refusals(
    ValueError={
        "[PolarRoPEHead] x is on cpu but the parameters are on meta": (
            lambda: PolarRoPEHead(12, 8, device="meta")(Y, COS, SIN)
        ),
        "[build_freqs_cis] d must be even": lambda: build_freqs_cis(4, 7),
        "[build_freqs_cis] seq_len must not be negative": lambda: build_freqs_cis(-1, 8),
        "[build_freqs_cis] d must not be negative": lambda: build_freqs_cis(4, -2),
        "[rotary_apply] x must have an even last dimension": (
            lambda: rotary_apply(Y[..., :7], COS, SIN)
        ),
        "[rotary_apply] cos and sin must share a shape that broadcasts against x, with 4 entries": [
            lambda: rotary_apply(Y[..., :8], COS[:4], SIN[:4]),
            lambda: rotary_apply(Y[..., :8], COS, SIN[:1]),
        ],
        "[PolarRoPEHead] d_head must be even": lambda: PolarRoPEHead(12, 7),
        "[PolarRoPEHead] d_head must be positive": lambda: PolarRoPEHead(12, -2),
        "[PolarRoPEHead] d_model must be positive": lambda: PolarRoPEHead(-12, 2),
        "[PolarRoPEHead] cos and sin must have shape (5, 4)": lambda: HEAD(Y, COS, SIN[:4]),
    },
    TypeError={
        "[build_freqs_cis] seq_len must be an int": lambda: build_freqs_cis(1.5, 8),
        "[build_freqs_cis] d must be an int": lambda: build_freqs_cis(4, 8.0),
        "[build_freqs_cis] dtype must be float32 or float64": (
            lambda: build_freqs_cis(4, 8, dtype=torch.bfloat16)
        ),
        "[PolarRoPEHead] use_spd must be a bool": lambda: PolarRoPEHead(12, 8, use_spd="no"),
        "[PolarRoPEHead] dtype must be floating": lambda: PolarRoPEHead(12, 8, dtype="float32"),
    },
)

new = partial(PolarRoPEAttention, 12, 4, 8)
A, C, OF_LENGTH = new(), new(causal=True), new(causal=True, spec=RopeSpec(8, scaling=BY_LENGTH))
TWO = new(gate="slope", spec=RopeSpec(8, axes=Axes.blocks((2, 2))))


def filled(**changes: Any) -> KVCache:
    """Return a cache of three tokens in two rows."""
    cache = KVCache()
    cache.append_(torch.zeros(2, 4, 3, 8), torch.ones(2, 4, 3, 8))
    vars(cache).update(changes)
    return cache


def masked(*shape: int, dtype: torch.dtype = torch.bool) -> Callable[[], object]:
    return lambda: A(Y, attn_mask=torch.ones(shape, dtype=dtype))


test_attention = refusals(
    "PolarRoPEAttention",
    ValueError={
        "x is on cpu but the parameters are on meta": lambda: new(device="meta")(Y),
        "x is on meta but the parameters are on cpu": lambda: A(Y.to(META)),
        "attn_mask is on meta but x is on cpu": (
            lambda: A(Y, attn_mask=torch.ones(5, 5, device=META))
        ),
        "num_heads must be a positive multiple of num_kv_heads": each(new, {"num_kv_heads": 3}),
        "spec must be a RopeSpec with head_dim=8": each(new, {"spec": RopeSpec(16)}, {"spec": 8}),
        "gate must be None, 'slope' or a gate": each(new, {"gate": "tanh"}),
        "tied must be None or 'pair'": each(new, {"tied": "head"}),
        "dropout must lie in [0, 1)": each(new, {"dropout": 1.0}, {"dropout": -0.1}),
        "num_heads must be positive": lambda: PolarRoPEAttention(12, 0, 8),
        "d_head must be positive": lambda: PolarRoPEAttention(12, 4, 0),
        "x must have shape (batch, tokens, 12)": [lambda: A(Y[..., :8]), lambda: A(Y[0])],
        "cache must hold keys and values float32[2, 4, tokens, 8] on cpu, or neither": [
            lambda: C(Y, cache=filled(v=None)),
            lambda: C(Y, cache=filled(v=[])),
            lambda: C(Y, cache=filled(k=None)),
            lambda: C(Y, cache=filled(v=torch.ones(2, 4, 2, 8))),
            lambda: C(Y, cache=filled(v=torch.ones(2, 4, 3, 8, device=META))),
        ],
        "values float32[2, 2, tokens": lambda: new(num_kv_heads=2, causal=True)(Y, cache=filled()),
        "values float64[2, 4, tokens": (
            lambda: copy.deepcopy(C).double()(Y.double(), cache=filled())
        ),
        "values float32[1, 4, tokens": lambda: C(Y[:1], cache=filled()),
        "positions must be prepared by RopeSpec(head_dim=8, interleaved=True)": (
            lambda: A(Y, positions=RopeSpec(8).at(0))
        ),
        "attn_mask must have shape (5, 5) or (2|1, 4|1, 5|1, 5)": [
            masked(5, 4),
            masked(5, 1),
            masked(2, 5, 5),
            masked(3, 1, 1, 5),
        ],
        "causal must be True with a cache": lambda: A(Y, cache=KVCache()),
        "cache must be None if the frequencies depend on the length": (
            lambda: OF_LENGTH(Y, cache=KVCache())
        ),
        "positions must have 1 axis for a gate that depends on them but got 2": (
            lambda: TWO(Y, positions=multi_axis(torch.zeros(2, 5)))
        ),
    },
    TypeError={
        "gate must be None, a gate of tightrope.gates, or a pair": each(new, {"gate": 3}),
        "dropout must be a number": each(new, {"dropout": "0.1"}, {"dropout": True}),
        "num_heads must be an int": lambda: PolarRoPEAttention(12, 4.0, 8),
        "num_kv_heads must be an int": each(new, {"num_kv_heads": 2.0}),
        "d_head must be an int": lambda: PolarRoPEAttention(12, 4, 8.0),
        "d_model must be an int": lambda: PolarRoPEAttention(12.0, 4, 8),
        "causal must be a bool": each(new, {"causal": "no"}),
        "dtype must be floating": each(new, {"dtype": torch.int64}),
        "x must be a tensor": lambda: A(None),
        "attn_mask must be a bool or floating tensor": masked(5, 5, dtype=torch.int64),
        "cache must be a KVCache": lambda: C(Y, cache={}),
    },
)
