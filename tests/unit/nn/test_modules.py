"""What all modules have in common: nothing to cast, exact copies, memory that comes later, one graph."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

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

# Options of LrpeRotate1d, and the shape of θ.
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "of heads and pairs": ({"num_heads": 3}, (3, 6)),
    "of pairs": ({}, (6,)),
    "of pairs, for heads": ({"num_heads": 3, "per": "pair"}, (6,)),
    "of heads": ({"num_heads": 3, "per": "head"}, (3,)),
    "short": ({"num_heads": 3, "pairs": 4}, (3, 4)),
    "one pair": ({"num_heads": 3, "pairs": 1, "act": "silu"}, (3, 1)),
    "as many heads as pairs": ({"num_heads": 6, "per": "head"}, (6,)),
    "of a slice": ({"num_heads": 3, "start": 2, "rotary_dim": 8}, (3, 4)),
    "softmax": ({"act": "softmax", "dim": 1}, (6,)),
}
POLAR: dict[str, dict[str, Any]] = {
    "plain": {"use_spd": False},
    "gated": {},
    "grouped": {"num_kv_heads": 2, "causal": True},
    "slope": {"gate": "slope", "num_kv_heads": 2},
    "tied": {"gate": "slope", "tied": "pair"},
    "xpos": {"gate": XPos(2.0), "causal": True},
    "by length": {"spec": RopeSpec(8, scaling=DynamicNTK(2.0, 4))},
}
ROTARY = partial(RotaryEmbedding, 8, base=777.0, interleaved=True, layout="bshd")
PER_HEAD = Given.of(torch.rand(3, 4))
# Modules, and the shapes of their input.
KINDS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "rotary": (ROTARY, (2, 5, 3, 8)),
    "learned": (partial(ROTARY, learnable=True), (2, 5, 3, 8)),
    "learned per head": (partial(ROTARY, scaling=PER_HEAD, learnable=True), (2, 5, 3, 8)),
    "positional": (partial(RotaryPositionalEmbedding, 8, base=777.0), (2, 3, 5, 8)),
    **{
        f"lrpe {name}": (
            partial(LrpeRotate1d, 12, **options),
            (2, 5, options.get("num_heads", 3), 12),
        )
        for name, (options, _) in SHAPES.items()
    },
    **{
        f"polar {name}": (partial(PolarRoPEAttention, 12, 4, 8, **options), (2, 6, 12))
        for name, options in POLAR.items()
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
    make, shape = KINDS[name]
    first, module, loaded, x = make(), moved(make()), make(), noise(*shape)
    want, begun = module(x), first(x)
    assert not list(module.buffers())
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()
    loaded.load_state_dict(module.state_dict())
    with torch.device("meta"):
        empty, filled = make(), make()
        assert empty(torch.empty(shape)).is_meta
    filled.load_state_dict(module.state_dict(), assign=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, filled):
        assert_same_bits(other(x), want)
    empty = empty.to_empty(device="cpu")
    if "polar" in name:
        assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    elif name != "positional":
        for other in (empty, loaded):
            other.reset_parameters()
            assert_same_bits(other(x), begun)
    if not list(module.parameters()):
        for other in (make().double(), make().bfloat16(), empty):
            assert_same_bits(other(x), begun)
            assert_same_bits(other(x.bfloat16()), first(x.bfloat16()))


@every_kind
@pytest.mark.parametrize("fake", [False, True])
def test_meta_and_fake_tensors(name: str, fake: bool) -> None:
    make, shape = KINDS[name]
    with FakeTensorMode() if fake else torch.device("meta"):
        module, x = make(), torch.randn(shape, requires_grad=True)
        calls: list[dict[str, Any]] = [{}]
        leaves = [x, *module.parameters()]
        if "polar" in name:
            mask, ids = torch.ones(2, 1, 1, 6, dtype=torch.bool), torch.arange(6).expand(2, 6)
            cache = KVCache() if module.causal else None
            calls += [{"positions": ids, "attn_mask": mask, "cache": cache}]
        elif "lrpe" in name and module.act != "softmax":
            calls += [{"offset": 7}, {"offset": torch.zeros(2, dtype=torch.int64)}]
        for call in calls:
            y = module(x, **call)
            assert (y.shape, y.device) == (x.shape, x.device)
            for grad, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
                assert (grad.shape, grad.device) == (leaf.shape, leaf.device)
        with torch.no_grad():
            assert module(x).shape == shape


@pytest.mark.parametrize(
    "name",
    [
        *("rotary", "learned", "positional", "lrpe of heads", "lrpe short", "lrpe softmax"),
        *("polar slope", "polar by length"),
    ],
)
def test_one_graph(name: str) -> None:
    """For all sizes of x, while those of parameters are constants; traced code notes no length.

    Attention, which takes long to compile, for one size.
    """
    make, shape = KINDS[name]
    torch.compiler.reset()
    module, x = moved(make()), noise(*shape)
    dynamic = "polar" not in name
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    sizes = [x, x[:, :-1]] if dynamic else [x]
    found = [compiled(each) for each in sizes]
    assert getattr(module, "max_seq_len_cached", 0) == 0
    assert_near(found, [module(each) for each in sizes], "float32 ways")


@pytest.mark.parametrize("options, shape", SHAPES.values(), ids=SHAPES)
def test_the_shape_of_theta(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert LrpeRotate1d(12, **options).theta.shape == shape


def test_what_they_print() -> None:
    softmax = LrpeRotate1d(64, start=4, pairs=8, act="softmax", dim=-1, learnable=False)
    for module, text in (
        (RotaryEmbedding(8), "RotaryEmbedding(RopeSpec(head_dim=8), layout='bhsd')"),
        (ROTARY(learnable=True), "base=777.0, interleaved=True), layout='bshd', learnable=True)"),
        (
            RotaryPositionalEmbedding(64),
            "(dim=64, max_seq_len=8192, base=10000.0, interleaved=False)",
        ),
        (
            LrpeRotate1d(64, 8),
            "LrpeRotate1d(64, num_heads=8, per='head and pair', act='none', base=10000)",
        ),
        (
            softmax,
            "act='softmax', dim=-1, start=4, rotary_dim=60, pairs=8, base=10000, learnable=False)",
        ),
    ):
        assert text in repr(module)
