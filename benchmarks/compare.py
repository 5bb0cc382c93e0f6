"""Two results beside each other: `python -m benchmarks.compare OLD.json NEW.json`.

Compares the ratios to the floors (`neg_`, `clone`), which hold across machines and days, and never
seconds. A case is marked where the ranges of the two do not touch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .report import span

FLOORS = ("neg_", "clone")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    old, new = (
        {r["case"]["name"]: r["ratios"] for r in json.loads(path.read_text())["results"]}
        for path in (options.old, options.new)
    )
    for name in old:
        for floor in FLOORS:
            a, b = old[name].get(floor), new.get(name, {}).get(floor)
            if a is None or b is None:
                continue
            mark = "slower" if b[0] > a[-1] else "faster" if b[-1] < a[0] else ""
            print(f"{name:32} / {floor:6} {span(a):>12} -> {span(b):>12}  {mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
