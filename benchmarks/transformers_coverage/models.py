"""Every model type of transformers, before and after `patch`: `python -m benchmarks.transformers_coverage.models`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from .catalogue import ModelType, catalogue

SECONDS = 40


def row(model_type: ModelType) -> dict[str, Any]:
    """What became of one type; never raises."""
    out: dict[str, Any] = {
        "model_type": model_type.name,
        "file": model_type.file,
        "status": "not built",
        "reason": "",
        "model": "",
        "max_doutput": None,
        "max_rel_dgrad": None,
        "replaced": [],
        "left": [],
    }
    from .trial import trial

    try:
        out.update(trial(model_type))
    except Exception as error:  # noqa: BLE001 - it is the row's reason; the run goes on
        out["reason"] = sentence(error)
        out["trace"] = traceback.format_exc()
    return out


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def work(pipe: Any) -> None:
    """A worker: takes names of types, gives rows."""
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    types = {t.name: t for t in catalogue()}
    while (name := pipe.recv()) is not None:
        pipe.send(row(types[name]))


class Worker:
    """A process that can be lost: started when asked, ended when it takes too long."""

    def __init__(self) -> None:
        self.process: Any = None

    def ask(self, model_type: ModelType) -> dict[str, Any]:
        """The row of a type, or a row that says how the process ended."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(target=work, args=(other,), daemon=True)
            self.process.start()
            other.close()
        self.pipe.send(model_type.name)
        reason = f"took longer than {SECONDS} s"
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
        except EOFError:
            self.process.join()
            reason = f"the process ended with {self.process.exitcode}"
        self.stop()
        return {
            "model_type": model_type.name, "file": model_type.file, "status": "not built",
            "reason": reason, "model": "", "max_doutput": None, "max_rel_dgrad": None,
            "replaced": [], "left": [],
        }  # fmt: skip

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def main(arguments: list[str] | None = None) -> None:
    """Rows into a JSON file, one per type; types that it holds already are not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="a regular expression that a type's name must match"
    )
    parser.add_argument("--out", type=Path, default=Path("transformers-models.json"))
    parser.add_argument(
        "--again", action="store_true", help="run types that the file holds already"
    )
    parser.add_argument(
        "--seconds", type=float, default=500, help="stop after so long; go on later"
    )
    options = parser.parse_args(arguments)
    rows = (
        {r["model_type"]: r for r in json.loads(options.out.read_text())}
        if options.out.exists()
        else {}
    )
    todo = [
        t for t in catalogue()
        if re.search(options.only, t.name) and (options.again or t.name not in rows)
    ]  # fmt: skip
    worker, end = Worker(), time.monotonic() + options.seconds
    from tqdm import tqdm

    for model_type in tqdm(todo, file=sys.stderr, mininterval=5):
        if time.monotonic() > end:
            break
        rows[model_type.name] = worker.ask(model_type)
        options.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    worker.stop()


if __name__ == "__main__":
    main()
