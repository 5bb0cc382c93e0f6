"""Many calls leave nothing behind, neither in Python nor in the kernel: `nox -s soak` runs it under memray."""

from __future__ import annotations

import contextlib
import gc
import random
import threading

import pytest
import torch

from tests.support.matrix import DTYPES
from tightrope import RopeSpec
from tightrope.functional import rotate, rotate_, rotate_qk


def various(draw: random.Random) -> None:
    """Calls with a spec of their own, which fill caches: lengths, offsets, dtypes, gradients, an error."""
    pairs = draw.choice((8, 16, 32, 33))
    spec = RopeSpec(2 * pairs, base=draw.uniform(1e3, 1e6), interleaved=draw.random() < 0.5)
    x = torch.randn(2, draw.randint(1, 6), draw.randint(1, 300), 2 * pairs).to(draw.choice(DTYPES))
    offset = draw.choice((0, draw.randrange(2**40), torch.randn(x.shape[2], dtype=torch.float64)))
    rotate_qk(x, x[:, :1], spec, inverse=draw.random() < 0.5)
    x.requires_grad_()
    rotate(x, spec, offset).sum().backward()
    act = draw.choice(("silu", "softmax", "exp"))
    torch.autograd.grad(rotate(x, spec, act=act).sum(), x)
    with contextlib.suppress(ValueError):
        rotate(x, spec, torch.zeros(7, 2, dtype=torch.int64))


def tokens(draw: random.Random, count: int) -> None:
    """Single tokens, as a model generates them."""
    spec, token = RopeSpec(64), torch.randn(1, 8, 1, 64)
    prepared, out = spec.at(draw.randrange(2**30)), torch.empty_like(token)
    for at in range(count):
        rotate_(token, prepared)
        rotate(token, prepared)
        rotate(token, prepared, out=out)
        rotate(token, spec, at)


@pytest.fixture
def draw() -> random.Random:
    """Random numbers, after the calls that fill every cache."""
    draw = random.Random(0)
    for _ in range(100):
        various(draw)
    tokens(draw, 100)
    return draw


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


# From one line of code. New entries of a full cache count as left behind, 20 KB of them.
@pytest.mark.limit_leaks("48 KB")
def test_nothing_is_left_of_many_calls(draw: random.Random) -> None:
    before = alive()
    for _ in range(8):
        thread = threading.Thread(target=various, args=(random.Random(draw.random()),))
        thread.start()
        various(draw)
        thread.join()
        tokens(draw, 500)
    assert alive() <= before
