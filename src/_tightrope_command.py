"""The `tightrope` command, before anything heavy is imported.

It stands beside the package because importing any part of tightrope imports torch, which takes seconds.
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
        # What fails here is worded by the command line itself.
        with suppress(OSError, PackageNotFoundError):
            os.write(1, f"tightrope {version('tightrope')}\n".encode())
            return 0
    # A process that was started with Ctrl-C ignored goes on ignoring it.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    from tightrope.cli import main

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _leave(*_: object) -> None:
    """End at once on Ctrl-C: nothing has begun, and an exception may get lost in C code."""
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(130)
