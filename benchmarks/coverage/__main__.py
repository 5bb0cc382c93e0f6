"""Measure the coverage of a library: `python -m benchmarks.coverage --library diffusers`.

Two parts, stored in one JSON file and shown in one section of a page: every rotary function by
itself, and every model class before and after `patch`. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..pages import between_marks
from . import functions, models, report
from .catalogue import LIBRARIES

FOLDER = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--library", choices=sorted(LIBRARIES), required=True)
    parser.add_argument("--functions", action="store_true", help="run only the functions")
    parser.add_argument("--models", action="store_true", help="run only the models")
    parser.add_argument("--only", default="", help="regular expression for names of models")
    parser.add_argument("--results", type=Path, help="the JSON file to update")
    parser.add_argument("--page", type=Path, default=PAGE, help="the Markdown page to update")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger(options.library).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    library = LIBRARIES[options.library]
    path = options.results or FOLDER / f"coverage-{library.name}.json"
    data: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    versions = {"version": metadata.version(library.name), "torch": torch.__version__}
    data |= {"library": library.name, **versions}
    both = options.functions == options.models
    if options.functions or both:
        data["functions"] = functions.run(library)
    if options.models or both:
        held = {row["model"]: row for row in data.get("models", []) if options.only}
        held |= {row["model"]: row for row in models.rows(library, options.only)}
        data["models"] = [held[name] for name in sorted(held)]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    between_marks(options.page, library.name, report.section(data))
    print(report.summary(data))


if __name__ == "__main__":
    main()
