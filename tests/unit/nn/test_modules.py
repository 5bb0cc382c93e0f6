"""RotaryEmbedding, RotaryPositionalEmbedding and LrpeRotate1d, and what all modules have in common.

See also laws/test_seeds.py.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import helpers
from tests.support.helpers import in_threads
from tests.support.rows import read_rows
from tests.support.tolerances import assert_near, assert_same_bits
from tests.support.written_calls import value_of
from tightrope import RopeSpec, nn, positions, rotate, rotate_qk
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear
from tightrope.functional import lrpe_rotate_1d
from tightrope.gates import XPos
from tightrope.nn import (
    KVCache,
    LrpeRotate1d,
    RotaryEmbedding,
    RotaryPositionalEmbedding,
)

noise = partial(helpers.noise, dtype=torch.float32)

# --- all modules ----------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Any], Any]] = {
    "Given": Given,
    "XPos": XPos,
    "by_length": lambda numbers: RopeSpec(8, scaling=DynamicNTK(*numbers)),
}


def maker_of(row: dict[str, Any]) -> Callable[..., Any]:
    """Return what makes the module of a row of modules.jsonl."""
    options = {name: value_of(value, MAKERS) for name, value in row["options"].items()}
    return partial(getattr(nn, row["module"]), *row["args"], **options)


MODULES = read_rows(Path(__file__).with_name("modules.jsonl"))
# Modules, and the shapes of their input.
KINDS = {name: (maker_of(row), tuple(row["input"])) for name, row in MODULES.items()}
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
        *("rotary", "learned", "positional", "lrpe of heads", "lrpe softmax", "polar by length"),
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


def test_the_shape_of_theta() -> None:
    shapes = {name: tuple(row["theta"]) for name, row in MODULES.items() if "theta" in row}
    assert {name: KINDS[name][0]().theta.shape for name in shapes} == shapes


# --- RotaryEmbedding ------------------------------------------------------------------------------

Q, K = noise(2, 4, 5, 8), noise(2, 2, 5, 8, seed=1)
ROWS = torch.arange(10).reshape(2, 5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_it_is_rotate_qk_with_its_spec(layout: str) -> None:
    options: dict[str, Any] = {"start": 2, "interleaved": True, "scaling": Linear(2.0)}
    spec = RopeSpec(8, base=500.0, rotary_dim=4, **options)
    q, k = (x if layout == "bhsd" else x.transpose(1, 2) for x in (Q, K))
    for rope in (
        RotaryEmbedding(spec, layout=layout),
        RotaryEmbedding(8, base=500.0, rotary_dim=4, layout=layout, **options),
    ):
        assert rope.spec == spec
        for at in (None, 7, ROWS, positions.per_row(torch.tensor([3, 9]))):
            wanted = rotate_qk(q, k, spec, at, layout=layout)
            assert_same_bits(rope(q, k, at), wanted)
            assert_same_bits(rope(q, positions=at), wanted[0])


def test_several_axes_and_lengths() -> None:
    axes, where = Axes.blocks((2, 2)), positions.multi_axis(ROWS)
    wanted = rotate(Q, RopeSpec(8, axes=axes), where)
    assert_same_bits(RotaryEmbedding(8, axes=axes)(Q, positions=where), wanted)
    rule = DynamicNTK(2.0, 4)
    for length in (None, 100):
        wanted = rotate(Q, RopeSpec(8, scaling=rule).at(seq_len=length))
        assert_same_bits(RotaryEmbedding(8, scaling=rule)(Q, seq_len=length), wanted)


def test_learned_frequencies() -> None:
    rope = RotaryEmbedding(8, learnable=True)
    assert rope.inv_freq.dtype == torch.float32
    assert_near(rope(Q, K, 3)[1].detach(), rotate(K, RopeSpec(8), 3), "float32 ways")
    rope(Q, K, 3)[0].square()[..., :2].sum().backward()
    assert rope.inv_freq.grad.any()  # type: ignore[union-attr]


# --- RotaryPositionalEmbedding --------------------------------------------------------------------


def test_positions_and_inverse() -> None:
    rope, x = RotaryPositionalEmbedding(8), noise(2, 5, 3, 8)
    y = rope(x, 1, positions=ROWS)
    assert_same_bits(y, rotate(x, RopeSpec(8), ROWS, layout="bshd"))
    assert_same_bits(rope(x.movedim(1, 0), 0, positions=ROWS), y.movedim(1, 0))
    six = noise(2, 4, 3, 5, 2, 8)
    each = [rope(six[row], 2, positions=ROWS[row]) for row in range(2)]
    assert_same_bits(rope(six, 3, positions=ROWS), torch.stack(each))
    assert_near(rope(y, 1, positions=ROWS, inverse=True), x, "float32 ways")


def test_the_longest_real_sequence_is_noted() -> None:
    """In any thread; not those of meta tensors or of traced code."""
    from torch.fx.experimental.proxy_tensor import make_fx

    rope = RotaryPositionalEmbedding(64)
    rope(torch.empty(2, 500, 3, 64, device="meta"), 1)
    assert rope.max_seq_len_cached == 0
    inputs = [noise(1, length, 2, 64) for length in (5, 300, 17, 211)]

    def work(x: torch.Tensor, expected: torch.Tensor) -> None:
        for _ in range(100):
            assert torch.equal(rope(x, 1), expected)

    in_threads(*(partial(work, x, RotaryPositionalEmbedding(64)(x, 1)) for x in inputs))
    make_fx(lambda x: rope(x, 1), tracing_mode="symbolic")(noise(2, 400, 3, 64))
    assert type(rope.max_seq_len_cached) is int
    assert rope.max_seq_len_cached == rope.cos_cached.shape[2] == 300  # type: ignore[union-attr]
    pickle.dumps(rope)


# --- checkpoints of other modules -----------------------------------------------------------------

every_rotary = pytest.mark.parametrize("kind", [RotaryEmbedding, RotaryPositionalEmbedding])


def loads(module: torch.nn.Module, **saved: Any) -> Callable[..., object]:
    """Return a function that loads a checkpoint which also has these keys below `rope`."""
    model = torch.nn.ModuleDict({"rope": module, "linear": torch.nn.Linear(2, 2)})
    keys = model.state_dict() | {f"rope.{name}": value for name, value in saved.items()}
    return lambda **options: model.load_state_dict(keys, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", ["inv_freq", "freqs"])
@every_rotary
def test_frequencies_of_other_modules_are_checked_and_dropped(
    kind: Any, key: str, dtype: torch.dtype
) -> None:
    """Very slow ones are compared within their dtype; a tensor without data is not."""
    for base in (10000.0, 1e30):
        exact = RopeSpec(8, base=base).frequencies().inv_freq
        right = exact.to(dtype)
        loads(kind(8, base=base), **{key: right, "cos_cached": torch.zeros(1, 1, 5, 8)})()
        loads(kind(8, base=base), **{key: right.to("meta")})(assign=True)
        broken = right.clone()
        broken[-1] = 1e-3 if base == 10000.0 else 1.0
        for wrong in (broken * 1.1, right[:3], right.tolist(), exact.long(), None):
            for strict in (True, False):
                phrase = (
                    rf"\[{kind.__name__}\] rope.{key} in the state_dict must agree with RopeSpec"
                )
                with pytest.raises(RuntimeError, match=phrase):
                    loads(kind(8, base=base), **{key: wrong})(strict=strict)


@every_rotary
def test_other_keys_are_unexpected(kind: Any) -> None:
    with pytest.raises(RuntimeError, match="Unexpected key"):
        loads(kind(8), weight=torch.zeros(1))()


def test_learned_frequencies_load_as_they_are() -> None:
    rope = RotaryEmbedding(8, learnable=True)
    loads(rope, inv_freq=ROWS[0, :4] / 7)()
    assert torch.equal(rope.inv_freq, ROWS[0, :4] / 7)


# --- LrpeRotate1d ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"per": "head and pair"}, {"per": "pair"}, {"per": "head"}, {"rotary_dim": 8, "start": 2}],
)
def test_it_is_the_function_with_its_theta(options: dict[str, Any]) -> None:
    module, x = LrpeRotate1d(12, 3, **options, act="silu"), noise(2, 5, 3, 12)
    call = {"start": module.start, "rotary_dim": module.rotary_dim}
    axis = "head" if options.get("per") == "head" else "pair"
    wanted = lrpe_rotate_1d(x, module.theta, 7, "silu", theta_axis=axis, **call)
    assert_same_bits(module(x, offset=7), wanted)
    module(x, offset=7).square()[0].sum().backward()
    assert module.theta.grad.any()  # type: ignore[union-attr]


def test_it_begins_as_an_ordinary_rotation() -> None:
    x = noise(2, 5, 3, 12)
    for options in ({}, {"num_heads": 3}):
        got = LrpeRotate1d(12, base=500.0, dtype=torch.float64, **options)(x)  # type: ignore[arg-type]
        assert_near(got, rotate(x, RopeSpec(12, base=500.0), layout="bshd"), "float32 ways")
    per_head = LrpeRotate1d(12, 4, per="head", base=16.0).theta
    assert_near(per_head.detach(), torch.tensor([1.0, 0.5, 0.25, 0.125]), "float32 ways")


def test_without_heads_and_frozen() -> None:
    x = noise(2, 5, 12)
    assert LrpeRotate1d(12, act="softmax", dim=1)(x).shape == x.shape
    assert_same_bits(LrpeRotate1d(12)(x), LrpeRotate1d(12)(x[:, :, None])[:, :, 0])
    frozen = LrpeRotate1d(12, learnable=False, dtype=torch.float64)
    assert frozen.theta.dtype == torch.float64
    assert not frozen(x).requires_grad
