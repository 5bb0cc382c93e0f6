"""Entry point of the `tightrope` command, before any heavy import."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

#: The packages of the extra `tools`.
NEEDS = ("typer", "rich", "matplotlib", "safetensors")


def main() -> int:
    """Run the command line and return its exit code."""
    if sys.argv[1:] == ["--version"]:
        # On failure fall through to the full command line, which reports the error.
        with suppress(OSError, PackageNotFoundError):
            os.write(1, f"tightrope {version('tightrope')}\n".encode())
            return 0
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The tightrope command needs {', '.join(missing)}. Install with `python -m pip install "
            '"tightrope[tools]"`, or in a clone of the repository with '
            "`pip install --no-build-isolation '.[tools]'`.\n"
        )
        return 2
    # A process that was started with Ctrl-C ignored keeps ignoring it.
    handles_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, _leave)
    try:
        from .cli.app import run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130


def begin() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from here on: torch is imported, and work begins."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    """Exit at once on Ctrl-C: no work has begun, and C code may swallow an exception."""
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(130)
