"""Execute what Triton's own launcher launches: kernels that are compiled for a GPU, on tensors of the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.compiler import CompiledKernel

from tests.emulator.driver import Driver
from tests.emulator.machine import Grid, Program
from tests.emulator.memory import runs_of
from tests.emulator.parse import Fault, parse

LAUNCH_FAILED = 719


def execute(
    program: Program,
    size: Sequence[int],
    values: Sequence[bytes],
    shared: int,
    tensors: Sequence[tuple[int, torch.Tensor]],
    seed: int | None = None,
) -> Grid:
    """Run a kernel, which may access the elements of the given tensors alone; return the grid at its end.

    Args:
        tensors: pairs of an address and its tensor.
        program, size, values, shared, seed: see :class:`Grid`.
    """
    runs = [runs_of(at, x.shape, x.stride(), x.element_size()) for at, x in tensors]
    grid = Grid(program, size, values, shared, runs, seed)
    grid.run()
    return grid


class Emulator(Driver):
    """A driver that executes the launches, on the tensors whose addresses were asked for.

    Attributes:
        launches: number of launches.
        executed: number of executed instructions; see :class:`Grid`.
        opcodes: all opcodes of the kernels that were launched.
        fault: the error of the last launch, if it had one.
        seen: called with each grid after its launch.
    """

    def __init__(self, folder: Path, seed: int | None = None) -> None:
        super().__init__(folder)
        self.seed = seed
        self.launches = self.executed = 0
        self.opcodes: set[str] = set()
        self.fault: Exception | None = None
        self.seen: Callable[[Grid], object] = lambda _: None
        self._programs: dict[int, Program] = {}
        # Also those of launches that are prepared together; so many are never asked for at once.
        self._asked: deque[tuple[int, torch.Tensor]] = deque(maxlen=200)

    @contextlib.contextmanager
    def using(self, device: int | None) -> Iterator[None]:  # noqa: ARG002
        """There is one device, and tensors say that they are on none."""
        yield

    def note(self, address_of: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
        """Return a function in the place of ``torch.Tensor.data_ptr``."""

        def data_ptr(x: torch.Tensor) -> int:
            address = address_of(x)
            if address and type(x) in (torch.Tensor, torch.nn.Parameter):
                self._asked.append((address, x.detach()))
            return address

        return data_ptr

    def forget(self) -> None:
        """Read the PTX of all kernels again."""
        self._programs.clear()

    def launch(self, config: Any, function: int, parameters: Any, device: int) -> int:  # noqa: ARG002
        # An error must not pass through the launcher, which is C.
        try:
            self._execute(config, function, parameters)
        except Exception as error:  # noqa: BLE001
            self.fault = error
            return LAUNCH_FAILED
        return 0

    def _execute(self, config: Any, function: int, parameters: Any) -> None:
        program = self._programs.get(function)
        if program is None:
            program = self._programs[function] = Program(parse(ptx_of(function)))
            self.opcodes |= {one.opcode for one in program.kernel.code}
        kernel = program.kernel
        if list(config.block) != [kernel.threads, 1, 1]:
            raise Fault(f"{kernel.name} needs {kernel.threads} threads, not {list(config.block)}")
        values = [
            ctypes.string_at(parameters[i], size) for i, (_, size) in enumerate(kernel.parameters)
        ]
        given = {int.from_bytes(value, "little") for value in values}
        tensors = [(address, x) for address, x in list(self._asked) if address in given]
        seed = None if self.seed is None else self.seed + self.launches
        grid = execute(program, list(config.grid), values, config.shared, tensors, seed)
        self.launches += 1
        self.executed += grid.executed
        self.seen(grid)


def ptx_of(function: int) -> str:
    """Return the PTX of a loaded kernel."""
    from tightrope.backends.triton import launch

    loaded = list(launch.compiled.values())
    for kernel in (loaded, (x for x in gc.get_objects() if isinstance(x, CompiledKernel))):
        for one in kernel:
            if one.function == function:
                ptx: str = one.asm["ptx"]
                return ptx
    raise Fault("an unknown kernel is launched")


def attach(capability: tuple[int, int], seed: int | None = None) -> Emulator:
    """Let this process execute kernels that are compiled for a capability, until it ends."""
    from tightrope.backends.triton import launch, phases, rotation, slots, sums

    folder = tempfile.TemporaryDirectory(prefix="driver")
    emulator = Emulator(Path(folder.name), seed)
    emulator.kept = folder  # type: ignore[attr-defined]
    with mock.patch.object(torch.cuda, "is_available"):
        emulator.pretend(capability)
    torch.Tensor.data_ptr = emulator.note(torch.Tensor.data_ptr)  # type: ignore[method-assign]
    real = launch.launcher

    def launcher(
        kernel: Any, grid: Any, values: Any, aligned: Any, blocks: Any, device: Any
    ) -> Callable[..., None]:
        run = real(kernel, grid, values, aligned, blocks, torch.device("cuda", 0))

        def raising(*arguments: Any) -> None:
            try:
                run(*arguments)
            except RuntimeError:
                fault, emulator.fault = emulator.fault, None
                if fault is None:
                    raise
                raise fault from None

        return raising

    for module in (rotation, sums, phases, slots):
        module.launcher = launcher
    return emulator
