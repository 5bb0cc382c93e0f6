"""Run foreign code: catch what it raises, and abandon calls that do not return."""

from __future__ import annotations

import io
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TypeVar

import torch

from tightrope._errors import bad_value

_T = TypeVar("_T")


class CallFailed(Exception):
    """The function raised an exception or returned an unusable value; the message states which."""


class Hangs(Exception):
    """The function did not return in time. It cannot be called again."""


class Guard:
    """A thread that makes the calls, so that a call that never returns can be abandoned.

    A thread cannot be killed: one that hangs remains as a daemon.

    Args:
        seconds: time limit of one call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._hung = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="tightrope-audit")
        self._thread.start()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        # A daemon thread that frees tensors while the interpreter shuts down aborts the process.
        if not self._hung:
            self._thread.join()

    def _serve(self) -> None:
        while (call := self._work.get()) is not None:
            try:
                self._done.put((True, call()))
            except BaseException as error:  # noqa: BLE001  # foreign code may raise even SystemExit
                self._done.put((False, error))

    def run(self, call: Callable[[], _T]) -> _T:
        """Make a call and return its value.

        Raises:
            CallFailed: the call raised an exception.
            Hangs: this call or an earlier one did not return in time.
        """
        if self._hung:
            raise Hangs
        self.calls += 1
        self._work.put(call)
        try:
            fine, value = self._done.get(timeout=self.seconds)
        except queue.Empty:
            self._hung = True
            raise Hangs(f"a call did not return in {self.seconds:g} s") from None
        if fine:
            return value  # type: ignore[no-any-return]
        raise CallFailed(describe_error(value)) from value


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_limits(timeout: float, device: str) -> None:
    """Refuse a time limit or a device that calls cannot be made with."""
    if not 0 < timeout < 1e6:
        raise bad_value(f"timeout must be positive and below 1e6 seconds but got {timeout}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise bad_value(
            f"device {device!r} must be available but torch raised {describe_error(error)}"
        ) from None


@contextmanager
def isolated(timeout: float) -> Iterator[Guard]:
    """Drop the output and warnings of foreign code, protect the random state, and yield a guard."""
    with (
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        Guard(timeout) as guard,
    ):
        warnings.simplefilter("ignore")
        yield guard
