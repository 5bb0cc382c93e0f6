"""Run every model of a library before and after `patch`.

The status of a row is:

- equal: no bit of any output or gradient changes, in float32 and, unless the row states why not, in
  bfloat16; this library served calls of the rotary functions, of transformers those of the model's file; a fault
  of one per cent in the replacements is detected; `unpatch` restores the model;
- close: the same, but the model multiplies complex numbers, whose last bit may differ, and does in its outputs or
  gradients;
- different: more changes, `unpatch` did not restore the model, or two runs of the original differ;
- not exercised: the model ran, but did not test the replacement, for the given reason;
- not built: no small model could be built or run, for the given reason;
- does not rotate: the model ran no rotary function, and no code of its modules can reach one, or none
  computes a cosine to rotate by. For example a vision tower whose text model, in the same file, rotates.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Container, Iterator
from typing import Any

from . import building, stand_ins, transformers
from .catalogue import LIBRARIES, TRANSFORMERS, Library, catalogued, mentions, table, used_names

# Time limit of one model in seconds.
SECONDS = 600


def row(library: Library, name: str) -> dict[str, Any]:
    """The row of one model; errors become its reason."""
    file = catalogued(library)[name]
    out: dict[str, Any] = {"model": name, "file": file}
    if frozen := table(library).get(name, {}).get("frozen"):
        out["frozen"] = frozen
    if library.base and not mentions(library, file):
        return {**out, "status": "does not rotate", "reason": "its file does not rotate"}
    try:
        if library is TRANSFORMERS:
            subject, before = transformers.prepare(name)
        else:
            subject, before = building.prepare(library, name, file)
    except Exception as error:  # noqa: BLE001 - recorded as the reason; the run continues
        return {**out, "status": "not built", "reason": sentence(error)}
    calls = subject.counted(before)
    if not calls:
        if reason := why_none(library, subject.model):
            return {**out, "status": "does not rotate", "reason": reason}
        return {**out, "status": "not exercised", "reason": "no rotary function ran"}
    out["calls"] = sum(calls.values())
    try:
        return out | {k: v for k, v in subject.row(before).items() if v not in ("", [], {})}
    except Exception as error:  # noqa: BLE001 - an error of `patch` or of the patched model
        return {**out, "status": "different", "reason": sentence(error)}


def why_none(library: Library, model: Any) -> str:
    """The reason why a model in which no rotary function ran cannot rotate; empty if it might."""
    names = used_names(model)
    if not any(re.search(library.rotary, name) for name in names):
        return "no method of its modules reaches a rotary function"
    if not names & {"cos", "polar"}:
        return "no method of its modules computes a cosine to rotate by"
    return ""


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    # Some messages have a title first and the cause in the last line.
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    return re.sub(r" \(/[^)]*\)", "", f"{type(error).__name__}: {text[:200]}")


def quiet(library: Library) -> None:
    """Silence the warnings of a library."""
    warnings.simplefilter("ignore")
    logging.getLogger(library.name).setLevel(logging.ERROR)


def work(pipe: Any, name: str, path: list[str]) -> None:
    """The loop of a worker process: receive names of models, send rows."""
    sys.path[:] = path
    library = LIBRARIES[name]
    quiet(library)
    with stand_ins.installed(library.stand_ins.split()):
        while (model := pipe.recv()) is not None:
            pipe.send(row(library, model))


class Worker:
    """A process that runs the models of a library; it is started on demand and killed at the time limit."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.process: Any = None

    def ask(self, name: str) -> dict[str, Any]:
        """Return the row of a model, made in the process.

        If the process ends or exceeds the time limit, the row is "not built", with the reason.
        """
        if self.process is None:
            # Threads that wait actively take a busy machine's cores from each other.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            given = other, self.library.name, sys.path
            self.process = context.Process(target=work, args=given, daemon=True)
            self.process.start()
            other.close()
        self.pipe.send(name)
        reason = f"took longer than {SECONDS} s"
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
        except EOFError:
            self.process.join()
            reason = f"the process ended with exit code {self.process.exitcode}"
        self.stop()
        file = catalogued(self.library)[name]
        return {"model": name, "file": file, "status": "not built", "reason": reason}

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def run(library: Library, only: str = "", without: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the row of each model whose name matches `only`, except those in `without`.

    A crash of a model does not stop the run.
    """
    from tqdm import tqdm

    worker = Worker(library)
    chosen = [name for name in catalogued(library) if re.search(only, name) and name not in without]
    try:
        for name in tqdm(chosen, file=sys.stderr, mininterval=5, unit="model"):
            yield worker.ask(name)
    finally:
        worker.stop()
