"""Entry point of the `tightrope` command, before any heavy import.

It is a module outside the package because importing any part of tightrope imports torch, which takes
seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def main() -> int:
    """Run the command line and return its exit code."""
    if sys.argv[1:] == ["--version"]:
        # On failure fall through to the full command line, which reports the error.
        with suppress(OSError, PackageNotFoundError):
            os.write(1, f"tightrope {version('tightrope')}\n".encode())
            return 0
    # A process that was started with Ctrl-C ignored keeps ignoring it.
    handles_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, _leave)
    from tightrope_tools.cli import main

    if handles_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _leave(*_: object) -> None:
    """Exit at once on Ctrl-C: no work has begun, and C code may swallow an exception."""
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(130)
