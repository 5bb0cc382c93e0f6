"""Measure the rows of libraries again: `python -m tests.coverage --library transformers`.

`--library others` measures all libraries but transformers and diffusers that are installed, or unpacked in a folder of
`PYTHONPATH`; packages that they only import have stand-ins. `--library configs` compares the configurations of
transformers' types with its small models, whose rows must be there. Nothing is downloaded. Each run writes the rows, and
from all rows docs/coverage.md and docs/config-coverage.md; without `--library`, only the pages.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata
from typing import Any

import torch

from . import configs, pages, rows
from .libraries import LIBRARIES, TRANSFORMERS, Library

BIG = ("transformers", "diffusers")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=__doc__)
    parser.add_argument("--library", choices=[*LIBRARIES, "others", "configs"])
    parser.add_argument("--only", default="", help="regular expression for files or models")
    options = parser.parse_args(arguments)
    for name, library in LIBRARIES.items():
        if options.library in (name, *([] if name in BIG else ["others"])):
            measure(library, options.only)
    if options.library == "configs":
        with rows.loadable(TRANSFORMERS):
            types = [row["model"] for row in rows.read("transformers") if row.get("calls")]
            kept = rows.read("configs")
            new = {name: configs.row(name) for name in progress(types, options.only)}
            rows.write("configs", [header("transformers"), *merged(types, kept, new)])
    pages.write()


def progress(names: list[str], only: str) -> Any:
    """The names that match, with a bar."""
    from tqdm import tqdm

    return tqdm([name for name in names if re.search(only, name)], file=sys.stderr, mininterval=5)


def header(name: str) -> rows.Row:
    """The first row: with what a library was measured."""
    return {"library": name, "version": metadata.version(name), "torch": torch.__version__}


def merged(names: list[str], old: list[rows.Row], new: dict[str, rows.Row]) -> list[rows.Row]:
    """The row of each model: a new one, or else the old one."""
    found = {row["model"]: row for row in old if "model" in row} | new
    return [found[name] for name in names if name in found]


def measure(library: Library, only: str) -> None:
    """Measure a library, and write its rows; of one that is not there, they stay."""
    try:
        first = header(library.name)
    except metadata.PackageNotFoundError:
        return
    old = rows.read(library.name)
    with rows.loadable(library):
        functions = rows.of_functions(library, only)
        again = {row["file"] for row in functions}
        functions += [row for row in old if "function" in row and row["file"] not in again]
        models = {name: rows.of_model(library, name) for name in progress([*library.models], only)}
    functions.sort(key=lambda row: row["file"])
    rows.write(library.name, [first, *functions, *merged([*library.models], old, models)])


if __name__ == "__main__":
    main()
