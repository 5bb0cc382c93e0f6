"""Casts, copies, meta devices and checkpoints of RotaryEmbedding and RotaryPositionalEmbedding."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.helpers import noise
from tightrope import RopeSpec
from tightrope.nn import RotaryEmbedding, RotaryPositionalEmbedding

X = noise(2, 50, 3, 8, dtype=torch.float32)
ROTARY = partial(RotaryEmbedding, 8, base=777.0, interleaved=True, layout="bshd")
MODULES: dict[str, Callable[[], Any]] = {
    "rotary": ROTARY,
    "learned": partial(ROTARY, learnable=True),
    "positional": partial(RotaryPositionalEmbedding, 8, base=777.0, interleaved=True),
}


def turned(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, 1) if isinstance(module, RotaryPositionalEmbedding) else module(x)


@pytest.mark.parametrize("name", MODULES)
def test_nothing_to_cast_to_move_or_to_save(name: str) -> None:
    make, learned = MODULES[name], name == "learned"
    rope = make()
    expected = turned(rope, X)
    assert not list(rope.buffers())
    assert len(list(rope.parameters())) == len(rope.state_dict()) == learned
    with torch.device("meta"):
        on_meta = make()
        assert turned(on_meta, torch.empty(1, 2, 3, 8)).is_meta
    variants = {
        "meta": on_meta.to_empty(device="cpu"),
        "moved to meta and back": copy.deepcopy(rope).to("meta").to_empty(device="cpu"),
        "deepcopy": copy.deepcopy(rope),
        "pickle": pickle.loads(pickle.dumps(rope)),
        "double": copy.deepcopy(rope).double(),
        "state_dict": make(),
    }
    variants["state_dict"].load_state_dict(rope.state_dict())
    if learned:
        variants["meta"].reset_parameters()
        variants["moved to meta and back"].reset_parameters()
    else:
        variants["bfloat16"] = copy.deepcopy(rope).to(torch.bfloat16)
        variants["half"] = copy.deepcopy(rope).half()
        with torch.inference_mode():
            variants["inference"] = make()
    for variant, module in variants.items():
        assert torch.equal(turned(module, X), expected), variant
        assert torch.equal(turned(module, X.bfloat16()), turned(rope, X.bfloat16())), variant


class Model(torch.nn.Module):
    def __init__(self, kind: Any, base: float = 10000.0, **options: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].rope = kind(8, base=base, **options)
        self.linear = torch.nn.Linear(2, 2)


every_kind = pytest.mark.parametrize("kind", [RotaryEmbedding, RotaryPositionalEmbedding])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", ["inv_freq", "freqs"])
@every_kind
def test_keys_of_other_modules_are_checked_and_dropped(
    kind: Any, key: str, dtype: torch.dtype
) -> None:
    model = Model(kind)
    saved = dict(Model(kind).state_dict())
    saved[f"layers.0.rope.{key}"] = RopeSpec(8).frequencies().inv_freq.to(dtype)
    saved["layers.0.rope.cos_cached"] = torch.zeros(1, 1, 5, 8)
    kept = set(saved)
    model.load_state_dict(saved)
    assert set(saved) == kept
    for strict in (True, False):
        with pytest.raises(RuntimeError) as caught:
            Model(kind, base=9000.0).load_state_dict(saved, strict=strict)
        assert (
            f"[{kind.__name__}] layers.0.rope.{key} in the state_dict must agree with "
            "RopeSpec(head_dim=8, base=9000.0) but does not; build the module with the frequencies "
            f"of the checkpoint ({key}: {str(dtype)[6:]}[4])."
        ) in str(caught.value)
    saved[f"layers.0.rope.{key}"] = torch.ones(3, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"{key} in the state_dict must agree"):
        model.load_state_dict(saved)
    del saved[f"layers.0.rope.{key}"]
    saved["layers.0.rope.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(saved)


@every_kind
def test_frequencies_of_every_kind(kind: Any) -> None:
    """Very slow frequencies are compared within their dtype; a tensor without data is not."""
    slow = Model(kind, base=1e30)
    right = slow.layers[0].rope.spec.frequencies().inv_freq
    saved = dict(slow.state_dict())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        slow.load_state_dict(saved | {"layers.0.rope.inv_freq": right.to(dtype)})
    broken = right.clone()
    broken[-1] = 0.0
    for wrong in (broken.float(), right.tolist(), right.long(), None):
        with pytest.raises(RuntimeError, match=r"rope\.inv_freq in the state_dict must agree"):
            slow.load_state_dict(saved | {"layers.0.rope.inv_freq": wrong})
    slow.load_state_dict(saved | {"layers.0.rope.inv_freq": right.to("meta")}, assign=True)


def test_learned_frequencies_load_as_they_are() -> None:
    model = Model(RotaryEmbedding, learnable=True)
    saved = {**model.state_dict(), "layers.0.rope.inv_freq": torch.rand(4)}
    model.load_state_dict(saved)
    assert torch.equal(model.layers[0].rope.inv_freq, saved["layers.0.rope.inv_freq"])
