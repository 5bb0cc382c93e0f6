"""Measure the coverage of transformers: `python -m benchmarks.transformers_coverage`.

Two parts, stored in one JSON file and shown on one page: every rotary function by itself, and every
model type before and after `patch`. Both run unless one is selected. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from . import functions, models, report

FOLDER = Path(__file__).resolve().parents[1] / "results"
RESULTS = FOLDER / "transformers-coverage.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers-coverage.md"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transformers_coverage", description=__doc__
    )
    parser.add_argument("--functions", action="store_true", help="run only the functions")
    parser.add_argument("--models", action="store_true", help="run only the models")
    parser.add_argument("--only", default="", help="regular expression for folders or model types")
    parser.add_argument("--missing", action="store_true", help="skip types that the file has")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to update")
    parser.add_argument("--page", type=Path, default=PAGE, help="the Markdown page to write")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path: Path = options.results
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    both = options.functions == options.models
    import transformers

    torch.set_num_threads(models.THREADS)
    data |= {"transformers": transformers.__version__, "torch": torch.__version__}
    data |= {"threads": torch.get_num_threads()}
    if options.functions or both:
        data["functions"] = merged(data.get("functions", []), functions.run(options.only), "file")
        data["shapes"] = functions.SHAPES
        write(data, path)
    if options.models or both:
        held = {row["model_type"] for row in data.get("models", []) if options.missing}
        # Written after each model, so that an interrupted run can continue with --missing.
        for row in models.run(options.only, held):
            data["models"] = merged(data.get("models", []), [row], "model_type")
            write(data, path)
    write(data, path)
    options.page.write_text(report.page(data), encoding="utf-8")
    print(report.summary(data))


def write(data: dict[str, Any], path: Path) -> None:
    """Write the results to their file."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the new rows, and the old rows whose key no new row has, sorted."""
    renewed = {row[key] for row in new}
    return sorted(
        [row for row in old if row[key] not in renewed] + new,
        key=lambda row: (row[key], row.get("function", "")),
    )


if __name__ == "__main__":
    main()
