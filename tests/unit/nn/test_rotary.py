"""RotaryPositionalEmbedding: positions, cached attributes, casts and saving; see also test_seeds.py."""

import pickle
from functools import partial

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


def test_one_module_in_several_threads() -> None:
    rope = RotaryPositionalEmbedding(64)
    inputs = [noise(1, length, 2, 64) for length in (5, 300, 17, 211)]

    def work(x: torch.Tensor, expected: torch.Tensor) -> None:
        for _ in range(100):
            assert torch.equal(rope(x, 1), expected)

    in_threads(*(partial(work, x, RotaryPositionalEmbedding(64)(x, 1)) for x in inputs))
    assert rope.max_seq_len_cached == 300


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
