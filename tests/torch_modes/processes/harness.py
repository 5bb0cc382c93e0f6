"""Start processes once, run every scenario in each of them, and collect the outcomes."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

#: The modules that define scenarios.
MODULES = ("llama", "context", "training", "sharded")

# A process that waits longer than this for another one fails.
PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Group:
    """The processes that run a scenario together, as one of them sees it.

    Attributes:
        rank, size: the number of this process, and the number of processes.
        folder: an empty folder that all of them can read and write.
    """

    rank: int
    size: int
    folder: Path

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All processes in one dimension."""
        return init_device_mesh("cpu", (self.size,))


SCENARIOS: dict[str, Callable[[Group], None]] = {}


def scenario(function: Callable[[Group], None]) -> Callable[[Group], None]:
    """Register a function as a scenario; it raises an error if a comparison fails."""
    SCENARIOS[function.__name__] = function
    return function


def run(size: int, chosen: Sequence[str] = ()) -> dict[str, str | None]:
    """Run scenarios on new processes, which keep their ranks.

    Args:
        size: the number of processes.
        chosen: names of scenarios; if empty, all.

    Returns:
        For each scenario None, or the errors of all processes in which it failed.
    """
    context = multiprocessing.get_context("spawn")
    started, outcomes = context.Value("i", 0), {}
    with (
        tempfile.TemporaryDirectory() as place,
        context.Pool(size, _start, (started,)) as pool,
    ):
        for name in chosen or pool.apply(_names):
            # A process blocks until all have begun, so each attempts a scenario once.
            each = pool.starmap_async(_attempt, [(name, size, Path(place))] * size, 1)
            try:
                errors = filter(None, each.get(4 * PATIENCE.total_seconds()))
            except multiprocessing.TimeoutError:
                return outcomes | {name: "did not end"}
            outcomes[name] = "\n".join(errors) or None
    return outcomes


# The rank of this process.
_ranks: list[int] = []


def _start(started: Any) -> None:
    with started.get_lock():
        _ranks.append(started.value)
        started.value += 1
    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")


def _names() -> list[str]:
    return list(SCENARIOS)


def _attempt(name: str, size: int, place: Path) -> str | None:
    """Run a scenario in a process group of its own; return the error.

    A process that fails closes its group. Processes that wait for it then fail at once, and the
    next scenario starts with new connections.
    """
    (rank,), folder = _ranks, place / name
    folder.mkdir(exist_ok=True)
    try:
        store = dist.FileStore(str(place / f"{name} store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
        torch.manual_seed(0)
        SCENARIOS[name](Group(rank, size, folder))
        dist.barrier()  # no process closes its connections while another one still reads
    except Exception:  # noqa: BLE001  (the parent process reports it)
        return f"rank {rank}: {traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return None
