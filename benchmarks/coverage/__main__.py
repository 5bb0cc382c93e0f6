"""Measure the coverage of libraries: `python -m benchmarks.coverage --library diffusers`.

Two parts, stored in one JSON file and shown in one section of a page: every rotary function by
itself, and small models before and after `patch`. Nothing is downloaded. `--library others` measures all other
libraries that are installed or unpacked in a folder (`--folder`); packages that they only import have stand-ins.
With OMP_WAIT_POLICY=PASSIVE in the environment, a run on a busy machine is several times faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..pages import between_marks
from ..transformers_coverage.functions import SHAPES
from ..transformers_coverage.models import THREADS
from . import functions, models, report, stand_ins
from .catalogue import LIBRARIES, Library

FOLDER = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--library", choices=["diffusers", "others"], required=True)
    parser.add_argument("--folder", type=Path, help="a folder of unpacked packages")
    parser.add_argument("--functions", action="store_true", help="run only the functions")
    parser.add_argument("--models", action="store_true", help="run only the models")
    parser.add_argument("--only", default="", help="regular expression for names of models")
    parser.add_argument("--results", type=Path, help="the JSON file to update")
    parser.add_argument("--page", type=Path, default=PAGE, help="the Markdown page to update")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    if options.folder:
        sys.path.append(str(options.folder))
    path = options.results or FOLDER / f"coverage-{options.library}.json"
    held = json.loads(path.read_text("utf-8")) if path.exists() else []
    old: dict[str, dict[str, Any]] = {each["library"]: each for each in held}
    data = []
    for name, library in LIBRARIES.items():
        if (name == "diffusers") is (options.library == "diffusers"):
            data.append(measured(library, old.get(name, {}), options))
            path.write_text(json.dumps([*data], indent=1) + "\n", encoding="utf-8")
    between_marks(options.page, options.library, report.section(data))
    print(report.summary(data))


def measured(library: Library, data: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The results of one library: the old ones, with those parts that were run again."""
    logging.getLogger(library.name).setLevel(logging.ERROR)
    try:
        version = metadata.version(library.name)
    except metadata.PackageNotFoundError:
        return {"library": library.name, "version": library.absent}
    data = {**data, "library": library.name, "version": version, "torch": torch.__version__}
    data["threads"] = torch.get_num_threads()
    both = options.functions == options.models
    with stand_ins.installed(library.stand_ins.split()):
        if options.functions or both:
            data["functions"] = functions.run(library)
            data["shapes"] = SHAPES
        if options.models or both:
            held = {row["model"]: row for row in data.get("models", []) if options.only}
            held |= {row["model"]: row for row in models.rows(library, options.only)}
            data["models"] = [held[name] for name in sorted(held)]
    return data


if __name__ == "__main__":
    main()
