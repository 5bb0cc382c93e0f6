"""Workers, each a process of its own: what they say is taken down, and who dies is replaced.

An illegal access of memory leaves a process no use of the device, a compiler can hang, a kernel can
take the process with it. Each costs the unit that it happens in.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .record import Record
from .voice import POISONED, shortened

#: Seconds that a worker has to end a unit by itself after its limit.
GRACE = 8.0

#: Seconds that a worker may be silent outside of units: imports, the start of a device.
SILENCE = 90.0

#: Seconds that a killed process has to be gone; one that waits for a driver may never be.
BURIAL = 10.0

#: Processes that may die before a unit began, until a stage is given up.
BARREN = 2

#: Set by whoever wants all of it to end now.
stop = threading.Event()

LATE, NO_TIME, STOPPED = "it took too long", "no time was left", "it was stopped"

_TICK = 0.03


@dataclass
class Job:
    """What one worker at a time does.

    Attributes:
        stage: the name under which results are taken down.
        options: what the worker is told, as JSON.
        seconds: that it may take in all.
        environment: variables beside those of this process.
    """

    stage: str
    options: dict[str, Any]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class _Seen:
    """Units that were announced, that processes have ended or lost, and those of them that failed."""

    planned: dict[str, None] = field(default_factory=dict)
    units: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def add(self, name: str, failed: bool) -> None:
        """Take note of a unit."""
        self.units.add(name)
        if failed:
            self.lost.add(name)


class _Process:
    """One worker and the files that it writes."""

    def __init__(self, job: Job, folder: Path, seen: _Seen, seconds: float) -> None:
        self.lines = folder / "lines"
        self.log = folder / "log"
        options = {**job.options, "stage": job.stage, "seconds": seconds, "lines": str(self.lines)}
        given = folder / "options"
        given.write_text(json.dumps({**options, "skip": list(seen.units), "lost": list(seen.lost)}))
        self.lines.touch()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", str(given)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **job.environment},
                cwd=Path(__file__).parents[2],
            )
        self._read = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """What it has said since it was last asked; a line that is not whole yet waits.

        Whatever else is in the file is said to be `garbage`.
        """
        with self.lines.open("rb") as file:
            file.seek(self._read)
            whole, found, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(found)
        return [_line(line) for line in whole.splitlines() if line]

    def kill(self) -> bool:
        """End it and whatever it has started, which shares its session; whether it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(BURIAL)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> str:
        """The end of what it printed."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 6000))
            return shortened(file.read().decode(errors="replace").strip())


def _line(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"garbage": repr(text[:200])}


def run(job: Job, record: Record) -> None:
    """Do a job, in as many processes as it takes; whatever goes wrong is taken down."""
    seen = _Seen()
    try:
        why = _run(job, record, seen)
    except Exception:  # noqa: BLE001  (no memory, no disk, no process: one stage's affair)
        why = "it could not be run"
        record.trouble(job.stage, shortened(traceback.format_exc()))
    record.not_run(job.stage, [name for name in seen.planned if name not in seen.units], why)


def _run(job: Job, record: Record, seen: _Seen) -> str:
    """The same; why there is nothing more to do."""
    record.stage(job.stage)
    deadline = time.monotonic() + job.seconds
    barren = 0
    while barren < BARREN:
        left = deadline - time.monotonic()
        if left <= 0 or stop.is_set():
            why = STOPPED if stop.is_set() else NO_TIME
            record.trouble(job.stage, why)
            return why
        with tempfile.TemporaryDirectory(
            prefix="gpu-worker-", ignore_cleanup_errors=True
        ) as folder:
            done = _follow(job, _Process(job, Path(folder), seen, left), record, seen, deadline)
        if done is None:
            return "its process did not come to it"
        barren = 0 if done else barren + 1
    why = f"given up: {BARREN} processes did nothing"
    record.trouble(job.stage, why)
    return why


def _follow(
    job: Job, worker: _Process, record: Record, seen: _Seen, deadline: float
) -> bool | None:
    """One worker from its start to its end.

    Returns:
        None if it said all that it had to, else whether it did or lost any unit.
    """
    current, late, advanced, finished = "", time.monotonic() + SILENCE, False, False
    why = ""
    try:
        while True:
            running = worker.process.poll() is None
            for line in worker.new_lines():
                late = time.monotonic() + SILENCE
                if "begin" in line:
                    current = line["begin"]
                    late = time.monotonic() + line["limit"] + GRACE
                elif "end" in line:
                    current, advanced = "", advanced or line["end"] not in seen.units
                    seen.add(line["end"], "failed" in line)
                    record.unit(
                        job.stage, line["end"], {k: v for k, v in line.items() if k != "end"}
                    )
                elif "plan" in line:
                    seen.planned.update(dict.fromkeys(line["plan"]))
                elif "finished" in line:
                    finished = True
                else:
                    record.trouble(job.stage, f"a line that is none: {line}"[:300])
            if finished or not running:
                break
            now = time.monotonic()
            if stop.is_set() or now > min(late, deadline + GRACE):
                why = LATE if now > late else NO_TIME
                break
            record.settle()
            time.sleep(_TICK)
    finally:
        gone = worker.kill()
    if not gone:
        record.trouble(job.stage, f"process {worker.process.pid} cannot be ended")
    if finished:
        return None
    code, tail = worker.process.returncode, worker.tail()
    if not why and "Timeout (" in tail:
        why = LATE  # what faulthandler says before it ends a process
    if not why:
        why = (
            "it left the device unusable" if code == POISONED else f"its process ended with {code}"
        )
    if current and why == NO_TIME:
        record.unit(job.stage, current, {"not run": "cut off when the time was over"})
        seen.add(current, False)
    elif current:
        kind = "late" if why == LATE else "died"
        record.unit(job.stage, current, {"failed": f"{why}\n{tail}", "kind": kind})
        seen.add(current, True)
    elif why != NO_TIME and not (advanced and code == POISONED):
        record.trouble(job.stage, f"{why}\n{tail}")
    return advanced or bool(current)
