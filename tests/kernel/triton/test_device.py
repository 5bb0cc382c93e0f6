"""The kernels on a device: CUDA graphs, streams, torch.compile, large tensors.

Without a GPU the same tests run at tiny sizes, so that they are right when there is one; see
tests/support/triton/cases.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.helpers import noise as noise_on_cpu, on
from tests.support.tolerances import value
from tests.support.triton.cases import DEVICE, HAS_GPU, needs_triton, on_this_device
from tightrope import RopeSpec, frequencies, positions
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_, write_kv
from tightrope.spec import _lengths, _prepared

__all__ = ["on_this_device"]

pytestmark = [needs_triton, pytest.mark.usefixtures("on_this_device")]

SPEC = RopeSpec(64)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return noise_on_cpu(*shape, seed=seed).float().to(DEVICE)


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    """Return the function that replays a call, captured in a CUDA graph; without a GPU the call itself."""
    if not HAS_GPU:
        return call
    call()  # outside the capture: it compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def assert_close(got: torch.Tensor, want: torch.Tensor, kind: torch.dtype = torch.float32) -> None:
    """Assert that all elements are close, relative to the largest element of `want`."""
    assert got.shape == want.shape
    off = (got.detach().double() - want).abs().max() / want.abs().max()
    assert off.item() <= value(f"triton on a device, {kind}"), f"off by {off.item():.3g}"


@pytest.mark.parametrize("work", ["in place", "out", "backward"])
def test_graph(work: str) -> None:
    """A captured CUDA graph follows positions that change on the device between replays."""
    at = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    q, k = (noise(3, heads, 4, 64, seed=heads) for heads in (4, 2))
    inside, outs = (q.clone(), k.clone()), (torch.empty_like(q), torch.empty_like(k))
    leaf, grads = q.clone().requires_grad_(), torch.empty_like(q)

    def call() -> None:
        where = positions.per_row(at)
        if work == "in place":
            rotate_qk_(*inside, SPEC, where)
        elif work == "out":
            rotate_qk(q, k, SPEC, where, out=outs)
        else:
            grads.copy_(torch.autograd.grad(rotate(leaf, SPEC, where), leaf, q)[0])

    replay = replayed(call)
    for base in (0, 5, 100_000, -7):
        at.copy_(base + torch.arange(3, device=DEVICE))
        for x, start in zip(inside, (q, k), strict=True):
            x.copy_(start)
        replay()
        back = work == "backward"
        wide = q.double(), k.double()
        want = on("reference", rotate_qk, *wide, SPEC, positions.per_row(at), inverse=back)
        found = (grads,) if back else inside if work == "in place" else outs
        for got, other in zip(found, want, strict=False):
            assert_close(got, other)


BY_LENGTH = {
    "dynamic NTK": frequencies.DynamicNTK(2.0, original_max_position=6),
    "LongRoPE": frequencies.LongRoPE([1.0] * 32, [3.0] * 32, 6, factor=1.0),
}


@pytest.mark.parametrize("given", ["ids", "per row", "lengths"])
@pytest.mark.parametrize("rule", BY_LENGTH)
def test_graph_of_lengths(rule: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured CUDA graph has the frequencies of the lengths that are on the device at each replay."""
    if not HAS_GPU:
        for module in (_prepared, _lengths):  # as on a GPU
            monkeypatch.setattr(module, "is_readable", lambda _: False)
    spec = RopeSpec(64, scaling=BY_LENGTH[rule])
    x = noise(3, 4, 4, 64, seed=1)
    y, ids = torch.empty_like(x), torch.arange(4, device=DEVICE).repeat(3, 1)
    lengths = torch.full((3,), 4, device=DEVICE)
    where = positions.per_row(ids[:, 0]) if given == "per row" else ids
    rope = spec.at(where, seq_len=lengths if given == "lengths" else None)
    replay = replayed(lambda: rotate(x, rope, out=y))
    for starts in ([0, 0, 0], [0, 2, 3], [5, 100, 1]):
        own = torch.tensor(starts)[:, None] + torch.arange(4)
        ids.copy_(own)
        lengths.copy_(own[:, -1] + 1)
        replay()
        want = [
            on("reference", rotate, row[None], spec.at(one, seq_len=int(one[-1]) + 1))
            for row, one in zip(x.double().cpu(), own, strict=True)
        ]
        assert_close(y, torch.cat(want).to(DEVICE))


def test_streams() -> None:
    """A launch uses the current stream: it reads the results of earlier work on that stream."""
    x = noise(1, 4, 4096 if HAS_GPU else 5, 64, seed=1)
    y = torch.empty_like(x)
    wait = torch.cuda.synchronize if HAS_GPU else bool
    wait()
    with torch.cuda.stream(torch.cuda.Stream()) if HAS_GPU else nullcontext():
        for _ in range(200 if HAS_GPU else 2):
            y.copy_(x)
            y.mul_(3)
            rotate_(y, SPEC)
    wait()
    assert_close(y, on("reference", rotate, x.double() * 3, SPEC))


def test_compile() -> None:
    """torch.compile gives correct results and gradients for several lengths, with ≤ 2 graphs."""
    import torch._dynamo.testing

    inner = "inductor" if HAS_GPU else "eager"
    counter = torch._dynamo.testing.CompileCounterWithBackend(inner)

    def call(q: torch.Tensor, k: torch.Tensor, offset: int, backend: str | None = None) -> Any:
        y, z = on(backend, rotate_qk, q * 2, k, SPEC, offset)
        return y + 1, z

    function = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for i, n in enumerate((16, 33, 1000, 4096) if HAS_GPU else (3, 5)):
        q, k = noise(1, 4, n, 64, seed=i), noise(1, 2, n, 64, seed=9 + i)
        q, wide = q.requires_grad_(), q.double().requires_grad_()
        found = function(q, k, 100 * i + 7)
        want = call(wide, k.double(), 100 * i + 7, "reference")
        (grad,), (want_grad,) = (
            torch.autograd.grad(ys[0].sum(), x) for ys, x in ((found, q), (want, wide))
        )
        for got, other in (*zip(found, want), (grad, want_grad)):
            assert_close(got, other.detach())
    assert counter.frame_count <= 2


@pytest.mark.parametrize("placed", [False, True], ids=["contiguous", "slots"])
def test_a_compiled_cache_in_8_bits(placed: bool) -> None:
    """Compiled code calls the kernel too, and has the bits of eager code."""
    k, scale = noise(2, 3, 5, 64, seed=1).bfloat16(), torch.full((3,), 0.3, device=DEVICE)
    slots = torch.arange(10, device=DEVICE).flip(0).view(2, 5) if placed else None
    caches = torch.zeros(2, *k.shape, device=DEVICE).to(torch.float8_e4m3fn).unbind()

    def step(k: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        write_kv(None, k * 2, None, SPEC, 3, cache=(cache, None), slots=slots, cache_scale=scale)
        return k + 1

    step(k, caches[0])
    inner = "inductor" if HAS_GPU else "aot_eager"
    torch.compile(step, fullgraph=True, backend=inner)(k, caches[1])
    assert torch.equal(*(cache.view(torch.uint8) for cache in caches))
    assert bool(caches[0].float().any())


def test_far() -> None:
    """A tensor of more than 2^31 elements is rotated correctly.

    Ten head vectors are compared, eight of them chosen at random.
    """
    rows, n, heads, width = (2, 70_000, 128, 128) if HAS_GPU else (2, 3, 2, 16)
    x = torch.empty((rows, n, heads, width), dtype=torch.bfloat16, device=DEVICE).normal_()
    x, spec, rng = x.transpose(1, 2), RopeSpec(width), random.Random(0)
    at = [(rows - 1, heads - 1, n - 1), (0, 0, 0)]
    at += [tuple(map(rng.randrange, (rows, heads, n))) for _ in range(8)]
    before = [x[index].clone() for index in at]
    rotate_(x, spec, 5)
    for (row, head, token), y in zip(at, before, strict=True):
        want = on("reference", rotate, y.double()[None, None, None], spec, 5 + token)
        assert_close(x[row, head, token], want[0, 0, 0], torch.bfloat16)
