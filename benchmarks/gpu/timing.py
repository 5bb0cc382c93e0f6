"""How a case is timed."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict
from typing import Any

import torch

from .cases import Case
from .contenders import CONTENDERS, AbsentError
from .inputs import count_of, sets


def milliseconds(call: Any, inputs: list[Any], device: torch.device, budget: float) -> float:
    """The median time of a call, over inputs that take turns.

    Args:
        budget: milliseconds to spend on timed calls.
    """
    turn = itertools.cycle(inputs)
    if device.type == "cpu":
        call(next(turn))
        start = time.perf_counter()
        call(next(turn))
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    return float(
        do_bench(lambda: call(next(turn)), warmup=budget / 4, rep=budget, return_mode="median")
    )


def time_case(case: Case, device: torch.device, budget: float, only: str = "") -> dict[str, Any]:
    """Every contender's median time, and its share of what a copy moves.

    Args:
        only: names of contenders beside ours must contain this.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        cache, free = properties.L2_cache_size, torch.cuda.mem_get_info(device)[0]
    else:
        cache, free = 1, 2**30
    inputs = sets(case, device, count_of(case, cache, free))
    times: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, contender in CONTENDERS.items():
        if only not in name and name not in ("tightrope", "copy"):
            continue
        try:
            call = contender(case, device)
            call(inputs[0])
            times[name] = milliseconds(call, inputs, device, budget)
        except AbsentError as reason:
            absent[name] = str(reason)
        except Exception as failure:  # noqa: BLE001  (one contender is not the end of a run)
            absent[name] = f"it failed: {failure!r}"[:400]
    found: dict[str, Any] = {
        "case": asdict(case),
        "sets": len(inputs),
        "milliseconds": times,
        "absent": absent,
        "GB/s": {name: case.moved / t / 1e6 for name, t in times.items()},
    }
    if "tightrope" in times:
        found["ratios"] = {
            name: times["tightrope"] / t for name, t in times.items() if name != "tightrope"
        }
    return found
