"""Versions, backends and hardware of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import __version__, backends, which
from .backends import cpu

__all__ = ["read_environment", "rows"]

#: Optional libraries whose versions are reported.
PACKAGES = (
    "transformers",
    "triton",
    "rotary-embedding-torch",
    "onnxruntime",
    "safetensors",
    "gguf",
    "matplotlib",
)


def read_environment() -> dict[str, Any]:
    """Return the versions, backends and hardware of this machine, and the date; no GPU is needed.

    Returns:
        By name, in types of JSON: ``backends`` has for each backend the reason why it cannot run here, or None if it
        can; ``runs`` is the backend of a float32 tensor on the CPU; ``instruction_sets`` are those that the kernel was
        built for and this processor has, best first; ``cores`` are those that this process may run on; ``threads``
        those that torch uses; ``packages`` has versions, or None for what is not installed; ``commit`` is
        `git describe` of the checkout with this file, None without one, or if git fails.

    >>> read_environment()["cores"] > 0
    True
    """
    runs, why_not_faster = which(torch.empty(1, 1, 1, 64))
    gpus, why_no_gpu = _gpus()
    return {
        "date": date.today().isoformat(),
        "tightrope": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "backends": backends.why_not(),
        "runs": runs,
        "why_not_faster": why_not_faster,
        "instruction_set": cpu.instruction_set(),
        "instruction_sets": cpu.instruction_sets(),
        "processor": _processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "why_no_gpu": why_no_gpu,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the result of :func:`read_environment` as pairs of a name and a text, for a report to read."""
    # The folder is not among the facts: files of results store them, and need no path of a machine.
    own, sets = found["instruction_set"], ", ".join(found["instruction_sets"])
    packages = found["packages"].items()
    pairs = {
        "tightrope": f"{found['tightrope']} in {Path(__file__).parent}",
        "torch": found["torch"],
        "python": f"{found['python']} on {found['system']}",
        "processor": f"{found['processor']}, {found['cores']} cores",
        "threads": f"{found['threads']} (torch's own pool)",
        "instruction set": f"{own} (this processor: {sets})"
        if own
        else "the native library is not loaded",
        "gpu": ", ".join(found["gpus"]) or f"none: {found['why_no_gpu']}",
    }
    for name, reason in found["backends"].items():
        pairs[f"backend {name}"] = "usable" if reason is None else f"not usable: {reason}"
    pairs |= {
        "runs on CPU tensors": found["runs"],
        "why not faster": found["why_not_faster"] or "",
        "found": ", ".join(f"{name} {version}" for name, version in packages if version) or "none",
        "not installed": ", ".join(name for name, version in packages if not version),
    }
    return [(name, text) for name, text in pairs.items() if text]


def _processor() -> str:
    """Return the model name of the processor, or its architecture if the name is unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
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
