"""Checks of a wheel for Linux. Each function returns the faults that it finds, in words."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

LIBRARY = "tightrope/_native.so"
# The newest symbol versions of manylinux_2_28, see PEP 600.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Torch comes with the user's environment and is loaded before the library, which has no path to it.
TORCH = "libtorch_cpu.so"
# In every system of manylinux_2_28, besides the loader.
LIBRARIES = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
PROCESSORS = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
REQUIRED = {
    *(LIBRARY, "tightrope/__init__.py", "tightrope/py.typed"),
    *("tightrope_tools/command.py", "tightrope_tools/py.typed"),
    *(
        f"tightrope/config/{name}.json"
        for name in ("diffusers", "families", "formats", "gguf", "keys", "timm")
    ),
}


def of_names(names: list[str]) -> list[str]:
    """Check the files of a wheel."""
    faults = [f"{name} is missing" for name in sorted(REQUIRED.difference(names))]
    metadata = r"tightrope-[^/]+\.dist-info/(METADATA|RECORD|WHEEL|\w+\.txt|licenses/LICENSE)"
    allowed = re.compile(rf"tightrope(_tools)?/([a-z0-9_]+/)*[a-z0-9_]+\.py|{metadata}")
    for name in names:
        if name not in REQUIRED and (not allowed.fullmatch(name) or re.search(r"\btest", name)):
            faults.append(f"{name} does not belong into a wheel")
    if not any(name.endswith("/LICENSE") for name in names):
        faults.append("the license is missing")
    return faults


def of_versions(versions: set[str]) -> list[str]:
    """Check symbol versions, such as GLIBC_2.28. Those of other names are not known, and faults."""
    faults = []
    for version in sorted(versions):
        name, _, number = version.partition("_")
        parts = tuple(int(part) for part in number.split(".") if part.isdigit())
        if not parts or parts > NEWEST.get(name, ()):
            faults.append(f"it needs {version}, which manylinux_2_28 lacks")
    return faults


def of_library(path: Path, machine: str) -> list[str]:
    """Check the processor, the symbol versions and the needed libraries of a shared library."""
    command = ["readelf", "--wide", "--file-header", "--dynamic", "--version-info", str(path)]
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, check=True, text=True, capture_output=True, env=english)
    allowed = {TORCH, LOADERS[machine], *LIBRARIES}
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout))
    faults = [f"it needs {name}" for name in sorted(needed - allowed)]
    if TORCH not in needed:
        faults.append(f"it does not name {TORCH}")
    if re.search(r"\((RPATH|RUNPATH)\)", done.stdout):
        faults.append("it has a path to other libraries")
    if not re.search(rf"Machine: +{PROCESSORS[machine]}\n", done.stdout):
        faults.append(f"it is not for {machine}")
    versions = set(re.findall(r"Name: (\S+)  Flags", done.stdout))
    return faults + (of_versions(versions) if versions else ["it has no symbol versions"])


def of_report(report: dict[str, Any]) -> list[str]:
    """Check what `auditwheel show --json` prints. It knows no wheel that leaves a library to another package."""
    faults = []
    system = re.match(r"manylinux_(\d+)_(\d+)_", report["sym_tag"])
    if system is None or (int(system[1]), int(system[2])) > NEWEST["GLIBC"]:
        faults.append(f"its symbols are those of {report['sym_tag']}")
    if set(report["external_libs"]) != {TORCH}:
        faults.append(f"it needs {', '.join(report['external_libs'])}, not {TORCH} alone")
    return faults


def of_bytes(data: bytes, folders: list[Path]) -> list[str]:
    """Check that a file contains no path of the machine that built it."""
    inside = [folder for folder in folders if f"{folder}/".encode() in data]
    return [f"it contains the path {folder}" for folder in inside]
