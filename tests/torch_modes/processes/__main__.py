"""Run scenarios and print one line for each: `python -m tests.torch_modes.processes --processes 4`."""

import argparse
import os
import sys

from . import harness


def main() -> int:
    """Run the command; return the number of scenarios that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4))
    parser.add_argument("scenario", nargs="*", help="names; all by default")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = harness.run(options.processes, options.scenario)
    for name, error in outcomes.items():
        print(f"{name}: {error or 'ok'}")
    return sum(error is not None for error in outcomes.values())


if __name__ == "__main__":
    sys.exit(min(main(), 1))
