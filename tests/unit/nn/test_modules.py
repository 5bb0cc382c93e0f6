"""What all modules have in common: nothing to cast, exact copies, memory that comes later, one graph."""

import copy
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import helpers
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.frequencies import DynamicNTK, Given
from tightrope.gates import XPos
from tightrope.nn import (
    KVCache,
    LrpeRotate1d,
    PolarRoPEAttention,
    RotaryEmbedding,
    RotaryPositionalEmbedding,
)

noise = partial(helpers.noise, dtype=torch.float32)


class Kind(NamedTuple):
    """A module, the shape of its input, and its parameters, of which `reset_parameters` restores the first values."""

    make: Callable[..., Any]
    x: tuple[int, ...]
    learned: dict[str, tuple[int, ...]]
    call: Mapping[str, Any] = MappingProxyType({})


ROTARY = partial(RotaryEmbedding, 8, base=777.0, interleaved=True, layout="bshd")
POSITIONAL = partial(RotaryPositionalEmbedding, 8, base=777.0, interleaved=True)
LRPE = partial(LrpeRotate1d, 12)
POLAR = partial(PolarRoPEAttention, 12, 4, 8)
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "of heads and pairs": ({"num_heads": 3}, (3, 6)),
    "of pairs": ({}, (6,)),
    "of pairs, for heads": ({"num_heads": 3, "per": "pair"}, (6,)),
    "of heads": ({"num_heads": 3, "per": "head"}, (3,)),
    "short": ({"num_heads": 3, "pairs": 4}, (3, 4)),
    "one pair": ({"num_heads": 3, "pairs": 1}, (3, 1)),
    "as many heads as pairs": ({"num_heads": 6, "per": "head"}, (6,)),
    "of a slice": ({"num_heads": 3, "start": 2, "rotary_dim": 8}, (3, 4)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"use_spd": False},
    "gated": {},
    "grouped": {"num_kv_heads": 2, "causal": True},
    "slope": {"gate": "slope", "num_kv_heads": 2},
    "tied": {"gate": "slope", "tied": "pair"},
    "xpos": {"gate": XPos(2.0), "causal": True},
    "by length": {"spec": RopeSpec(8, scaling=DynamicNTK(2.0, 4))},
}
PER_HEAD = Given.of(torch.rand(3, 4))
KINDS: dict[str, Kind] = {
    "rotary": Kind(ROTARY, (2, 5, 3, 8), {}),
    "learned": Kind(partial(ROTARY, learnable=True), (2, 5, 3, 8), {"inv_freq": (4,)}),
    "learned per head": Kind(
        partial(ROTARY, scaling=PER_HEAD, learnable=True), (2, 5, 3, 8), {"inv_freq": (3, 4)}
    ),
    "positional": Kind(POSITIONAL, (2, 5, 3, 8), {}, {"seq_dim": 1}),
    **{
        f"lrpe {name}": Kind(
            partial(LRPE, **options), (2, 5, options.get("num_heads", 3), 12), {"theta": shape}
        )
        for name, (options, shape) in SHAPES.items()
    },
    "lrpe softmax": Kind(partial(LRPE, act="softmax", dim=1), (2, 5, 3, 12), {"theta": (6,)}),
    **{
        f"polar {name}": Kind(partial(POLAR, **options), (2, 6, 12), {})
        for name, options in OPTIONS.items()
    },
}
every_kind = pytest.mark.parametrize("name", KINDS)


def moved(module: Any) -> Any:
    """Return the module with other parameters than those it begins with."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p += 0.1 * noise(*p.shape, seed=i)
    return module


@every_kind
def test_copies_and_checkpoints_give_the_same_bits(name: str) -> None:
    """Also built on the meta device; and there is no buffer that a cast could round."""
    make, shape, learned, call = KINDS[name]
    first, module, x = make(), moved(make()), noise(*shape)
    want, begun = module(x, **call), first(x, **call)
    assert not list(module.buffers())
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()
    assert {key: p.shape for key, p in first.named_parameters()}.items() >= learned.items()
    loaded = make()
    loaded.load_state_dict(module.state_dict())
    with torch.device("meta"):
        empty, to_fill = make(), make()
        assert empty(torch.empty(shape), **call).is_meta
    to_fill.load_state_dict(module.state_dict(), assign=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, to_fill):
        assert_same_bits(other(x, **call), want)
    if learned:
        empty = empty.to_empty(device="cpu")
        for other in (empty, loaded):
            other.reset_parameters()
            assert_same_bits(other(x, **call), begun)
    if name in ("rotary", "positional"):
        for other in (make().double(), make().bfloat16(), empty.to_empty(device="cpu")):
            assert_same_bits(other(x, **call), begun)
            assert_same_bits(other(x.bfloat16(), **call), first(x.bfloat16(), **call))
    elif name not in ("learned", "learned per head") and not name.startswith("lrpe"):
        assert module.to(torch.bfloat16)(x.bfloat16(), **call).dtype == torch.bfloat16


@every_kind
@pytest.mark.parametrize("fake", [False, True])
def test_meta_and_fake_tensors(name: str, fake: bool) -> None:
    make, shape, _, call = KINDS[name]
    with FakeTensorMode() if fake else torch.device("meta"):
        module, x, calls = make(), torch.randn(shape, requires_grad=True), [dict(call)]
        leaves = [x, *module.parameters()]
        if name.startswith("polar"):
            mask, ids = torch.ones(2, 1, 1, 6, dtype=torch.bool), torch.arange(6).expand(2, 6)
            cache = KVCache() if module.causal else None
            calls.append({"positions": ids, "attn_mask": mask, "cache": cache})
        elif name.startswith("lrpe of"):
            calls += [{"offset": 7}, {"offset": torch.zeros(2, dtype=torch.int64)}]
        for each in calls:
            y = module(x, **each)
            assert (y.shape, y.device) == (x.shape, x.device)
            for grad, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
                assert (grad.shape, grad.device) == (leaf.shape, leaf.device)
        with torch.no_grad():
            assert module(x, **call).shape == shape


@pytest.mark.parametrize(
    "name", ["positional", "lrpe short", "lrpe softmax", "polar slope", "polar by length"]
)
def test_one_graph(name: str) -> None:
    make, shape, _, call = KINDS[name]
    torch.compiler.reset()
    module = moved(make())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_near(compiled(noise(*shape), **call), module(noise(*shape), **call), "float32 ways")


@pytest.mark.parametrize(
    "module, text",
    [
        (RotaryEmbedding(8), "RotaryEmbedding(RopeSpec(head_dim=8), layout='bhsd')"),
        (
            RotaryEmbedding(RopeSpec(8, base=500.0), layout="thd", learnable=True),
            "RotaryEmbedding(RopeSpec(head_dim=8, base=500.0), layout='thd', learnable=True)",
        ),
        (
            RotaryPositionalEmbedding(dim=64),
            "RotaryPositionalEmbedding(dim=64, max_seq_len=8192, base=10000.0, interleaved=False)",
        ),
        (
            LrpeRotate1d(64, 8, act="silu"),
            "LrpeRotate1d(64, num_heads=8, per='head and pair', act='silu', base=10000)",
        ),
        (
            LrpeRotate1d(
                64, start=4, rotary_dim=32, pairs=8, act="softmax", dim=-1, learnable=False
            ),
            "LrpeRotate1d(64, num_heads=None, per='pair', act='softmax', dim=-1, start=4, rotary_dim=32, "
            "pairs=8, base=10000, learnable=False)",
        ),
    ],
    ids=str,
)
def test_what_it_prints(module: torch.nn.Module, text: str) -> None:
    assert repr(module) == text
