"""What a run has found so far, on disk soon after every line."""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The same as JSON has it: what is no number, or of no type that JSON has, becomes text."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


class Record:
    """Results of stages by unit; changes are written at once, while that takes a tenth of the time.

    A unit is the least that can be lost: a case and a contender, a check, a test. What cannot be
    written where it was asked for goes to the folder of temporary files; nothing here raises for it.

    Args:
        path: the JSON file, written beside itself and renamed; None for none.
        facts: what the file says beside the stages.

    Attributes:
        written: the file that holds all of it; None where none does.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.written: Path | None = None
        self.data: dict[str, Any] = {"format": 3, **plain(facts), "stages": {}, "finished": False}
        self._lock = threading.RLock()
        self._changed = False
        self._due = 0.0
        self._flush()

    def stage(self, name: str) -> dict[str, Any]:
        """What a stage has found: `units` by name, and `troubles` of its processes."""
        with self._lock:
            found: dict[str, Any] = self.data["stages"].setdefault(
                name, {"units": {}, "troubles": []}
            )
            return found

    def unit(self, stage: str, name: str, result: dict[str, Any]) -> None:
        """Take down what became of a unit."""
        with self._lock:
            self.stage(stage)["units"][name] = plain(result)
            self._changed = True
            self.settle()

    def settle(self) -> None:
        """Write changes, unless the last were written just now."""
        with self._lock:
            if self._changed and time.monotonic() >= self._due:
                self._flush()

    def not_run(self, stage: str, names: Iterable[str], why: str) -> None:
        """Take down units that nobody came to."""
        with self._lock:
            units = self.stage(stage)["units"]
            units.update({name: {"not run": why} for name in names if name not in units})
            self._flush()

    def trouble(self, stage: str, text: str) -> None:
        """Take down what went wrong with a process, outside of any unit."""
        with self._lock:
            self.stage(stage)["troubles"].append(text)
            self._flush()

    def put(self, name: str, value: Any) -> None:
        """Take down something that is no stage."""
        with self._lock:
            self.data[name] = plain(value)
            self._flush()

    def _flush(self) -> None:
        if self.path is None:
            return
        start, self._changed = time.monotonic(), False
        refuge = Path(tempfile.gettempdir()) / f"{self.path.name}.{os.getpid()}.json"
        self.written = None
        for place in (self.path, refuge):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                new = place.with_name(place.name + ".new")
                new.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
                os.replace(new, place)
            except OSError as error:
                self.data.setdefault("unwritten", {})[str(place)] = str(error)
            else:
                self.written = place
                break
        ended = time.monotonic()
        self._due = ended + 9 * (ended - start)
