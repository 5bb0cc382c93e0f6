"""Every model type of transformers, before and after `patch`.

`python -m benchmarks.transformers_coverage --models --only '^llama'` runs some. A row says one of:

- equal: outputs and gradients keep the bounds of `comparing.py`, calls of its own file's rotary functions
  were served by this library, and a fault of one per cent in them would have been noticed;
- different: they do not keep the bounds, or the model is not the same as before after `unpatch`;
- not exercised: it ran, but nothing was tried by it: the reason says why;
- not built: no small model of it was made or run, and why.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import traceback
import warnings
from collections.abc import Container, Iterator
from typing import Any

from .catalogue import ModelType, catalogue

# What one model may take; the slowest takes a tenth of it on one core.
SECONDS = 40


def blank(model_type: ModelType) -> dict[str, Any]:
    """A row before anything was tried."""
    return {
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


def row(model_type: ModelType, trace: bool = False) -> dict[str, Any]:
    """What became of one type; never raises."""
    from .trial import trial

    out = blank(model_type)
    try:
        out.update(trial(model_type))
    except Exception as error:  # noqa: BLE001 - it is the row's reason; the run goes on
        out["reason"] = sentence(error)
        if trace:
            out["trace"] = traceback.format_exc()
    return out


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    # Some put what is wrong in the last line, under a title.
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:200]}"


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
        return {**blank(model_type), "reason": reason}

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def rows(types: list[ModelType]) -> Iterator[dict[str, Any]]:
    """A row for each type, with a progress bar; nothing that a model does stops it."""
    from tqdm import tqdm

    worker = Worker()
    try:
        for model_type in tqdm(types, file=sys.stderr, mininterval=5):
            yield worker.ask(model_type)
    finally:
        worker.stop()


def run(only: str = "", without: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of all types whose name the regular expression finds something in, but for some."""
    return rows([t for t in catalogue() if re.search(only, t.name) and t.name not in without])
