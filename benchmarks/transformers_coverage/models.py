"""Run every model type of transformers before and after `patch`.

`python -m benchmarks.transformers_coverage --models --only '^llama'` runs the types that match.
The status of a row is:

- equal: no bit of any output or gradient changes, in float32 and, unless the row states why not, in
  bfloat16; this library served calls of the rotary functions of the model's file; a fault of one
  per cent in these functions is detected;
- different: a bit changes, `unpatch` did not restore the model, or two runs of the original differ;
- not exercised: the model ran, but did not test the replacement, for the given reason;
- not built: no small model of the type could be built or run, for the given reason;
- does not rotate: the model ran no rotary function, and no code of its modules can reach one, or none
  computes a cosine to rotate by. For example a vision tower whose text model, in the same file, rotates.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Container, Iterator
from typing import Any

from .catalogue import ModelType, catalogue

# Threads that torch computes on.
THREADS = 2
# Time limit of one model in seconds.
SECONDS = 200


def blank(model_type: ModelType) -> dict[str, Any]:
    """A row before the run."""
    return {
        "model_type": model_type.name,
        "file": model_type.file,
        "status": "not built",
        "reason": "",
        "model": "",
        "bfloat16": "",
        "replaced": [],
        "left": [],
    }


def row(model_type: ModelType) -> dict[str, Any]:
    """The row of one type; errors become its reason."""
    from .trial import trial

    out = blank(model_type)
    try:
        out.update(trial(model_type))
    except Exception as error:  # noqa: BLE001 - recorded as the reason; the run continues
        out["reason"] = sentence(error)
    return out


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    # Some messages have a title first and the cause in the last line.
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    return re.sub(r" \(/[^)]*\)", "", f"{type(error).__name__}: {text[:200]}")


def work(pipe: Any) -> None:
    """The loop of a worker process: receive names of types, send rows."""
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    types = {t.name: t for t in catalogue()}
    while (name := pipe.recv()) is not None:
        pipe.send(row(types[name]))


class Worker:
    """A process that runs models; it is started on demand and killed at the time limit."""

    def __init__(self) -> None:
        self.process: Any = None

    def ask(self, model_type: ModelType) -> dict[str, Any]:
        """Return the result row of a model type, made in the process.

        If the process ends or exceeds the time limit, the row is blank except for the reason.
        """
        if self.process is None:
            # Threads that wait actively take a busy machine's cores from each other.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
            reason = f"the process ended with exit code {self.process.exitcode}"
        self.stop()
        return {**blank(model_type), "reason": reason}

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def rows(types: list[ModelType]) -> Iterator[dict[str, Any]]:
    """Yield a row for each type, with a progress bar; a crash of a model does not stop the run."""
    from tqdm import tqdm

    worker = Worker()
    try:
        for model_type in tqdm(types, file=sys.stderr, mininterval=5):
            yield worker.ask(model_type)
    finally:
        worker.stop()


def run(only: str = "", without: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a result row for each model type whose name matches `only`, except those in `without`."""
    return rows([t for t in catalogue() if re.search(only, t.name) and t.name not in without])
