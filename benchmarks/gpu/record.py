"""What a run has found so far, on disk after every line."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any


class Record:
    """Results of stages by unit; each change is written before the next is taken.

    A unit is the least that can be lost: a case and a contender, a check, a test.

    Args:
        path: the JSON file, written beside itself and renamed; None for none.
        facts: what the file says beside the stages.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"format": 2, **facts, "stages": {}, "finished": False}
        self._lock = threading.Lock()
        self._flush()

    def stage(self, name: str) -> dict[str, Any]:
        """What a stage has found: `units` by name, and `troubles` of its processes."""
        found: dict[str, Any] = self.data["stages"].setdefault(name, {"units": {}, "troubles": []})
        return found

    def unit(self, stage: str, name: str, result: dict[str, Any]) -> None:
        """Take down what became of a unit."""
        with self._lock:
            self.stage(stage)["units"][name] = result
            self._flush()

    def note(self, stage: str, name: str, found: dict[str, Any]) -> None:
        """Take down what is known of a group of units."""
        with self._lock:
            self.stage(stage).setdefault("notes", {})[name] = found
            self._flush()

    def trouble(self, stage: str, text: str) -> None:
        """Take down what went wrong with a process, outside of any unit."""
        with self._lock:
            self.stage(stage)["troubles"].append(text)
            self._flush()

    def put(self, name: str, value: Any) -> None:
        """Take down something that is no stage."""
        with self._lock:
            self.data[name] = value
            self._flush()

    def _flush(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)
