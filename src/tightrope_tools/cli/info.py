"""Show versions, usable backends, why a faster one is unavailable, and the hardware.

Exit codes: 0 success, 1 the required backend is not usable, 2 invalid arguments.

Examples:

  tightrope info --json
  tightrope info --require cpu || echo 'plain torch runs'
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ._output import FINDING, Mistake, show_json, show_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--require", metavar="BACKEND", help="exit with code 1 if this backend cannot run here")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import tightrope
    from tightrope.environment import read_environment, rows

    found = read_environment()
    require = options.require
    if require is not None and require not in found["backends"]:
        raise Mistake(
            f"--require must be one of {', '.join(found['backends'])} but got {require!r}."
        )
    if options.json:
        installed = str(Path(tightrope.__file__).parent)
        show_json({**found, "installed_at": installed})
    else:
        show_table(rows(found))
    return FINDING if require is not None and found["backends"][require] is not None else 0
