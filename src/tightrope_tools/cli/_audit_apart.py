"""The child process of `tightrope audit`: if it crashes, the command survives."""

import json
import signal
import sys
from pathlib import Path

from ..place import write_whole
from .audit import here


def main() -> None:
    """Read target and options from standard input; write report or error to the file `argv[1]`."""
    # On Ctrl-C this process ends without a traceback: the parent reports the interruption.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = Path(sys.argv[1])
    target, options = json.load(sys.stdin)
    try:
        saved = here(target, options).to_dict()
    except (ValueError, TypeError) as error:
        saved = {"invalid arguments": str(error)}
    write_whole(out, json.dumps(saved).encode())


if __name__ == "__main__":
    main()
