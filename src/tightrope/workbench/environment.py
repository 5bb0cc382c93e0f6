"""What is installed on this machine and which backend would run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__, backends, which
from ..backends import cpu

#: Libraries whose versions matter to a rotation, or that `tightrope bench` compares with.
PACKAGES = (
    "transformers", "triton", "rotary-embedding-torch", "onnxruntime", "jax", "safetensors", "gguf",
    "typer", "rich", "matplotlib",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """Versions, backends, hardware and the day: what every command and result says of a machine."""

    date: str
    tightrope: str
    commit: str | None
    """The commit that the package is imported from; None where that is no checkout of it."""
    torch: str
    python: str
    system: str
    backends: dict[str, str | None]
    """Name of each backend, with the reason why it cannot run here (None: it can)."""
    runs: str
    """The backend that a float32 tensor on the CPU gets."""
    why_not_faster: str | None
    instruction_set: str | None
    instruction_sets: list[str]
    """What this processor has that the kernel was built for, best first."""
    processor: str
    cores: int
    """How many cores this process may run on."""
    threads: int
    """How many of them torch uses."""
    gpus: list[str]
    why_no_gpu: str | None
    packages: dict[str, str | None]
    """Versions of libraries that matter, None where one is not installed."""
    installed_at: str


def read_environment() -> Environment:
    """Look at this machine; nothing is initialised on a device that is not there."""
    runs, why_not_faster = which(torch.empty(1, 1, 1, 64))
    return Environment(
        date=date.today().isoformat(),
        tightrope=__version__,
        commit=_commit(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        backends=dict(backends()),
        runs=runs,
        why_not_faster=why_not_faster,
        instruction_set=cpu.instruction_set(),
        instruction_sets=cpu.instruction_sets(),
        processor=processor(),
        cores=cores(),
        threads=torch.get_num_threads(),
        gpus=_gpus(),
        why_no_gpu=_why_no_gpu(),
        packages={name: _version(name) for name in PACKAGES},
        installed_at=str(Path(__file__).parents[1]),
    )


def processor() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """What git says of the checkout that this file is in, `-dirty` if it was changed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _why_no_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built for the CPU alone"
    return "torch finds no GPU"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
