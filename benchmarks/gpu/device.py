"""The device as the benchmark needs it: an NVIDIA GPU, or a stand-in without one for a dry run."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Device(Protocol):
    """What a benchmark asks of a device."""

    at: torch.device
    dry: bool

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    def broken(self) -> bool:
        """Whether nothing can be launched any more."""

    def cache_bytes(self) -> int:
        """Of the L2 cache."""

    def total_bytes(self) -> int:
        """Of memory, whoever has it."""

    def free_bytes(self) -> int:
        """Of memory."""

    def release(self) -> None:
        """Give back memory that nobody uses."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """A stream beside the usual one, on which a graph can be captured."""

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Record what work launches; the function that does it again."""

    def time(self, work: Callable[[], Any]) -> Callable[[], float]:
        """Launch work; the function that says how many milliseconds the device took for it."""

    def each(self, call: Callable[[], Any], milliseconds: float) -> list[float]:
        """Milliseconds of single calls, by `triton.testing.do_bench`."""


class Gpu:
    """The current CUDA device."""

    dry = False

    def __init__(self) -> None:
        self.at = torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream()
        self._spoilt = False

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        torch.cuda.synchronize()

    def broken(self) -> bool:
        """Whether nothing can be launched any more, as after an illegal access of memory.

        After a capture that failed the allocator may still serve it.
        """
        if self._spoilt:
            return True
        try:
            torch.zeros(1, device=self.at).add_(1).item()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        except RuntimeError:
            return True
        return False

    def cache_bytes(self) -> int:
        """Of the L2 cache."""
        return int(torch.cuda.get_device_properties(self.at).L2_cache_size)

    def total_bytes(self) -> int:
        """Of memory, whoever has it."""
        return int(torch.cuda.mem_get_info()[1])

    def free_bytes(self) -> int:
        """Of memory, with what this process has set aside and does not use."""
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0] + kept)

    def release(self) -> None:
        """Give back memory that nobody uses."""
        torch.cuda.empty_cache()

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """A stream beside the usual one."""
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Record what work launches; its results are kept as long as the graph, in memory of their own."""
        graph = torch.cuda.CUDAGraph()
        self._spoilt = True
        with torch.cuda.graph(graph, stream=self._side):
            results = work()
        self._spoilt = False

        def replay(_kept: Any = results) -> None:
            graph.replay()

        return replay

    def time(self, work: Callable[[], Any]) -> Callable[[], float]:
        """Launch work between two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return float(start.elapsed_time(end))

        return elapsed

    def each(self, call: Callable[[], Any], milliseconds: float) -> list[float]:
        """Milliseconds of single calls; the L2 cache is flushed before each."""
        from triton.testing import do_bench

        found: list[float] = do_bench(
            call, warmup=milliseconds / 4, rep=milliseconds, return_mode="all"
        )
        return found


class Dry:
    """No device: Triton's interpreter in place of the kernels, a clock in place of events."""

    dry = True
    at = torch.device("cpu")

    def __init__(self) -> None:
        interpret()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def broken(self) -> bool:
        """Whether a test says so."""
        return "GPU_BENCHMARK_BROKEN" in os.environ

    def cache_bytes(self) -> int:
        """So few that two sets are enough."""
        return 1

    def total_bytes(self) -> int:
        """So many that nothing is cut."""
        return 2**60

    def free_bytes(self) -> int:
        """So many that nothing is left out."""
        return 2**40

    def release(self) -> None:
        """Nothing is kept."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """There is one stream."""
        return contextlib.nullcontext()

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Recorded is the work itself, once it has been done."""
        work()

        def replay() -> None:
            work()

        return replay

    def time(self, work: Callable[[], Any]) -> Callable[[], float]:
        """What a clock says."""
        start = time.perf_counter()
        work()
        took = 1e3 * (time.perf_counter() - start)
        return lambda: took

    def each(self, call: Callable[[], Any], milliseconds: float) -> list[float]:  # noqa: ARG002
        """Two calls."""
        return [self.time(call)() for _ in range(2)]


_library: list[torch.library.Library] = []


def interpret() -> None:
    """The kernels under Triton's interpreter in place of the CPU's."""
    import triton.language  # noqa: F401  (its own functions must all be of one kind)

    with _interpreted():
        from tightrope.backends.triton import blocks, operators
        from tightrope.backends.triton.registration import OPERATORS

    # The interpreter runs programs one after the other.
    blocks.PROGRAMS = 1
    if not _library:
        _library.append(torch.library.Library("tightrope", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in OPERATORS.items():
                kernel = getattr(operators, function)
                _library[0].impl(name, kernel, "CPU", allow_override=True)


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def device(dry: bool) -> Device:
    """The device of a run."""
    return Dry() if dry else Gpu()
