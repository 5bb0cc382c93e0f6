"""The tests of the Triton backend on the device: each a unit, in as many processes as are asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .voice import Voice

TESTS = Path(__file__).parents[2] / "tests"
FILES = ("test_triton.py", "test_triton_backend.py")

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
        mine = [
            item
            for item in items
            if self.only in item.name
        ]
        mine = [item for i, item in enumerate(mine) if i % self.parts == self.part]
        items[:] = [item for item in mine if item.nodeid not in self.voice.skip]

    def pytest_collectreport(self, report: Any) -> None:
        """A file was imported, or cannot be."""
        if report.failed:
            self.voice.end(report.nodeid, failed=report.longreprtext[-4000:], kind="raised")

    def pytest_runtest_protocol(self, item: Any) -> None:
        """A test begins."""
        self._texts, self._skipped = [], ""
        self.voice.begin(item.nodeid, LIMIT)

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


def run(voice: Voice, part: int, parts: int, only: str, files: list[str]) -> None:
    """Run this process's share of the tests."""
    import pytest

    os.environ.pop("TRITON_INTERPRET", None)
    arguments = [str(TESTS / name) for name in files or FILES]
    # A warning of a version of torch or Python that is new to the tests is no wrong result.
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", "-W", "default"]
    pytest.main([*options, *arguments], plugins=[Plugin(voice, part, parts, only)])
