"""Processes that take turns: each measures one case per request, so that medians are interleaved."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Child:
    """A process that runs ``python -m module --serve arguments`` and answers lines with JSON."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", module, "--serve", *arguments]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=os.environ | environment, **pipes)

    def ask(self, line: str) -> Any:
        """Return the answer to one line."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process must have pipes")
        print(line, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    def end(self) -> None:
        """Stop the process."""
        self._process.terminate()


def serve(answer: Callable[[str], Any]) -> None:
    """Answer every line of standard input."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


def ratios(
    children: Sequence[Child], line: str, seconds: float, most: int, runs: int = 3
) -> list[float]:
    """Median answer of the second child divided by that of the first, for each run, sorted."""
    slowest = max(child.ask(line) for child in children)
    rounds = max(1, min(most, int(seconds / (len(children) * slowest))))
    found = []
    for _ in range(runs):
        answers = [[child.ask(line) for child in children] for _ in range(rounds)]
        first, second = (statistics.median(column) for column in zip(*answers, strict=True))
        found.append(round(second / first, 3))
    return sorted(found)
