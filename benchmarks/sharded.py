"""Host time of calls on DTensors, beside the local calls that they make, and beside a product of DTensors.

OMP_NUM_THREADS=1 python -m benchmarks.sharded --out RESULTS.json

One token, 8 heads of q and 2 of k, on a mesh of one process, so that almost all the time is Python's.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tightrope import RopeSpec
from tightrope.environment import read_environment
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_qk, rotate_qk_

from .pages import written
from .speed.method import Call, medians

HEAD_DIM = 128


def calls(sharded: bool, learns: bool) -> dict[str, Call]:
    """Return calls on DTensors, or the same calls on local tensors."""
    mesh = init_device_mesh("cpu", (1,))
    q, k = (torch.randn(1, heads, 1, HEAD_DIM) for heads in (8, 2))
    if sharded:
        q, k = (DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k))
    q, k = q.requires_grad_(learns), k.requires_grad_(learns)
    spec = RopeSpec(HEAD_DIM)
    rope = spec.at(1000)
    cos, sin = torch.ones(2, 1, HEAD_DIM)
    found: dict[str, Call] = {
        "rotate": lambda: rotate(q, rope),
        "rotate_qk": lambda: rotate_qk(q, k, rope),
        "rotate_qk, a spec": lambda: rotate_qk(q, k, spec, 1000),
        "apply_rotary_pos_emb": lambda: apply_rotary_pos_emb(q, k, cos, sin),
        "q * q": lambda: q * q,
    }
    if not learns:
        found["rotate_qk_"] = lambda: rotate_qk_(q, k, rope)
    return found


def measure(rounds: int, runs: int) -> list[dict[str, Any]]:
    """Return the medians of each case, in microseconds, and their differences, for each run."""
    found: list[dict[str, Any]] = []
    for learns in (False, True):
        local, sharded = calls(False, learns), calls(True, learns)
        for name in local:
            both = {"local": local[name], "DTensor": sharded[name]}
            times = [
                medians(both, cold=False, rounds=rounds, rng=random.Random(run))
                for run in range(runs)
            ]
            more = [1e6 * (time["DTensor"] - time["local"]) for time in times]
            case: dict[str, Any] = {"call": name, "learns": learns}
            for key in both:
                case[key] = round(statistics.median(1e6 * time[key] for time in times), 1)
            case["more"] = [round(value, 1) for value in sorted(more)]
            found.append(case)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = measure(options.rounds, options.runs)
    dist.destroy_process_group()
    for case in found:
        gradient = ", with gradients" if case["learns"] else ""
        low, *_, high = case["more"]
        print(f"{case['call']}{gradient}: {case['local']} + {low} to {high} µs")
    if options.out:
        results = {"environment": asdict(read_environment()), "microseconds": found}
        options.out.write_text(written(results), encoding="utf-8")


if __name__ == "__main__":
    main()
