"""`python -m tightrope`: the versions, backends and hardware here, for reports of bugs."""

import sys

from .environment import read_environment, rows


def main() -> int:
    """Print the environment, and how to get the command `tightrope`; return the exit code."""
    if sys.argv[1:]:
        sys.stderr.write("python -m tightrope takes no arguments; it prints the environment.\n")
        return 2
    sys.stdout.writelines(f"{name:20} {text}\n" for name, text in rows(read_environment()))
    sys.stdout.write("\nTools: pip install 'tightrope[tools]', then tightrope --help\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
