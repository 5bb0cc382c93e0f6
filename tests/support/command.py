"""Run a command: its main function in this process, or Python in a new process."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch


def call(
    main: Callable[[], int], *arguments: object, width: int | str = 80
) -> tuple[int, str, str]:
    """Run a command with some arguments; return its exit code, output and error stream."""
    output, error = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["command", *map(str, arguments)]),
        patch.dict("os.environ", COLUMNS=str(width)),
        redirect_stdout(output),
        redirect_stderr(error),
    ):
        code = main()
    return code, output.getvalue(), error.getvalue()


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process with these additional environment variables."""
    command = [sys.executable, *arguments]
    more = os.environ | environment
    return subprocess.run(command, env=more, capture_output=True, text=True, check=False)
