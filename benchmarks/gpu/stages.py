"""The stages of a run: their order, which of them run side by side, and what time each has."""

from __future__ import annotations

import argparse
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import machine, supervise, table
from .cases import CONTENDERS, FLOOR, OURS
from .record import Record
from .summary import right, units
from .supervise import Job

#: In the order of their value, as time may run out.
STAGES = ("machine", "budgets", "counts", "checks", "tests", "prepare", "times", "blocks")

#: What of the time that is left each may take at most; the others, all of it.
SHARES = {"machine": 0.25, "budgets": 0.4, "counts": 0.25, "side by side": 0.5, "times": 0.75}

#: Processes of the stages that run side by side.
PARTS = {"prepare": 5, "checks": 2, "tests": 5}

#: Where other libraries are; see `peers`.
PEERS = "TIGHTROPE_GPU_PEERS"


def no_gpu(record: Record) -> str:
    """Why nothing but the first stage can run, if so."""
    reason = units(record.data, "machine").get("device", {}).get("absent", "")
    return str(reason)


def told(options: argparse.Namespace) -> dict[str, Any]:
    """What all workers are told."""
    against = re.compile(options.against)
    return {
        "dry": options.dry_run,
        "only": options.only,
        "names": [n for n in CONTENDERS if n in (OURS, FLOOR) or against.search(n)],
        "tests": options.tests,
        "faults": dict(fault.rsplit("=", 1) for fault in options.fault),
    }


def environment(options: argparse.Namespace, caches: str) -> dict[str, str]:
    """Variables of all workers.

    Args:
        caches: a folder for what compilers keep, new in each run.
    """
    paths = (str(machine.ROOT / "src"), str(machine.ROOT), os.environ.get("PYTHONPATH", ""))
    found = {
        # Compilers in the process itself: a pool of them takes longer to start than one kernel does.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TRITON_CACHE_DIR": f"{caches}/triton",
        # What others tuned while the device had company is not what they are measured with.
        "FLA_CACHE_RESULTS": "0",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    return found | ({PEERS: str(options.peers.resolve())} if options.peers else {})


def measure(options: argparse.Namespace, record: Record, caches: str, ends: float) -> None:
    """All stages that were asked for.

    Args:
        ends: when time is over, by `time.monotonic`.
    """
    variables, everyone = environment(options, caches), told(options)
    wanted = options.stages.split(",")

    def until(stage: str) -> float:
        left = max(0.0, ends - time.monotonic())
        # Who comes last has all of it.
        later = STAGES[STAGES.index(stage) + 1 :]
        return left * (SHARES.get(stage, 1.0) if set(later) & set(wanted) else 1.0)

    def alone(stage: str, **more: Any) -> None:
        if stage not in wanted:
            return
        start = time.monotonic()
        supervise.run(Job(stage, everyone | more, until(stage), variables), record)
        _progress(record, stage, time.monotonic() - start)

    alone("machine")
    versions = units(record.data, "machine").get("versions", {}).get("result", {})
    record.put("machine", record.data["machine"] | versions)
    if no_gpu(record):
        return
    alone("budgets")
    alone("counts")
    side = [stage for stage in PARTS if stage in wanted]
    if side:
        share = SHARES["side by side"] if set(STAGES[-2:]) & set(wanted) else 1.0
        _side_by_side(
            side, everyone, variables, share * (ends - time.monotonic()), options.jobs, record
        )
    alone("times", right=right(record.data))
    alone("blocks")


def _side_by_side(
    side: list[str],
    everyone: dict[str, Any],
    variables: dict[str, str],
    seconds: float,
    jobs: int,
    record: Record,
) -> None:
    """Stages beside one another, each in several processes, as many at a time as there are jobs."""
    start = time.monotonic()
    # A thread to each compiler and process: a dozen of them share the cores.
    few = variables | {"OMP_NUM_THREADS": "1"}
    parts = {stage: 1 if jobs == 1 else PARTS[stage] for stage in side}

    def one(stage: str, part: int) -> None:
        more = everyone | {"part": part, "parts": parts[stage]}
        left = max(0.0, start + seconds - time.monotonic())
        supervise.run(Job(stage, more, left, few), record)

    # The first parts of all stages first, so that each has begun where processes are few.
    order = sorted(
        (part, side.index(stage), stage) for stage in side for part in range(parts[stage])
    )
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(one, stage, part) for part, _, stage in order]:
            future.result()
    for stage in side:
        _progress(record, stage, time.monotonic() - start)


def _progress(record: Record, stage: str, seconds: float) -> None:
    try:
        table.tell(table.progress(record.data, stage, seconds))
    except Exception as error:  # noqa: BLE001  (what cannot be told is no reason to stop)
        record.trouble(stage, f"its line could not be told: {error!r}")
