"""The entry point of the `tightrope` command; it names the packages that are missing, if any."""

import sys
from importlib.util import find_spec

from ._missing import without

_NEEDS = ("typer", "rich")


def main() -> int:
    """Run the command line and return its exit code."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"{without(*missing)}\n")
        return 2
    try:
        from .app import run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130
