"""Measure the coverage of libraries by `patch`: `python -m benchmarks.coverage --library transformers`.

Two parts, stored in a file for each library and shown on one page: every rotary function by itself, and small
models before and after `patch`. Both run unless one is selected. Nothing is downloaded. `--library others` measures
all libraries but transformers and diffusers that are installed or unpacked in a folder (`--folder`); packages that
they only import have stand-ins. Without `--library`, only the page is written.
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..pages import between_marks, with_marks
from . import functions, models, report, stand_ins
from .catalogue import LIBRARIES, Library

RESULTS = Path(__file__).resolve().parents[1] / "results" / "coverage"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
BIG = ("transformers", "diffusers")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--library", choices=[*LIBRARIES, "others"])
    parser.add_argument("--folder", type=Path, help="a folder of unpacked packages")
    parser.add_argument("--functions", action="store_true", help="run only the functions")
    parser.add_argument("--models", action="store_true", help="run only the models")
    parser.add_argument("--only", default="", help="regular expression for files or models")
    parser.add_argument("--missing", action="store_true", help="skip models that the file has")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of JSON files")
    parser.add_argument(
        "--page", type=with_marks("coverage"), default=PAGE, help="the Markdown page to update"
    )
    options = parser.parse_args(arguments)
    if options.folder:
        sys.path.append(str(options.folder))
    for name, library in LIBRARIES.items():
        if options.library in (name, *([] if name in BIG else ["others"])):
            measure(library, options)
    every = [report.read(options.results / f"{name}.json") for name in LIBRARIES]
    data = [each for each in every if each]
    between_marks(options.page, "coverage", report.page(data))
    print("\n".join(map(report.summary, data)))


def measure(library: Library, options: argparse.Namespace) -> None:
    """Measure a library, and write its file after each model, so that a run can continue with `--missing`."""
    path: Path = options.results / f"{library.name}.json"
    data = report.read(path)
    models.quiet(library)
    try:
        version = metadata.version(library.name)
    except metadata.PackageNotFoundError:
        # Results of an earlier run stay.
        return report.write(path, data or {"library": library.name, "version": library.absent})
    data |= {"library": library.name, "version": version, "torch": torch.__version__}
    data |= {"threads": torch.get_num_threads()}
    both = options.functions == options.models
    if options.functions or both:
        with stand_ins.installed(library.stand_ins.split()):
            new = functions.run(library, options.only)
        data["functions"] = merged(data.get("functions", []), new, "file")
        report.write(path, data)
    if options.models or both:
        known = {row["model"] for row in data.get("models", []) if options.missing}
        with stand_ins.installed(library.stand_ins.split()):
            for row in models.run(library, options.only, known):
                data["models"] = merged(data.get("models", []), [row], "model")
                report.write(path, data)
    return report.write(path, data)


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the new rows, and the old rows whose key no new row has, sorted."""
    renewed = {row[key] for row in new}
    return sorted([row for row in old if row[key] not in renewed] + new, key=lambda row: row[key])


if __name__ == "__main__":
    main()
