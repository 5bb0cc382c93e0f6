"""Calls the library many times in many ways, and fails if memory grows.

    python -m ci.hardening.soak --calls 10000000

One call in ten thousand is drawn anew: another spec, length, offset, dtype, gradients, a second thread. The
others rotate one token with what was drawn last. After a tenth of the calls the caches are full; from then
on the resident memory may grow by 32 MB, and the number of tensors that are alive not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import resource
import threading
from pathlib import Path

import torch

from tightrope import RopeSpec
from tightrope.functional import rotate, rotate_, rotate_qk

MOST_MB = 32
OFTEN = 10_000


def resident() -> float:
    """Return the resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def various(draw: random.Random) -> None:
    """Make a few calls that fill caches and need memory."""
    pairs = draw.choice((8, 16, 32, 33))
    spec = RopeSpec(2 * pairs, base=draw.uniform(1e3, 1e6), interleaved=draw.random() < 0.5)
    x = torch.randn(2, draw.randint(1, 6), draw.randint(1, 300), 2 * pairs)
    x = x.to(draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    offset = draw.choice((0, draw.randrange(2**40), torch.randn(x.shape[2], dtype=torch.float64)))
    rotate(x, spec, offset)
    rotate_qk(x, x[:, :1], spec, inverse=draw.random() < 0.5)
    x.requires_grad_()
    rotate(x, spec, offset).sum().backward()
    act = draw.choice(("silu", "softmax", "exp"))
    torch.autograd.grad(rotate(x, spec, act=act).sum(), x)
    with contextlib.suppress(ValueError):
        rotate(x, spec, torch.zeros(7, 2, dtype=torch.int64))


def main(calls: int) -> None:
    draw = random.Random(0)
    spec = RopeSpec(64)
    token = torch.randn(1, 8, 1, 64)
    out = torch.empty_like(token)
    first: tuple[float, int] | None = None
    for begin in range(0, calls, OFTEN):
        various(draw)
        if draw.random() < 0.1:
            thread = threading.Thread(target=various, args=(random.Random(begin),))
            thread.start()
            various(draw)
            thread.join()
        way, prepared = draw.randrange(4), spec.at(begin)
        for at in range(begin, begin + OFTEN):
            if way == 0:
                rotate_(token, prepared)
            elif way == 1:
                rotate(token, prepared)
            elif way == 2:
                rotate(token, prepared, out=out)
            else:
                rotate(token, spec, at)
        if first is None and begin >= calls // 10:
            first = resident(), alive()
    assert first is not None
    found = {
        "executions": calls,
        "growth_mb": round(resident() - first[0], 1),
        "tensors": alive() - first[1],
    }
    print(json.dumps(found))
    assert found["growth_mb"] < MOST_MB, found
    assert found["tensors"] <= 0, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=100_000)
    main(parser.parse_args().calls)
