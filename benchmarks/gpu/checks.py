"""What must hold before anything is timed: results, compilations, host time, graphs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from tightrope import RopeSpec
from tightrope.functional import rotate_qk_
from tightrope.ops import schema
from tightrope.ops.definition import compose
from tightrope.ops.schema import Form

from .cases import CASES, Case, small
from .inputs import ours, sets

# Of the largest channel, beside the definition in float64: pairings, signs and positions, and rounding.
NEAR = {"float32": 1e-5, "float64": 1e-9, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def results(device: torch.device, quick: bool = False) -> list[str]:
    """Cases whose results are not the definition's; each dtype, and tails of tiles.

    Args:
        quick: one dtype and one length for each case.
    """
    wrong = []
    dtypes = ("bfloat16", "float32", "float16")
    for index, case in enumerate(CASES):
        for dtype in dtypes[index % 3 :][:1] if quick else dtypes:
            for tokens in (1, 5)[case.tokens > 1 and quick :] if case.tokens > 1 else (1,):
                little = small(case)
                little = Case(**{**little.__dict__, "dtype": dtype, "tokens": tokens})
                try:
                    error = _error(little, device)
                except Exception as failure:  # noqa: BLE001  (one case is not the end of a run)
                    wrong.append(f"{little.name}, {dtype}, {tokens} tokens: {failure!r}"[:300])
                    continue
                if not error <= NEAR[dtype]:
                    wrong.append(f"{little.name}, {dtype}, {tokens} tokens: off by {error:.2g}")
    return wrong


def _error(case: Case, device: torch.device) -> float:
    (given,) = sets(case, device, 1)
    (kept,) = sets(case, device, 1)
    got = ours(case, device)(given)
    wide = Case(**{**case.__dict__, "dtype": "float32"})
    for name in ("q", "k"):
        x = getattr(kept, name)
        setattr(kept, name, None if x is None else x.double())
    kept.grads = tuple(grad.double() for grad in kept.grads)
    want = ours(wide, device, "reference")(kept)
    errors = [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
        for a, b in zip(_flat(got), _flat(want), strict=True)
    ]
    return max(errors, default=0.0)


def _flat(found: Any) -> list[torch.Tensor]:
    tensors = [found] if isinstance(found, torch.Tensor) else list(found)
    return [x for x in tensors if x is not None and x.numel()]


def compilations(device: torch.device) -> dict[str, int]:
    """How many kernels are compiled over many lengths and offsets: no more than after the first."""
    from tightrope.backends.triton import launch

    rotation = RopeSpec(64)
    for length, offset in ((5, 3), (5, 3)):
        x = torch.randn(1, 4, length, 64, device=device)
        rotate_qk_(x, None, rotation, offset)
    first = len(launch.compiled)
    lengths = [1, 2, 3, 15, 16, 17, 100, 255, 256, 1000, 4096, 9999, 10_000]
    lengths = lengths if device.type != "cpu" else lengths[:6]
    for length in lengths:
        for offset in (0, 1, 16, 2**31, -(2**40)):
            rotate_qk_(torch.randn(1, 4, length, 64, device=device), None, rotation, offset)
    return {"after one call": first, "after many lengths and offsets": len(launch.compiled)}


def host_microseconds(device: torch.device, calls: int = 2000) -> dict[str, float]:
    """Time that the host takes for a call: medians of batches, without waiting for the device."""
    rotation = RopeSpec(128).at(torch.zeros(1, 1, dtype=torch.int64, device=device), device=device)
    q = torch.randn(1, 32, 1, 128, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, 8, 1, 128, device=device, dtype=torch.bfloat16)
    words = rotation.words
    form = Form().pack()
    timed = {
        "rotate_qk_, prepared": lambda: rotate_qk_(q, k, rotation),
        "the operator in place": lambda: schema.rotate_(q, k, words, None, None, 7, form, 1.0),
        "the operator": lambda: schema.rotate(q, k, words, None, None, 7, form, 1.0),
    }
    found = {}
    for name, call in timed.items():
        batches = []
        for _ in range(min(calls, 11)):
            start = time.perf_counter()
            for _ in range(max(1, calls // 11)):
                call()
            batches.append((time.perf_counter() - start) / max(1, calls // 11))
            if device.type != "cpu":
                torch.accelerator.synchronize()
        found[name] = 1e6 * statistics.median(batches)
    return found


def graph(device: torch.device) -> str:
    """Whether a captured graph follows positions that change on the device between replays."""
    if device.type != "cuda":
        return "no CUDA here"
    words = RopeSpec(64).at(None, device=device).words
    at = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    x = torch.randn(1, 4, 3, 64, device=device)
    form = Form().pack()
    schema.rotate(x, None, words, None, at, 0, form, 1.0)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        (y,) = schema.rotate(x, None, words, None, at, 0, form, 1.0)
    for position in (0, 5, 100_000):
        at.fill_(position)
        captured.replay()
        (want,) = compose(x.double(), None, words, None, at, 0, form, 1.0)
        if not torch.allclose(y.double(), want, atol=1e-5):
            return f"wrong at position {position}"
    return "right"
