"""Run a command: its main function in this process, or Python in a new process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import tightrope


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


def python(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, in a folder, with this library and these additional environment variables.

    It joins no parallel run of the tests that this process is a worker of.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = str(Path(tightrope.__file__).resolve().parents[1]), own.get("PYTHONPATH")
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)


def interrupted(
    script: str, *arguments: str, at: str, sent: int = signal.SIGINT, **environment: str
) -> tuple[int, str]:
    """Run a script in a new process and send it Ctrl-C, or another signal, when it has printed a line.

    Args:
        at: the beginning of that line.

    Returns:
        Its exit code, and what it printed after that line, to the error stream included.
    """
    # Processes started in the background by a shell inherit an ignored SIGINT.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with subprocess.Popen(
        [sys.executable, "-c", heard + script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(at):
            assert process.poll() is None
        os.killpg(process.pid, sent)
        rest, _ = process.communicate(timeout=30)
    return process.returncode, rest
