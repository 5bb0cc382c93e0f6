"""Measure the rows of libraries again: `python -m tests.coverage --library transformers`.

`--library others` measures all libraries but transformers and diffusers that are installed, or unpacked in a folder of
`PYTHONPATH`; packages that they only import have stand-ins. `--library configs` compares the configurations of
transformers' types with its small models, whose rows must be there. Nothing is downloaded. Each run writes the rows, and
from all rows docs/coverage.md and docs/config-coverage.md; without `--library`, only the pages.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from importlib import metadata

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
        old, first = rows.read("configs"), header("transformers")
        types = [row["model"] for row in rows.read("transformers") if row.get("calls")]
        with rows.loadable(TRANSFORMERS):
            replace("configs", [first], old, types, configs.row, options.only)
    pages.write()


def header(name: str) -> rows.Row:
    """The first row: with what a library was measured."""
    return {"library": name, "version": metadata.version(name), "torch": torch.__version__}


def measure(library: Library, only: str) -> None:
    """Measure a library; the rows of one that is not there stay."""
    try:
        first = header(library.name)
    except metadata.PackageNotFoundError:
        return
    old = rows.read(library.name)
    with rows.loadable(library):
        functions = rows.of_functions(library, only)
        again = {row["file"] for row in functions}
        functions += [row for row in old if "function" in row and row["file"] not in again]
        functions.sort(key=lambda row: row["file"])
        measured = functools.partial(rows.of_model, library)
        replace(library.name, [first, *functions], old, [*library.models], measured, only)


def replace(
    file: str,
    begin: list[rows.Row],
    old: list[rows.Row],
    names: list[str],
    measured: Callable[[str], rows.Row],
    only: str,
) -> None:
    """Write the rows of models, new ones for names that match; after each, as a run may end early."""
    from tqdm import tqdm

    found = {row["model"]: row for row in old if "model" in row}

    def save() -> None:
        rows.write(file, [*begin, *(found[name] for name in names if name in found)])

    save()
    for name in tqdm([n for n in names if re.search(only, n)], file=sys.stderr, mininterval=5):
        found[name] = measured(name)
        save()


if __name__ == "__main__":
    main()
