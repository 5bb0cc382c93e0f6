"""What can go wrong in a process, to be planted by the tests of the benchmark: `--fault UNIT=NAME`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


class PlantedError(RuntimeError):
    """A fault that was asked for."""


def _raise() -> None:
    raise PlantedError("planted")


def _exit() -> None:
    os._exit(3)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    while True:
        time.sleep(1)


def _memory() -> None:
    raise RuntimeError("CUDA out of memory: planted")


def _garbage() -> None:
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}").endswith("/lines"):
            os.write(int(name), b'\xff\x00{"end": \n[]\n')
    os.write(1, b"\xff\xfe\x00" * 100)
    os.kill(os.getpid(), signal.SIGKILL)


def _quit() -> None:
    raise SystemExit(0)


def _poison() -> None:
    os.environ["GPU_BENCHMARK_BROKEN"] = "1"
    raise PlantedError("planted: an illegal memory access was encountered")


#: By name.
FAULTS: dict[str, Callable[[], None]] = {
    "poison": _poison,
    "garbage": _garbage,
    "raise": _raise,
    "exit": _exit,
    "crash": _crash,
    "hang": _hang,
    "memory": _memory,
    "quit": _quit,
}
