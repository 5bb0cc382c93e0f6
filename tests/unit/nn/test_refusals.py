"""What calls of the modules refuse; rows of their arguments are in unit/refused_calls.jsonl."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK
from tightrope.functional import build_freqs_cis
from tightrope.nn import KVCache, LrpeRotate1d, PolarRoPEAttention, PolarRoPEHead, RotaryEmbedding

META, BY_LENGTH, BLOCKS = torch.device("meta"), DynamicNTK(2.0, 4), Axes.blocks((2, 2))
Y, (COS, SIN) = torch.zeros(2, 5, 12), build_freqs_cis(5, 8)
ROPE, LRPE, HEAD = RotaryEmbedding(8), LrpeRotate1d(12, 3), PolarRoPEHead(12, 8)

new = partial(PolarRoPEAttention, 12, 4, 8)
A, C, OF_LENGTH = new(), new(causal=True), new(causal=True, spec=RopeSpec(8, scaling=BY_LENGTH))
TWO, GROUPED = new(gate="slope", spec=RopeSpec(8, axes=BLOCKS)), new(num_kv_heads=2, causal=True)
PLANE = positions.multi_axis(torch.zeros(2, 5))


def follows(
    x: torch.Tensor = Y, attention: Any = C, options: Any = None, **changes: Any
) -> Callable[[], object]:
    """Return a call with a cache of three tokens in two rows, and these changes; the cache must not grow."""
    cache = KVCache()
    cache.append_(torch.zeros(2, 4, 3, 8), torch.ones(2, 4, 3, 8))
    vars(cache).update(changes)

    def call() -> None:
        before = dict(vars(cache))
        try:
            attention(x, cache=cache, **(options or {}))
        finally:
            assert vars(cache) == before

    return call


def masked(*shape: int, **kind: Any) -> Callable[[], object]:
    return lambda: A(Y, attn_mask=torch.ones(shape, **kind))


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())
