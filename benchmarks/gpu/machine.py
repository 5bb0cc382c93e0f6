"""Where a run was, and what it ran."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_ASKED = (
    "name", "driver_version", "vbios_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu", "memory.total", "memory.used",
    "utilization.gpu", "persistence_mode", "mig.mode.current", "ecc.mode.current",
)  # fmt: skip

#: Sizes that are copied, in bytes.
COPIED = (1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 32)


def _said(*command: str, seconds: float = 15.0) -> str | None:
    """What a program prints; None if it fails, or is not heard of in time."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
    except OSError:
        return None
    try:
        said, _ = process.communicate(timeout=seconds)
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        # Waited for only so long: who asks a driver that hangs cannot be ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        if process.stdout is not None:
            process.stdout.close()
        return None
    return said.strip() if process.returncode == 0 else None


def gpu_now() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; nothing where there is none."""
    said = _said(
        "nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "-i", "0"
    )
    if said is None:
        return {}
    return dict(zip(_ASKED, (value.strip() for value in said.split(",")), strict=False))


def digest() -> str:
    """Of the sources that were measured, as a copy of them may have no commit."""
    whole = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")) + sorted(Path(__file__).parent.rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if "/peers/" not in relative:
            whole.update(relative.encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def commit() -> tuple[str, bool | None]:
    """The commit and whether it was changed; "unknown" where git cannot say."""
    name = _said("git", "rev-parse", "HEAD")
    if name is None:
        return "unknown", None
    changed = _said("git", "status", "--porcelain")
    return name, None if changed is None else bool(changed)


def facts(dry: bool, named_commit: str) -> dict[str, Any]:
    """What is known without torch being imported.

    Args:
        named_commit: of a copy that has none; empty to ask git.
    """
    name, changed = (named_commit, None) if named_commit else commit()
    return {
        "dry": dry,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "commit": name,
        "changed": changed,
        "sources": digest(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu before": gpu_now(),
    }


def versions() -> dict[str, Any]:
    """Of what is measured and of what it stands on; why one cannot be imported, in its place."""
    found: dict[str, Any] = {}
    for name in ("torch", "triton", "tightrope"):
        try:
            found[name] = __import__(name).__version__
        except Exception as reason:  # noqa: BLE001  (whatever an import does)
            found[name] = f"{type(reason).__name__}: {reason}"
    with contextlib.suppress(Exception):
        import torch

        found["cuda"] = torch.version.cuda
        from tightrope.backends.triton import blocks

        found["blocks"] = blocks.MEASURED_ON
    return found


def device_facts(dry: bool) -> dict[str, Any]:
    """What the device says of itself.

    Raises:
        AbsentError: there is none.
    """
    import torch

    from .voice import AbsentError

    if dry:
        return {"name": "Triton's interpreter"}
    if not torch.cuda.is_available():
        raise AbsentError("torch sees no GPU here; --dry-run needs none")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {"name": torch.cuda.get_device_name(), "devices": torch.cuda.device_count()}
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    for name in ("multi_processor_count", "L2_cache_size", "total_memory"):
        found[name] = getattr(properties, name, None)
    return found


def copy_bandwidth(device: Any) -> dict[str, float]:
    """GB/s read and written by copies of several sizes: the ceiling of all that moves memory."""
    import torch

    found = {}
    for size in (1 << 12,) if device.dry else COPIED:
        if 4 * size > device.free_bytes():
            continue
        # Random, as zeros may move faster.
        source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device.at)
        other = torch.empty_like(source)
        times = device.each(lambda a=source, b=other: b.copy_(a), 60.0)
        found[f"{size} bytes"] = round(2 * size / sorted(times)[len(times) // 2] / 1e6, 1)
    return found
