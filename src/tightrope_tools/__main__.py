"""`python -m tightrope_tools.cli` is the same as the `tightrope` command."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
