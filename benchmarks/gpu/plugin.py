"""The pytest plugin of the GPU benchmark: each test is a unit, with a result file of its own.

A unit's file has the outcome "running" from its start, so a process that dies leaves the name of its
unit. pytest-xdist then starts another worker, which continues with the next unit.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

#: Environment variable with the options of the workers.
VARIABLE = "TIGHTROPE_GPU_BENCHMARK"


@dataclass(frozen=True)
class Options:
    """Options of the workers of a phase.

    Attributes:
        results: the folder of the units' result files.
        deadline: time, by `time.time`, after which no unit is started.
        limit: time limit of a unit in seconds.
        dry: tiny sizes, and Triton's interpreter on the CPU.
        only, against: regular expressions for units and for contenders.
        mixed: whether to interleave the units of several files, so that no file comes last.
    """

    results: str = ""
    deadline: float = math.inf
    limit: float = 120.0
    dry: bool = False
    only: str = ""
    against: str = ""
    mixed: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment variable that passes the options to the workers."""
        return {VARIABLE: json.dumps(asdict(self))}


OPTIONS = Options(**json.loads(os.environ.get(VARIABLE, "{}")))


def write(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(data, indent=1))
    os.replace(partial, path)


def read_units(folder: Path) -> list[dict[str, Any]]:
    """Return all units in the planned order, with an outcome for each.

    Outcomes: passed, failed, skipped, crashed, hung, and "no time" for those not started. A unit
    that is still running counts as crashed.
    """
    planned: dict[str, None] = {}
    for path in sorted(folder.glob("plan-*.json"), key=lambda path: path.stat().st_mtime):
        planned.update(dict.fromkeys(json.loads(path.read_text())))
    return [
        _read(folder, name) or {"unit": name, "outcome": "no time", "result": {}}
        for name in planned
    ]


def _file(folder: Path, name: str, suffix: str, prefix: str = "") -> Path:
    return folder / f"{prefix}{hashlib.sha256(name.encode()).hexdigest()[:20]}{suffix}"


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the result of a unit, or None if it was not started.

    If the unit's process died, the outcome is "hung" or "crashed", and the note is the trace.
    """
    path = _file(folder, name, ".json")
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    if found["outcome"] == "running":
        trace = path.with_suffix(".trace").read_text()
        found["outcome"] = "hung" if trace.startswith("Timeout") else "crashed"
        found["note"] = trace[:4000]
    return found


class Units:
    """The pytest hooks of one worker."""

    def __init__(self, options: Options) -> None:
        self.options, self.folder = options, Path(options.results)
        self.unit: dict[str, Any] = {}
        self._started = 0.0
        self._trace: TextIO

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose the units, and record the plan."""
        chosen = [item for item in items if re.search(self.options.only, item.nodeid)]
        if self.options.mixed:
            count = {item.path: 0 for item in chosen}
            place = {}
            for item in chosen:
                place[item] = count[item.path]
                count[item.path] += 1
            chosen.sort(key=lambda item: place[item] / count[item.path])
        items[:] = chosen
        names = [item.nodeid for item in items]
        write(_file(self.folder, str(names), ".json", "plan-"), names)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Start a unit, unless the deadline has passed."""
        self.unit = {"unit": item.nodeid, "outcome": "no time", "note": "", "result": {}}
        params = getattr(getattr(item, "callspec", None), "params", {})
        self.unit |= {name: one.name for name, one in params.items() if hasattr(one, "name")}
        self._started = time.time()
        left = self.options.deadline - self._started
        if left > 0:
            self.unit["outcome"] = "running"
            self._trace = _file(self.folder, item.nodeid, ".trace").open("w")
            faulthandler.enable(self._trace)
            faulthandler.dump_traceback_later(
                min(self.options.limit, left + 10), exit=True, file=self._trace
            )
        self._write()
        return None if left > 0 else True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        """Record the outcome of a unit's set-up, call or tear-down."""
        report = yield
        if report.failed:
            self.unit["outcome"] = "failed"
            self.unit["note"] += f"{report.when}: {report.longreprtext[-4000:]}"
        elif report.skipped and self.unit["outcome"] == "running":
            self.unit |= {"outcome": "skipped", "note": str(report.longrepr[-1])}
        broken = self._broken(report.when == "teardown")
        if broken:
            self.unit["outcome"] = "failed"
            self.unit["note"] += f"\nthe device is unusable: {broken}"
        if report.when == "teardown" or broken:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
            self._trace.close()
            if self.unit["outcome"] == "running":
                self.unit["outcome"] = "passed"
            self._write()
        if broken:
            # All further work of this process on the device would fail as well.
            os._exit(3)
        return report

    def _broken(self, last: bool) -> str | None:
        """Wait for the device, and return why it is unusable, or None."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        try:
            torch.cuda.synchronize()
            if last:
                gc.collect()
                torch.cuda.empty_cache()  # other workers need the memory
        except RuntimeError as error:
            return str(error)
        return None

    def _write(self) -> None:
        self.unit["seconds"] = round(time.time() - self._started, 3)
        write(_file(self.folder, self.unit["unit"], ".json"), self.unit)


def pytest_configure(config: Any) -> None:
    """Register the hooks in a worker, or in pytest without workers; the controller runs no unit."""
    if OPTIONS.results and (hasattr(config, "workerinput") or not config.getoption("numprocesses")):
        config.pluginmanager.register(Units(OPTIONS), "units")


@pytest.fixture
def record(request: Any) -> dict[str, Any]:
    """Return a dict for the measurements of a unit; they are kept even if it fails."""
    units = request.config.pluginmanager.get_plugin("units")
    found: dict[str, Any] = units.unit["result"] if units else {}
    return found


@pytest.fixture
def device() -> Iterator[str]:
    """Yield the type of the units' device: in a dry run the CPU, with interpreted kernels."""
    from tests.support.triton.cases import DEVICE, kernels_in_place

    with kernels_in_place():
        yield DEVICE.type
