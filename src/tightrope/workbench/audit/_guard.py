"""Run foreign code: catch what it raises, and abandon calls that do not return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
