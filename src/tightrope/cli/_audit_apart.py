"""The other process of `tightrope audit`: it may crash without taking the command with it."""

import json
import sys
from pathlib import Path

from ..workbench.place import write_whole
from .audit import here


def main() -> None:
    """Reads the work from standard input and writes the report to the file named as argument."""
    out = Path(sys.argv[1])
    target, options = json.load(sys.stdin)
    try:
        saved = here(target, options).to_dict()
    except (ValueError, TypeError) as error:
        saved = {"wrong use": str(error)}
    write_whole(out, json.dumps(saved).encode())
