"""The child process of `tightrope audit`: if it crashes, the command survives."""

import json
import sys
from pathlib import Path

from ..place import write_whole
from .audit import here


def main() -> None:
    """Read target and options from standard input; write report or error to the file `argv[1]`."""
    out = Path(sys.argv[1])
    target, options = json.load(sys.stdin)
    try:
        saved = here(target, options).to_dict()
    except (ValueError, TypeError) as error:
        saved = {"invalid arguments": str(error)}
    write_whole(out, json.dumps(saved).encode())
