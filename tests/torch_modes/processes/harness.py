"""Start processes once, run every scenario in each of them, and collect the outcomes."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

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

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensors of all processes, concatenated in the order of ranks."""
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.detach().contiguous())
        return torch.cat(parts, dim)


SCENARIOS: dict[str, Callable[[Group], None]] = {}


def scenario(function: Callable[[Group], None]) -> Callable[[Group], None]:
    """Register a function as a scenario; it raises an error if a comparison fails."""
    SCENARIOS[function.__name__] = function
    return function


def run(size: int, chosen: Sequence[str] = (), seconds: float = 300.0) -> dict[str, str | None]:
    """Run scenarios on new processes.

    Args:
        size: the number of processes.
        chosen: names of scenarios; if empty, all.
        seconds: the time after which processes are killed.

    Returns:
        For each scenario None, or the errors of all processes in which it failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        workers = [
            context.Process(target=_work, args=(rank, size, folder, chosen), daemon=True)
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        end = time.monotonic() + seconds
        while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
            if any(worker.exitcode for worker in workers):
                break  # the others would wait for it
            time.sleep(0.05)
        for worker in workers:
            worker.kill()
            worker.join()
        return _outcomes([_written(folder, rank) for rank in range(size)])


def _written(folder: Path, rank: int) -> dict[str, str | None]:
    """Read the outcomes of one process."""
    path = folder / f"outcomes-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(map(json.loads, lines)) or {"start": "did not start"}


def _outcomes(written: list[dict[str, str | None]]) -> dict[str, str | None]:
    """Merge the outcomes of all processes."""
    found: dict[str, str | None] = {}
    for name in dict.fromkeys(name for outcomes in written for name in outcomes):
        errors = [
            f"rank {rank}: {error}"
            for rank, outcomes in enumerate(written)
            if (error := outcomes.get(name))
        ]
        found[name] = "\n".join(errors) or None
    return found


def _work(rank: int, size: int, folder: Path, chosen: Sequence[str]) -> None:
    """Run scenarios in one process and write an outcome after each."""
    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    names = chosen or list(SCENARIOS)
    store = dist.FileStore(str(folder / "store"), size)
    with (folder / f"outcomes-{rank}").open("w") as file:
        # These outcomes stay if this process ends too early.
        file.writelines(json.dumps([name, "did not end"]) + "\n" for name in names)
        for name in names:
            file.flush()
            own = folder / name
            own.mkdir(exist_ok=True)
            error = _attempt(name, dist.PrefixStore(name, store), Group(rank, size, own))
            file.write(json.dumps([name, error]) + "\n")


def _attempt(name: str, store: dist.Store, group: Group) -> str | None:
    """Run a scenario in a process group of its own.

    A process that fails closes its group. Processes that wait for it then fail at once, and the
    next scenario starts with new connections.
    """
    try:
        dist.init_process_group(
            "gloo", store=store, rank=group.rank, world_size=group.size, timeout=PATIENCE
        )
        torch.manual_seed(0)
        SCENARIOS[name](group)
        dist.barrier()  # no process closes its connections while another one still reads
    except Exception:  # noqa: BLE001  (the parent process reports it)
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return None
