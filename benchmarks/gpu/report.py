"""Tables for the documentation from a committed run: `python -m benchmarks.gpu.report RESULTS.json`.

With `--page docs/gpu.md` they replace what stands between the two marks there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import machine
from .summary import conclude
from .table import markdown

BEGIN, END = "<!-- results of a GPU -->", "<!-- end of the results of a GPU -->"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, help="file whose marked tables are replaced")
    options = parser.parse_args(arguments)
    data = json.loads(options.results.read_text())
    if data["machine"]["dry"]:
        print(f"{options.results} is of a dry run, whose times mean nothing", file=sys.stderr)
        return 2
    if data["machine"]["sources"] != machine.digest():
        print("note: the sources have changed since they were measured", file=sys.stderr)
    # Worked out anew, as a run that was cut off has no summary.
    data["summary"] = conclude(data)
    text = markdown(data)
    if options.page is None:
        print(text)
        return 0
    page = options.page.read_text()
    if BEGIN not in page or END not in page:
        print(f"{options.page} has no marks {BEGIN} … {END}", file=sys.stderr)
        return 2
    before, rest = page.split(BEGIN, 1)
    options.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
