"""What calls of the modules refuse; rows of their arguments are in unit/refusals.jsonl."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec, positions
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

META, BY_LENGTH, BLOCKS = torch.device("meta"), DynamicNTK(2.0, 4), Axes.blocks((2, 2))
Y, (COS, SIN) = torch.zeros(2, 5, 12), build_freqs_cis(5, 8)
ROPE, LRPE, HEAD = RotaryEmbedding(8), LrpeRotate1d(12, 3), PolarRoPEHead(12, 8)
FITS = "x must have shape (batch, tokens, 3, 12) or, if num_heads is None, (batch, tokens, 12)"
test_modules = refusals(
    ValueError={
        "[RotaryEmbedding] base, rotary_dim, start, interleaved, scaling and axes must be left out": [
            lambda base=base: RotaryEmbedding(RopeSpec(8), base=base)
            for base in (500.0, torch.ones(2))
        ],
        "[RotaryEmbedding] learnable must be False for frequencies that depend on the length or": [
            lambda: RotaryEmbedding(8, scaling=BY_LENGTH, learnable=True),
            lambda: RotaryEmbedding(8, axes=BLOCKS, learnable=True),
        ],
        "[rotate_qk] q must have": lambda: ROPE(torch.zeros(1, 2, 3, 6)),
        f"[LrpeRotate1d] {FITS}": [lambda: LRPE(Y[..., :8]), lambda: LRPE(Y[0])],
        "theta must have shape (6,), (4, 6) or (1, 6)": lambda: LRPE(torch.zeros(2, 5, 4, 12)),
        "[PolarRoPEHead] x is on meta but the parameters are on cpu": (
            lambda: HEAD(Y.to(META), COS, SIN)
        ),
        "[PolarRoPEHead] cos and sin must have shape (5, 4)": lambda: HEAD(Y, COS, SIN[:4]),
        "[rotary_apply] x must have an even last dimension": (
            lambda: rotary_apply(Y[..., :7], COS, SIN)
        ),
        "[rotary_apply] cos and sin must share a shape that broadcasts against x, with 4 entries": [
            lambda: rotary_apply(Y[..., :8], COS[:4], SIN[:4]),
            lambda: rotary_apply(Y[..., :8], COS, SIN[:1]),
        ],
    },
    TypeError={
        "[RotaryEmbedding] only spec may be given without a name": lambda: RotaryEmbedding(8, 81),
        "[rotate_qk] q must be a tensor": lambda: ROPE(None, Y),
        "[LrpeRotate1d] x must be a tensor": lambda: LRPE(3),
        "[LrpeRotate1d] dtype must be floating": lambda: LrpeRotate1d(12, dtype=torch.int64),
        "[build_freqs_cis] dtype must be float32 or float64": (
            lambda: build_freqs_cis(4, 8, dtype=torch.bfloat16)
        ),
    },
)

new = partial(PolarRoPEAttention, 12, 4, 8)
A, C, OF_LENGTH = new(), new(causal=True), new(causal=True, spec=RopeSpec(8, scaling=BY_LENGTH))
TWO, GROUPED = new(gate="slope", spec=RopeSpec(8, axes=BLOCKS)), new(num_kv_heads=2, causal=True)
PLANE = positions.multi_axis(torch.zeros(2, 5))


def follows(x: torch.Tensor = Y, attention: Any = C, **changes: Any) -> Callable[[], object]:
    """Return a call with a cache of three tokens in two rows, and these changes."""
    cache = KVCache()
    cache.append_(torch.zeros(2, 4, 3, 8), torch.ones(2, 4, 3, 8))
    vars(cache).update(changes)
    return lambda: attention(x, cache=cache)


def masked(*shape: int, **kind: Any) -> Callable[[], object]:
    return lambda: A(Y, attn_mask=torch.ones(shape, **kind))


test_attention = refusals(
    "PolarRoPEAttention",
    ValueError={
        "x is on cpu but the parameters are on meta": lambda: new(device="meta")(Y),
        "attn_mask is on meta but x is on cpu": masked(5, 5, device=META),
        "spec must be a RopeSpec with head_dim=8": lambda: new(spec=RopeSpec(16)),
        "x must have shape (batch, tokens, 12)": [lambda: A(Y[..., :8]), lambda: A(Y[0])],
        "cache must hold keys and values float32[2, 4, tokens, 8] on cpu, or neither": [
            *(follows(v=None), follows(v=[]), follows(k=None)),
            *(follows(v=torch.ones(2, 4, 2, 8)), follows(v=torch.ones(2, 4, 3, 8, device=META))),
        ],
        "values float32[2, 2, tokens": follows(attention=GROUPED),
        "values float64[2, 4, tokens": follows(Y.double(), copy.deepcopy(C).double()),
        "values float32[1, 4, tokens": follows(Y[:1]),
        "positions must be prepared by RopeSpec(head_dim=8, interleaved=True)": (
            lambda: A(Y, positions=RopeSpec(8).at(0))
        ),
        "attn_mask must have shape (5, 5) or (2|1, 4|1, 5|1, 5)": [
            masked(*shape) for shape in ((5, 4), (5, 1), (2, 5, 5), (3, 1, 1, 5))
        ],
        "causal must be True with a cache": lambda: A(Y, cache=KVCache()),
        "cache must be None if the frequencies depend": lambda: OF_LENGTH(Y, cache=KVCache()),
        "positions must have 1 axis for a gate that depends on": lambda: TWO(Y, positions=PLANE),
    },
    TypeError={
        "dtype must be floating": lambda: new(dtype=torch.int64),
        "x must be a tensor": lambda: A(None),
        "attn_mask must be a bool or floating tensor": masked(5, 5, dtype=torch.int64),
        "cache must be a KVCache": lambda: C(Y, cache={}),
    },
)
