"""What is counted, and what the host takes: compilations, launches, microseconds of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tightrope import RopeSpec
from tightrope.functional import rotate_qk, rotate_qk_
from tightrope.ops import schema
from tightrope.ops.schema import Form

from .device import Device

#: Seconds that a count may take.
LIMIT = 60.0


def compilations(device: Device) -> dict[str, int]:
    """How many kernels there are after one call, and after calls of many lengths and offsets."""
    spec = RopeSpec(64)

    def call(length: int, offset: int) -> None:
        x = torch.randn(1, 4, length, 64, device=device.at)
        rotate_qk_(x, None, spec, offset)

    lengths = [1, 2, 3, 15, 16, 17, 100, 255, 256, 1000, 4096, 9999, 10_000]
    call(5, 3)
    first = number()
    for length in lengths[:1] if device.dry else lengths:
        for offset in (0, 1, 16, 2**31, -(2**40)):
            call(length, offset)
    return {"after one call": first, "after many lengths and offsets": number()}


def kernels(since: int = 0) -> list[dict[str, Any]]:
    """What the compiler made of kernels: registers of a thread, and how many it had to spill.

    Args:
        since: how many there were before.
    """
    from tightrope.backends.triton import launch

    return [
        {
            "kernel": str(key[0]),
            "warps": getattr(getattr(kernel, "metadata", None), "num_warps", None),
            "registers": getattr(kernel, "n_regs", None),
            "spills": getattr(kernel, "n_spills", None),
        }
        for key, kernel in list(launch.compiled.items())[since:]
    ]


def number() -> int:
    """Of the kernels that this process has compiled."""
    from tightrope.backends.triton import launch

    return len(launch.compiled)


def _decode(device: Device) -> dict[str, Callable[[], Any]]:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device.at)
    prepared = RopeSpec(128).at(ids, device=device.at)
    q = torch.randn(1, 32, 1, 128, device=device.at, dtype=torch.bfloat16)
    k = torch.randn(1, 8, 1, 128, device=device.at, dtype=torch.bfloat16)
    words, form = prepared.words, Form().pack()
    leaf = q.clone().requires_grad_()
    spec = RopeSpec(128)
    return {
        "rotate_qk_, prepared": lambda: rotate_qk_(q, k, prepared),
        "rotate_qk, prepared": lambda: rotate_qk(q, k, prepared),
        "rotate_qk_, an offset": lambda: rotate_qk_(q, k, spec, 7),
        "rotate_qk, prepared, under grad": lambda: rotate_qk(leaf, k, prepared),
        "the operator in place": lambda: schema.rotate_(q, k, words, None, None, 7, form, 1.0),
        "the operator": lambda: schema.rotate(q, k, words, None, None, 7, form, 1.0),
    }


#: Calls whose time and launches are counted.
CALLS = (
    "rotate_qk_, prepared",
    "rotate_qk, prepared",
    "rotate_qk_, an offset",
    "rotate_qk, prepared, under grad",
    "the operator in place",
    "the operator",
)


def host_microseconds(device: Device, name: str) -> dict[str, float]:
    """Time that the host takes for a call, in batches between which it waits for the device."""
    call = _decode(device)[name]
    call()
    # Fewer calls than a device takes down before the host must wait.
    batches, calls = (2, 1) if device.dry else (25, 100)
    found = []
    for _ in range(batches):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    device.synchronize()
    found.sort()
    return {"median": statistics.median(found), "least": found[0], "most": found[-1]}


def launches(device: Device, name: str) -> dict[str, Any]:
    """The kernels that a call launches, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    call = _decode(device)[name]
    call()
    device.synchronize()
    activity = ProfilerActivity.CPU if device.dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as found:
        call()
        device.synchronize()
    names = [event.name for event in found.events() if event.device_type.name == "CUDA"]
    return {"launches": len(names), "names": names}


def counts(device: Device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All counts by name."""
    yield "compilations", partial(compilations, device)
    for name in CALLS:
        yield f"host | {name}", partial(host_microseconds, device, name)
    for name in CALLS[:2]:
        yield f"launches | {name}", partial(launches, device, name)
