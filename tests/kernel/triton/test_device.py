"""Properties on a device: gradients, memory, CUDA graphs, streams, torch.compile, large tensors.

Without a GPU, Triton's interpreter runs the same tests at tiny sizes; see tests/support/triton/cases.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.tolerances import value
from tests.support.triton.cases import (
    DEVICE,
    HAS_GPU,
    needs_triton,
    noise as noise_on_cpu,
    on_this_device,
)
from tightrope import RopeSpec, frequencies, gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.spec import _lengths, _prepared

__all__ = ["on_this_device"]

pytestmark = [needs_triton, pytest.mark.usefixtures("on_this_device")]

SPEC = RopeSpec(64)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Capture a call in a CUDA graph, and return the function that replays it."""
    call()  # outside the capture: it compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return noise_on_cpu(*shape, seed=seed, scale=scale).to(DEVICE)


def assert_close(got: torch.Tensor, want: torch.Tensor, kind: torch.dtype = torch.float32) -> None:
    """Assert that all elements are close, relative to the largest element of `want`."""
    assert got.shape == want.shape
    off = (got.detach().double() - want).abs().max() / want.abs().max()
    assert off.item() <= value(f"triton on a device, {kind}"), f"off by {off.item():.3g}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", [None, "silu", "rms_norm", "softmax"])
def test_gradients(act: str | None, dtype: torch.dtype) -> None:
    """Results and gradients of one call with all kinds of tensors agree with the definition."""
    n = 301 if HAS_GPU else 5
    start = {
        "q": noise(2, n, 6, 64, seed=1).transpose(1, 2),
        "k": noise(2, n, 2, 64, seed=2).transpose(1, 2),
        "at": noise(2, n, seed=3, scale=100.0),
        "omega": noise(32, seed=4, scale=0.5).abs(),
        "weight": 1 + noise(64, seed=5, scale=0.1),
        "gamma": noise(6, 64, seed=6, scale=0.3),
        "slope": noise(2, 64, seed=7, scale=1e-3),
    }
    if act != "rms_norm":
        del start["weight"]
    # Rounded before both runs, so that only the computation differs.
    start = {name: x.to(dtype if name in "qk" else torch.float32) for name, x in start.items()}

    def run(wide: bool) -> list[torch.Tensor]:
        given = {n: (x.double() if wide else x).detach().requires_grad_() for n, x in start.items()}
        norm = RMSNorm(given["weight"]) if act == "rms_norm" else act
        gate = gates.Exp(given["gamma"]), gates.Slope(given["slope"])
        named: dict[str, Any] = {"inv_freq": given["omega"], "act": norm, "gate": gate}
        named["backend"] = "reference" if wide else None
        y, z = rotate_qk(given["q"], given["k"], SPEC, given["at"], **named)
        seeds = [noise(*x.shape, seed=9 + i).to(dtype) for i, x in enumerate((y, z))]
        seeds = [seed.to(y.dtype) for seed in seeds]
        return [y, z, *torch.autograd.grad((y, z), list(given.values()), seeds)]

    for got, want in zip(run(False), run(True), strict=True):
        assert_close(got, want, dtype)


def test_phases() -> None:
    """Phases have the same bits in one call, in two and token by token; gradients are those of the sums."""
    n, cut, given = (1000, 300, 32) if HAS_GPU else (7, 3, 8)
    spec = RopeSpec(2 * given)
    x = noise(2, n, 6, 2 * given, seed=1).float().transpose(1, 2)
    start = noise(2, n, 6, given, seed=2).float().transpose(1, 2)
    reset = torch.zeros(n, dtype=torch.bool, device=DEVICE)
    reset[cut + 1] = True
    whole = phases.running(start, reset=reset)
    for wide in (False, True):
        found, state = [], None
        for at in (slice(0, cut), slice(cut, n - 2), slice(n - 2, n - 1), slice(n - 1, n)):
            part = phases.running(start[:, :, at], state, reset[at])
            found.append(part.words(wide))
            state = part.state
        assert torch.equal(torch.cat(found, 2), whole.words(wide))
    assert whole.state is not None
    assert torch.equal(state.words, whole.state.words)

    def run(wide: bool) -> list[torch.Tensor]:
        leaf = (start.double() if wide else start).clone().requires_grad_()
        leaves = leaf, (x.double() if wide else x).clone().requires_grad_()
        named: Any = {"phases": phases.running(leaf, reset=reset)}
        named["backend"] = "reference" if wide else None
        if wide:
            total = leaf.cumsum(2)
            before = (total - leaf)[:, :, cut + 1 : cut + 2] * reset.cumsum(0)[:, None]
            named["phases"] = phases.given(total - before)
        y = rotate(leaves[1], spec, 7, **named)
        return [y, *torch.autograd.grad(y, leaves, noise(*y.shape, seed=3).to(y.dtype))]

    for got, want in zip(run(False), run(True), strict=True):
        assert_close(got, want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("make", [gates.Exp, gates.Slope])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_factor_beyond_float32_is_infinite(make: Any, dtype: torch.dtype) -> None:
    x = torch.ones(1, 2, 3, 64, device=DEVICE)
    gate = make(torch.full((2, 64), 100.0, dtype=dtype, device=DEVICE))
    got, want = (rotate(x, SPEC, 1, gate=gate, backend=name) for name in (None, "reference"))
    assert torch.isinf(want).all()
    assert torch.equal(got, want)


def test_memory() -> None:
    """Views of a projection get the same bits in place, into `out` and token by token."""
    qkv = noise(2, 1000 if HAS_GPU else 5, 12, 64, seed=1).bfloat16()

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :, :8].transpose(1, 2), x[:, :, 8:10].transpose(1, 2)

    q, k = parts(qkv)
    want = rotate_qk(q, k, SPEC, 7)
    inside = qkv.clone()
    rotate_qk_(*parts(inside), SPEC, 7)
    outs = torch.full_like(want[0], float("nan")), torch.full_like(want[1], float("nan"))
    rotate_qk(q, k, SPEC, 7, out=outs)
    one = torch.cat([rotate(q[:, :, i : i + 1], SPEC, 7 + i) for i in range(5)], 2)
    assert torch.equal(inside[:, :, 10:], qkv[:, :, 10:])
    for got, other in (
        *zip(parts(inside), want, strict=True),
        *zip(outs, want, strict=True),
        (rotate(q, SPEC, 7), want[0]),
        (one, want[0][:, :, :5]),
    ):
        assert torch.equal(*(x.contiguous().view(torch.int16) for x in (got, other)))


@pytest.mark.parametrize("work", ["in place", "out", "backward"])
def test_graph(work: str) -> None:
    """A captured CUDA graph follows positions that change on the device between replays."""
    at = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    q, k = (noise(3, heads, 4, 64, seed=heads).float() for heads in (4, 2))
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

    replay = captured(call) if HAS_GPU else call
    for base in (0, 5, 100_000, -7):
        at.copy_(base + torch.arange(3, device=DEVICE))
        for x, start in zip(inside, (q, k), strict=True):
            x.copy_(start)
        replay()
        back = work == "backward"
        named: Any = {"inverse": back, "backend": "reference"}
        want = rotate_qk(q.double(), k.double(), SPEC, positions.per_row(at), **named)
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
    x = noise(3, 4, 4, 64, seed=1).float()
    y, ids = torch.empty_like(x), torch.arange(4, device=DEVICE).repeat(3, 1)
    lengths = torch.full((3,), 4, device=DEVICE)
    where = positions.per_row(ids[:, 0]) if given == "per row" else ids
    rope = spec.at(where, seq_len=lengths if given == "lengths" else None)
    replay = (
        captured(lambda: rotate(x, rope, out=y), 1) if HAS_GPU else lambda: rotate(x, rope, out=y)
    )
    for starts in ([0, 0, 0], [0, 2, 3], [5, 100, 1]):
        own = torch.tensor(starts)[:, None] + torch.arange(4)
        ids.copy_(own)
        lengths.copy_(own[:, -1] + 1)
        replay()
        rows = zip(x.double().cpu(), own, strict=True)
        want = [
            rotate(row[None], spec, one, seq_len=int(one[-1]) + 1, backend="reference")
            for row, one in rows
        ]
        assert_close(y, torch.cat(want).to(DEVICE))


def test_streams() -> None:
    """A launch uses the current stream: it reads the results of earlier work on that stream."""
    x = noise(1, 4, 4096 if HAS_GPU else 5, 64, seed=1).float()
    y = torch.empty_like(x)
    if HAS_GPU:
        torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if HAS_GPU else nullcontext():
        for _ in range(200 if HAS_GPU else 2):
            y.copy_(x)
            y.mul_(3)
            rotate_(y, SPEC)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert_close(y, rotate(x.double() * 3, SPEC, backend="reference"))


def test_compile() -> None:
    """torch.compile gives correct results and gradients for several lengths, with ≤ 2 graphs."""
    import torch._dynamo.testing

    inner = "inductor" if HAS_GPU else "eager"
    counter = torch._dynamo.testing.CompileCounterWithBackend(inner)

    def call(q: torch.Tensor, k: torch.Tensor, offset: int) -> Any:
        y, z = rotate_qk(q * 2, k, SPEC, offset)
        return y + 1, z

    function = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for i, n in enumerate((16, 33, 1000, 4096) if HAS_GPU else (3, 5)):
        q = noise(1, 4, n, 64, seed=i).float().requires_grad_()
        k = noise(1, 2, n, 64, seed=9 + i).float()
        y, z = function(q, k, 100 * i + 7)
        (grad,) = torch.autograd.grad(y.sum(), q)
        wide = q.detach().double().requires_grad_()
        want = rotate_qk(wide * 2, k.double(), SPEC, 100 * i + 7, backend="reference")
        (want_grad,) = torch.autograd.grad(want[0].sum(), wide)
        for got, other in ((y - 1, want[0].detach()), (z, want[1]), (grad, want_grad)):
            assert_close(got, other)
    assert counter.frame_count <= 2


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
        want = rotate(y.double()[None, None, None], spec, 5 + token, backend="reference")
        assert_close(x[row, head, token], want[0, 0, 0], torch.bfloat16)
