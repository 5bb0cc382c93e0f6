"""`python -m tightrope`: the versions, backends and hardware here, for reports of bugs."""

import sys
from importlib.util import find_spec

from .environment import read_environment

TOOLS = ("matplotlib", "safetensors")


def main() -> int:
    """Print the environment, and how to get the command `tightrope`; return the exit code."""
    if sys.argv[1:]:
        sys.stderr.write("python -m tightrope takes no arguments; it prints the environment.\n")
        return 2
    rows = read_environment().rows()
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {text}" for name, text in rows]
    missing = [name for name in TOOLS if find_spec(name) is None]
    lines.append("")
    if missing:
        lines.append(
            "The command `tightrope` (inspect, audit, convert, detect) needs more packages: "
            "pip install 'tightrope[tools]'"
        )
    else:
        lines.append("Tools: tightrope --help")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
