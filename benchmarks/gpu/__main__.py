"""Check and measure the GPU kernels: `python -m benchmarks.gpu --out benchmarks/results/gpu-NAME.json`.

Stages, the most valuable first, each in processes of its own, which may fail, hang or lose the device
without harm to the rest:

    machine   what the device is, and how fast it copies
    budgets   the calls that DESIGN 11 sets budgets for: right, and beside a copy
    counts    compilations, launches, microseconds of the host
    checks    results, gradients, memory, graphs and torch.compile against float64
    tests     the tests of the Triton backend, on the device
    prepare   every contender of every case at its full size, compiled and compared with float64
    times     who was right, in rounds of random order: replays of CUDA graphs, and single calls
    blocks    other shapes of blocks than those of the kernels' table

checks, tests and prepare run beside one another; the rest alone. The JSON is written after every unit,
and names what there was no time for. It needs torch, triton and this tree; other libraries take part
where their files are (docs/gpu.md).

--dry-run does all of it at tiny sizes under Triton's interpreter, where times mean nothing.
--report FILE prints the tables of a run, and needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from . import machine, report, stages, supervise, table
from .record import Record
from .summary import conclude

#: Nothing is wrong where there was only no time.
NO_FAULT = {supervise.NO_TIME, supervise.STOPPED}

#: Where results go if nobody says where.
OUT = Path("gpu-results.json")

#: How it ends: all right; something is wrong; there is no GPU.
FINE, WRONG, NO_GPU = 0, 1, 2


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, help=f"JSON file to write ({OUT}; none for a dry run)")
    add("--budget", type=float, default=8.0, help="minutes for the whole run (8)")
    add("--stages", default=",".join(stages.STAGES), help="which, with commas between")
    add("--only", type=_expression, default="", help="regular expression for cases, checks, counts")
    add("--against", type=_expression, default="", help="regular expression for contenders")
    add("--tests", default="", help="tests' names must contain this")
    add("--peers", type=Path, help="folder with the files of other libraries")
    add("--commit", default="", help="of a copy of the tree that git does not know")
    add("--jobs", type=int, help="processes side by side (cores less 2, at most 12)")
    add("--dry-run", action="store_true", help="tiny, under Triton's interpreter")
    add("--report", type=Path, metavar="FILE", help="print the tables of a run, and end")
    add("--page", type=Path, help="with --report: the file whose marked tables are replaced")
    # Faults that the tests of this benchmark plant: NAME=FAULT of faults.py, at units with the name.
    add("--fault", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.stages.split(",")) - set(stages.STAGES)
    if unknown:
        names = ", ".join(stages.STAGES)
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {names}")
    if not options.budget > 0:
        parser.error(f"--budget must be more than 0 minutes but is {options.budget}")
    if options.out is None and not options.dry_run:
        options.out = OUT
    if options.jobs is None:
        options.jobs = 1 if options.dry_run else max(1, min(12, (os.cpu_count() or 1) - 2))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run, write, say how it went."""
    options = parsed(arguments)
    if options.report is not None:
        return report.report(options.report, options.page)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: supervise.stop.set())
    start = time.monotonic()
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    record = Record(options.out, {"machine": {"dry": options.dry_run}, "options": given})
    try:
        record.put("machine", machine.facts(options.dry_run, options.commit))
        with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as caches:
            stages.measure(options, record, caches, start + 60 * options.budget)
    except Exception:  # noqa: BLE001  (what was found until then is told all the same)
        record.trouble("all", traceback.format_exc())
        table.tell(traceback.format_exc(), sys.stderr)
    record.put("seconds", round(time.monotonic() - start, 1))
    return _end(record)


def _end(record: Record) -> int:
    """Sum up, print, and say by the exit status whether all was right."""
    data, concluded = record.data, {"cases": [], "budgets": []}
    reason = stages.no_gpu(record)
    try:
        concluded = conclude(data)
        record.put("summary", concluded)
        table.tell(reason or table.printed(data), sys.stderr if reason else None)
    except Exception:  # noqa: BLE001  (--report works it out anew)
        record.trouble("all", traceback.format_exc())
        table.tell(traceback.format_exc(), sys.stderr)
    record.put("finished", not supervise.stop.is_set())
    record.put("machine", data["machine"] | {"gpu after": machine.gpu_now()})
    if record.path is not None and record.written is None:
        # Better on the screen than nowhere.
        table.tell(json.dumps(data, allow_nan=False))
    if record.path != record.written:
        table.tell(
            f"not all could be written: {data['unwritten']}; see {record.written}", sys.stderr
        )
    wrong = any(
        b["held"] is False for b in concluded["budgets"] if b["name"].startswith("no failure")
    )
    troubles = {text for stage in data["stages"].values() for text in stage["troubles"]}
    return NO_GPU if reason else WRONG if wrong or troubles - NO_FAULT else FINE


if __name__ == "__main__":
    sys.exit(main())
