"""Versions, backends and hardware of this machine."""

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

from . import __version__, backends, which
from .backends import cpu

__all__ = ["Environment", "read_environment"]

#: Optional libraries whose versions are reported.
PACKAGES = (
    "transformers",
    "triton",
    "rotary-embedding-torch",
    "onnxruntime",
    "jax",
    "safetensors",
    "gguf",
    "matplotlib",
)


@dataclass(frozen=True)
class Environment:
    """Versions, backends and hardware of this machine, and the date."""

    date: str
    tightrope: str
    commit: str | None
    """`git describe` of the checkout that holds the package; None outside one, or if git fails."""
    torch: str
    python: str
    system: str
    backends: dict[str, str | None]
    """For each backend the reason why it cannot run here, or None if it can."""
    runs: str
    """The backend for a float32 tensor on the CPU."""
    why_not_faster: str | None
    instruction_set: str | None
    instruction_sets: list[str]
    """Instruction sets that the kernel was built for and this processor has, best first."""
    processor: str
    cores: int
    """Number of cores that this process may run on."""
    threads: int
    """Number of threads that torch uses."""
    gpus: list[str]
    why_no_gpu: str | None
    packages: dict[str, str | None]
    """Versions of the libraries in `PACKAGES`; None if one is not installed."""

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as pairs of a name and a text, for a report to read."""
        # The folder is no field: files of results store the fields, and need no path of a machine.
        rows = [
            ("tightrope", f"{self.tightrope} in {Path(__file__).parent}"),
            ("torch", self.torch),
            ("python", f"{self.python} on {self.system}"),
            ("processor", f"{self.processor}, {self.cores} cores"),
            ("threads", f"{self.threads} (torch's own pool)"),
        ]
        sets = f"{self.instruction_set} (this processor: {', '.join(self.instruction_sets)})"
        missing = self.instruction_set is None
        rows.append(("instruction set", "the native library is not loaded" if missing else sets))
        rows.append(("gpu", ", ".join(self.gpus) or f"none: {self.why_no_gpu}"))
        rows += [
            (f"backend {name}", "usable" if reason is None else f"not usable: {reason}")
            for name, reason in self.backends.items()
        ]
        rows.append(("runs on CPU tensors", self.runs))
        if self.why_not_faster is not None:
            rows.append(("why not faster", self.why_not_faster))
        there = [f"{name} {version}" for name, version in self.packages.items() if version]
        lacks = [name for name, version in self.packages.items() if not version]
        rows.append(("found", ", ".join(there) or "none"))
        if lacks:
            rows.append(("not installed", ", ".join(lacks)))
        return rows


def read_environment() -> Environment:
    """Return the versions, backends and hardware of this machine; no GPU is needed."""
    runs, why_not_faster = which(torch.empty(1, 1, 1, 64))
    gpus, why_no_gpu = _gpus()
    return Environment(
        date=date.today().isoformat(),
        tightrope=__version__,
        commit=commit(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        backends=backends.why_not(),
        runs=runs,
        why_not_faster=why_not_faster,
        instruction_set=cpu.instruction_set(),
        instruction_sets=cpu.instruction_sets(),
        processor=processor(),
        cores=cores(),
        threads=torch.get_num_threads(),
        gpus=gpus,
        why_no_gpu=why_no_gpu,
        packages={name: _version(name) for name in PACKAGES},
    )


def processor() -> str:
    """Return the model name of the processor, or its architecture if the name is unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """Return `git describe --dirty` of the checkout with this file; None without one, or if git fails."""
    root = Path(__file__).parents[2]
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


def _gpus() -> tuple[list[str], str | None]:
    """Return the names of the GPUs, and why there is none."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_name(index) for index in range(count)], None
    if torch.version.cuda is None and torch.version.hip is None:
        return [], "this torch was built for the CPU alone"
    return [], "torch finds no GPU"
