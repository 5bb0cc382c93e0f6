"""The entry point of the `tightrope` command; it names the packages that are missing, if any."""

import sys
from importlib.util import find_spec

_NEEDS = ("typer", "rich")


def without(*missing: str) -> str:
    """Return one line that names missing packages and how to install them."""
    return (
        f"The tightrope command needs {', '.join(missing)}. Install with `python -m pip install "
        '"tightrope[cli]"`, or in a clone of the repository with '
        "`pip install --no-build-isolation '.[cli]'`."
    )


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
