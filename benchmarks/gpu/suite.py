"""The tests of the Triton backend on the device: each a unit, in as many processes as are asked for."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from .voice import Voice

TESTS = Path(__file__).parents[2] / "tests"

#: Which of them; not those that compile for devices that are not there.
PATTERN, NOT = "test_triton*.py", ("test_triton_compile.py",)

#: Seconds that a test may take: most go through a dozen calls, each of which compiles a kernel.
LIMIT = 120.0


class Plugin:
    """Tells of each test as a unit, and leaves out what is done or another process does.

    Args:
        part, parts: which tests are this process's.
        only: names must contain this.
    """

    def __init__(self, voice: Voice, part: int, parts: int, only: str) -> None:
        self.voice = voice
        self.part, self.parts, self.only = part, parts, only
        self._texts: list[str] = []
        self._skipped = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out tests."""
        wanted = [item for item in items if self.only in item.name]
        mine = wanted[self.part :: self.parts]
        self.voice.plan(item.nodeid for item in mine)
        items[:] = [item for item in mine if item.nodeid not in self.voice.skip]

    def pytest_collectreport(self, report: Any) -> None:
        """A file was imported, or cannot be."""
        if report.failed:
            self.voice.end(report.nodeid, failed=report.longreprtext[-4000:], kind="raised")

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """A test begins, unless there is no time for it."""
        self._texts, self._skipped = [], ""
        if not self.voice.in_time(item.nodeid):
            return True
        self.voice.begin(item.nodeid, LIMIT)
        return None

    def pytest_runtest_call(self, item: Any) -> None:
        """Its function is about to be called."""
        self.voice.plant(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test was set up, called or torn down."""
        if report.failed:
            self._texts.append(f"{report.when}: {report.longreprtext}")
        elif report.skipped:
            self._skipped = str(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        if self._texts:
            text = "\n".join(self._texts)
            self.voice.end(nodeid, failed=text[-4000:], kind="raised")
        elif self._skipped:
            self.voice.end(nodeid, absent=self._skipped)
        else:
            self.voice.end(nodeid, result={})


def run(voice: Voice, part: int, parts: int, only: str) -> None:
    """Run this process's share of the tests."""
    arguments = sorted(str(path) for path in TESTS.glob(PATTERN) if path.name not in NOT)
    if importlib.util.find_spec("pytest") is None or not arguments:
        voice.say(end="all tests", absent="pytest is not installed, or tests/ is not here")
        return
    import pytest

    os.environ.pop("TRITON_INTERPRET", None)
    # A warning of a version of torch or Python that is new to the tests is no wrong result.
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", "-W", "default"]
    code = int(pytest.main([*options, *arguments], plugins=[Plugin(voice, part, parts, only)]))
    if code not in (0, 1, 5):
        # 0, 1 and 5: all passed, some failed, there were none.
        voice.say(end=f"pytest, process {part}", failed=f"it ended with {code}", kind="raised")
