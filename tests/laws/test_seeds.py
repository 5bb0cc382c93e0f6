"""The four systems that this library began with: names, signatures, defaults and results.

The rotation by LRPE is compared in tests/unit/functional/test_lrpe.py.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.tolerances import assert_near
from tightrope.functional import build_freqs_cis, lrpe_rotate_1d, rotary_apply, rotary_pos_embedding
from tightrope.nn import LrpeRotate1d, PolarRoPEAttention, PolarRoPEHead, RotaryPositionalEmbedding

F64 = torch.float64


def angles(ids: torch.Tensor, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return position · base^(−2k / width) as (tokens, pairs)."""
    k = torch.arange(width // 2, dtype=F64)
    return torch.outer(ids.double(), base ** (-2 * k / width))


def turned(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first pairs of x (…, channels) by angles that broadcast to (…, pairs)."""
    return oracle.turned(x, angle.cos(), angle.sin(), 0, interleaved)


# --- signatures -----------------------------------------------------------------------------------

NEEDED = inspect.Parameter.empty
SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {
    rotary_pos_embedding: {"input_": NEEDED, "position_ids": None, "interleaved": True},
    RotaryPositionalEmbedding: {"dim": NEEDED, "max_seq_len": 8192, "base": 10000.0},
    RotaryPositionalEmbedding.forward: {"self": NEEDED, "x": NEEDED, "seq_dim": -2},
    build_freqs_cis: {"seq_len": NEEDED, "d": NEEDED},
    rotary_apply: {"x": NEEDED, "cos": NEEDED, "sin": NEEDED},
    PolarRoPEHead: {"d_model": NEEDED, "d_head": NEEDED, "use_spd": True},
    PolarRoPEHead.forward: {"self": NEEDED, "x": NEEDED, "cos": NEEDED, "sin": NEEDED},
    PolarRoPEAttention: {"d_model": NEEDED, "num_heads": NEEDED, "d_head": NEEDED, "use_spd": True},
    PolarRoPEAttention.forward: {"self": NEEDED, "x": NEEDED},
    lrpe_rotate_1d: {"x": NEEDED, "theta": NEEDED, "offset": 0, "act": "none", "dim": None},
    LrpeRotate1d.forward: {"self": NEEDED, "x": NEEDED, "offset": 0},
}


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_arguments_by_position_and_their_defaults(call: Callable[..., Any]) -> None:
    found = inspect.signature(call).parameters.values()
    by_position = {each.name: each.default for each in found if each.kind != each.KEYWORD_ONLY}
    assert list(by_position.items()) == list(SIGNATURES[call].items())
    others = [each for each in found if each.kind == each.KEYWORD_ONLY]
    assert all(each.default is not NEEDED for each in others)


# --- rotary_pos_embedding -------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 1, 3, 2, 5, 6), (0, 5, 8), (2, 0, 8), (2, 5, 0), (1, 2)],
)
def test_rotary_pos_embedding(shape: tuple[int, ...], interleaved: bool) -> None:
    x, tokens = noise(*shape[::-1]).permute(*range(len(shape))[::-1]), shape[-2]
    before = x.clone()
    for ids in (None, torch.arange(tokens) * 7 - 9, torch.rand(tokens, dtype=F64)):
        where = torch.arange(tokens) if ids is None else ids
        y = rotary_pos_embedding(x, ids, interleaved)
        assert y.shape == x.shape
        assert_near(y, turned(x, angles(where, shape[-1]), interleaved), "float64 formula")
    assert torch.equal(rotary_pos_embedding(x), rotary_pos_embedding(x, None, True))
    assert torch.equal(x, before)


# --- RotaryPositionalEmbedding --------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 12, 9])
@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_seq_dim_is_the_sequence_for_any_value(rank: int, width: int) -> None:
    rope = RotaryPositionalEmbedding(8)
    x = noise(*range(3, 3 + rank - 1), width, dtype=torch.float32)
    for dim in range(rank - 1):
        angle = angles(torch.arange(x.shape[dim]), 8)
        expected = turned(x.movedim(dim, -2), angle, False).movedim(-2, dim)
        for spelled in (dim, dim - rank):
            y = rope(x, seq_dim=spelled)
            assert y.shape == x.shape
            assert_near(y, expected.float(), "float32 ways")
            assert torch.equal(y[..., 8:], x[..., 8:])
    assert torch.equal(rope(x), rope(x, -2))


def test_attributes_and_growth() -> None:
    rope = RotaryPositionalEmbedding(8, 4, 5e5)
    assert (rope.dim, rope.max_seq_len, rope.base) == (8, 4, 5e5)
    assert (rope.cos_cached, rope.sin_cached, rope.max_seq_len_cached) == (None, None, 0)
    assert_near(rope.inv_freq, angles(torch.ones(1), 8, 5e5)[0].float(), "float32 ways")
    for tokens, longest in ((50, 50), (3, 50), (60, 60)):  # longer than max_seq_len
        x = noise(1, tokens, 8, dtype=torch.float32)
        expected = turned(x, angles(torch.arange(tokens), 8, 5e5), False)
        assert_near(rope(x), expected.float(), "float32 ways")
        assert rope.max_seq_len_cached == longest
        angle = angles(torch.arange(longest), 8, 5e5).repeat(1, 2)[None, None]
        for table, wanted in ((rope.cos_cached, angle.cos()), (rope.sin_cached, angle.sin())):
            assert_near(table, wanted.float(), "float32 ways")
    adjacent = RotaryPositionalEmbedding(8, interleaved=True)
    adjacent(noise(5, 8, dtype=torch.float32))
    sines = angles(torch.arange(5), 8).sin().repeat_interleave(2, -1)[None, None]
    assert_near(adjacent.sin_cached, sines.float(), "float32 ways")


# --- polar attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("use_spd", [True, False])
def test_a_polar_head(use_spd: bool) -> None:
    """It is softmax(q · k / √d) v of rotated and gated q and k, without a mask; the gate begins as 1."""
    x, module = noise(2, 7, 12), PolarRoPEHead(12, 8, use_spd, dtype=F64)
    gate = 1.0
    if use_spd:
        assert not module.gamma.any()
        gate = torch.nn.init.normal_(module.gamma).detach().exp()
    q, k, v = (x @ getattr(module, f"{name}_proj").weight.detach().T for name in "qkv")
    angle = angles(torch.arange(7), 8)
    q, k = turned(q, angle, True) * gate, turned(k, angle, True) * gate
    wanted = (q @ k.mT / math.sqrt(8)).softmax(-1) @ v
    assert_near(module(x, *build_freqs_cis(7, 8, dtype=F64)), wanted, "float64 ways")
