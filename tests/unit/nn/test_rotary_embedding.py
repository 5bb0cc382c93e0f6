"""RotaryEmbedding, the module for attention code: calls, learned frequencies, casts and saving."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support import helpers
from tests.support.helpers import refusals
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, positions, rotate, rotate_qk
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear
from tightrope.nn import RotaryEmbedding

noise = partial(helpers.noise, dtype=torch.float32)
Q, K = noise(2, 4, 5, 8), noise(2, 2, 5, 8, seed=1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_it_is_rotate_qk_with_its_spec(layout: str) -> None:
    spec = RopeSpec(8, base=500.0, rotary_dim=4, start=2, interleaved=True, scaling=Linear(2.0))
    options: dict[str, Any] = {"start": 2, "interleaved": True, "scaling": Linear(2.0)}
    q, k = (x if layout == "bhsd" else x.transpose(1, 2) for x in (Q, K))
    for rope in (
        RotaryEmbedding(spec, layout=layout),
        RotaryEmbedding(8, base=500.0, rotary_dim=4, layout=layout, **options),
    ):
        assert rope.spec == spec
        for at in (
            None,
            7,
            torch.arange(10).reshape(2, 5),
            positions.per_row(torch.tensor([3, 9])),
        ):
            wanted = rotate_qk(q, k, spec, at, layout=layout)
            for got, expected in zip(rope(q, k, at), wanted, strict=True):
                assert torch.equal(got, expected)
            assert torch.equal(rope(q, positions=at), wanted[0])


def test_several_axes_and_lengths() -> None:
    axes = Axes.blocks((2, 2))
    where = positions.multi_axis(torch.arange(10).reshape(2, 5))
    assert torch.equal(
        RotaryEmbedding(8, axes=axes)(Q, positions=where), rotate(Q, RopeSpec(8, axes=axes), where)
    )
    rule = DynamicNTK(2.0, 4)
    rope, spec = RotaryEmbedding(8, scaling=rule), RopeSpec(8, scaling=rule)
    for length in (None, 100):
        got = rope(Q, seq_len=length)
        assert torch.equal(got, rotate(Q, spec, seq_len=length))


def test_learned_frequencies() -> None:
    rope = RotaryEmbedding(8, learnable=True)
    assert list(rope.state_dict()) == ["inv_freq"]
    assert rope.inv_freq.dtype == torch.float32
    assert_near(rope.inv_freq.detach(), RopeSpec(8).frequencies().inv_freq.float(), "float32 ways")
    assert_near(rope(Q, K, 3)[1].detach(), rotate(K, RopeSpec(8), 3), "float32 ways")
    rope(Q, K, 3)[0].square()[..., :2].sum().backward()
    assert rope.inv_freq.grad.any()
    other = RotaryEmbedding(8, learnable=True)
    with torch.no_grad():
        rope.inv_freq.mul_(2)
    other.load_state_dict(rope.state_dict())
    assert torch.equal(other(Q), rope(Q))
    other.reset_parameters()
    assert torch.equal(other(Q), RotaryEmbedding(8, learnable=True)(Q))
    heads = RotaryEmbedding(8, scaling=Given.of(noise(4, 4)), learnable=True)
    assert heads.inv_freq.shape == (4, 4)
    heads(Q)
    with pytest.warns(UserWarning, match="frequencies should be float32"):
        rope.to(torch.bfloat16)(Q)


@pytest.mark.parametrize("learnable", [False, True])
def test_one_graph(learnable: bool) -> None:
    rope, counter = RotaryEmbedding(8, learnable=learnable), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 4, 3):
        q, k = noise(2, 4, tokens, 8), noise(2, 2, tokens, 8)
        for got, wanted in zip(compiled(q, k, 100 - tokens), rope(q, k, 100 - tokens), strict=True):
            assert_near(got, wanted, "float32 ways")
    assert counter.frame_count == 1


def test_repr() -> None:
    assert repr(RotaryEmbedding(8)) == "RotaryEmbedding(RopeSpec(head_dim=8), layout='bhsd')"
    assert repr(RotaryEmbedding(RopeSpec(8, base=500.0), layout="thd", learnable=True)) == (
        "RotaryEmbedding(RopeSpec(head_dim=8, base=500.0), layout='thd', learnable=True)"
    )


test_errors = refusals(
    "RotaryEmbedding",
    ValueError={
        "base, rotary_dim, start, interleaved, scaling and axes must be left out with a RopeSpec, "
        "which has them, but got RopeSpec(head_dim=8) and others.": (
            [
                lambda: RotaryEmbedding(RopeSpec(8), base=500.0),
                lambda: RotaryEmbedding(RopeSpec(8), base=torch.ones(2)),
            ]
        ),
        "layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got 'hb'.": (
            lambda: RotaryEmbedding(8, layout="hb")
        ),
        "learnable must be False for frequencies that depend on the length or on several axes; pass "
        "inv_freq= to tightrope.rotate_qk instead.": (
            lambda: RotaryEmbedding(8, scaling=DynamicNTK(2.0, 4), learnable=True)
        ),
    },
    TypeError={
        "learnable must be a bool but got 1.": lambda: RotaryEmbedding(8, learnable=1),
        "only spec may be given without a name but got 2 values; name the others: base=, rotary_dim=, "
        "start=, interleaved=, scaling=, axes=, layout=, learnable=, device=.": (
            lambda: RotaryEmbedding(64, 8192)
        ),
    },
)


def test_errors_of_a_call_are_those_of_rotate_qk() -> None:
    rope = RotaryEmbedding(8)
    with pytest.raises(ValueError, match=r"^\[rotate_qk\] q must have"):
        rope(torch.zeros(1, 2, 3, 6))
    with pytest.raises(TypeError, match=r"^\[rotate_qk\] q must be a tensor"):
        rope(None, K)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope(Q.bfloat16(), K.bfloat16())
