"""RotaryPositionalEmbedding: positions, cached attributes, casts and saving; see also test_seeds.py."""

import copy
import pickle
from functools import partial

import pytest
import torch

from tests.support import helpers
from tests.support.helpers import in_threads
from tightrope import RopeSpec
from tightrope.functional import rotate
from tightrope.nn import RotaryPositionalEmbedding

noise = partial(helpers.noise, dtype=torch.float32)


def test_repr() -> None:
    assert repr(RotaryPositionalEmbedding(dim=64)) == (
        "RotaryPositionalEmbedding(dim=64, max_seq_len=8192, base=10000.0, interleaved=False)"
    )


def test_positions_and_inverse() -> None:
    rope = RotaryPositionalEmbedding(8)
    x = noise(2, 5, 3, 8)
    rows = torch.arange(10).reshape(2, 5)
    y = rope(x, 1, positions=rows)
    assert torch.equal(y, rotate(x, RopeSpec(8), rows, layout="bshd"))
    assert torch.equal(rope(x.movedim(1, 0), 0, positions=rows), y.movedim(1, 0))
    six = noise(2, 4, 3, 5, 2, 8)
    got = rope(six, 3, positions=rows)
    for row in range(2):
        assert torch.equal(got[row], rope(six[row], 2, positions=rows[row]))
    torch.testing.assert_close(rope(y, 1, positions=rows, inverse=True), x)
    assert torch.equal(rope(x, 1, positions=7), rope(x, 1, positions=torch.arange(5) + 7))


def test_cached_tables_are_those_of_the_longest_call() -> None:
    rope = RotaryPositionalEmbedding(8)
    assert rope.cos_cached is None
    assert rope.sin_cached is None
    assert rope.max_seq_len_cached == 0
    rope(noise(2, 5, 3, 8), seq_dim=1)
    rope(noise(2, 3, 3, 8), seq_dim=1)
    assert rope.max_seq_len_cached == 5
    rope(noise(2, 1, 9, 8))
    assert rope.max_seq_len_cached == 9
    angle = torch.arange(9.0)[:, None] * rope.inv_freq
    for table, expected in ((rope.cos_cached, angle.cos()), (rope.sin_cached, angle.sin())):
        assert table.shape == (1, 1, 9, 8)
        assert table.dtype == torch.float32
        torch.testing.assert_close(table[0, 0], expected.repeat(1, 2))
    interleaved = RotaryPositionalEmbedding(8, interleaved=True)
    interleaved(noise(5, 8))
    torch.testing.assert_close(
        interleaved.sin_cached[0, 0], angle[:5].sin().repeat_interleave(2, -1)
    )


def test_nothing_to_cast_to_move_or_to_save() -> None:
    rope = RotaryPositionalEmbedding(8, base=777.0, interleaved=True)
    x = noise(2, 50, 3, 8)
    expected = rope(x, 1)
    assert not list(rope.buffers())
    assert not list(rope.parameters())
    assert not rope.state_dict()
    with torch.device("meta"):
        on_meta = RotaryPositionalEmbedding(8, base=777.0, interleaved=True)
    variants = {
        "bfloat16": copy.deepcopy(rope).to(torch.bfloat16),
        "half": copy.deepcopy(rope).half(),
        "double": copy.deepcopy(rope).double(),
        "meta": on_meta.to_empty(device="cpu"),
        "moved to meta and back": copy.deepcopy(rope).to("meta").to_empty(device="cpu"),
        "deepcopy": copy.deepcopy(rope),
        "pickle": pickle.loads(pickle.dumps(rope)),
        "state_dict": RotaryPositionalEmbedding(8, base=777.0, interleaved=True),
    }
    variants["state_dict"].load_state_dict(rope.state_dict())
    with torch.inference_mode():
        variants["inference"] = RotaryPositionalEmbedding(8, base=777.0, interleaved=True)
    for name, module in variants.items():
        assert torch.equal(module(x, 1), expected), name
        assert torch.equal(module(x.bfloat16(), 1), rope(x.bfloat16(), 1)), name


class Model(torch.nn.Module):
    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].rope = RotaryPositionalEmbedding(8, base=base)
        self.linear = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", ["inv_freq", "freqs"])
def test_legacy_keys_are_checked(key: str, dtype: torch.dtype) -> None:
    model = Model()
    saved = dict(Model().state_dict())
    saved[f"layers.0.rope.{key}"] = model.layers[0].rope.inv_freq.to(dtype)
    saved["layers.0.rope.cos_cached"] = torch.zeros(1, 1, 5, 8)
    kept = set(saved)
    model.load_state_dict(saved)
    assert set(saved) == kept
    other = Model(base=9000.0)
    message = rf"\[RotaryPositionalEmbedding\] layers.0.rope.{key} in the state_dict must agree"
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(saved, strict=False)
    saved[f"layers.0.rope.{key}"] = torch.ones(3, dtype=dtype)
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(saved)


def test_unknown_keys_are_still_refused() -> None:
    saved = dict(Model().state_dict())
    saved["layers.0.rope.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Model().load_state_dict(saved)


def test_one_module_in_several_threads() -> None:
    rope = RotaryPositionalEmbedding(64)
    inputs = [noise(1, length, 2, 64) for length in (5, 300, 17, 211)]

    def work(x: torch.Tensor, expected: torch.Tensor) -> None:
        for _ in range(100):
            assert torch.equal(rope(x, 1), expected)

    in_threads(*(partial(work, x, RotaryPositionalEmbedding(64)(x, 1)) for x in inputs))
    assert rope.max_seq_len_cached == 300


def test_gradients_flow() -> None:
    rope = RotaryPositionalEmbedding(6)
    x = noise(2, 5, 3, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope(x, 1), (x,))


def test_only_real_sequences_are_noted() -> None:
    rope = RotaryPositionalEmbedding(8)
    rope(torch.empty(2, 500, 3, 8, device="meta"), 1)
    assert rope.max_seq_len_cached == 0
    rope(noise(2, 5, 3, 8), 1)
    assert rope.max_seq_len_cached == 5
    assert rope.cos_cached.device.type == "cpu"
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: rope(x, 1), tracing_mode="symbolic")(noise(2, 50, 3, 8))
    assert type(rope.max_seq_len_cached) is int
    pickle.dumps(rope)


def test_legacy_keys_of_every_kind() -> None:
    slow = Model(base=1e30)
    right = slow.layers[0].rope.inv_freq
    saved = dict(slow.state_dict())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        saved["layers.0.rope.inv_freq"] = right.to(dtype)
        slow.load_state_dict(saved)
    broken = right.clone()
    broken[-1] = 0.0
    for wrong in (broken, right.tolist(), right.long(), None):
        saved["layers.0.rope.inv_freq"] = wrong
        with pytest.raises(RuntimeError, match=r"rope\.inv_freq in the state_dict must agree"):
            slow.load_state_dict(saved)
    saved["layers.0.rope.inv_freq"] = right.to("meta")
    slow.load_state_dict(saved, assign=True)
