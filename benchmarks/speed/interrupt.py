"""Ctrl-C as a flag that loops check between steps, so that no step is half recorded."""

import signal
from types import FrameType, TracebackType


class Interrupt:
    """Context in which the first Ctrl-C sets `requested`; the next raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)
