"""Tables for the documentation from a run: `python -m benchmarks.gpu --report RESULTS.json`.

With `--page docs/gpu.md` they replace what stands between the two marks there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import machine
from .summary import conclude
from .table import markdown

BEGIN, END = "<!-- results of a GPU -->", "<!-- end of the results of a GPU -->"


def report(results: Path, page: Path | None = None) -> int:
    """Print the tables of a run, or put them into a page; the exit status."""
    try:
        data = json.loads(results.read_text())
        data["machine"]["dry"], data["stages"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{results} is no result of this benchmark: {error!r}", file=sys.stderr)
        return 2
    if data["machine"]["dry"] and page is not None:
        print(f"{results} is of a dry run, whose times mean nothing", file=sys.stderr)
        return 2
    if data["machine"].get("sources") != machine.digest():
        print("note: the sources have changed since they were measured", file=sys.stderr)
    # Worked out anew, as a run that was cut off has no summary.
    data["summary"] = conclude(data)
    text = markdown(data)
    if page is None:
        print(text)
        return 0
    old = page.read_text()
    if BEGIN not in old or END not in old:
        print(f"{page} has no marks {BEGIN} … {END}", file=sys.stderr)
        return 2
    before, rest = old.split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")
    return 0
