"""`python -m tightrope_tools` is the same as the `tightrope` command."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
