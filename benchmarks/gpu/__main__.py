"""Check and measure the GPU kernels: `python -m benchmarks.gpu --out benchmarks/results/gpu-NAME.json`.

Stages, each in processes of its own, which may fail, hang or lose the device without harm to the rest:

    machine   what the device is, and how fast it copies
    checks    results, gradients, memory, graphs and torch.compile against float64
    tests     the tests of the Triton backend, on the device
    prepare   every contender of every case at its full size, compiled and compared with float64
    counts    compilations, launches, microseconds of the host
    times     who was right, in rounds of random order: replays of CUDA graphs, and single calls

checks, tests and prepare run beside one another; the rest alone. The JSON is written after every unit.
It needs torch, triton and this tree; other libraries take part where their files are (docs/gpu.md).

--dry-run does all of it at tiny sizes under Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from . import machine, peers, suite, supervise, table
from .cases import CASES
from .contenders import CONTENDERS, FLOOR
from .record import Record
from .summary import conclude, right
from .supervise import Job

STAGES = ("machine", "checks", "tests", "prepare", "counts", "times")

#: What of the time may go into what runs side by side, and into counting.
SIDE_BY_SIDE, COUNTING = 0.45, 0.12

#: Processes of the stages that run side by side.
PARTS = {"checks": 2, "tests": 5, "prepare": 5}

#: Cases of a quick run: the first.
QUICK = 11


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--seconds", type=float, help="for the whole run (450; quick: 210)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, and no tests")
    parser.add_argument("--stages", default=",".join(STAGES), help="which, with commas between")
    parser.add_argument("--only", default="", help="regular expression for names of cases, checks")
    parser.add_argument("--against", default="", help="regular expression for names of contenders")
    parser.add_argument("--tests", default="", help="tests' names must contain this")
    parser.add_argument("--peers", type=Path, help="folder with the files of other libraries")
    parser.add_argument("--commit", default="", help="of a copy of the tree that git does not know")
    parser.add_argument("--jobs", type=int, help="processes side by side (cores less 2, at most 12)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, under Triton's interpreter")
    # Faults that the tests of this benchmark plant: NAME=FAULT of voice.py, at units with the name.
    parser.add_argument("--fault", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.stages.split(",")) - set(STAGES)
    if unknown:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    if options.seconds is None:
        options.seconds = 210.0 if options.quick else 450.0
    if options.jobs is None:
        cores = os.cpu_count() or 1
        options.jobs = 1 if options.dry_run else max(1, min(12, cores - 2))
    return options


def told(options: argparse.Namespace) -> dict[str, Any]:
    """What all workers are told."""
    only = options.only
    if options.quick and not only:
        only = "|".join(f"^{re.escape(case.name)}$" for case in CASES[:QUICK])
    names = [
        name
        for name in CONTENDERS
        if name in ("tightrope", FLOOR) or re.search(options.against, name)
    ]
    return {
        "dry": options.dry_run,
        "only": only,
        "names": names,
        "tests": options.tests,
        "files": list(suite.FILES),
        "faults": dict(fault.rsplit("=", 1) for fault in options.fault),
    }


def measure(options: argparse.Namespace, record: Record, caches: str) -> None:
    """All stages that were asked for."""
    ends = time.monotonic() + options.seconds
    environment = {
        # Compilers in the process itself: a pool of them takes longer to start than one kernel does.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TRITON_CACHE_DIR": f"{caches}/triton",
        # What others tuned while the device had company is not what they are measured with.
        "FLA_CACHE_RESULTS": "0",
        "PYTHONPATH": os.pathsep.join(
            [str(machine.ROOT / "src"), str(machine.ROOT), os.environ.get("PYTHONPATH", "")]
        ),
    }
    if options.peers:
        environment[peers.VARIABLE] = str(options.peers.resolve())
    everyone = told(options)
    wanted = options.stages.split(",")
    if options.quick and options.stages == ",".join(STAGES):
        wanted.remove("tests")

    def left() -> float:
        return max(0.0, ends - time.monotonic())

    def alone(stage: str, seconds: float, **more: Any) -> None:
        if stage in wanted:
            start = time.monotonic()
            supervise.run(Job(stage, everyone | more, seconds, environment), record)
            print(table.progress(record.data, stage, time.monotonic() - start), flush=True)

    alone("machine", min(90.0, left()))
    side = [stage for stage in PARTS if stage in wanted]
    if side:
        start, until = time.monotonic(), time.monotonic() + SIDE_BY_SIDE * left()
        if not set(wanted) & {"counts", "times"}:
            until = ends

        def one(stage: str, part: int, parts: int) -> None:
            more = everyone | {"part": part, "parts": parts}
            # A thread to each compiler and process: a dozen of them share the cores.
            few = environment | {"OMP_NUM_THREADS": "1"}
            supervise.run(Job(stage, more, max(0.0, until - time.monotonic()), few), record)

        with ThreadPoolExecutor(options.jobs) as pool:
            shares = {stage: 1 if options.jobs == 1 else PARTS[stage] for stage in side}
            # The first parts of all stages first, so that each has begun where processes are few.
            order = sorted((i, list(PARTS).index(s), s) for s in side for i in range(shares[s]))
            running = [pool.submit(one, stage, i, shares[stage]) for i, _, stage in order]
            for future in running:
                future.result()
        for stage in side:
            print(table.progress(record.data, stage, time.monotonic() - start), flush=True)
    alone("counts", COUNTING * options.seconds if "times" in wanted else left())
    alone("times", left(), right=right(record.data))


def main(arguments: list[str] | None = None) -> int:
    """Run, write, say how it went."""
    options = parsed(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here; --dry-run needs none", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: supervise.stop.set())
    start = time.monotonic()
    facts = machine.facts(options.dry_run, options.commit)
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    record = Record(options.out, {"machine": facts, "options": given})
    print(json.dumps(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-caches-", ignore_cleanup_errors=True) as caches:
        with contextlib.suppress(KeyboardInterrupt):
            measure(options, record, caches)
    record.put("machine", facts | {"gpu after": machine.gpu_now()})
    record.put("seconds", round(time.monotonic() - start, 1))
    concluded = conclude(record.data)
    record.put("summary", concluded)
    record.put("finished", not supervise.stop.is_set())
    print(table.printed(record.data))
    failed = any(budget["held"] is False for budget in concluded["budgets"] if "right" in budget["name"])
    troubles = any(stage["troubles"] for stage in record.data["stages"].values())
    return 1 if failed or troubles else 0


if __name__ == "__main__":
    sys.exit(main())
