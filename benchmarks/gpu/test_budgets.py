"""The speed budgets of a GPU that do not involve other libraries."""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tightrope import RopeSpec, phases
from tightrope.environment import read_environment
from tightrope.frequencies import Proportional
from tightrope.functional import rotate_qk, rotate_qk_

from ..speed import CONTENDERS, Case, measure
from .cases import SHARES, sized
from .plugin import OPTIONS

_QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"


def test_machine(record: dict[str, Any]) -> None:
    """Record the versions, the GPU and its clocks."""
    record |= {"environment": asdict(read_environment())}
    if OPTIONS.dry:
        return
    properties = torch.cuda.get_device_properties(0)
    record["l2_bytes"], record["bytes"] = properties.L2_cache_size, properties.total_memory
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "-i", "0"]
    reply = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    record["gpu"] = dict(zip(_QUERY.split(","), map(str.strip, reply.split(",")), strict=False))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", SHARES, ids=lambda case: case.name)
def test_share_of_the_copy(case: Case, record: dict[str, Any]) -> None:
    """Time a rotation relative to a copy of the same tensors."""
    often = {"runs": 1, "rounds": 1} if OPTIONS.dry else {"runs": 3, "rounds": 40}
    record |= measure(sized(case), CONTENDERS, **often, wanted=re.compile("^clone$"))


def _calls(device: str) -> dict[str, Callable[[], Any]]:
    q_heads, k_heads = (1, 1) if OPTIONS.dry else (32, 8)
    q = torch.randn(1, q_heads, 1, 128, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, k_heads, 1, 128, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    spec = RopeSpec(128)
    prepared, leaf = spec.at(ids, device=device), q.clone().requires_grad_()
    alone = RopeSpec(128, scaling=Proportional(0.0)).at(0, device=device)
    step = torch.rand(1, 1, 1, 64, device=device)
    state = phases.running(step).state
    return {
        "rotate_qk_, prepared": lambda: rotate_qk_(q, k, prepared),
        "rotate_qk, prepared": lambda: rotate_qk(q, k, prepared),
        "rotate_qk_, an offset": lambda: rotate_qk_(q, k, spec, 7),
        "rotate_qk, prepared, with gradients": lambda: rotate_qk(leaf, k, prepared),
        "phases.running": lambda: phases.running(step, state),
        "rotate_qk_, running phases": lambda: rotate_qk_(
            q, k, alone, phases=phases.running(step, state)
        ),
    }


def test_host_time(device: str, record: dict[str, Any]) -> None:
    """Measure the microseconds until a call returns, without waiting for the device."""
    for name, call in _calls(device).items():
        call()
        found = []
        # Few enough calls that the device's queue does not block the host.
        for _ in range(2 if OPTIONS.dry else 25):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(1 if OPTIONS.dry else 100):
                call()
            found.append(1e6 * (time.perf_counter() - start) / (1 if OPTIONS.dry else 100))
        record[name] = statistics.median(found)


def test_compilations(device: str, record: dict[str, Any]) -> None:
    """After calls with few tokens and with many, a new length or offset compiles no further kernel."""
    from tightrope.backends.triton import launch

    def call(length: int, offset: int) -> None:
        rotate_qk_(torch.randn(1, 4, length, 64, device=device), None, RopeSpec(64), offset)

    call(5, 3)
    call(5 if OPTIONS.dry else 9999, 3)
    first = len(launch.compiled)
    for length in (1, 3) if OPTIONS.dry else (1, 2, 3, 15, 16, 17, 100, 255, 256, 1000, 4096, 9999):
        for offset in (0, 1, 16, 2**31, -(2**40)):
            call(length, offset)
    record |= {"after two calls": first, "after all": len(launch.compiled)}
    assert OPTIONS.dry or first > 0
    assert len(launch.compiled) == first
