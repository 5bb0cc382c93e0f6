"""An aarch64 Python with torch and this library, in `build/aarch64`, which runs under qemu."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tightrope.backends import cpu

Results = dict[str, list[torch.Tensor]]
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "aarch64"
PYTHON = FOLDER / "python"
LIBRARY = FOLDER / "lib"
COMPILER = "aarch64-linux-gnu-g++"
# The last release whose aarch64 wheel on PyPI is for CPUs alone: 0.15 GB, later ones 0.45 GB.
TORCH = "torch==2.10.0"
# What torch and the tests import. pip cannot resolve the dependencies of torch for another machine.
PACKAGES = (
    "filelock fsspec hypothesis jinja2 mpmath networkx numpy pytest safetensors setuptools sympy"
)


def missing() -> str | None:
    """Return why nothing can run here, or None."""
    needed = {"qemu-aarch64": "qemu-user", COMPILER: "g++-aarch64-linux-gnu"}
    needed |= {"apt-get": "apt", "dpkg-deb": "dpkg"}
    lacking = [package for command, package in needed.items() if not shutil.which(command)]
    if lacking:
        return f"needs Debian and: apt-get install {' '.join(lacking)}"
    return None if "avx2" in cpu.instruction_sets() else "needs the CPU kernel and AVX2 here"


def prepared() -> bool:
    """Return whether everything is there that would be downloaded."""
    return (FOLDER / "system").exists() and (FOLDER / "packages").exists()


def execute(*command: object, **more: str) -> None:
    """Run a command with more environment variables; an error ends the program."""
    subprocess.run([*map(str, command)], env={**os.environ, **more}, cwd=ROOT, check=True)


def system(to: Path) -> None:
    """Unpack Debian's Python for aarch64, without installing it and without being root."""
    state = to / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    options = ["APT::Architecture=arm64", "APT::Architectures::=arm64", f"Dir::State={state}"]
    options += [f"Dir::State::status={state}/status", f"Dir::Cache={state}", "APT::Sandbox::User="]
    apt = ["apt-get", "-qq", *(part for option in options for part in ("-o", option))]
    execute(*apt, "update")
    install = [*apt, "install", "--yes", "--download-only", "--no-install-recommends"]
    execute(*install, "python3", "libstdc++6", "libgomp1")
    for package in (state / "archives").glob("*.deb"):
        execute("dpkg-deb", "--extract", package, to)
    shutil.rmtree(state)


def packages(to: Path) -> None:
    """Install torch and what the tests import, for the Python of the emulator."""
    version = (FOLDER / "system" / "usr" / "bin" / "python3").readlink().name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--target", to, "--only-binary=:all:", f"--python-version={version}"]
    pip += ["--platform=manylinux_2_28_aarch64", "--platform=manylinux2014_aarch64"]
    constraints = FOLDER / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    execute(*pip, "--no-deps", TORCH)
    execute(*pip, "--upgrade", "-c", constraints, "typing-extensions", *PACKAGES.split())


def install() -> None:
    """Make the emulated Python with torch, as far as it is not there yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for make in (system, packages):
        target = FOLDER / make.__name__
        if not target.exists():
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(target)
    # Python takes its name from its first argument, so programs that it starts are emulated too.
    PYTHON.write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME='{FOLDER}/system/usr'\n"
        f"exec qemu-aarch64 -L '{FOLDER}/system' -cpu neoverse-n1 -0 \"$0\" "
        f"'{FOLDER}/system/usr/bin/python3' \"$@\"\n"
    )
    PYTHON.chmod(0o755)


def prepare() -> None:
    """Make what is not there yet, and build the library from the present source."""
    install()
    # A cross build: qemu often hangs where a process with threads starts another one.
    shutil.rmtree(LIBRARY, ignore_errors=True)
    torch = FOLDER / "packages" / "torch"
    compiler = [COMPILER, f"-isystem{torch}/include", f"-L{torch}/lib"]
    more = {"CXX": shlex.join(compiler), "TIGHTROPE_NATIVE": "1"}
    more |= {"_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    build = ["--quiet", "build", f"--build-base={FOLDER}", f"--build-lib={LIBRARY}"]
    execute(sys.executable, "setup.py", *build, **more)


def settings() -> dict[str, str]:
    """Return the environment of a program under the emulator."""
    paths = [LIBRARY, FOLDER / "packages", ROOT]
    more = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **more}


def bits() -> tuple[Results, Results]:
    """Return the results of bits.py, of this machine with AVX2 and of the emulator."""
    files = [FOLDER / "avx2.pt", FOLDER / "aarch64.pt"]
    program = Path(__file__).with_name("bits.py")
    execute(sys.executable, program, files[0], "avx2")
    execute(PYTHON, program, files[1], **settings())
    one, two = (torch.load(file) for file in files)
    return one, two
