"""What must hold on the device, each a unit: results of the public functions, gradients, memory, graphs.

References are float64: the formulas of `expected`, or the definition, which tests hold against an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tightrope import RopeSpec, gates, positions
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.ops import schema
from tightrope.ops.schema import Form

from .cases import CASES, Case, small
from .contenders import results
from .device import Device
from .expected import NEAR, bound, error
from .inputs import our_call, poison, sets
from .voice import AbsentError

#: Seconds that a check may take.
LIMIT = 60.0

#: Of the largest value of a gradient that is a sum of float32 products, beside float64.
SUMS = 1e-5


class WrongError(Exception):
    """What a check found."""


def require_near(name: str, got: torch.Tensor, want: torch.Tensor, near: float) -> float:
    """How far a result is off, of the largest value; refused where that is too far."""
    off = ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()
    if got.shape != want.shape or not off <= near:
        raise WrongError(f"{name}: {tuple(got.shape)} off by {off:.3g}, not {near:.3g}")
    return float(off)


def _of_case(case: Case, device: Device) -> dict[str, Any]:
    (given,) = sets(case, device.at, 1)
    mine = given.clone()
    poison(given)
    found = results(our_call(case, device.at)(mine), mine)
    device.synchronize()
    off = error(case, found, given)
    if not off <= bound(case):
        raise WrongError(f"off by {off:.3g} of a head's largest channel, not {bound(case):.3g}")
    return {"off by": off, "bound": bound(case)}


def _noise(device: Device, *shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device.at)


def _start(device: Device) -> dict[str, torch.Tensor]:
    """Numbers that all dtypes of a check hold exactly, so that only what is computed differs."""
    n = 5 if device.dry else 301
    start = {
        "q": _noise(device, 2, n, 6, 64, seed=1).bfloat16().transpose(1, 2),
        "k": _noise(device, 2, n, 2, 64, seed=2).bfloat16().transpose(1, 2),
        "positions": _noise(device, 2, n, seed=3, scale=100.0),
        "frequencies": _noise(device, 32, seed=4, scale=0.5).abs(),
        "weight": 1 + _noise(device, 64, seed=5, scale=0.1),
        "gamma": _noise(device, 6, 64, seed=6, scale=0.3),
        "slope": _noise(device, 2, 64, seed=7, scale=1e-3),
    }
    return {name: x.float() for name, x in start.items()}


def _gradients(device: Device, act: str, dtype: str, wrap: bool) -> dict[str, Any]:
    """By x, positions, frequencies, the weight of a norm, a gate of q and slopes of k, all at once."""
    start = _start(device)

    def run(kind: torch.dtype, backend: str | None) -> dict[str, torch.Tensor]:
        wide = torch.float64 if kind == torch.float64 else torch.float32
        given = {
            name: x.to(kind if name in ("q", "k") else wide).detach().requires_grad_()
            for name, x in start.items()
        }
        if act != "rms_norm":
            del given["weight"]

        def call(q: torch.Tensor, k: torch.Tensor) -> Any:
            return rotate_qk(
                *(q, k, RopeSpec(64), given["positions"]),
                inv_freq=given["frequencies"],
                act=RMSNorm(given["weight"]) if act == "rms_norm" else act,
                gate=(gates.Exp(given["gamma"]), gates.Slope(given["slope"])),
                backend=backend,
            )

        function = torch.compile(call) if wrap and backend is None else call
        y, z = function(given["q"], given["k"])
        seeds = [_noise(device, *x.shape, seed=9 + i) for i, x in enumerate((y, z))]
        seeds = [seed.bfloat16().to(kind) for seed in seeds]
        found = torch.autograd.grad((y, z), list(given.values()), seeds)
        return {"y": y.detach(), "z": z.detach(), **dict(zip(given, found, strict=True))}

    got = run(getattr(torch, dtype), None)
    want = run(torch.float64, "reference")
    sums = max(NEAR[dtype], SUMS)
    return {
        name: require_near(
            name, got[name], want[name], NEAR[dtype] if name in ("y", "z", "q", "k") else sums
        )
        for name in want
    }


def _memory(device: Device) -> dict[str, Any]:
    """In place, into given memory, slices of one projection and out of place: the same bits."""
    tokens = 5 if device.dry else 1000
    qkv = _noise(device, 2, tokens, 12, 64, seed=1).bfloat16()
    spec = RopeSpec(64)

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :, :8].transpose(1, 2), x[:, :, 8:10].transpose(1, 2)

    want = rotate_qk(*parts(qkv), spec, 7)
    inside = qkv.clone()
    rotate_qk_(*parts(inside), spec, 7)
    outs = torch.full_like(want[0], float("nan")), torch.full_like(want[1], float("nan"))
    rotate_qk(*parts(qkv), spec, 7, out=outs)
    alone = rotate(parts(qkv)[0], spec, 7)
    one = torch.cat([rotate(parts(qkv)[0][:, :, i : i + 1], spec, 7 + i) for i in range(5)], 2)
    pairs = {
        "in place": (parts(inside)[0], want[0]),
        "in place, k": (parts(inside)[1], want[1]),
        "out": (outs[0], want[0]),
        "out, k": (outs[1], want[1]),
        "q alone": (alone, want[0]),
        "token by token": (one, want[0][:, :, :5]),
    }
    for name, (got, other) in pairs.items():
        if not torch.equal(
            got.contiguous().view(torch.int16), other.contiguous().view(torch.int16)
        ):
            raise WrongError(f"{name}: other bits")
    if not torch.equal(inside[:, :, 10:], qkv[:, :, 10:]):
        raise WrongError("in place: values were changed")
    base = _noise(device, 2, 3, 4, 64, seed=2).float().requires_grad_()
    x = base * 1
    rotate_(x, spec, 7)
    (grad,) = torch.autograd.grad(x.sum(), base)
    turned_back = rotate(torch.ones_like(base), spec, 7, inverse=True, backend="reference")
    return {"in place, gradient": require_near("gradient", grad, turned_back, NEAR["float32"])}


def _compile(device: Device) -> dict[str, Any]:
    """torch.compile over lengths, forward and backward: results, and how many graphs."""
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    spec = RopeSpec(64)

    def call(q: torch.Tensor, k: torch.Tensor, offset: int) -> Any:
        y, z = rotate_qk(q * 2, k, spec, offset)
        return y + 1, z

    function = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    lengths = (3, 5) if device.dry else (16, 33, 1000, 4096)
    worst = 0.0
    for i, n in enumerate(lengths):
        q = _noise(device, 1, 4, n, 64, seed=i).float().requires_grad_()
        k = _noise(device, 1, 2, n, 64, seed=9 + i).float()
        y, z = function(q, k, 100 * i + 7)
        (grad,) = torch.autograd.grad(y.sum(), q)
        wide = q.detach().double().requires_grad_()
        want, want_k = rotate_qk(wide * 2, k.double(), spec, 100 * i + 7, backend="reference")
        (want_grad,) = torch.autograd.grad(want.sum(), wide)
        for got, other in ((y - 1, want), (z, want_k), (grad, want_grad)):
            worst = max(worst, require_near(f"{n} tokens", got, other, NEAR["float32"]))
    if counter.frame_count > 2:
        raise WrongError(f"{counter.frame_count} graphs for {len(lengths)} lengths and offsets")
    return {"off by": worst, "graphs": counter.frame_count}


def _graph(device: Device, work: str) -> dict[str, Any]:
    """A captured graph follows positions that change on the device between replays."""
    rows, n = 3, 4
    spec = RopeSpec(64)
    at = torch.zeros(rows, dtype=torch.int64, device=device.at)
    q = _noise(device, rows, 4, n, 64, seed=1).float()
    k = _noise(device, rows, 2, n, 64, seed=2).float()
    inside = [q.clone(), k.clone()]
    outs = torch.empty_like(q), torch.empty_like(k)
    leaf = q.clone().requires_grad_()
    grads: list[torch.Tensor] = []

    def call() -> None:
        where = positions.per_row(at)
        if work == "in place":
            rotate_qk_(*inside, spec, where)
        elif work == "out":
            rotate_qk(q, k, spec, where, out=outs)
        else:
            y = rotate(leaf, spec, where)
            grads[:] = torch.autograd.grad(y, leaf, q)

    with device.aside():
        call()
        replay = device.capture(call)
    worst = 0.0
    for base in (0, 5, 100_000, -7):
        at.copy_(base + torch.arange(rows, device=device.at))
        for x, start in zip(inside, (q, k), strict=True):
            x.copy_(start)
        replay()
        device.synchronize()
        where = positions.per_row(at)
        wide = [x.double() for x in (q, k)]
        want = rotate_qk(*wide, spec, where, backend="reference")
        if work == "backward":
            back = rotate(wide[0], spec, where, inverse=True, backend="reference")
            pairs: Any = [(grads[0], back)]
        else:
            pairs = zip(inside if work == "in place" else outs, want, strict=True)
        for got, other in pairs:
            worst = max(worst, require_near(f"position {base}", got, other, NEAR["float32"]))
    return {"off by": worst}


def _streams(device: Device) -> dict[str, Any]:
    """Launches are on the current stream: what a stream has just written is what is read."""
    spec = RopeSpec(64)
    x = _noise(device, 1, 4, 5 if device.dry else 4096, 64, seed=1).float()
    want = rotate(x.double() * 3, spec, backend="reference")
    with device.aside():
        y = x.clone()
        for _ in range(2 if device.dry else 200):
            y.copy_(x)
            y.mul_(3)
            rotate_(y, spec)
    device.synchronize()
    return {"off by": require_near("on a stream", y, want, NEAR["float32"])}


def _far(device: Device) -> dict[str, Any]:
    """A result beyond 2^31 elements from its first is the one of the definition."""
    rows, n, heads, width = (2, 3, 2, 16) if device.dry else (2, 70_000, 128, 128)
    if 3 * rows * n * heads * width > device.free_bytes():
        raise AbsentError("there is not so much memory")
    x = torch.zeros((rows, n, heads, width), dtype=torch.bfloat16, device=device.at).transpose(1, 2)
    x[-1, :, -3:] = 1.0
    spec = RopeSpec(width)
    rotate_(x, spec, 5)
    want = rotate(torch.ones(1, 1, 3, width, device=device.at), spec, n + 2, backend="reference")
    got = x[-1:, -1:, -3:]
    off = require_near("the end", got, want, NEAR["bfloat16"])
    if x[0, 0].any() or x[-1, :, :-3].any():
        raise WrongError("zeros were written")
    return {"off by": off, "elements": x.numel()}


def _tables(device: Device) -> dict[str, Any]:
    """Given tables, positions outside of them, and positions that are no number."""
    form = Form(ramp=False, source=3).pack()
    x = torch.ones(2, 3, 4, 8, device=device.at)
    table = torch.ones(1, 1, 5, 4, device=device.at)
    ids = torch.tensor([[[0, 4, 5, -1]]], device=device.at)
    (y,) = schema.rotate(x, None, table, table, ids, 0, form, 1.0)
    if not (bool(y[:, :, :2].isfinite().all()) and bool(y[:, :, 2:].isnan().all())):
        raise WrongError(f"rows outside of a table: {y[0, 0].tolist()}")
    return {}


def checks(device: Device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All checks by name, the quickest and most telling first."""
    plain = replace(small(CASES[1]), dtype="float32", tokens=64)
    yield "first of all: one call", partial(_of_case, plain, device)
    yield "memory", partial(_memory, device)
    for act in ("none", "silu", "rms_norm", "softmax"):
        for dtype in ("float32", "bfloat16"):
            yield f"gradients, {act}, {dtype}", partial(_gradients, device, act, dtype, False)
    for work in ("in place", "out", "backward"):
        yield f"graph, {work}", partial(_graph, device, work)
    yield "streams", partial(_streams, device)
    yield "tables", partial(_tables, device)
    yield "torch.compile", partial(_compile, device)
    yield "gradients, torch.compile", partial(_gradients, device, "silu", "float32", True)
    yield "beyond 2^31 elements", partial(_far, device)
    dtypes = ("bfloat16", "float32", "float16")
    for index, case in enumerate(CASES):
        if case.neighbours:
            continue
        for dtype in dtypes[index % 3 :][:1] if device.dry else dtypes:
            for tokens in (1,) if case.tokens == 1 else (5,) if device.dry else (1, 37, 300):
                sized = replace(small(case), dtype=dtype, tokens=tokens)
                if not device.dry:
                    sized = replace(sized, q_heads=5, k_heads=2 * bool(case.k_heads), head_dim=128)
                yield f"{case.name}, {dtype}, {tokens} tokens", partial(_of_case, sized, device)
