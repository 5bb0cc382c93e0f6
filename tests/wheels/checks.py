"""What a wheel for Linux must be like. Each function returns the faults that it finds, in words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

LIBRARY = "tightrope/_native.so"
# The newest symbol versions of manylinux_2_28, see PEP 600.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Torch brings the first; the others are in every system of manylinux_2_28.
LIBRARIES = {"libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
PROCESSORS = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
REQUIRED = {LIBRARY, "tightrope/__init__.py", "tightrope/py.typed", "_tightrope_command.py"}


def of_names(names: list[str]) -> list[str]:
    """Check the files of a wheel."""
    faults = [f"{name} is missing" for name in sorted(REQUIRED.difference(names))]
    metadata = r"tightrope-[^/]+\.dist-info/(METADATA|RECORD|WHEEL|\w+\.txt|licenses/LICENSE)"
    allowed = re.compile(rf"tightrope/([a-z0-9_]+/)*[a-z0-9_]+\.py|{metadata}")
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
    done = subprocess.run(command, check=True, text=True, capture_output=True, env={"LC_ALL": "C"})
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout))
    faults = [f"it needs {name}" for name in sorted(needed - LIBRARIES - {LOADERS[machine]})]
    if "libtorch_cpu.so" not in needed:
        faults.append("it does not name libtorch_cpu.so")
    if re.search(r"\((RPATH|RUNPATH)\)", done.stdout):
        faults.append("it has a path to other libraries")
    if not re.search(rf"Machine: +{PROCESSORS[machine]}\n", done.stdout):
        faults.append(f"it is not for {machine}")
    versions = set(re.findall(r"Name: (\S+)  Flags", done.stdout))
    return faults + (of_versions(versions) if versions else ["it has no symbol versions"])


def of_bytes(data: bytes, folders: list[Path]) -> list[str]:
    """Check that a file contains no path of the machine that built it."""
    inside = [folder for folder in folders if f"{folder}/".encode() in data]
    return [f"it contains the path {folder}" for folder in inside]
