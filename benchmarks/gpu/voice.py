"""What a worker says of its units, a line of JSON each, and how it keeps one unit from harming the next."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from .faults import FAULTS
from .record import plain

#: The exit status of a worker whose device no longer answers: whoever comes next must be a new process.
POISONED = 70

#: Longer texts of failures are cut in the middle: their ends say most.
LONGEST = 6000

T = TypeVar("T")


class AbsentError(Exception):
    """Why somebody or something cannot take part."""


class MissingError(AbsentError):
    """The same where it could, were it there."""


def shortened(text: str) -> str:
    """Both ends of a long text."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 4]}\n[…]\n{text[-3 * LONGEST // 4 :]}"


class Voice:
    """The units of a worker.

    Args:
        path: the file that lines are appended to.
        skip: units that are done, or have failed.
        lost: those of them that have failed.
        ends: when no unit is begun any more, by `time.monotonic`.
        broken: says whether the device is past use; asked after each failure.
        faults: what to do in place of a unit, by the text that its name must contain (see `faults`).
    """

    def __init__(
        self,
        path: Path,
        skip: Collection[str] = (),
        lost: Collection[str] = (),
        ends: float = float("inf"),
        broken: Callable[[], bool] = lambda: False,
        faults: dict[str, str] | None = None,
    ) -> None:
        self._file = path.open("a", buffering=1)
        self.skip = set(skip)
        self.lost = set(lost)
        self.ends = ends
        self.broken = broken
        self.faults = faults or {}

    def say(self, **line: Any) -> None:
        """A line; it is in the file when this returns."""
        self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def plan(self, names: Iterable[str]) -> None:
        """Announce units: those that are never come to are named as such."""
        self.say(plan=list(names))

    def begin(self, name: str, limit: float) -> None:
        """A unit begins. If it hangs, its traceback goes to stderr and the process ends."""
        self.say(begin=name, limit=limit)
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.stderr)

    def plant(self, name: str) -> None:
        """Have the fault that was asked for at a unit, if any was."""
        for part, fault in self.faults.items():
            if part in name:
                FAULTS[fault]()

    def in_time(self, name: str) -> bool:
        """Whether a unit can still begin; if not, this is said."""
        if time.monotonic() <= self.ends:
            return True
        self.say(end=name, **{"not run": "no time was left"})
        return False

    def end(self, name: str, **line: Any) -> None:
        """A unit has ended; if it failed and took the device with it, so does the process."""
        faulthandler.cancel_dump_traceback_later()
        self.say(end=name, **line)
        if "failed" in line:
            faulthandler.dump_traceback_later(30, exit=True, file=sys.stderr)
            broken = self.broken()
            faulthandler.cancel_dump_traceback_later()
            if broken:
                # A fault of the device stays with its process, and atexit would wait for the device.
                os._exit(POISONED)

    def unit(
        self,
        name: str,
        limit: float,
        work: Callable[[], T],
        result: Callable[[T], dict[str, Any]] | None = None,
        again: bool = False,
    ) -> T | None:
        """Do a unit, whatever it does.

        Args:
            limit: seconds that it may take.
            work: what it is; :class:`AbsentError` says that it does not apply.
            result: what is said of what it returns; that itself, if None.
            again: whether to do it even if another process has, as its result is needed here.

        Returns:
            What `work` does; None if it failed, is skipped, or no time is left.
        """
        if name in self.lost or (name in self.skip and not again):
            return None
        if not self.in_time(name):
            return None
        start = time.monotonic()
        try:
            self.begin(name, limit)
            self.plant(name)
            found = work()
            said: Any = found if result is None else result(found)
        except AbsentError as reason:
            self.end(name, absent=str(reason), missing=isinstance(reason, MissingError))
            return None
        except BaseException:  # noqa: BLE001  (whatever a unit raises is its own affair)
            self.end(name, failed=shortened(traceback.format_exc()), kind="raised")
            return None
        self.end(name, seconds=round(time.monotonic() - start, 3), result=said)
        return found

    def finish(self) -> None:
        """All units are done."""
        self.say(finished=True)
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
