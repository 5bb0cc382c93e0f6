"""What is installed on this machine and which backend would run."""

import platform
from dataclasses import dataclass

import torch

from .. import __version__, backends, which
from ..backends import cpu


@dataclass(frozen=True)
class Environment:
    """Versions, backends and hardware, as `tightrope info` and the demo report them."""

    tightrope: str
    torch: str
    python: str
    system: str
    backends: dict[str, str | None]
    """Name of each backend, with the reason why it cannot run here (None: it can)."""
    runs: str
    """The backend that a float32 tensor on the CPU gets."""
    why_not_faster: str | None
    instruction_set: str | None
    threads: int
    gpus: list[str]


def read_environment() -> Environment:
    """Look at this machine; nothing is initialised on a device that is not there."""
    runs, why_not_faster = which(torch.empty(1, 1, 1, 64))
    return Environment(
        tightrope=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        backends=dict(backends()),
        runs=runs,
        why_not_faster=why_not_faster,
        instruction_set=cpu.instruction_set(),
        threads=torch.get_num_threads(),
        gpus=_gpus(),
    )


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
