"""LrpeRotate1d, the module with a learnable θ: shapes, initial values, saving and errors."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import helpers
from tests.support.helpers import refusals
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.activations import ACTS, RMS_NORM
from tightrope.functional import lrpe_rotate_1d, rotate
from tightrope.nn import LrpeRotate1d

noise = partial(helpers.noise, dtype=torch.float32)


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
every_shape = pytest.mark.parametrize("options, shape", SHAPES.values(), ids=SHAPES)


@every_shape
def test_it_is_the_function_with_its_theta(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    module = LrpeRotate1d(12, **options, act="silu")
    assert module.theta.shape == shape
    x = noise(2, 5, module.num_heads or 3, 12)
    per_head = options.get("per") == "head"
    call = {"start": module.start, "rotary_dim": module.rotary_dim}
    axis = "head" if per_head else "pair"
    wanted = lrpe_rotate_1d(x, module.theta, 7, "silu", theta_axis=axis, **call)
    got = module(x, offset=7)
    assert_same_bits(got, wanted)
    got.square()[0].sum().backward()
    assert module.theta.grad.shape == shape
    assert module.theta.grad.any()


def test_it_begins_as_an_ordinary_rotation() -> None:
    x = noise(2, 5, 3, 12)
    for options in ({}, {"num_heads": 3}):
        got = LrpeRotate1d(12, base=500.0, dtype=torch.float64, **options)(x)
        assert_near(got, rotate(x, RopeSpec(12, base=500.0), layout="bshd"), "float32 ways")
    got = LrpeRotate1d(12, rotary_dim=8, pairs=3)(x)
    assert_near(
        got[..., :3], rotate(x, RopeSpec(12, rotary_dim=8), layout="bshd")[..., :3], "float32 ways"
    )
    assert torch.equal(got[..., [3, 7, 8, 9, 10, 11]], x[..., [3, 7, 8, 9, 10, 11]])
    per_head = LrpeRotate1d(12, 4, per="head", base=16.0).theta
    assert_near(per_head.detach(), torch.tensor([1.0, 0.5, 0.25, 0.125]), "float32 ways")


def test_without_heads() -> None:
    x = noise(2, 5, 12)
    assert LrpeRotate1d(12, act="softmax", dim=1)(x).shape == x.shape
    assert_same_bits(LrpeRotate1d(12)(x), LrpeRotate1d(12)(x[:, :, None])[:, :, 0])


@every_shape
def test_saving_copying_and_building_without_memory(
    options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    module = LrpeRotate1d(12, **options)
    assert list(module.state_dict()) == ["theta"]
    assert not list(module.buffers())
    with torch.no_grad():
        module.theta += 1
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.theta, module.theta)
    fresh = LrpeRotate1d(12, **options)
    begun = fresh.theta.detach().clone()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.theta, module.theta)
    fresh.reset_parameters()
    assert torch.equal(fresh.theta, begun)
    with torch.device("meta"):
        empty = LrpeRotate1d(12, **options)
    assert empty.theta.shape == shape
    assert empty.theta.is_meta
    empty = LrpeRotate1d(12, **options, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.theta, begun)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("per", ["pair", "head", "head and pair"])
@pytest.mark.parametrize("act", ACTS[:RMS_NORM])
def test_meta_and_fake_tensors(act: str, per: str, fake: bool) -> None:
    options: dict[str, Any] = {"num_heads": 3, "per": per, "act": act, "start": 2, "rotary_dim": 6}
    if act == "softmax":
        options["dim"] = 1
    with FakeTensorMode() if fake else torch.device("meta"):
        empty = LrpeRotate1d(12, **options)
        x = torch.randn(2, 5, 3, 12, requires_grad=True)
        offsets = (0,) if act == "softmax" else (0, 7, torch.zeros(2, dtype=torch.int64))
        for offset in offsets:
            y = empty(x, offset)
            assert (y.shape, y.device) == (x.shape, x.device)
            found = torch.autograd.grad(y.sum(), [x, empty.theta])
            assert [g.shape for g in found] == [x.shape, empty.theta.shape]
    if not fake:
        full = LrpeRotate1d(12, **options)
        empty.load_state_dict(full.state_dict(), assign=True)
        x = torch.randn(2, 5, 3, 12)
        assert torch.equal(empty(x), full(x))


def test_frozen_and_of_another_dtype() -> None:
    module = LrpeRotate1d(12, learnable=False, dtype=torch.float64)
    assert not module.theta.requires_grad
    assert module.theta.dtype == torch.float64
    assert not module(noise(2, 5, 3, 12)).requires_grad


def test_a_cast_to_16_bits_warns_once_for_each_line() -> None:
    module, x = LrpeRotate1d(8, 2).to(torch.bfloat16), noise(1, 3, 2, 8, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            module(x)
    (warning,) = caught
    assert str(warning.message).startswith("[theta] frequencies should be float32 but are bfloat16")
    assert warning.filename == __file__


def test_compiled() -> None:
    module, x = LrpeRotate1d(12, 3, act="silu"), noise(2, 5, 3, 12)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x, 7), module(x, 7))
    torch.compiler.reset()


def test_what_it_prints() -> None:
    assert repr(LrpeRotate1d(64, 8, act="silu")) == (
        "LrpeRotate1d(64, num_heads=8, per='head and pair', act='silu', base=10000)"
    )
    other = LrpeRotate1d(
        64, start=4, rotary_dim=32, pairs=8, act="softmax", dim=-1, learnable=False
    )
    assert repr(other) == (
        "LrpeRotate1d(64, num_heads=None, per='pair', act='softmax', dim=-1, start=4, rotary_dim=32, "
        "pairs=8, base=10000, learnable=False)"
    )


def new(**options: Any) -> Callable[[], object]:
    return lambda: LrpeRotate1d(**{"head_dim": 12, **options})


ROWS, SOFTMAX = LrpeRotate1d(12, 3), {"act": "softmax"}
FITS = "x must have shape (batch, tokens, 3, 12) or, if num_heads is None, (batch, tokens, 12)"
test_errors = refusals(
    "LrpeRotate1d",
    ValueError={
        "rotary_dim must be even but got 7, its default of head_dim - start; rotary_dim=6 leaves the last channel as it is.": new(
            head_dim=7
        ),
        "num_heads must be positive but got 0.": new(num_heads=0),
        "per must be one of 'head and pair', 'pair', 'head' but got 'token'.": new(per="token"),
        "num_heads must be given for per='head' but is None.": new(per="head"),
        "pairs must be None for per='head', where all pairs rotate, but got 3.": (
            new(per="head", num_heads=2, pairs=3)
        ),
        "pairs must be at most 6 but got 7.": new(pairs=7),
        "pairs must be positive but got 0.": new(pairs=0),
        **{
            f"act must be one of {', '.join(ACTS[:RMS_NORM])} but got {act!r}.": new(act=act)
            for act in ("swish", "rms_norm")
        },
        "dim must be None for act 'relu' but got -1.": new(act="relu", dim=-1),
        "dim must be -1 or 1 for act 'softmax' but got None.": new(**SOFTMAX),
        "dim must be -1 or 1 for act 'softmax' but got 2.": new(**SOFTMAX, dim=2),
        "base must be positive and finite but got 0.": new(base=0),
        f"{FITS} (x: float32[2, 5, 3, 8]).": lambda: ROWS(noise(2, 5, 3, 8)),
        f"{FITS} (x: float32[5, 12]).": lambda: ROWS(noise(5, 12)),
    },
    TypeError={
        "head_dim must be an int but got 'wide'.": new(head_dim="wide"),
        "num_heads must be an int but got 2.0.": new(num_heads=2.0),
        "dim must be an int but got True.": new(**SOFTMAX, dim=True),
        "dim must be an int but got 1.0.": new(**SOFTMAX, dim=1.0),
        "base must be a number but got '1e4'.": new(base="1e4"),
        "dtype must be floating but got torch.int64.": new(dtype=torch.int64),
        "dtype must be floating but got 'float32'.": new(dtype="float32"),
        "learnable must be a bool but got 'no'.": new(learnable="no"),
        "x must be a tensor but got 3.": lambda: ROWS(3),
    },
)


def test_a_call_with_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"theta must have shape \(6,\), \(4, 6\) or \(1, 6\)"):
        ROWS(noise(2, 5, 4, 12))
